"""ConvNeXt: "A ConvNet for the 2020s", arXiv 2201.03545, and V2, arXiv 2301.00808.

Parameters have timm's names, but V2's response normalisation is `mlp/norm`. The model
differs from the authors' code in one thing: the head starts at zero, as in all models here.
LAION trained it as the image tower of CLIP, with a larger size and a hidden layer in the head.
"""

import functools
from typing import Literal

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.check import Count, Depth, Share
from vit_jax.errors import UserError, choose
from vit_jax.kernels.depthwise import depthwise
from vit_jax.models.base import Family, ImageTower
from vit_jax.nn.layers import ACTIVATIONS, LayerNorm, MlpBlock, check_images, param
from vit_jax.nn.stack import StochasticDepth, depth_rates, stack

# Blocks and channels per stage, from section 3 of the paper. A, F, P, N and H are from
# appendix A.1 of V2's paper, XXL is LAION's.
VARIANTS = {
  'A': ((2, 2, 6, 2), (40, 80, 160, 320)),
  'F': ((2, 2, 6, 2), (48, 96, 192, 384)),
  'P': ((2, 2, 6, 2), (64, 128, 256, 512)),
  'N': ((2, 2, 8, 2), (80, 160, 320, 640)),
  'T': ((3, 3, 9, 3), (96, 192, 384, 768)),
  'S': ((3, 3, 27, 3), (96, 192, 384, 768)),
  'B': ((3, 3, 27, 3), (128, 256, 512, 1024)),
  'L': ((3, 3, 27, 3), (192, 384, 768, 1536)),
  'XL': ((3, 3, 27, 3), (256, 512, 1024, 2048)),
  'H': ((3, 3, 27, 3), (352, 704, 1408, 2816)),
  'XXL': ((3, 4, 30, 3), (384, 768, 1536, 3072)),
}
_INIT = nn.initializers.truncated_normal(0.02)  # appendix A.1


def variant(name: str) -> dict:
  """Returns the fields of a size in VARIANTS; raises UserError for others."""
  depths, widths = choose('ConvNeXt variant', name, VARIANTS)
  return dict(depths=depths, widths=widths)


class ResponseNorm(nn.Module):
  """Global response normalisation (V2), x + scale * x * g / mean(g) + bias.

  g [C] is the length of each channel as a vector over the map. Keeps the shape [B, H, W, C].
  """

  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x):
    shape, zeros = x.shape[-1:], nn.initializers.zeros_init()
    make = lambda name: param(self, name, lambda rng: zeros(rng, shape), shape)
    scale, bias, x = make('scale'), make('bias'), x.astype(jnp.float32)
    # The gradient must stay finite for a channel of zeros.
    g = jnp.sqrt(jnp.maximum(jnp.square(x).sum((1, 2), keepdims=True), 1e-30))
    y = x * (g / (g.mean(-1, keepdims=True) + 1e-6))
    return (x + scale * y + bias).astype(self.dtype)


class Block(nn.Module):
  """x + gamma * mlp(norm(7x7 depthwise convolution(x))); keeps the shape [B, H, W, C].

  V2 has no gamma (`layer_scale` None), but a `ResponseNorm` in the MLP.
  """

  layer_scale: float | None
  act: str
  norm_eps: float
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, rate=None, *, train: bool = False):
    C = x.shape[-1]
    conv = DepthwiseConv(7, self.dtype, name='conv_dw')
    norm = LayerNorm(self.dtype, self.norm_eps, name='norm')
    is_v2 = self.layer_scale is None
    options = dict(kernel_init=_INIT, bias_init=nn.initializers.zeros_init())
    options |= dict(norm=functools.partial(ResponseNorm, self.dtype)) if is_v2 else {}
    mlp = MlpBlock(4 * C, act=self.act, dtype=self.dtype, name='mlp', **options)
    drop = lambda y: StochasticDepth()(y, rate, train=train)
    if is_v2:
      return x + drop(mlp(norm(conv(x))))
    start = nn.initializers.constant(self.layer_scale)
    gamma = self.param('gamma', start, (C,), jnp.float32).astype(self.dtype)
    return x + drop(gamma * mlp(norm(conv(x))))


