"""The three targets of masked patch prediction, arXiv 2010.11929, appendix B.1.2.

Each is a class with `outputs`, numbers to predict for a patch, `of`: images [B, H, W, C]
in [-1, 1] -> targets [B, N, ...], and `measure`: (predictions [..., outputs], targets) ->
(loss, share of right answers or None), both [...].
"""

import functools

import jax
import jax.numpy as jnp
import optax

LEVELS = 8  # Levels of a channel: 3 bits.


def cut(images, patch: tuple[int, int]):
  """Returns the patches of images [B, H, W, C], row by row: [B, N, ph, pw, C]."""
  B, H, W, C = images.shape
  ph, pw = patch
  x = images.reshape(B, H // ph, ph, W // pw, pw, C).swapaxes(2, 3)
  return x.reshape(B, -1, ph, pw, C)


def color_code(color):
  """Returns int32 [...] of colours [..., C] in [-1, 1], with 3 bits for each channel.

  sum_c floor(8 m_c) << 3 c of m = (color + 1) / 2; an m of 1 is of the last level.
  """
  levels = jnp.floor((color + 1) / 2 * LEVELS).astype(jnp.int32)
  levels = levels.clip(0, LEVELS - 1)
  return jnp.sum(levels << (3 * jnp.arange(color.shape[-1])), -1)


class Colors:
  """Colours of `cells` x `cells` parts of a patch, each one of 8 ** C classes."""

  def __init__(self, patch: tuple[int, int], channels: int, cells: int = 1):
    if any(n % cells for n in patch):
      raise ValueError(
        f"target='downsized' makes patches {cells} x {cells} pixels, which does not divide "
        f'{patch[0]} x {patch[1]}'
      )
    self.patch, self.cells = patch, cells
    self.classes = LEVELS**channels
    self.outputs = cells**2 * self.classes

  def of(self, images):
    """Returns int32 [B, N, cells ** 2]."""
    x, n = cut(images, self.patch), self.cells
    B, N, ph, pw, C = x.shape
    x = x.reshape(B, N, n, ph // n, n, pw // n, C).mean((3, 5))
    return color_code(x.reshape(B, N, n * n, C))

  def measure(self, predictions, targets):
    """Cross entropy and accuracy, means over the cells."""
    logits = predictions.reshape(*targets.shape, self.classes)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    right = (logits.argmax(-1) == targets).astype(jnp.float32)
    return loss.mean(-1), right.mean(-1)


class Pixels:
  """All pixels of the patch, by regression: the mean squared error of values in [-1, 1]."""

  def __init__(self, patch: tuple[int, int], channels: int):
    self.patch = patch
    self.outputs = patch[0] * patch[1] * channels

  def of(self, images):
    """Returns float32 [B, N, ph * pw * C]."""
    x = cut(images, self.patch)
    return x.reshape(*x.shape[:2], -1)

  def measure(self, predictions: jax.Array, targets: jax.Array):
    """The squared error, a mean over the pixels; no answer is right or wrong."""
    return jnp.square(predictions - targets).mean(-1), None


# The mean colour is one prediction, of 512 classes for three channels.
TARGETS = {
  'mean_color': Colors,
  'downsized': functools.partial(Colors, cells=4),
  'pixels': Pixels,
}
