"""Mixup and CutMix: mix each example of a batch with the one before it, on the device.

They are pure functions of a global batch and a random key, so that the result does not
depend on the number of devices. (The reference code mixes inside each device's part of the
batch. There, the same seed gives a different run on a different number of devices.)
"""

import dataclasses

import jax
import jax.numpy as jnp

MODES = ('batch', 'example')


@dataclasses.dataclass(frozen=True)
class Mixing:
  """Mixup or CutMix; if both are given, each with probability 1/2.

  Attributes:
    mixup: alpha of the Beta(alpha, alpha) of mixup; 0: no mixup.
    cutmix: alpha of the Beta(alpha, alpha) of CutMix; 0: no CutMix.
    mixup_mode: whether to draw once for the 'batch', as the reference recipes do, or for
      each 'example'.
  """

  mixup: float = 0.0
  cutmix: float = 0.0
  mixup_mode: str = 'batch'

  def __bool__(self) -> bool:
    return bool(self.mixup or self.cutmix)

  def __call__(self, images, targets, weight, rng):
    """Mixes a batch and returns (images, targets).

    Args:
      images: float32 [B, H, W, C].
      targets: float32 [B, K].
      weight: [B]; an example with weight 0 is neither mixed nor used to mix another.
    """
    size = len(images)
    choose, draw = jax.random.split(rng)
    shape = (size,) if self.mixup_mode == 'example' else (1,)
    # If the partner of an example has weight 0, the example stays as it is.
    alone = jnp.roll(weight, 1) == 0
    if not self.cutmix:
      share, keep = _mixup(draw, self.mixup, shape, images)
    elif not self.mixup:
      share, keep = _cutmix(draw, self.cutmix, shape, images)
    else:
      blend, cut = jax.random.split(draw)
      use_cut = jax.random.uniform(choose, shape) < 0.5
      pairs = zip(
        _cutmix(cut, self.cutmix, shape, images),
        _mixup(blend, self.mixup, shape, images),
        strict=True,
      )
      where = lambda a, b: jnp.where(use_cut.reshape(-1, *[1] * (a.ndim - 1)), a, b)
      share, keep = (where(a, b) for a, b in pairs)
    keep = jnp.where(alone[:, None, None, None], 1.0, keep)
    share = jnp.where(alone, 1.0, share)[:, None]
    return (
      keep * images + (1 - keep) * jnp.roll(images, 1, axis=0),
      share * targets + (1 - share) * jnp.roll(targets, 1, axis=0),
    )


def _mixup(rng, alpha: float, shape, images):
  """Returns each example's weight in its mixture: [n] for labels, [n, H, W, 1] for pixels.

  lambda ~ Beta(alpha, alpha) (arXiv 1710.09412, equation 2). The weight is the larger of
  lambda and 1 - lambda, as in big_vision, so that each example stays the main part of its
  row.
  """
  share = jax.random.beta(rng, alpha, alpha, shape)
  share = jnp.maximum(share, 1 - share)
  return share, jnp.broadcast_to(share[:, None, None, None], _pixels(shape, images))


def _cutmix(rng, alpha: float, shape, images):
  """Returns each example's weight in its mixture: [n] for labels, [n, H, W, 1] for pixels.

  A pixel has weight 1 if it is kept, and 0 in the box to replace. The box has 1 - lambda of
  the image's area, and its proportions. Its centre is uniform, and it is clipped at the
  border. The weight of the label is the share of the area that is kept (arXiv 1905.04899,
  section 3.1 and the authors' code).
  """
  height, width = images.shape[1:3]
  box_rng, y_rng, x_rng = jax.random.split(rng, 3)
  side = jnp.sqrt(1 - jax.random.beta(box_rng, alpha, alpha, shape))

  def keep_outside(rng, length):
    # bool [n, length], whether a row or column lies outside of the box.
    centre = jax.random.randint(rng, shape, 0, length)
    half = jnp.floor(length * side).astype(jnp.int32) // 2
    at = jnp.arange(length)
    return (at < (centre - half)[:, None]) | (at >= (centre + half)[:, None])

  keep = (
    keep_outside(y_rng, height)[:, :, None] | keep_outside(x_rng, width)[:, None, :]
  )
  keep = keep[..., None].astype(images.dtype)
  return keep.mean((1, 2, 3)), keep


def _pixels(shape, images):
  return (*shape, *images.shape[1:3], 1)
