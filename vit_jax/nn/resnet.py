"""ResNets (arXiv 1512.03385): their shapes, and a trunk for hybrids and `resnet_gn`.

The trunk is post-activation, with GroupNorm and weight standardisation.
"""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.errors import UserError, did_you_mean
from vit_jax.nn.layers import group_norm
from vit_jax.nn.stack import remat_policy

# {layers: bottleneck units per stage}. 50, 101, 152: Table 1 of the ResNet paper; 200:
# arXiv 1603.05027; 26: the small hybrids of arXiv 2106.10270.
STAGES = {
  26: (2, 2, 2, 2),
  50: (3, 4, 6, 3),
  101: (3, 4, 23, 3),
  152: (3, 8, 36, 3),
  200: (3, 24, 36, 3),
}


def variant(name: str) -> dict:
  """Returns the fields `blocks` and `width` of a name: 'R50', or 'R152x4', 4 times as wide.

  Raises:
    UserError: for an unknown name.
  """
  match = re.fullmatch(r'R(\d+)(?:x([1-9]\d*))?', str(name))
  if not match or int(match[1]) not in STAGES:
    names = [f'R{depth}' for depth in STAGES]
    raise UserError(
      f'Unknown ResNet variant {name!r}: expected one of {names}, or one of them with a '
      f"multiple of its width, such as 'R50x3'."
      f'{did_you_mean(str(name).split("x")[0], names)}'
    )
  return dict(blocks=STAGES[int(match[1])], width=64 * int(match[2] or 1))


def stride(blocks: tuple[int, ...] | None) -> int:
  """Returns the pixels per position of the trunk's output; 1 without a trunk (None)."""
  return 1 if blocks is None else 4 * 2 ** max(len(blocks) - 1, 0)


class StdConv(nn.Module):
  """A convolution without bias that standardises its kernel.

  The parameter `kernel` [kh, kw, C, features] is float32. Every call scales it in float32
  to mean 0 and standard deviation 1 for each output channel. The two reference codes
  protect the division differently, and a published file needs that of its own code:
  w / (std + 1e-5) in the hybrids and in `resnet_gn`, w / sqrt(var + 1e-10) in the published
  BiT (`eps_in_root`).
  """

  features: int
  kernel_size: int
  strides: int = 1
  padding: str | int = 'SAME'  # or a number: that many zeros on each side
  eps_in_root: bool = False
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x):
    """Maps [B, H, W, C] to [B, h, w, features] of `dtype`."""
    size = (self.kernel_size, self.kernel_size)
    kernel = self.param(
      'kernel',
      nn.initializers.lecun_normal(),
      (*size, x.shape[-1], self.features),
      jnp.float32,
    )
    padding = self.padding
    if not isinstance(padding, str):
      padding = [(padding, padding)] * 2
    return jax.lax.conv_general_dilated(
      x.astype(self.dtype),
      standardise(kernel, eps_in_root=self.eps_in_root).astype(self.dtype),
      window_strides=(self.strides, self.strides),
      padding=padding,
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    )


def standardise(kernel, *, eps_in_root: bool = False):
  """Scales a kernel [kh, kw, C, K] to mean 0 and standard deviation 1 over (kh, kw, C)."""
  centred = kernel - kernel.mean((0, 1, 2), keepdims=True)
  variance = (centred * centred).mean((0, 1, 2), keepdims=True)
  if eps_in_root:
    return centred * jax.lax.rsqrt(variance + 1e-10)
  # The gradient must stay finite for a constant kernel, such as one that has decayed to 0.
  return centred / (jnp.sqrt(jnp.maximum(variance, 1e-30)) + 1e-5)


class Bottleneck(nn.Module):
  """1x1, 3x3 and 1x1 convolutions beside a shortcut. Maps [B, H, W, C] to [B, h, w, 4 mid].

  Post-activation: ReLU follows the sum. The 3x3 convolution has the stride. The shortcut is
  projected if the resolution or the number of channels changes.
  """

  mid: int
  strides: int = 1
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x):
    def layer(i, x, features, size, strides=1):
      x = StdConv(features, size, strides, dtype=self.dtype, name=f'conv{i}')(x)
      return group_norm(x, f'gn{i}', zero_scale=i == 3, dtype=self.dtype)

    features, shortcut = 4 * self.mid, x
    if self.strides != 1 or x.shape[-1] != features:
      project = StdConv(features, 1, self.strides, dtype=self.dtype, name='conv_proj')
      shortcut = group_norm(project(x), 'gn_proj', dtype=self.dtype)
    y = nn.relu(layer(1, x, self.mid, 1))
    y = nn.relu(layer(2, y, self.mid, 3, self.strides))
    return nn.relu(shortcut + layer(3, y, features, 1))


class Stage(nn.Module):
  """Units `unit1`, ...; the first has the stride."""

  units: int
  mid: int
  strides: int = 1
  remat: str = 'none'
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x):
    Unit = rematerialise(Bottleneck, self.remat)
    for i in range(self.units):
      strides = self.strides if i == 0 else 1
      x = Unit(self.mid, strides, self.dtype, name=f'unit{i + 1}')(x)
    return x


def rematerialise(Unit, remat: str):
  """Returns the module's class with the rematerialisation `remat`, see `nn.stack`."""
  policy = remat_policy(remat)
  return Unit if policy is None else nn.remat(Unit, policy=policy)


def trunk(images, blocks: tuple[int, ...], width: int, *, remat: str, dtype):
  """Runs root and stages in the calling compact module, which owns their parameters.

  Args:
    images: [B, H, W, C].
    blocks: units per stage; () for the root alone.
    width: channels of the root convolution; stage i has 4 width 2^(i-1) channels.
    remat: rematerialisation of the units, see `nn.stack`.

  Returns:
    (x [B, h, w, C], {'root': [B, H / 4, W / 4, width], 'stage1': [B, h, w, C], ...}).
  """
  x = StdConv(width, 7, 2, dtype=dtype, name='conv_root')(images)
  x = nn.relu(group_norm(x, 'gn_root', dtype=dtype))
  out = {}
  out['root'] = x = nn.max_pool(x, window_shape=(3, 3), strides=(2, 2), padding='SAME')
  for i, units in enumerate(blocks):
    strides = 1 if i == 0 else 2
    x = Stage(units, width * 2**i, strides, remat, dtype, name=f'block{i + 1}')(x)
    out[f'stage{i + 1}'] = x
  return x, out
