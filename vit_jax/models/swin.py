"""Swin Transformer, arXiv 2103.14030, and its second version, arXiv 2111.09883.

Parameters are those of the published files. The model differs from the authors' code in two
initial values: the head starts at zero, as in all models here, and the patch embedding starts
like every dense layer here.
"""

import functools
import re
from collections.abc import Sequence
from typing import Annotated, Literal

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.check import Depth, Range, Share
from vit_jax.errors import UserError, choose
from vit_jax.kernels import place
from vit_jax.models.base import Classifier, Family
from vit_jax.nn.layers import (
  ACTIVATIONS,
  Dense,
  LayerNorm,
  MlpBlock,
  MultiHeadDotProductAttention,
  PatchEmbedding,
  check_images,
)
from vit_jax.nn.stack import StochasticDepth, depth_rates, stack
from vit_jax.nn.windows import BORDERS, CosineBias, TableBias, Windows, pad, windows_of

# Width of the first stage, blocks and heads per stage: section 3.3 of the first paper.
VARIANTS = {
  'T': (96, (2, 2, 6, 2), (3, 6, 12, 24)),
  'S': (96, (2, 2, 18, 2), (3, 6, 12, 24)),
  'B': (128, (2, 2, 18, 2), (4, 8, 16, 32)),
  'L': (192, (2, 2, 18, 2), (6, 12, 24, 48)),
}
_MASKED = -100.0  # added to the scores of tokens that are not neighbours in the map
_EPS = 1e-5
_INIT = nn.initializers.truncated_normal(0.02)
_ZEROS = nn.initializers.zeros_init()


def variant(name: str) -> dict:
  """Returns the fields of 'T', 'B/12', 'V2-B/16' or 'V2-B/12to24'.

  The number is the side of the windows, 7 by default and 8 in V2. '12to24' is for models
  that were pre-trained at 192 px with windows of 12: windows of 24, with positions scaled by
  windows of 12.

  Raises:
    UserError: for an unknown name.
  """
  match = re.fullmatch(r'(V2-)?(\w+?)(?:/(?:([1-9]\d*)to)?([1-9]\d*))?', name)
  second, size, old, side = match.groups() if match else (None, name, None, None)
  if old and not second:
    raise UserError(
      f'Swin variant {name!r}: only V2 has windows of two sizes: V2-{name}.'
    )
  width, depths, num_heads = choose(
    'Swin variant', size, VARIANTS, ', V2- before and /7 after it for its windows'
  )
  side = int(side or (8 if second else 7))
  fields = dict(width=width, depths=depths, num_heads=num_heads, windows=(side,) * 4)
  if second:
    fields['version'] = 2
  if old:
    fields['pretrained_windows'] = (int(old),) * 3 + (int(old) // 2,)
  return fields


class Block(nn.Module):
  """Attention within windows and an MLP, both residual; keeps the shape [B, H, W, C].

  Each branch begins with a norm in V1, and ends with one in V2.
  """

  num_heads: int
  version: int
  pretrained: int
  mlp_ratio: float
  act: str
  masked: float
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, rate=None, *, windows: Windows, train: bool = False):
    C, second = x.shape[-1], self.version == 2
    attention = MultiHeadDotProductAttention(
      self.num_heads,
      dtype=self.dtype,
      kernel_init=_INIT,
      biases=('query', 'value', 'out') if second else ('query', 'key', 'value', 'out'),
      name='attention',
    )
    bias = functools.partial(CosineBias, self.pretrained) if second else TableBias
    positions = bias(name='relative_positions')

    def scores(query, key):
      query, key, bias = positions(query, key, windows.window)
      return query, key, bias + windows.mask(query.shape[0], self.masked)

    def attend(x):
      return windows.join(attention(windows.cut(x), train=train, positions=scores))

    mlp = MlpBlock(
      int(C * self.mlp_ratio),
      act=self.act,
      dtype=self.dtype,
      kernel_init=_INIT,
      bias_init=_ZEROS,
      name='mlp',
    )
    drop = lambda y: StochasticDepth()(y, rate, train=train)
    # In V2, the scales of the norms start at zero, as in the authors' code, so that a new
    # block is the identity.
    start = dict(scale_init=_ZEROS) if second else {}
    norm1, norm2 = (
      LayerNorm(self.dtype, _EPS, name=name, **start) for name in ('norm1', 'norm2')
    )
    x = place(x)
    if second:
      x = x + drop(norm1(attend(x)))
      return x + drop(norm2(mlp(x)))
    x = x + drop(attend(norm1(x)))
    return x + drop(mlp(norm2(x)))


