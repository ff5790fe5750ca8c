"""Semantic FPN: a class for every pixel, from the maps of a pyramid.

The semantic segmentation branch of "Panoptic Feature Pyramid Networks", arXiv 1901.02446,
section 3.1 and figure 3.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.check import Count
from vit_jax.detection.models import sfp
from vit_jax.detection.models.pyramid import bilinear
from vit_jax.errors import UserError, choose
from vit_jax.models.base import Family, Model
from vit_jax.nn.layers import check_images, group_norm


def variant(name: str) -> dict:
  """Returns the fields of a head on the pyramid `name`: 'sfp:B' or 'fpn:swin:T'."""
  return dict(backbone={'name': name, 'extra_level': False})


class Upsample(nn.Module):
  """Doubles a map's sides `steps` times.

  Maps [B, h, w, C] to [B, h 2^steps, w 2^steps, width].
  Each step is a 3 x 3 convolution, GroupNorm, ReLU and bilinear interpolation. With
  `steps` 0, there is one step without interpolation.
  """

  width: int
  steps: int
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x):
    for i in range(max(self.steps, 1)):
      x = nn.Conv(
        self.width,
        (3, 3),
        use_bias=False,
        kernel_init=nn.initializers.variance_scaling(2.0, 'fan_out', 'normal'),
        dtype=self.dtype,
        name=f'conv{i}',
      )(x)
      x = nn.relu(group_norm(x, f'norm{i}', eps=1e-5, dtype=self.dtype))
      if self.steps:
        x = bilinear(x, (2 * x.shape[1], 2 * x.shape[2]))
    return x


def _fit(x, size: tuple[int, int]):
  """Crops or pads a map to (H, W), because halving an odd side rounds.

  Padding repeats the last row or column.
  """
  missing = [(0, max(n - m, 0)) for n, m in zip(size, x.shape[1:3], strict=True)]
  if missing != [(0, 0)] * 2:
    x = jnp.pad(x, [(0, 0), *missing, (0, 0)], mode='edge')
  return x[:, : size[0], : size[1]]


class SemanticFPN(Model):
  """A segmentation head that sums all levels of a pyramid."""

  # None: there is no last layer, and the output is out['merged'].
  num_classes: Count | None = None
  backbone: nn.Module | None = None  # a pyramid, such as fpn or sfp
  levels: Sequence[str] = ()  # names of the maps to use, such as 'p2'; (): all
  # Fewer channels hardly learn, because the 32 groups of GroupNorm get too small.
  channels: int = 128
  # Dtype of the body, and of a backbone that does not set one. Logits are float32.
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, images, *, train: bool = False, features: bool = True):
    """Classifies every pixel.

    Args:
      images: [B, H, W, C] in [-1, 1]; H and W are multiples of the finest level's stride.
      train: whether the backbone applies stochastic depth, which needs the 'dropout' rng.
      features: whether the caller reads more of `out` than 'merged'.

    Returns:
      (logits [B, H, W, K] float32, out). `out` has 'merged' [B, h, w, channels], the sum of
      all levels at the scale of the finest, and the features of the backbone.
    """
    check_images(images)
    if self.backbone is None:
      raise UserError("A semantic_fpn needs a pyramid: backbone={'name': 'sfp', ...}.")
    maps, out = self.backbone(images, train=train, features=features)
    if not isinstance(maps, dict):
      kind = type(self.backbone).__name__
      raise UserError(f'A semantic_fpn needs a pyramid, fpn or sfp, not {kind} alone.')
    names = [choose('level of the pyramid', n, list(maps)) for n in self.levels or maps]
    numbers = {name: int(name.removeprefix('p')) for name in names}
    finest = min(names, key=numbers.get)
    merged = 0
    for name, number in numbers.items():
      steps = number - numbers[finest]
      x = Upsample(self.channels, steps, self.dtype, name=f'level{number}')(maps[name])
      merged = merged + _fit(x, maps[finest].shape[1:3])
    out = {**(out if features else {}), 'merged': merged}
    if self.num_classes is None:
      return merged, out
    x = nn.Conv(
      self.num_classes,
      (1, 1),
      kernel_init=nn.initializers.zeros_init(),
      name='head',
    )(merged.astype(jnp.float32))
    return bilinear(x, images.shape[1:3]), out


_TINY_SFP = sfp.FAMILY.tiny[0] | dict(name='sfp', extra_level=False)
_TINY_SFP['backbone'] = _TINY_SFP['backbone'] | dict(patch_size=(8, 8))

FAMILY = Family(
  SemanticFPN,
  variant,
  # Unlike a pyramid, it takes no maps in place of a backbone.
  inputs=lambda fields, size: {},
  outputs='pixels',
  tiny=(dict(backbone=_TINY_SFP, channels=32),),
)
