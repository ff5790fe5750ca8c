"""Non-maximum suppression in static shapes, exactly; proposals and detections.

For one image; callers map over a batch. No function has a gradient.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from vit_jax.detection.boxes import common_and_union, iou
from vit_jax.detection.regions import coding


def keep(
  boxes: jax.Array,
  scores: jax.Array,
  threshold: float,
  valid: jax.Array,
  classes: jax.Array | None = None,
) -> jax.Array:
  """Greedy suppression: bool [n], the boxes that no better one, itself kept, overlaps.

  By falling score, the first of equals first. A box is suppressed where the intersection
  over union exceeds the threshold; boxes without an area suppress none. All boxes are
  decided at once, from the decisions before, until none changes. That fixed point is
  greedy suppression itself: box j depends on better ones alone, so after round j its
  decision is final. Rounds are as many as the longest chain of overlaps, mostly below 10.

  Args:
    boxes: [n, 4] corners.
    valid: bool [n], False for padding, which is not kept.
    classes: int [n]; boxes of different classes do not suppress each other.
  """
  n = len(boxes)
  order = jnp.argsort(jnp.where(valid, -scores, jnp.inf), stable=True)
  ours, valid = boxes[order], valid[order]
  common, union = common_and_union(ours[:, None], ours[None])
  # Not a quotient: where division is approximate, a quotient at the threshold is unsafe.
  over = (common > threshold * union) & jnp.triu(jnp.ones((n, n), bool), 1)
  if classes is not None:
    over &= classes[order][:, None] == classes[order][None]

  def again(state):
    kept, _ = state
    new = valid & ~(over & kept[:, None]).any(0)
    return new, (new != kept).any()

  kept, _ = jax.lax.while_loop(lambda state: state[1], again, (valid, n > 0))
  return kept[jnp.argsort(order)]


def _best(scores: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
  """Returns the largest scores and their places, the first of equals first.

  By a sort: `top_k` of 2,000 among 200,000 takes a TPU v5e 25 times as long.
  """
  places = jnp.arange(len(scores))
  falling, index = jax.lax.sort((-scores, places), num_keys=1, is_stable=True)
  return -falling[:number], index[:number]


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

  Suppression is within a level, "Feature Pyramid Networks", arXiv 1612.03144, section 4.1.

  Args:
    logits, deltas, anchors: [A], [A, 4] and [A, 4] of each level.
    size: [2], the image's height and width: boxes end there.
    before, after: the best of each level before suppression; of all levels after it.
    least: proposals have longer sides.
    clamp_both: see `coding.decode`.
  """
  levels = []
  for logit, delta, anchor in zip(logits, deltas, anchors, strict=True):
    best, index = _best(logit.astype(jnp.float32), min(before, len(logit)))
    boxes = coding.decode(
      delta[index], jnp.asarray(anchor)[index], (1.0,) * 4, clamp_both
    )
    finite = jnp.isfinite(boxes).all(-1) & jnp.isfinite(best)
    boxes = coding.clip(jnp.where(finite[:, None], boxes, 0), size)
    valid = finite & (coding.sides(boxes) > least).all(-1)
    valid = keep(boxes, best, threshold, valid)
    levels.append((boxes, jnp.where(valid, best, -jnp.inf)))
  boxes, best = (jnp.concatenate(parts) for parts in zip(*levels, strict=True))
  best, index = jax.lax.top_k(best, min(after, len(best)))
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
  """Returns 'boxes' [D, 4], 'scores', 'labels', 'rows', 'valid', 'complete', best first.

  Suppression is within a class. Only the best `candidates` of all pairs of a box and a
  class enter it. The result is exact where no pair was left out, or where D detections
  remain that score no less than those pairs; 'complete' tells.

  Args:
    boxes: [R, 4] corners, or [R, 4 K] for a box of each class.
    probabilities: [R, K], without the background.
    valid: bool [R].
    size: [2], the image's height and width.
    least: detections score more.
    threshold: of intersection over union.
    most: D, at most.
    soft: linear soft-NMS, arXiv 1704.04503: overlapping boxes stay, and score less by the
      overlap, as in mmcv.
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
    kept = keep(boxes, scores, threshold, valid, labels)
    scores, index = jax.lax.top_k(jnp.where(kept, scores, -jnp.inf), most)
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
  """Returns the scores [most], decayed, and places [most] that soft-NMS takes in turn."""

  def take(scores, _):
    best = scores.argmax()
    overlap = iou(boxes, boxes[best])
    same = (classes == classes[best]) & (scores > 0)  # -inf * 0 would be NaN
    decay = jnp.where(same & (overlap >= threshold), 1 - overlap, 1)
    return (scores * decay).at[best].set(-jnp.inf), (scores[best], best)

  return jax.lax.scan(take, scores, length=most)[1]