class Merge(nn.Module):
  """Merges 2 x 2 positions into one of twice the width. Maps [B, H, W, C] to [B, h, w, 2 C]."""

  version: int
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x):
    x = pad(x, (2, 2))
    B, H, W, C = x.shape
    x = x.reshape(B, H // 2, 2, W // 2, 2, C)  # columns before rows
    x = x.transpose(0, 1, 3, 4, 2, 5).reshape(B, H // 2, W // 2, 4 * C)
    norm = LayerNorm(self.dtype, _EPS, name='norm')
    reduction = Dense(
      2 * C, use_bias=False, kernel_init=_INIT, dtype=self.dtype, name='reduction'
    )
    return norm(reduction(x)) if self.version == 2 else reduction(norm(x))


class Stem(nn.Module):
  """Embeds patches, then normalizes them. Maps [B, H, W, C] to [B, h, w, width]."""

  width: int
  patch_size: tuple[int, int]
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x):
    x = pad(x, self.patch_size)
    x = PatchEmbedding(self.width, self.patch_size, self.dtype, name='embedding')(x)
    return LayerNorm(self.dtype, _EPS, name='norm')(x)


class Swin(Classifier):
  """Stages of blocks that attend within shifted windows, a mean, a head.

  Fields up to `pretrained_windows` come from `variant`.
  """

  version: Literal[1, 2] = 1
  width: int = 96  # channels of the first stage; each later stage has twice as many
  depths: tuple[Depth, ...] = (2, 2, 6, 2)  # blocks per stage
  num_heads: tuple[int, ...] = (3, 6, 12, 24)  # heads per stage
  windows: tuple[int, ...] = (7, 7, 7, 7)  # sides of the windows, per stage
  # V2: sides of the windows in pre-training, per stage, by which positions within windows
  # are scaled; (): the sides in `windows`.
  pretrained_windows: Sequence[Annotated[int, Range(0, 4096)]] = ()
  # shift of the windows in every second block, as a share of their side
  shift: Share = 0.5
  borders: Literal[BORDERS] = 'pad_shift'  # how to treat maps that windows do not tile
  patch_size: tuple[int, int] = (4, 4)
  mlp_ratio: float = 4.0
  act: Literal[tuple(ACTIVATIONS)] = 'gelu_erf'
  stochastic_depth: Share = 0.0  # rate of the last block, rising linearly from 0
  # For detectors: a norm on the map of each stage instead of one after the last stage.
  map_norms: bool = False

  @nn.compact
  def __call__(self, images, *, train: bool = False, features: bool = True):
    """Classifies images of any size. Images and maps are padded for patches and windows.

    Returns:
      (logits [B, K] float32, out): named features, 'stem', 'stage1', ... [B, h, w, C], each
      before it is merged for the next stage, 'pre_logits' [B, D], the mean of the last stage
      after the final norm.
    """
    check_images(images)
    stages = self._stages()
    out = {}
    stem = Stem(self.width, self.patch_size, self.dtype, name='stem')
    out['stem'] = x = stem(images)
    rates = depth_rates(self.stochastic_depth, sum(self.depths))
    masked = _MASKED * (2 if self.borders == 'pad_shift_twice' else 1)
    for s, (depth, heads, side, pretrained) in enumerate(stages):
      if s:
        name = f'stage{s + 1}_downsample'
        x = Merge(self.version, self.dtype, name=name)(x)
      shifts = (0, int(side * self.shift))
      kinds = [windows_of(x.shape[1:3], side, n, self.borders) for n in shifts]
      block = functools.partial(
        Block,
        heads,
        self.version,
        pretrained,
        self.mlp_ratio,
        self.act,
        masked,
        self.dtype,
      )
      x, _ = stack(
        block,
        x,
        name=f'stage{s + 1}_block',
        rates=rates[:depth],
        remat=self.remat,
        train=train,
        more=lambda i, kinds=kinds: {'windows': kinds[i % 2]},
      )
      rates = rates[depth:]
      norm = LayerNorm(self.dtype, _EPS, name=f'stage{s + 1}_norm')
      out[f'stage{s + 1}'] = norm(x) if self.map_norms else x
    if not self.map_norms:
      x = LayerNorm(eps=_EPS, name='norm')(x)
    x = x.mean(axis=(1, 2))
    return self.classify(x, out, features)

  def _stages(self) -> list[tuple[int, int, int, int]]:
    """Returns (blocks, heads, side of windows, side in pre-training) of each stage."""
    pretrained = tuple(self.pretrained_windows)
    if self.version == 1 and any(pretrained):
      raise UserError(
        f'pretrained_windows={pretrained} scales positions, which version=1 does not '
        'support: leave it out, or use version=2.'
      )
    pretrained = pretrained or (0,) * len(self.depths)
    stages = self.depths, self.num_heads, self.windows, pretrained
    if len(set(map(len, stages))) != 1 or not self.depths:
      raise UserError(
        f'depths={self.depths}, num_heads={self.num_heads}, windows={self.windows}, '
        f'pretrained_windows={pretrained}: expected one value of each per stage.'
      )
    return list(zip(*stages, strict=True))


_TIMM = {'tiny': 'T', 'small': 'S', 'base': 'B', 'large': 'L'}
_BLOCK = r'stage\d+_block_\d+'

FAMILY = Family(
  model=Swin,
  variant=variant,
  blocks=r'(?P<block>stage(?P<stage>\d+)_block)_(?P<layer>\d+)/.*',
  before=r'stem/.*',
  transitions=r'stage(?P<stage>\d+)_downsample/.*',
  matrices=(
    (rf'{_BLOCK}/attention/(query|key|value)/kernel', ((-3,), (-2, -1))),
    (rf'{_BLOCK}/attention/out/kernel', ((-3, -2), (-1,))),
    (rf'{_BLOCK}/(mlp|relative_positions)/Dense_\d+/kernel', ((-2,), (-1,))),
    (r'stage\d+_downsample/reduction/kernel', ((-2,), (-1,))),
  ),
  branch_ends=rf'{_BLOCK}/mlp',  # In V2 a norm follows.
  prompts=(),
  stems=('stem/embedding/kernel',),
  offsets=rf'{_BLOCK}/relative_positions/table',
  patches='stem/embedding/kernel',
  stride=lambda f: tuple(n * 2 ** (len(f['depths']) - 1) for n in f['patch_size']),
  published=(
    (
      rf'swin_({"|".join(_TIMM)})_patch4_window(\d+)_\d+',
      lambda size, side: (f'{_TIMM[size]}/{side}', {}),
    ),
    (
      rf'swinv2_({"|".join(_TIMM)})_window((?:\d+to)?\d+)_(?:\d+to)?\d+',
      lambda size, sides: (f'V2-{_TIMM[size]}/{sides}', {}),
    ),
  ),
  tiny=(
    dict(width=16, depths=(2, 1), num_heads=(2, 4), windows=(4, 4)),
    dict(version=2, width=16, depths=(2, 1), num_heads=(2, 4), windows=(3, 3)),
  ),
)
