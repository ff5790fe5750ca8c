"""Feature pyramid: "Feature Pyramid Networks for Object Detection", arXiv 1612.03144.

Built on the stages of a backbone, or alone on maps of any origin.
"""

from collections.abc import Sequence
from typing import Literal

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.detection.models import pyramid
from vit_jax.errors import UserError, choose
from vit_jax.models.family import Family


def variant(name: str) -> dict:
  """Returns the fields of 'swin:T' or another model's name, which is the backbone."""
  return dict(backbone={'name': name})


class FPN(nn.Module):
  """See `__call__`."""

  backbone: nn.Module | None = None  # gives 'stage1', ...; None: maps are the inputs
  stages: Sequence[str] = ()  # names of the backbone's maps; (): all 'stage1', ...
  channels: int = 256
  norm: Literal[pyramid.NORMS] = 'none'  # after every convolution
  extra_level: bool = True  # every second row and column of the coarsest, as one more
  # Without a backbone: pixels per position of the finest map, and the maps' channels,
  # by which parameters are made.
  stride: int = 4
  in_channels: Sequence[int] = ()
  dtype: jnp.dtype = jnp.float32  # of the pyramid, and of a backbone that names none

  @nn.compact
  def __call__(self, inputs, *, train: bool = False, features: bool = True):
    """Gives maps of equal width whose strides are powers of 2.

    Args:
      inputs: images [B, H, W, C] in [-1, 1]; without a backbone {name: [B, h, w, C]},
        each map half as large as the one before, in the order of the numbers in their
        names.
      train: stochastic depth of the backbone, which needs the 'dropout' rng.
      features: whether the caller reads more of `out` than the pyramid.

    Returns:
      ({'p2': [B, H / 4, W / 4, channels], ...}, out): the maps, each named by the
      logarithm of its stride; `out` has them too, and the features of the backbone.

    Raises:
      UserError: for maps that are not each half as large as the one before.
    """
    maps, out = pyramid.maps_of(self.backbone, inputs, train=train)
    stride = self.stride
    if self.backbone is None:
      pyramid.check_widths(maps, self.in_channels)
    else:
      maps = self._stages(maps)
      stride = inputs.shape[1] / next(iter(maps.values())).shape[1]
    pyramid.check_halves(maps)
    first = pyramid.level_of(stride)
    laterals = [
      self._conv(1, f'p{first + i}_lateral')(x) for i, x in enumerate(maps.values())
    ]
    levels = {
      f'p{first + i}': self._conv(3, f'p{first + i}_output')(x)
      for i, x in enumerate(pyramid.top_down(laterals))
    }
    if self.extra_level:
      last = first + len(levels)
      levels[f'p{last}'] = pyramid.subsampled(levels[f'p{last - 1}'])
    return levels, {**out, **levels} if features else levels

  def _conv(self, size: int, name: str):
    return pyramid.ConvNorm(self.channels, size, self.norm, self.dtype, name=name)

  def _stages(self, maps: dict) -> dict:
    names = list(self.stages) or [n for n in maps if n.startswith('stage')]
    if not names:
      raise UserError(
        f'{type(self.backbone).__name__} has no stages to build a pyramid on, only '
        f'{list(maps)}: name some in model.stages, or take the model sfp.'
      )
    return {name: choose('stage of the backbone', name, maps) for name in names}


def _inputs(fields, size) -> dict[str, tuple[int, int, int]]:
  strides = [fields['stride'] * 2**i for i in range(len(fields['in_channels']))]
  return {
    f'res{pyramid.level_of(stride)}': (*(-(-n // stride) for n in size), C)
    for stride, C in zip(strides, fields['in_channels'], strict=True)
  }


FAMILY = Family(
  FPN,
  variant,
  inputs=_inputs,
  outputs='maps',
  tiny=(
    dict(
      backbone=dict(
        name='swin', width=16, depths=(2, 1), num_heads=(2, 4), windows=(4, 4)
      ),
      channels=8,
    ),
  ),
)
