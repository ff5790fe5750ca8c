"""Assigns targets to boxes, and samples the boxes that are trained.

All shapes are static. Sampling takes its random numbers as an argument, so that the number
of devices does not change a sample. Functions are for one image; callers map over a batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# The min_pos_iou of mmdetection.
_LEAST = 0.3


def match(
  iou: jax.Array,
  valid: jax.Array,
  low: float,
  high: float,
  low_quality: str | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Assigns a target and a label to each of M boxes; returns both, int [M].

  The target is the one with the largest overlap; ties go to the first. The label is 1 if
  that overlap is at least `high`, 0 if it is below `low`, and -1 (not trained) in between.

  Args:
    iou: [N, M], overlaps of N targets with M boxes.
    valid: bool [N], False for padding. Without targets, all labels are 0.
    low_quality: the rule for the boxes that overlap a target most, even if the overlap is
      below `high`.
      None: no such rule.
      'tied': they get the label 1 and keep their own target (arXiv 1506.01497, section
      3.1.2). As in detectron2, a target that overlaps no box ties with all of them.
      'reassigned': they get the label 1 and that target, the last if there are several,
      provided that they overlap by at least 0.3, as in mmdetection.
  """
  if low_quality is not None:
    # The rule tests for equality, so every use must see the same rounding: the barrier
    # keeps XLA from computing the overlaps again in another kernel.
    iou = jax.lax.optimization_barrier(iou)
  iou = jnp.where(valid[:, None], iou, -1.0)
  best, index = iou.max(0), iou.argmax(0)
  label = jnp.where(best >= high, 1, jnp.where(best < low, 0, -1))
  if low_quality is not None:
    most = iou.max(1, keepdims=True)
    least = _LEAST if low_quality == 'reassigned' else 0.0
    tied = (iou == most) & (most >= least)  # `most` is -1 for padding
    label = jnp.where(tied.any(0), 1, label)
    if low_quality == 'reassigned':
      last = len(iou) - 1 - tied[::-1].argmax(0)
      index = jnp.where(tied.any(0), last, index)
  return index, label


class Sample(NamedTuple):
  """A sample of boxes: positives, then negatives, each in order of priority.

  Attributes:
    index: int [number], positions among the candidates.
    positive: bool [number], whether the row is a positive.
    valid: bool [number], False for rows that lack a candidate.
  """

  index: jax.Array
  positive: jax.Array
  valid: jax.Array


def sample(priority: jax.Array, label: jax.Array, number: int, most: int) -> Sample:
  """Samples at most `most` positives, and fills the sample up with negatives.

  Args:
    priority: float32 [M], uniformly random. Candidates with the smallest values are taken.
    label: int [M]: 1, 0, or -1 for candidates that are left out.
    number: rows of the sample.
  """

  def draw(kind: int, n: int):
    """Returns the positions of the n candidates of a label that come first."""
    return jax.lax.top_k(jnp.where(label == kind, -priority, -jnp.inf), n)[1]

  most = min(most, number, len(label))
  positives, negatives = draw(1, most), draw(0, min(number, len(label)))
  p = jnp.minimum((label == 1).sum(), most)
  n = jnp.minimum((label == 0).sum(), number - p)
  row = jnp.arange(number)

  def take(index, rows):
    return index[jnp.clip(rows, 0, max(len(index) - 1, 0))]

  positive = row < p
  index = take(negatives, row - p)
  if most:
    index = jnp.where(positive, take(positives, row), index)
  return Sample(index, positive, row < p + n)


def labels_of_sample(drawn: Sample, count: int) -> jax.Array:
  """Returns the labels, int [count], of all candidates: -1 for those not sampled."""
  index = jnp.where(drawn.valid, drawn.index, count)
  labels = jnp.full(count, -1, jnp.int32)
  return labels.at[index].set(drawn.positive.astype(jnp.int32), mode='drop')
