"""Feature pyramid: "Feature Pyramid Networks for Object Detection", arXiv 1612.03144.

Built on the stages of a backbone, or alone on maps of any origin.
"""

import flax.linen as nn

from vit_jax.detection.models import pyramid
from vit_jax.models.family import Family


def variant(name: str) -> dict:
  """Returns the fields of 'swin:T' or another model's name, which is the backbone."""
  return dict(backbone={'name': name})


class FPN(pyramid.Pyramid):
  """See `__call__`."""

  @nn.compact
  def __call__(self, inputs, *, train: bool = False, features: bool = True):
    """Gives maps of equal width whose strides are powers of 2, see `Pyramid`.

    Args:
      inputs: images [B, H, W, C] in [-1, 1]; without a backbone {name: [B, h, w, C]},
        each map half as large as the one before, in the order of their names.
      train: stochastic depth of the backbone, which needs the 'dropout' rng.
      features: whether the caller reads more of `out` than the pyramid.
    """
    maps, out = pyramid.maps_of(self.backbone, inputs, train=train)
    stride = self.stride
    if self.backbone is not None:
      maps = pyramid.stages_of(self.backbone, maps)
      stride = inputs.shape[1] / next(iter(maps.values())).shape[1]
    pyramid.check_halves(maps)
    first = pyramid.level_of(stride)
    laterals = {
      f'p{first + i}': self.conv(1, f'p{first + i}_lateral')(x)
      for i, x in enumerate(maps.values())
    }
    return self.outputs(pyramid.top_down(laterals), out, features)


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
