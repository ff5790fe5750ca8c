"""Side-tuning: "A Baseline for Network Adaptation via Additive Side Networks", 1912.13503."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError
from vit_jax.tune.method import Method
from vit_jax.tune.tuned import Added

# AlexNet's convolutions: channels, kernel, stride, padding, and whether a max pool of 3
# with stride 2 follows (arXiv 1404.5997, as torchvision has it).
_ALEXNET = (
  (64, 11, 4, 2, True),
  (192, 5, 1, 2, True),
  (384, 3, 1, 1, False),
  (256, 3, 1, 1, False),
  (256, 3, 1, 1, True),
)
_POOLED = 6
_LEAST = 63  # pixels of which something is left after its pools


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side(Method):
  """s(a) model(x) + (1 - s(a)) W side(x) before the head, s the logistic function.

  As the table of VPT has it (arXiv 2203.12119): the side network is AlexNet's, its 6 x 6
  positions of 256 channels and W [9216, D] without a bias; a starts at 0. There it starts
  from weights of ImageNet, here from scratch.
  """

  def added(self, backbone):
    if backbone.family.outputs == 'pixels':
      raise UserError(
        'config.tune.method=side changes one feature of a whole image, and this model has a '
        'head at every pixel: choose another method, such as lora.'
      )
    return SideNetwork(backbone.head('side').inputs[-1])


class SideNetwork(Added):
  """Parameters `conv_0/{kernel,bias}`, ..., `project/kernel`, `alpha`."""

  width: int

  @nn.compact
  def layers(self, images, train):
    x = images
    if min(x.shape[1:3]) < _LEAST:
      H, W = (max(size, _LEAST) for size in x.shape[1:3])
      x = jax.image.resize(x, (x.shape[0], H, W, x.shape[-1]), 'bilinear')
    for i, (channels, size, stride, padding, pools) in enumerate(_ALEXNET):
      conv = nn.Conv(channels, (size,) * 2, stride, padding, name=f'conv_{i}')
      x = nn.relu(conv(x))
      if pools:
        x = nn.max_pool(x, (3, 3), (2, 2))
    rows, columns = (jnp.asarray(_means(size)) for size in x.shape[1:3])
    x = jnp.einsum('bhwc,ih,jw->bijc', x, rows, columns).reshape(x.shape[0], -1)
    side = nn.Dense(self.width, use_bias=False, name='project')(x)
    share = nn.sigmoid(self.param('alpha', nn.initializers.zeros_init(), ()))

    def head(call, x):
      each = side.astype(x.dtype)
      if x.ndim > each.ndim:  # every token has a head
        each = each[:, None]
      return call(share * x + (1 - share) * each)

    return lambda module, path: head if path == 'head' else None


def _means(size: int) -> np.ndarray:
  """Returns [6, size]: means over 6 ranges that cover `size` positions, as torch's."""
  matrix = np.zeros((_POOLED, size), np.float32)
  for i, row in enumerate(matrix):
    begin, end = i * size // _POOLED, -(-(i + 1) * size // _POOLED)
    row[begin:end] = 1 / (end - begin)
  return matrix
