"""Boxes as arrays [..., 4]: conversions, overlaps, and the detections of a model.

Three orders are in use:
- centres, in models and losses: centre x, centre y, width, height;
- corners: left, top, right, bottom;
- examples (`data.features`): top, left, bottom, right, as fractions of the image.

Functions of two boxes broadcast: for every pair of N and M boxes call them with
a[..., :, None, :] and b[..., None, :, :].
"""

import jax
import jax.numpy as jnp


def to_corners(boxes: jax.Array) -> jax.Array:
  """Converts centres to corners."""
  centre, half = boxes[..., :2], boxes[..., 2:] / 2
  return jnp.concatenate([centre - half, centre + half], -1)


def to_centres(boxes: jax.Array) -> jax.Array:
  """Converts corners to centres."""
  low, high = boxes[..., :2], boxes[..., 2:]
  return jnp.concatenate([(low + high) / 2, high - low], -1)


def swap_axes(boxes: jax.Array) -> jax.Array:
  """Swaps x and y: the order of examples becomes that of corners, and vice versa."""
  return boxes[..., jnp.array([1, 0, 3, 2])]


def area(boxes: jax.Array) -> jax.Array:
  """Returns areas [...], given corners; 0 where the corners cross."""
  return jnp.prod(jnp.maximum(boxes[..., 2:] - boxes[..., :2], 0), -1)


def iou(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns intersection over union [...], given corners; 0 where both are empty."""
  return _divide(*common_and_union(a, b))


def giou(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns generalised intersection over union [...], from -1 to 1, given corners.

  From the IoU it subtracts a penalty: the part of the smallest enclosing box that neither
  box covers. So it keeps falling as separate boxes move apart. Rezatofighi et al., arXiv
  1902.09630, algorithm 1.
  """
  common, union = common_and_union(a, b)
  low = jnp.minimum(a[..., :2], b[..., :2])
  high = jnp.maximum(a[..., 2:], b[..., 2:])
  around = area(jnp.concatenate([low, high], -1))
  return _divide(common, union) - _divide(around - union, around)


def postprocess(outputs: dict) -> dict[str, jax.Array]:
  """Turns the outputs of a detector into detections.

  Args:
    outputs: the outputs of a two-stage detector, which are detections already, or of a DETR,
      see `tasks.detect`. Each query of a DETR is one detection. Its class is the most probable
      one other than "no object", and its score is the probability of that class.

  Returns:
    'scores', 'labels' and 'valid' [B, Q]; 'boxes' [B, Q, 4]; and 'masks' [B, Q, m, m],
    probabilities inside the boxes, if the model predicts masks; with 'grow' [B, Q] where
    `regions.masks.paste` must grow them. Boxes are corners, as fractions of the image,
    because float32 cannot hold pixels of large images exactly. Where `valid` is False there
    is no detection.
  """
  if 'scores' in outputs:
    names = ('scores', 'labels', 'boxes', 'masks', 'grow')
    valid = outputs['valid'] & (area(outputs['boxes']) > 0)
    return {name: outputs[name] for name in names if name in outputs} | {'valid': valid}
  likely = jax.nn.softmax(outputs['logits'].astype(jnp.float32))[..., :-1]
  corners = to_corners(outputs['boxes'].astype(jnp.float32))
  scores, labels = likely.max(-1), likely.argmax(-1)
  valid = jnp.ones(scores.shape, bool)
  return {'scores': scores, 'labels': labels, 'valid': valid, 'boxes': corners}


def common_and_union(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the areas [...] of intersection and union, given corners."""
  low = jnp.maximum(a[..., :2], b[..., :2])
  high = jnp.minimum(a[..., 2:], b[..., 2:])
  common = area(jnp.concatenate([low, high], -1))
  return common, area(a) + area(b) - common


def _divide(x, y):
  # The inner `where` keeps the gradient finite where y is 0.
  return jnp.where(y > 0, x / jnp.where(y > 0, y, 1), 0)
