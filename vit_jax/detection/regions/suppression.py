"""Exact non-maximum suppression in static shapes, for proposals and detections.

Functions are for one image; callers map over a batch. None has a gradient.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from vit_jax.detection.boxes import common_and_union, iou
from vit_jax.detection.regions import coding


def keep(
  boxes: jax.Array,
  threshold: float,
  valid: jax.Array,
  classes: jax.Array | None = None,
) -> jax.Array:
  """Suppresses boxes greedily; returns which of them are kept, bool [n].

  Boxes are visited in their order, the best first. A box is suppressed if its IoU with a
  better box that is kept exceeds the threshold. Boxes without an area suppress none.

  The loop decides about all boxes at once, given the decisions of the round before, until
  nothing changes. This yields exactly the greedy result: box j depends only on better
  boxes, so its decision is final after round j. The number of rounds is the length of the
  longest chain of overlaps, usually below 10.

  Args:
    boxes: [n, 4] corners, in order of falling score.
    valid: bool [n], False for padding, which is never kept.
    classes: int [n]. Boxes of different classes do not suppress each other.
  """
  n = len(boxes)
  common, union = common_and_union(boxes[:, None], boxes[None])
  # Compare a product, because some devices divide approximately, and a quotient at the
  # threshold could fall on the wrong side.
  over = (common > threshold * union) & jnp.triu(jnp.ones((n, n), bool), 1)
  if classes is not None:
    over &= classes[:, None] == classes[None]

  def again(state):
    old, _ = state
    new = valid & ~(over & old[:, None]).any(0)
    return new, (new != old).any()

  return jax.lax.while_loop(lambda state: state[1], again, (valid, n > 0))[0]


def proposals(
  logits: Sequence[jax.Array],
  deltas: Sequence[jax.Array],
  anchors: Sequence[jax.Array],
  size: jax.Array,
  *,
  before: int,
  after: int,
  threshold: float = 0.7,
  least: float = 0.0,
  clamp_both: bool = False,
) -> dict[str, jax.Array]:
  """Returns the proposals of an RPN: 'boxes' [P, 4], 'logits' [P], 'valid' [P], best first.

  Boxes of different levels do not suppress each other ("Feature Pyramid Networks", arXiv
  1612.03144, section 4.1).

  Args:
    logits, deltas, anchors: [A], [A, 4] and [A, 4] of each level.
    size: [2], the image's height and width, to which boxes are clipped.
    before: proposals to keep per level, before suppression.
    after: proposals to keep in all, after suppression.
    least: the minimum side length; proposals with a shorter side are dropped.
    clamp_both: see `coding.decode`.
  """
  # Levels are padded to one length: a program for all compiles faster than one for each.
  numbers = [min(before, len(logit)) for logit in logits]
  levels = []
  for number, logit, delta, anchor in zip(
    numbers, logits, deltas, anchors, strict=True
  ):
    logit = logit.astype(jnp.float32)
    # A NaN would count as the largest.
    best, index = jax.lax.top_k(jnp.where(jnp.isnan(logit), -jnp.inf, logit), number)
    more = max(numbers) - number
    best = jnp.pad(best, (0, more), constant_values=-jnp.inf)
    index = jnp.pad(index, (0, more))
    levels.append((best, delta[index], anchor[index]))
  best, delta, anchor = (jnp.stack(parts) for parts in zip(*levels, strict=True))
  boxes = coding.decode(delta, anchor, (1.0,) * 4, clamp_both)
  finite = jnp.isfinite(boxes).all(-1) & jnp.isfinite(best)
  boxes = coding.clip(jnp.where(finite[..., None], boxes, 0), size)
  valid = finite & (coding.sides(boxes) > least).all(-1)
  valid = jax.vmap(keep, (0, None, 0))(boxes, threshold, valid)
  boxes, best = boxes.reshape(-1, 4), jnp.where(valid, best, -jnp.inf).reshape(-1)
  best, index = jax.lax.top_k(best, min(after, sum(numbers)))
  valid = jnp.isfinite(best)
  boxes = jnp.where(valid[:, None], boxes[index], 0)
  return {'boxes': boxes, 'logits': best, 'valid': valid}


def detections(
  boxes: jax.Array,
  probabilities: jax.Array,
  valid: jax.Array,
  size: jax.Array,
  *,
  least: float,
  threshold: float,
  most: int,
  candidates: int = 2048,
  soft: bool = False,
) -> dict[str, jax.Array]:
  """Returns detections, best first: 'boxes' [D, 4], 'scores', 'labels' and 'valid' [D].

  'rows' [D] are their positions among the R boxes. Boxes of different classes do not suppress
  each other. Of all pairs (box, class) only the best `candidates` are considered. The result
  is still exact if no pair was left out, or if D detections remain that score at least as
  much as every pair left out. 'complete' [] says whether it is exact.

  Args:
    boxes: [R, 4] corners, or [R, 4 K] with a box for each class.
    probabilities: [R, K], without the background.
    valid: bool [R], False for padding.
    least: the score that detections must exceed.
    most: the maximum number D of detections.
    soft: whether to use linear soft-NMS, arXiv 1704.04503, as in mmcv: overlapping boxes
      stay, and their score is multiplied by 1 - overlap.
  """
  R, K = probabilities.shape
  boxes = boxes.astype(jnp.float32).reshape(R, -1, 4)
  scores = probabilities.astype(jnp.float32)
  valid &= jnp.isfinite(boxes).all((1, 2)) & jnp.isfinite(scores).all(1)
  boxes = coding.clip(jnp.where(valid[:, None, None], boxes, 0), size)
  scores = jnp.where(valid[:, None] & (scores > least), scores, -jnp.inf).reshape(-1)
  number = jnp.isfinite(scores).sum()
  scores, pair = jax.lax.top_k(scores, min(max(candidates, most), R * K))
  rows, labels = pair // K, pair % K
  boxes = boxes[rows, labels if boxes.shape[1] > 1 else 0]
  valid, most, worst = jnp.isfinite(scores), min(most, len(pair)), scores[-1]
  if soft:
    scores, index = _soft(boxes, scores, labels, threshold, most)
    scores = jnp.where(scores > least, scores, -jnp.inf)
  else:
    mask = keep(boxes, threshold, valid, labels)
    scores, index = jax.lax.top_k(jnp.where(mask, scores, -jnp.inf), most)
  valid = jnp.isfinite(scores)
  return {
    'boxes': jnp.where(valid[:, None], boxes[index], 0),
    'scores': jnp.where(valid, scores, 0),
    'labels': labels[index],
    'rows': rows[index],
    'valid': valid,
    'complete': (number <= len(pair)) | (scores[-1] >= worst),
  }


def _soft(boxes, scores, classes, threshold: float, most: int):
  """Soft-NMS: returns decayed scores [most] and positions [most], in order of choice."""

  def take(scores, _):
    best = scores.argmax()
    overlap = iou(boxes, boxes[best])
    same = (classes == classes[best]) & (scores > 0)  # -inf * 0 would be NaN
    decay = jnp.where(same & (overlap >= threshold), 1 - overlap, 1)
    return (scores * decay).at[best].set(-jnp.inf), (scores[best], best)

  return jax.lax.scan(take, scores, length=most)[1]
