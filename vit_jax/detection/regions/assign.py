"""Which target a box is trained towards, and the sample of boxes that are trained.

Both have static shapes, and sampling takes its random numbers as an argument: an example
is sampled alike on any number of devices. For one image; callers map over a batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_LEAST = 0.3  # mmdetection's min_pos_iou


def match(
  iou: jax.Array,
  valid: jax.Array,
  low: float,
  high: float,
  low_quality: str | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns the target and the label of each of M boxes: (int [M], int [M]).

  The target is the one that a box overlaps with most, the first of equals. The label is 1
  from `high`, 0 below `low`, and -1, not trained, in between.

  Args:
    iou: [N, M], of N targets with M boxes.
    valid: bool [N], False for padding. Without targets all labels are 0.
    low_quality: None; 'tied': boxes that a target overlaps with most, all of equals, get
      the label 1 and keep their own target (arXiv 1506.01497, section 3.1.2); a target
      that overlaps with no box marks all of these, as in detectron2. 'reassigned': they
      get that target, the last of several, if they overlap by 0.3 at least, as in
      mmdetection.
  """
  if low_quality is not None:
    # Computed once and stored, as the rule tests for equality: kernels round differently.
    iou = jax.lax.optimization_barrier(iou)
  iou = jnp.where(valid[:, None], iou, -1.0)
  best, index = iou.max(0), iou.argmax(0)
  label = jnp.where(best >= high, 1, jnp.where(best < low, 0, -1))
  if low_quality is not None:
    most = iou.max(1, keepdims=True)
    least = _LEAST if low_quality == 'reassigned' else 0.0
    tied = (iou == most) & (most >= least)  # padding has -1
    label = jnp.where(tied.any(0), 1, label)
    if low_quality == 'reassigned':
      last = len(iou) - 1 - tied[::-1].argmax(0)
      index = jnp.where(tied.any(0), last, index)
  return index, label


class Sample(NamedTuple):
  """The rows of a sample, positives first, each by its priority.

  Attributes:
    index: int [number], places among the candidates.
    positive: bool [number].
    valid: bool [number], False where there are too few candidates.
  """

  index: jax.Array
  positive: jax.Array
  valid: jax.Array


def sample(priority: jax.Array, label: jax.Array, number: int, share: float) -> Sample:
  """Draws positives, at most a share of the sample, and fills it up with negatives.

  Args:
    priority: float32 [M], uniformly random: candidates with the smallest are taken.
    label: int [M], 1, 0, or -1 for candidates that are left out.
    number: size of the sample.
    share: of positives, rounded down.
  """
  most = min(int(number * share), len(label))
  drawn = lambda want, n: jax.lax.top_k(
    jnp.where(label == want, -priority, -jnp.inf), n
  )[1]
  positives, negatives = drawn(1, most), drawn(0, min(number, len(label)))
  p = jnp.minimum((label == 1).sum(), most)
  n = jnp.minimum((label == 0).sum(), number - p)
  row = jnp.arange(number)
  of = lambda index, rows: index[jnp.clip(rows, 0, max(len(index) - 1, 0))]
  positive = row < p
  index = of(negatives, row - p)
  if most:
    index = jnp.where(positive, of(positives, row), index)
  return Sample(index, positive, row < p + n)


def labels_of_sample(drawn: Sample, count: int) -> jax.Array:
  """Returns the labels int [count] of all candidates, -1 for those outside of a sample."""
  index = jnp.where(drawn.valid, drawn.index, count)
  labels = jnp.full(count, -1, jnp.int32)
  return labels.at[index].set(drawn.positive.astype(jnp.int32), mode='drop')
