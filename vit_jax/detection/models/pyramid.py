"""What feature pyramids are made of: maps [B, h, w, C] of several scales."""

import itertools
from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError
from vit_jax.nn.layers import LayerNorm, check_images

NORMS = ('none', 'layer')


class ConvNorm(nn.Module):
  """A convolution, then a norm of the channels at each position, if any.

  Attributes:
    size: side of the kernel, 1 or 3; maps keep theirs.
    norm: one of NORMS; with one the convolution has no bias.
  """

  width: int
  size: int
  norm: str
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x):
    x = nn.Conv(
      self.width,
      (self.size, self.size),
      use_bias=self.norm == 'none',
      kernel_init=nn.initializers.variance_scaling(2.0, 'fan_out', 'normal'),
      dtype=self.dtype,
      name='conv',
    )(x)
    return LayerNorm(self.dtype, name='norm')(x) if self.norm == 'layer' else x


class Rescale(nn.Module):
  """A map of another scale: [B, h, w, C] -> [B, h factor, w factor, C'].

  ViTDet's (arXiv 2203.16527, section 3): deconvolutions of stride 2, which halve the
  channels, a norm and GELU between two of them; maxima of 2 x 2 for half the scale.

  Attributes:
    factor: 4, 2, 1 or 0.5.
  """

  factor: float
  norm: str
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x):
    if self.factor == 0.5:
      return nn.max_pool(x, (2, 2), (2, 2))
    for i in range(1, int(np.log2(self.factor)) + 1):
      if i > 1:
        if self.norm == 'layer':
          x = LayerNorm(self.dtype, name=f'norm{i - 1}')(x)
        x = jax.nn.gelu(x, approximate=False)
      x = nn.ConvTranspose(
        x.shape[-1] // 2, (2, 2), (2, 2), dtype=self.dtype, name=f'deconv{i}'
      )(x)
    return x


def top_down(maps: list[jax.Array]) -> list[jax.Array]:
  """Adds to every map the coarser ones, resized to it by nearest neighbours.

  Args:
    maps: of the same number of channels, the finest first.
  """
  found = [maps[-1]]
  for x in reversed(maps[:-1]):
    found.insert(0, x + nearest(found[0], x.shape[1:3]))
  return found


def nearest(x: jax.Array, size: tuple[int, int]) -> jax.Array:
  """Returns a map [B, h, w, C] resized to (H, W): position i is that of i h // H."""
  for axis, new in zip((1, 2), size, strict=True):
    old = x.shape[axis]
    if new % old == 0:
      x = jnp.repeat(x, new // old, axis, total_repeat_length=new)
    else:
      x = jnp.take(x, np.arange(new) * old // new, axis)
  return x


def subsampled(x: jax.Array) -> jax.Array:
  """Returns every second row and column of a map."""
  return x[:, ::2, ::2]


def check_halves(maps: dict) -> None:
  """Raises UserError unless each map is half as large as the one before, rounded."""
  sizes = {name: x.shape[1:3] for name, x in maps.items()}
  pairs = itertools.pairwise(sizes.items())
  for (before, larger), (name, smaller) in pairs:
    if any(n not in (m // 2, -(-m // 2)) for m, n in zip(larger, smaller, strict=True)):
      raise UserError(
        f'A pyramid needs maps each half as large as the one before: {before} has '
        f'{larger}, {name} has {smaller}. Choose other stages, or a backbone whose stages '
        'have strides of 4, 8, 16, ... (for plain ViTs see sfp).'
      )


def maps_of(
  backbone: nn.Module | None, inputs, *, train: bool
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
  """Returns (maps, features) of images by a backbone, or of the maps that are given.

  Args:
    backbone: gives named features; None: there is none, and inputs are maps.
    inputs: images [B, H, W, C], or {name: [B, h, w, C]}, ordered by the numbers in their
      names, the finest first.

  Raises:
    UserError: for images without a backbone, or maps with one.
  """
  if isinstance(inputs, Mapping):
    if backbone is not None:
      raise UserError(
        f'The maps {list(inputs)} were given to a pyramid with a backbone, which takes '
        'images [B, H, W, C]: build it without one.'
      )
    number = lambda name: (int(''.join(filter(str.isdigit, name)) or 0), name)
    return {name: inputs[name] for name in sorted(inputs, key=number)}, {}
  if backbone is None:
    raise UserError(
      "A pyramid without a backbone takes maps, {'res2': [B, h, w, C], ...}: give it "
      "these, or a backbone={'name': ...} for images."
    )
  check_images(inputs)
  _, out = backbone(inputs, train=train)
  out = {name: x for name, x in out.items() if name != 'pre_logits'}
  return {name: x for name, x in out.items() if x.ndim == 4}, out


def level_of(stride: float) -> int:
  """Returns the level of a map, the 4 of 'p4', by its stride in pixels of the image."""
  return round(np.log2(stride))


def check_widths(maps: Mapping, widths: tuple[int, ...]) -> None:
  """Raises UserError for maps of other channels than a pyramid was built for."""
  found = tuple(x.shape[-1] for x in maps.values())
  if widths and found != tuple(widths):
    raise UserError(
      f'The maps {list(maps)} have {list(found)} channels: in_channels says '
      f'{list(widths)}.'
    )
