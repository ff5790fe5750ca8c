"""Layers and fields that feature pyramids share.

A pyramid has maps [B, h, w, C] of several scales.
"""

from collections.abc import Sequence
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.base import Model
from vit_jax.nn.batch_norm import BatchNorm
from vit_jax.nn.layers import LayerNorm, check_images

NORMS = ('none', 'layer', 'batch')
MSRA = nn.initializers.variance_scaling(2.0, 'fan_out', 'normal')


def normalise(x, norm: str, dtype, name: str, **options) -> jax.Array:
  """Adds a norm of NORMS to a compact module; `options` are those of `BatchNorm`."""
  if norm == 'layer':
    return LayerNorm(dtype, name=name)(x)
  return BatchNorm(dtype=dtype, name=name)(x, **options) if norm == 'batch' else x


class ConvNorm(nn.Module):
  """A convolution, then perhaps a norm of the channels.

  Attributes:
    size: side of the kernel, 1 or 3. The map keeps its size.
    norm: one of NORMS. With a norm, the convolution has no bias.
  """

  width: int
  size: int
  norm: str
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, *, train: bool):
    x = nn.Conv(
      self.width,
      (self.size, self.size),
      use_bias=self.norm == 'none',
      kernel_init=MSRA,
      dtype=self.dtype,
      name='conv',
    )(x)
    return normalise(x, self.norm, self.dtype, 'norm', train=train)


class Pyramid(Model):
  """Base class of pyramids: their fields, first steps and last steps.

  A pyramid returns ({'p2': [B, H / 4, W / 4, channels], ...}, out). A map's name has the
  binary logarithm of its stride. `out` has the same maps and the backbone's features.
  """

  # A model with the maps 'stage1', 'stage2', and so on. None: the inputs are the maps.
  backbone: nn.Module | None = None
  channels: int = 256
  norm: Literal[NORMS] = 'none'  # norm after every convolution
  # Whether to add a level: every second row and column of the coarsest map.
  extra_level: bool = True
  # Used if there is no backbone: pixels per position of the finest map, and the channels of
  # every map, on which the shapes of parameters depend.
  stride: int = 4
  in_channels: Sequence[int] = ()
  # Dtype of the pyramid, and of a backbone that does not set one.
  dtype: jnp.dtype = jnp.float32

  def conv(self, size: int, name: str) -> ConvNorm:
    return ConvNorm(self.channels, size, self.norm, self.dtype, name=name)

  def stages(
    self, inputs, *, train: bool, plain: bool = False
  ) -> tuple[dict[str, jax.Array], dict, float]:
    """Returns ({name: map}, features of the backbone, stride of the first map).

    Args:
      inputs: images [B, H, W, C]. If there is no backbone, the maps themselves, {name: [B, h,
        w, C]}, whose sorted names go from the finest to the coarsest.
      plain: whether to accept a backbone without stages, such as a ViT, and use its last
        map.

    Raises:
      UserError: the backbone has no stages.
    """
    if self.backbone is None:
      return dict(sorted(inputs.items())), {}, self.stride
    named, out = maps_of(self.backbone, inputs, train=train)
    stages = {name: x for name, x in named.items() if name.startswith('stage')}
    if plain and not stages:
      stages = {name: x for name, x in named.items() if name == 'encoded'}
    if not stages:
      raise UserError(
        f'{type(self.backbone).__name__} has no stages to build a pyramid on, only '
        f'{list(named)}: use the pyramid sfp for a plain ViT.'
      )
    return stages, out, inputs.shape[1] / next(iter(stages.values())).shape[1]

  def outputs(self, laterals: dict, out: dict, features: bool, train: bool):
    """Applies the last convolutions; returns (maps, out), the outputs of a pyramid.

    Args:
      laterals: {level: map} with `channels` channels each, the finest first.
      features: whether the caller reads more of `out` than the pyramid.
    """
    levels = {
      name: self.conv(3, f'{name}_output')(x, train=train)
      for name, x in laterals.items()
    }
    if self.extra_level and len(levels) > 1:
      last = list(levels)[-1]
      levels[f'p{int(last[1:]) + 1}'] = levels[last][:, ::2, ::2]
    return levels, {**out, **levels} if features else levels


def top_down(maps: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Adds to every map the coarser ones, resized by nearest neighbours.

  Args:
    maps: {name: map}, the finest first, all with the same number of channels.
  """
  *finer, coarsest = maps
  sums = {coarsest: maps[coarsest]}
  above = maps[coarsest]
  for name in reversed(finer):
    above = maps[name] + nearest(above, maps[name].shape[1:3])
    sums = {name: above, **sums}
  return sums


def nearest(x: jax.Array, size: tuple[int, int]) -> jax.Array:
  """Resizes a map [B, h, w, C] to (H, W): row i is row i h // H of the input."""
  for axis, new in zip((1, 2), size, strict=True):
    old = x.shape[axis]
    if new % old == 0:
      x = jnp.repeat(x, new // old, axis, total_repeat_length=new)
    else:
      x = jnp.take(x, np.arange(new) * old // new, axis)
  return x


def maps_of(backbone: nn.Module, images, *, train: bool) -> tuple[dict, dict]:
  """Runs a backbone on images; returns ({name: map [B, h, w, C]}, all features)."""
  check_images(images)
  _, out = backbone(images, train=train)
  out = {name: x for name, x in out.items() if name != 'pre_logits'}
  return backbone.maps(out), out


def bilinear(x: jax.Array, size: tuple[int, int]) -> jax.Array:
  """Resizes a map [B, h, w, C] to (H, W), with pixel centres aligned."""
  return jax.image.resize(x, (x.shape[0], *size, x.shape[3]), 'bilinear')


def level_of(stride: float) -> int:
  """Returns the level of a map with this stride in pixels: 4 for stride 16."""
  return round(np.log2(stride))
