"""Boxes as arrays [..., 4]: their forms, their overlap, and a detector's answers.

Three orders are in use. Models and losses: centre x, centre y, width, height. Corners:
left, top, right, bottom. Examples (`data.features`): top, left, bottom, right, from 0 to 1
of the image. Functions of two boxes broadcast: for every pair of N and M boxes call them
with a[..., :, None, :] and b[..., None, :, :].
"""

import jax
import jax.numpy as jnp


def to_corners(boxes: jax.Array) -> jax.Array:
  """Returns left, top, right, bottom of boxes given by centre, width and height."""
  centre, half = boxes[..., :2], boxes[..., 2:] / 2
  return jnp.concatenate([centre - half, centre + half], -1)


def to_centres(boxes: jax.Array) -> jax.Array:
  """Returns centre, width and height of boxes given by left, top, right, bottom."""
  low, high = boxes[..., :2], boxes[..., 2:]
  return jnp.concatenate([(low + high) / 2, high - low], -1)


def swap_axes(boxes: jax.Array) -> jax.Array:
  """Returns left, top, right, bottom of top, left, bottom, right, and the reverse."""
  return boxes[..., jnp.array([1, 0, 3, 2])]


def area(boxes: jax.Array) -> jax.Array:
  """Returns the areas [...] of boxes given by corners, 0 where the corners cross."""
  return jnp.prod(jnp.maximum(boxes[..., 2:] - boxes[..., :2], 0), -1)


def iou(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns intersection over union [...] of boxes by corners; 0 where both are empty."""
  return _divide(*common_and_union(a, b))


def giou(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns the generalised intersection over union [...] of boxes by corners, -1 to 1.

  It subtracts the share of the smallest box around both that neither covers, and so falls
  as separate boxes move apart. Rezatofighi et al., arXiv 1902.09630, algorithm 1.
  """
  common, union = common_and_union(a, b)
  low = jnp.minimum(a[..., :2], b[..., :2])
  high = jnp.maximum(a[..., 2:], b[..., 2:])
  around = area(jnp.concatenate([low, high], -1))
  return _divide(common, union) - _divide(around - union, around)


def postprocess(outputs: dict) -> dict[str, jax.Array]:
  """Returns detections: 'scores', 'labels', 'valid' [B, Q], 'boxes' [B, Q, 4], maybe 'masks'.

  Boxes are left, top, right, bottom from 0 to 1 of the image: float32 would not hold pixels
  of large images exactly. Where `valid` is False there is no detection. Masks are
  probabilities [B, Q, m, m] inside of boxes.

  Args:
    outputs: of a detector. 'regions' are detections; of 'boxes', see `tasks.detect`, each
      query is one. Its class is the likeliest other than "no object", its score the
      probability of that.
  """
  if 'scores' in outputs:
    names = ('scores', 'labels', 'boxes', 'masks')
    valid = outputs['valid'] & (area(outputs['boxes']) > 0)
    return {name: outputs[name] for name in names if name in outputs} | {'valid': valid}
  likely = jax.nn.softmax(outputs['logits'].astype(jnp.float32))[..., :-1]
  corners = to_corners(outputs['boxes'].astype(jnp.float32))
  scores, labels = likely.max(-1), likely.argmax(-1)
  valid = jnp.ones(scores.shape, bool)
  return {'scores': scores, 'labels': labels, 'valid': valid, 'boxes': corners}


def common_and_union(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the areas [...] of the intersection and of the union of boxes by corners."""
  low = jnp.maximum(a[..., :2], b[..., :2])
  high = jnp.minimum(a[..., 2:], b[..., 2:])
  common = area(jnp.concatenate([low, high], -1))
  return common, area(a) + area(b) - common


def _divide(x, y):
  # The inner `where` keeps the gradient finite where y is 0.
  return jnp.where(y > 0, x / jnp.where(y > 0, y, 1), 0)
