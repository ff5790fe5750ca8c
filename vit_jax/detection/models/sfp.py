"""Pyramids on the maps of a plain backbone, all of one scale: ViTDet, arXiv 2203.16527.

The four variants of its Table 1; the backbone is in `models.vitdet`.
"""

from collections.abc import Sequence
from typing import Literal

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.detection.models.pyramid import (
  NORMS,
  ConvNorm,
  Rescale,
  check_widths,
  level_of,
  maps_of,
  subsampled,
  top_down,
)
from vit_jax.errors import UserError
from vit_jax.models.family import Family

# Figure 2 of the paper. 'simple': (c), every level from the last map alone; 'fpn_last':
# (b), the same maps with the lateral and top-down connections of an FPN; 'fpn_stages':
# (a), the same of four stages of the backbone; 'none': one level, of the last map's scale.
PYRAMIDS = ('simple', 'fpn_last', 'fpn_stages', 'none')
_FACTORS = (4.0, 2.0, 1.0, 0.5)  # of the scale of the last map


def variant(name: str) -> dict:
  """Returns the fields of 'B', 'L' or 'H', of ViTDet, or of a backbone 'NAME:VARIANT'."""
  return dict(backbone={'name': name if ':' in name else f'vitdet:{name}'})


class SFP(nn.Module):
  """See `__call__`."""

  # A model whose maps are all of one scale; None: maps are the inputs.
  backbone: nn.Module | None = None
  pyramid: Literal[PYRAMIDS] = 'simple'
  channels: int = 256
  norm: Literal[NORMS] = 'layer'  # after every convolution
  # Every second row and column of the coarsest map, as one more; not with 'none'.
  extra_level: bool = True
  # Without a backbone: pixels per position of the maps, and the maps' channels, by which
  # parameters are made.
  stride: int = 16
  in_channels: Sequence[int] = ()
  dtype: jnp.dtype = jnp.float32  # of the pyramid, and of a backbone that names none

  @nn.compact
  def __call__(self, inputs, *, train: bool = False, features: bool = True):
    """Gives maps of equal width whose strides are powers of 2.

    Args:
      inputs: images [B, H, W, C] in [-1, 1]; without a backbone {name: [B, h, w, C]}: one
        map, or four stages in the order of the numbers in their names.
      train: stochastic depth of the backbone, which needs the 'dropout' rng.
      features: whether the caller reads more of `out` than the pyramid.

    Returns:
      ({'p2': [B, H / 4, W / 4, channels], ...}, out): the maps, each named by the
      logarithm of its stride; `out` has them too, and the features of the backbone.
    """
    maps, out = maps_of(self.backbone, inputs, train=train)
    stride = self.stride
    if self.backbone is None:
      check_widths(maps, self.in_channels)
    else:
      maps = {name: x for name, x in maps.items() if name.startswith('stage')}
    maps = self._of_one_scale(maps)
    if self.backbone is not None:
      stride = inputs.shape[1] / maps[-1].shape[1]
    level = level_of(stride)
    factors = (1.0,) if self.pyramid == 'none' else _FACTORS
    if self.pyramid != 'fpn_stages':
      maps = maps[-1:] * len(factors)
    names = [f'p{level - level_of(factor)}' for factor in factors]
    rescale = lambda factor, name: Rescale(
      factor, self.norm, self.dtype, name=f'{name}_scale'
    )
    maps = [
      self._conv(1, f'{name}_lateral')(rescale(factor, name)(x))
      for factor, name, x in zip(factors, names, maps, strict=True)
    ]
    if self.pyramid.startswith('fpn'):
      maps = top_down(maps)
    levels = {
      name: self._conv(3, f'{name}_output')(x)
      for name, x in zip(names, maps, strict=True)
    }
    if self.extra_level and self.pyramid != 'none':
      last = int(names[-1][1:])
      levels[f'p{last + 1}'] = subsampled(levels[names[-1]])
    return levels, {**out, **levels} if features else levels

  def _conv(self, size: int, name: str):
    return ConvNorm(self.channels, size, self.norm, self.dtype, name=name)

  def _of_one_scale(self, maps: dict) -> list:
    """Returns the maps; UserError if they are not such that this pyramid can be built."""
    if len({x.shape[1:3] for x in maps.values()}) != 1:
      shapes = {name: x.shape[1:3] for name, x in maps.items()}
      raise UserError(
        f'This pyramid is built on maps of one scale, such as those of a vitdet, not on '
        f'{shapes or "a backbone without stages"}: take the model fpn.'
      )
    if self.pyramid == 'fpn_stages' and len(maps) != len(_FACTORS):
      raise UserError(
        f"pyramid='fpn_stages' takes {len(_FACTORS)} maps, and there are {list(maps)}: a "
        'vitdet has one for each of its global_blocks.'
      )
    return list(maps.values())


def _inputs(fields, size) -> dict[str, tuple[int, int, int]]:
  grid = tuple(-(-n // fields['stride']) for n in size)
  return {f'stage{i + 1}': (*grid, C) for i, C in enumerate(fields['in_channels'])}


FAMILY = Family(
  SFP,
  variant,
  inputs=_inputs,
  outputs='maps',
  tiny=(
    dict(
      backbone=dict(
        name='vitdet',
        patch_size=(4, 4),
        width=16,
        depth=2,
        mlp_dim=32,
        num_heads=2,
        global_blocks=(1,),
        window=3,
        pretrained_size=(16, 16),
      ),
      channels=8,
    ),
  ),
)
