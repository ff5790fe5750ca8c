"""Feature pyramid: "Feature Pyramid Networks for Object Detection", arXiv 1612.03144.

It is built on the stages of a backbone, or stands alone and takes maps as its inputs.
"""

import itertools

import flax.linen as nn

from vit_jax.detection.models import pyramid
from vit_jax.errors import UserError
from vit_jax.models.base import Family


def variant(name: str) -> dict:
  """Returns the fields of a pyramid on the backbone `name`, such as 'swin:T'."""
  return dict(backbone={'name': name})


class FPN(pyramid.Pyramid):
  """Adds coarse, meaningful maps to fine ones, from the top down."""

  @nn.compact
  def __call__(self, inputs, *, train: bool = False, features: bool = True):
    """Computes maps with equal numbers of channels at strides that are powers of 2.

    See `Pyramid`.

    Args:
      inputs: images [B, H, W, C] in [-1, 1]. If there is no backbone, a dict {name: [B, h, w,
        C]} instead. In the order of names, each map is half as large as the one before.
      train: whether the backbone applies stochastic depth, which needs the 'dropout' rng.
      features: whether the caller reads more of `out` than the pyramid.
    """
    maps, out, stride = self.stages(inputs, train=train)
    _check_halves(maps)
    first = pyramid.level_of(stride)
    laterals = {
      f'p{first + i}': self.conv(1, f'p{first + i}_lateral')(x, train=train)
      for i, x in enumerate(maps.values())
    }
    return self.outputs(pyramid.top_down(laterals), out, features, train)


def _check_halves(maps: dict) -> None:
  """Raises UserError unless each map is half as large as the one before, up to rounding."""
  sizes = {name: x.shape[1:3] for name, x in maps.items()}
  for (before, larger), (name, smaller) in itertools.pairwise(sizes.items()):
    if any(n not in (m // 2, -(-m // 2)) for m, n in zip(larger, smaller, strict=True)):
      raise UserError(
        f'A pyramid needs maps each half as large as the one before: {before} has '
        f'{larger}, {name} has {smaller}.'
      )


def _inputs(fields, size) -> dict[str, tuple[int, int, int]]:
  strides = [fields['stride'] * 2**i for i in range(len(fields['in_channels']))]
  return {
    f'res{pyramid.level_of(stride)}': (*(-(-n // stride) for n in size), C)
    for stride, C in zip(strides, fields['in_channels'], strict=True)
  }


_TINY_SWIN = dict(
  name='swin', width=16, depths=(2, 1), num_heads=(2, 4), windows=(4, 4)
)

FAMILY = Family(
  FPN,
  variant,
  inputs=_inputs,
  outputs='maps',
  tiny=(dict(backbone=_TINY_SWIN, channels=8),),
)
