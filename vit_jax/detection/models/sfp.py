"""Pyramids on a plain backbone, whose maps have one scale: ViTDet, arXiv 2203.16527.

These are the four variants of the paper's Table 1. The backbone is in `models.vitdet`.
"""

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.detection.models import vitdet
from vit_jax.detection.models.pyramid import (
  NORMS,
  Pyramid,
  level_of,
  normalise,
  top_down,
)
from vit_jax.errors import UserError
from vit_jax.models.base import Family

# Figure 2 of the paper.
# 'simple' (c): every level comes from the last map.
# 'fpn_last' (b): the same, with the lateral and top-down connections of an FPN.
# 'fpn_stages' (a): the same, but levels come from four stages of the backbone.
# 'none': one level, with the scale of the last map.
PYRAMIDS = ('simple', 'fpn_last', 'fpn_stages', 'none')
# Scales of the levels, relative to the last map.
_FACTORS = (4.0, 2.0, 1.0, 0.5)


def variant(name: str) -> dict:
  """Returns the fields of a pyramid on a ViTDet 'B', 'L' or 'H', or on any 'NAME:VARIANT'."""
  return dict(backbone={'name': name if ':' in name else f'vitdet:{name}'})


class Rescale(nn.Module):
  """Rescales a map [B, h, w, C] to [B, h factor, w factor, C'] (section 3).

  Enlarges by deconvolutions of stride 2, which halve the channels, with a norm and GELU
  between two of them. Shrinks by max pooling of 2 x 2.

  Attributes:
    factor: one of 4, 2, 1 and 0.5.
  """

  factor: float
  norm: str
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, *, train: bool):
    if self.factor == 0.5:
      return nn.max_pool(x, (2, 2), (2, 2))
    for i in range(1, int(np.log2(self.factor)) + 1):
      if i > 1:
        x = normalise(x, self.norm, self.dtype, f'norm{i - 1}', train=train)
        x = jax.nn.gelu(x, approximate=False)
      x = nn.ConvTranspose(
        x.shape[-1] // 2, (2, 2), (2, 2), dtype=self.dtype, name=f'deconv{i}'
      )(x)
    return x


class SFP(Pyramid):
  """A pyramid on a backbone whose maps all have one scale."""

  pyramid: Literal[PYRAMIDS] = 'simple'
  norm: Literal[NORMS] = 'layer'
  stride: int = 16

  @nn.compact
  def __call__(self, inputs, *, train: bool = False, features: bool = True):
    """Computes maps with equal numbers of channels at strides that are powers of 2.

    See `Pyramid`.

    Args:
      inputs: images [B, H, W, C] in [-1, 1]. If there is no backbone, a dict {name: [B, h, w,
        C]} instead, which holds one map, or four stages in the order of their names.
      train: whether the backbone applies stochastic depth, which needs the 'dropout' rng.
      features: whether the caller reads more of `out` than the pyramid.
    """
    maps, out, stride = self.stages(inputs, train=train, plain=True)
    maps = self._check_scale(maps)
    level = level_of(stride)
    factors = (1.0,) if self.pyramid == 'none' else _FACTORS
    if self.pyramid != 'fpn_stages':
      maps = maps[-1:] * len(factors)
    laterals = {}
    for factor, x in zip(factors, maps, strict=True):
      name = f'p{level - level_of(factor)}'
      x = Rescale(factor, self.norm, self.dtype, name=f'{name}_scale')(x, train=train)
      laterals[name] = self.conv(1, f'{name}_lateral')(x, train=train)
    if self.pyramid.startswith('fpn'):
      laterals = top_down(laterals)
    return self.outputs(laterals, out, features, train)

  def _check_scale(self, maps: dict) -> list:
    """Returns the maps; raises UserError if this pyramid cannot be built on them."""
    if len({x.shape[1:3] for x in maps.values()}) != 1:
      shapes = {name: x.shape[1:3] for name, x in maps.items()}
      raise UserError(
        f'The model sfp is built on maps of one scale, such as those of a vitdet, not on '
        f'{shapes}: use the model fpn.'
      )
    if self.pyramid == 'fpn_stages' and len(maps) != len(_FACTORS):
      raise UserError(
        f"pyramid='fpn_stages' takes {len(_FACTORS)} maps, but there are {list(maps)}: a "
        'vitdet has one for each of its global_blocks.'
      )
    return list(maps.values())


def _inputs(fields, size) -> dict[str, tuple[int, int, int]]:
  grid = tuple(-(-n // fields['stride']) for n in size)
  return {f'stage{i + 1}': (*grid, C) for i, C in enumerate(fields['in_channels'])}


_TINY_VITDET = vitdet.FAMILY.tiny[0] | dict(
  name='vitdet', depth=2, global_blocks=(1,), neck=None
)

FAMILY = Family(
  SFP,
  variant,
  inputs=_inputs,
  outputs='maps',
  tiny=(dict(backbone=_TINY_VITDET, channels=8),),
)