class DepthwiseConv(nn.Module):
  """A filter of size x size for every channel, plus a bias. The map is padded with zeros.

  Parameters are those of `nn.Conv`: `kernel` [size, size, 1, C] and `bias` [C].
  """

  size: int
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x):
    C, zeros = x.shape[-1], nn.initializers.zeros_init()
    shape = (self.size, self.size, 1, C)
    kernel = param(self, 'kernel', lambda rng: _INIT(rng, shape), shape)
    bias = param(self, 'bias', lambda rng: zeros(rng, (C,)), (C,))
    x, kernel, bias = (a.astype(self.dtype) for a in (x, kernel, bias))
    return depthwise(x, kernel, 1, ((self.size // 2,) * 2,) * 2) + bias


class Patches(nn.Module):
  """A convolution whose stride is the size of its kernel, after or before a norm.

  Maps [B, H, W, C] to [B, H / size, W / size, width].
  """

  width: int
  size: int
  norm_first: bool
  norm_eps: float
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x):
    norm = LayerNorm(self.dtype, self.norm_eps, name='norm')
    size = (self.size, self.size)
    options = dict(padding='VALID', kernel_init=_INIT, dtype=self.dtype, name='conv')
    conv = nn.Conv(self.width, size, size, **options)
    return conv(norm(x)) if self.norm_first else norm(conv(x))


class ConvNeXt(ImageTower):
  """Stages of depthwise convolutions and MLPs, a normalised mean, a head.

  `depths` and `widths` come from `variant`.
  """

  depths: tuple[Depth, ...] = (3, 3, 9, 3)  # blocks per stage
  widths: tuple[int, ...] = (96, 192, 384, 768)  # channels per stage
  stochastic_depth: Share = 0.0  # rate of the last block, rising linearly from 0
  layer_scale: float | None = 1e-6  # initial value of gamma; None: no gamma (V2)
  act: Literal[tuple(ACTIVATIONS)] = 'gelu_erf'
  norm_eps: float = 1e-6  # epsilon of the final norm; transformers' ConvNext has 1e-12
  body_norm_eps: float = 1e-6  # epsilon of all other norms; 1e-5 in LAION's XXL
  # Width of a layer with GELU before the head (LAION's L); None: no such layer.
  representation_size: Count | None = None

  @nn.compact
  def __call__(self, images, *, train: bool = False, features: bool = True):
    """Classifies images of any size. Positions that do not fill a patch are cut off.

    Returns:
      (logits [B, K] float32, out): named features, 'stem', 'stage1', ... [B, h, w, C],
      'pre_logits' [B, D], the normalised mean of the last stage.
    """
    check_images(images)
    if not len(self.depths) == len(self.widths) >= 1:
      raise UserError(
        f'depths={self.depths}, widths={self.widths}: expected one depth and one width '
        'per stage.'
      )
    options = dict(norm_eps=self.body_norm_eps, dtype=self.dtype)
    patches = functools.partial(Patches, **options)
    x = patches(self.widths[0], 4, norm_first=False, name='stem')(images)
    out = {'stem': x}
    block = functools.partial(Block, self.layer_scale, self.act, **options)
    rates = depth_rates(self.stochastic_depth, sum(self.depths))
    for s, (depth, width) in enumerate(zip(self.depths, self.widths, strict=True)):
      if s:
        x = patches(width, 2, norm_first=True, name=f'stage{s + 1}_downsample')(x)
      options = dict(rates=rates[:depth], remat=self.remat, train=train)
      x, _ = stack(block, x, name=f'stage{s + 1}_block', **options)
      rates = rates[depth:]
      out[f'stage{s + 1}'] = x
    x = x.astype(jnp.float32).mean(axis=(1, 2))
    x = LayerNorm(eps=self.norm_eps, name='norm')(x)
    if self.representation_size is not None:
      x = nn.Dense(self.representation_size, kernel_init=_INIT, name='pre_logits')(x)
      x = ACTIVATIONS['gelu_erf'](x)
    return self.classify(x, out, features)


_TIMM = dict(atto='A', femto='F', pico='P', nano='N', tiny='T', small='S', base='B')
_TIMM |= dict(large='L', xlarge='XL', huge='H')
_V1, _V2 = '|'.join([*_TIMM][:-1]), '|'.join(size for size in _TIMM if size != 'xlarge')

_MLP, _XXL = dict(representation_size=1536), dict(norm_eps=1e-5, body_norm_eps=1e-5)
# {name of LAION's image towers in open_clip: (size, width of the projection, fields)}.
_LAION = {
  'base_w': ('B', 640, {}),
  'large_d': ('L', 768, _MLP),
  'xxlarge': ('XXL', 1024, _XXL),
}


def _tower(name: str):
  size, outputs, fields = _LAION[name]
  return size, fields | dict(num_classes=outputs, head_bias=False)


FAMILY = Family(
  model=ConvNeXt,
  variant=variant,
  blocks=r'(?P<block>stage(?P<stage>\d+)_block)_(?P<layer>\d+)/.*',
  before=r'stem/.*',
  transitions=r'stage(?P<stage>\d+)_downsample/.*',
  matrices=((r'.*_block_\d+/mlp/Dense_\d+/kernel', ((-2,), (-1,))),),
  branch_ends=r'stage\d+_block_\d+/mlp',
  prompts=('pad',),
  stems=('stem/conv/kernel',),
  stride=lambda fields: (4 * 2 ** (len(fields['depths']) - 1),) * 2,
  published=(
    (rf'convnext_({_V1})', lambda size: (_TIMM[size], {})),
    (r'convnext_large_mlp', lambda: ('L', _MLP)),
    (r'convnext_xxlarge', lambda: ('XXL', _XXL)),
    # open_clip: convnext_base_w; laion/CLIP-convnext_base_w-laion2B-s13B-b82K
    (rf'(?:laion/CLIP-)?convnext_({"|".join(_LAION)})(?:_320)?(?:-laion.*)?', _tower),
    (rf'convnextv2_({_V2})', lambda size: (_TIMM[size], {'layer_scale': None})),
  ),
  tiny=(
    dict(depths=(1, 2), widths=(16, 32), layer_scale=1.0),
    dict(depths=(1, 2), widths=(16, 32), layer_scale=None),
  ),
)
