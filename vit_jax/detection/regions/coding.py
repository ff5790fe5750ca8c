"""Encodes boxes as offsets from other boxes, and decodes them.

"Rich feature hierarchies", arXiv 1311.2524, appendix C. Boxes are float32 [..., 4], left,
top, right, bottom in pixels; functions broadcast.
"""

import math

import jax
import jax.numpy as jnp

# The largest offset of a side, which turns 16 pixels into 1000. Without a limit, the
# exponential could overflow.
CLAMP = math.log(1000 / 16)


def encode(boxes: jax.Array, targets: jax.Array, weights) -> jax.Array:
  """Encodes targets as offsets [..., 4] (dx, dy, dw, dh) from boxes.

  Boxes or targets without an area, such as padding, give finite but meaningless offsets.

  Args:
    weights: factors by which the four offsets are multiplied.
  """
  (x, y, w, h), (X, Y, W, H) = _parts(boxes), _parts(targets)
  # A padded box has no width; `where` before the division keeps gradients finite.
  w, h, W, H = (jnp.where(n > 0, n, 1) for n in (w, h, W, H))
  offsets = (X - x) / w, (Y - y) / h, jnp.log(W / w), jnp.log(H / h)
  return jnp.stack(offsets, -1) * jnp.asarray(weights, jnp.float32)


def decode(
  deltas: jax.Array, boxes: jax.Array, weights, clamp_both: bool = False
) -> jax.Array:
  """Decodes offsets `deltas` from `boxes` to boxes [..., 4]; the inverse of `encode`.

  Args:
    weights: the factors of `encode`.
    clamp_both: whether offsets of sides are clamped from below as well as from above.
  """
  x, y, w, h = _parts(boxes)
  deltas = deltas.astype(jnp.float32) / jnp.asarray(weights, jnp.float32)
  sides = jnp.clip(deltas[..., 2:], -CLAMP if clamp_both else None, CLAMP)
  x, y = deltas[..., 0] * w + x, deltas[..., 1] * h + y
  w, h = jnp.exp(sides[..., 0]) * w, jnp.exp(sides[..., 1]) * h
  return jnp.stack([x - 0.5 * w, y - 0.5 * h, x + 0.5 * w, y + 0.5 * h], -1)


def clip(boxes: jax.Array, size: jax.Array) -> jax.Array:
  """Clips boxes [..., 4] at the border of an image.

  Args:
    size: [2], the image's height and width.
  """
  size = jnp.asarray(size, jnp.float32)
  return jnp.clip(boxes, 0, jnp.stack([size[1], size[0]] * 2, -1))


def sides(boxes: jax.Array) -> jax.Array:
  """Returns widths and heights [..., 2]."""
  return boxes[..., 2:] - boxes[..., :2]


def _parts(boxes):
  """Returns centre x, centre y, width and height."""
  w, h = jnp.moveaxis(sides(boxes), -1, 0)
  return boxes[..., 0] + 0.5 * w, boxes[..., 1] + 0.5 * h, w, h
