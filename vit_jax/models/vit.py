"""Vision Transformer: "An Image is Worth 16x16 Words", arXiv 2010.11929.

Differs from the paper in one default: the head is a single linear layer. The paper's
pre-training head has one tanh hidden layer before it; `representation_size` gives it.
"""

import functools
import re
from collections.abc import Callable
from typing import Literal

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.check import Depth, Share
from vit_jax.errors import UserError, choose, did_you_mean
from vit_jax.kernels import place
from vit_jax.models.family import Classifier, Family
from vit_jax.nn import resnet
from vit_jax.nn.layers import (
  ACTIVATIONS,
  Dropout,
  LayerNorm,
  MAPHead,
  MlpBlock,
  MultiHeadDotProductAttention,
  PatchEmbedding,
  check_images,
)
from vit_jax.nn.positions import ADDED, POSEMBS, WHERE, Posemb
from vit_jax.nn.stack import StochasticDepth, depth_rates, stack

CLASSIFIERS = ('token', 'gap', 'map', 'none')
ATTENTION = ('full', 'axial')

# width, depth, MLP width, heads. Ti, S: DeiT (arXiv 2012.12877); B, L, H: Table 1 of
# the paper; M, So400m, mu: big_vision; g, G: arXiv 2106.04560 Table 2; the *-opt
# shapes: arXiv 2305.13035; e: arXiv 2209.06794.
VARIANTS = {
  'mu': (32, 1, 128, 2),
  'Ti': (192, 12, 768, 3),
  'S': (384, 12, 1536, 6),
  'M': (512, 12, 2048, 8),
  'B': (768, 12, 3072, 12),
  'L': (1024, 24, 4096, 16),
  'So400m': (1152, 27, 4304, 16),
  'H': (1280, 32, 5120, 16),
  'g': (1408, 40, 6144, 16),
  'g-opt': (1536, 40, 6144, 16),
  'G': (1664, 48, 8192, 16),
  'G-opt': (1536, 48, 8192, 16),
  'e': (1792, 56, 15360, 16),
}


def variant(name: str) -> dict:
  """Returns the fields of 'B/16', 'B/16x8' (patches of 16 x 8 px) or 'R50+B/16'.

  In a hybrid R<layers>+SIZE/STRIDE (section 4.1), each position of a ResNet's last map is
  a token. At stride 32 the ResNet has its four stages. At stride 16 it has three, and the
  third also has the units of the fourth. 'R+SIZE/16' has the ResNet's root and patches of
  8 x 8 positions: its stride is 32, although it was published as 16.

  Raises:
    UserError: for an unknown name or a missing patch size.
  """
  match = re.fullmatch(r'(?:R(\d*)\+)?([A-Za-z0-9-]+)/(\d+)(?:x(\d+))?', str(name))
  if not match or match[2] not in VARIANTS or match[3] == '0' or match[4] == '0':
    size = str(name).split('/')[0].split('+')[-1]
    raise UserError(
      f"Unknown ViT variant {name!r}: SIZE/PATCH such as 'B/16', or a hybrid such as "
      f"'R50+B/16', SIZE one of {list(VARIANTS)}.{did_you_mean(size, VARIANTS)}"
    )
  width, depth, mlp_dim, num_heads = VARIANTS[match[2]]
  fields = dict(width=width, depth=depth, mlp_dim=mlp_dim, num_heads=num_heads)
  if match[1] is None:
    return dict(fields, patch_size=(int(match[3]), int(match[4] or match[3])))
  size = match[2]
  stems = {f'R+{size}/16': ((), 8)}
  for layers, (*first, third, fourth) in resnet.STAGES.items():
    stems[f'R{layers}+{size}/16'] = (*first, third + fourth), 1
    stems[f'R{layers}+{size}/32'] = (*first, third, fourth), 1
  blocks, patch = choose('hybrid', name, stems)
  return dict(fields, stem_blocks=blocks, patch_size=(patch, patch))


class EncoderBlock(nn.Module):
  """x + attention(norm(x)), then x + mlp(norm(x)): equations 2 and 3.

  Fields are those of `ViT`.

  Attributes:
    grid: (h, w) of the last h * w tokens.
    axis: None, or the direction in which tokens attend: 'rows' or 'columns'.
  """

  num_heads: int
  mlp_dim: int
  act: str
  norm_eps: float
  posemb: Posemb
  dropout: float
  dtype: jnp.dtype
  grid: tuple[int, int]
  axis: str | None = None

  @nn.compact
  def __call__(self, x, depth_rate=None, *, train: bool = False, num_queries=None):
    """Maps [B, N, D] to [B, N, D], or to the first [B, num_queries, D] of it."""
    norm = functools.partial(LayerNorm, self.dtype, self.norm_eps)
    attention = MultiHeadDotProductAttention(
      self.num_heads, dtype=self.dtype, name='MultiHeadDotProductAttention_0'
    )
    mlp = MlpBlock(self.mlp_dim, self.dropout, self.act, self.dtype, name='MlpBlock_0')

    def attend(y):
      if self.axis is not None:
        return unfold(attention(fold(y, self.grid, self.axis)), self.grid, self.axis)
      positions = self.posemb.in_attention(self.grid)
      return attention(y[:, :num_queries], y, positions=positions)

    def drop(y):
      y = Dropout(self.dropout)(y, deterministic=not train)
      return StochasticDepth()(y, depth_rate, train=train)

    x = place(x)
    # The two halves of an axial block share one addition, in the first.
    if self.posemb.where == 'every' and self.axis != 'columns':
      x = x + self.posemb.embedding()(x, self.grid)
    x = x[:, :num_queries] + drop(attend(norm(name='LayerNorm_0')(x)))
    return x + drop(mlp(norm(name='LayerNorm_1')(x), train=train))


class AxialBlock(nn.Module):
  """A block whose tokens attend along rows, then one along columns (section D.6)."""

  block: Callable[..., EncoderBlock]

  @nn.compact
  def __call__(self, x, depth_rate=None, *, train: bool = False):
    """Maps [B, h w, D] to [B, h w, D]."""
    for axis in ('rows', 'columns'):
      x = self.block(axis=axis, name=axis)(x, depth_rate, train=train)
    return x


def fold(x, grid: tuple[int, int], axis: str):
  """Maps tokens [B, h w, D] to sequences: rows [B h, w, D] or columns [B w, h, D]."""
  (B, _, D), (h, w) = x.shape, grid
  x = x.reshape(B, h, w, D)
  if axis == 'columns':
    x = x.swapaxes(1, 2)
  return x.reshape(-1, x.shape[2], D)


def unfold(x, grid: tuple[int, int], axis: str):
  """The inverse of `fold`: sequences to tokens [B, h w, D]."""
  (h, w), D = grid, x.shape[-1]
  if axis == 'columns':
    return x.reshape(-1, w, h, D).swapaxes(1, 2).reshape(-1, h * w, D)
  return x.reshape(-1, h * w, D)


class Encoder(nn.Module):
  """Position embedding, L blocks, final norm: equations 1 to 4.

  Attributes:
    block: makes an `EncoderBlock`, given `grid` and `name`.
    rates: rates of stochastic depth of the L blocks.
  """

  block: Callable[..., EncoderBlock]
  posemb: Posemb
  attention: str
  rates: tuple[float, ...]
  dropout: float
  norm_eps: float
  scan: bool
  remat: str

  @nn.compact
  def __call__(self, x, grid, *, train=False, num_queries=None, between=None):
    """Runs the blocks on a grid (h, w) of tokens, others in front of them.

    Args:
      x: [B, N, D].
      num_queries: how many tokens the caller needs, from the first on; None: all. The
        last block computes only these, unless the blocks are scanned.
      between: see `stack`.

    Returns:
      (normalised tokens [B, N, D] in float32, {name: [B, N, D]}).
    """
    _check(self.posemb, self.attention, x.shape[1], grid)
    if self.posemb.kind in ADDED and self.posemb.where != 'every':
      added = self.posemb.embedding()(x, grid)
      x = x + added
      if self.posemb.where == 'shared':
        between = _adds(added, then=between)
    tokens = x = Dropout(self.dropout)(x, deterministic=not train)
    block = functools.partial(self.block, grid=grid)
    if self.attention == 'axial':
      block = functools.partial(AxialBlock, block)
    last = len(self.rates) - 1
    queries = lambda i: {'num_queries': num_queries} if i == last else {}
    x, out = stack(
      block,
      x,
      name='encoderblock',
      rates=self.rates,
      scan=self.scan,
      remat=self.remat,
      train=train,
      between=between,
      more=None if num_queries is None else queries,
    )
    x = LayerNorm(eps=self.norm_eps, name='encoder_norm')(x)
    return x, {'tokens': tokens, **out}


def _check(posemb: Posemb, attention: str, tokens: int, grid: tuple[int, int]) -> None:
  """Raises UserError for positions and attention that do not go together."""
  posemb.check()
  if choose('attention', attention, ATTENTION) == 'full':
    return
  if tokens != grid[0] * grid[1]:
    raise UserError(
      "attention='axial' is along rows and columns of patches, and a class token is in "
      "none of them: choose classifier='gap', 'map' or 'none'."
    )
  if posemb.kind not in (*ADDED, 'none'):
    raise UserError(
      f"posemb={posemb.kind!r} works only with attention='full': with 'axial' choose one "
      f'of {[*ADDED, "none"]}.'
    )


def _adds(added, then=None):
  """Returns a `between` of `stack` that adds to the input of every block but the first."""

  def between(i, x):
    x = x + jnp.where(i > 0, added, 0)
    return x if then is None else then(i, x)

  return between


class ViT(Classifier):
  """Patches, a Transformer, a head: equations 1 to 4 of the paper.

  Fields up to `num_heads` come from `variant`.
  """

  patch_size: tuple[int, int] = (16, 16)
  width: int = 768
  depth: Depth = 12
  mlp_dim: int = 3072
  num_heads: int = 12
  # Hybrid (section 3.1): units per stage of the ResNet whose last map is cut into patches;
  # (): only its root; None: no ResNet.
  stem_blocks: tuple[Depth, ...] | None = None
  stem_width: int = 64  # channels of the ResNet's root
  # token: a learned cls token; gap: mean of tokens; map: attention pooling;
  # none: every token is classified, logits are [B, N, K].
  classifier: Literal[CLASSIFIERS] = 'token'
  # Width of the tanh layer before the head (paper 3.2); None: no such layer.
  representation_size: int | None = None
  # learn, learn2d, sincos2d are added to tokens; relative and rotary act in attention.
  posemb: Literal[POSEMBS] = 'learn'
  # Where positions are added (Table 8). stem: before the first block; every: before every
  # block, each with a table of its own; shared: before every block, from one table.
  posemb_where: Literal[WHERE] = 'stem'
  posemb_std: float | None = 0.02  # deviation of initial values; None: 1 / sqrt(width)
  # Whether the class token has a learned position too; not in big_vision and FlexiViT.
  posemb_cls: bool = True
  # axial (section D.6): each block is one along rows, then one along columns.
  attention: Literal[ATTENTION] = 'full'
  act: Literal[tuple(ACTIVATIONS)] = 'gelu_tanh'
  norm_eps: float = 1e-6  # every LayerNorm's; transformers' ViT has 1e-12 by default
  dropout: Share = 0.0  # paper B.1: after the embedding and every dense but q, k, v
  stochastic_depth: Share = 0.0  # rate of the last block; the first has 0, linear
  scan: bool = False  # blocks as one scanned block with stacked parameters

  @nn.compact
  def __call__(self, images, *, train: bool = False, features: bool = True):
    """Classifies images.

    Args:
      images: [B, H, W, C] in [-1, 1]. Without a hybrid's stem, pixels behind the last
        whole patch are cut off, as by big_vision and timm: SigLIP reads 378 of 384 px.
      train: dropout and stochastic depth, which need the 'dropout' rng.
      features: whether the caller reads more of `out` than 'pre_logits'. If not, the
        last block (unless scanned) computes the class token alone.

    Returns:
      (logits [B, K] float32, out): named features, 'stem' [B, h, w, D], 'tokens'
      [B, N, D] with positions added, 'block00', ... [B, N, D], 'encoded' [B, N, D]
      after the final norm, 'pre_logits' [B, D]; of hybrids also 'root', 'stage1', ...
      [B, h, w, C]. With `features=False` only 'pre_logits'.
    """
    check_images(images)
    choose('classifier', self.classifier, CLASSIFIERS)
    out, stride = {}, resnet.stride(self.stem_blocks)
    if self.stem_blocks is None:
      down, across = (
        max(n // p, 1) * p
        for n, p in zip(images.shape[1:3], self.patch_size, strict=True)
      )
      x = images[:, :down, :across]
    else:
      x, out = resnet.trunk(
        images, self.stem_blocks, self.stem_width, remat=self.remat, dtype=self.dtype
      )
    embedding = PatchEmbedding(
      self.width, self.patch_size, self.dtype, stride, name='embedding'
    )
    out['stem'] = x = embedding(x)
    B, h, w, D = x.shape
    x = x.reshape(B, h * w, D)
    if self.classifier == 'token':
      cls = self.param('cls', nn.initializers.zeros_init(), (1, 1, D), jnp.float32)
      cls = jnp.broadcast_to(cls.astype(x.dtype), (B, 1, D))
      x = jnp.concatenate([cls, x], axis=1)  # [B, 1 + h w, D]

    # Nothing else of the last block reaches the logits: 7 % of a step at depth 12.
    num_queries = 1 if self.classifier == 'token' and not features else None
    x, blocks = self._encoder()(x, (h, w), train=train, num_queries=num_queries)
    out |= blocks
    out['encoded'] = x

    if self.classifier == 'token':
      x = x[:, 0]
    elif self.classifier == 'gap':
      x = x.mean(axis=1)
    elif self.classifier == 'map':
      x = MAPHead(
        self.num_heads, self.mlp_dim, self.act, self.norm_eps, name='MAPHead_0'
      )(x)
    if self.representation_size is not None:
      x = nn.tanh(nn.Dense(self.representation_size, name='pre_logits')(x))
    return self.classify(x, out, features)

  def _encoder(self) -> Encoder:
    posemb = Posemb(self.posemb, self.posemb_where, self.posemb_std, self.posemb_cls)
    block = functools.partial(
      EncoderBlock,
      num_heads=self.num_heads,
      mlp_dim=self.mlp_dim,
      act=self.act,
      norm_eps=self.norm_eps,
      posemb=posemb,
      dropout=self.dropout,
      dtype=self.dtype,
    )
    return Encoder(
      block,
      posemb,
      attention=self.attention,
      rates=tuple(depth_rates(self.stochastic_depth, self.depth)),
      dropout=self.dropout,
      norm_eps=self.norm_eps,
      scan=self.scan,
      remat=self.remat,
      name='Transformer',
    )


# timm's words for the sizes.
_TIMM = dict(tiny='Ti', small='S', medium='M', base='B', large='L', so400m='So400m')
_TIMM |= dict(huge='H', giant='g', giantopt='g-opt', gigantic='G')
_SIZES = '|'.join(_TIMM)


def _timm(size, patch, siglip='', gap=''):
  classifier = {'classifier': 'gap' if gap else 'map'} if gap or siglip else {}
  return f'{_TIMM[size]}/{patch}', classifier


# See `Family.published`.
PUBLISHED = (
  # timm: vit_base_patch16_224 and SigLIP (arXiv 2303.15343). Its vit_medium_patch16_gap_240
  # has LayerScale.
  (
    rf'vit_(?!medium_patch\d+_gap)({_SIZES})_patch(\d+)(_siglip)?(_gap)?(?:_\d+)?',
    _timm,
  ),
  # timm's hybrids: vit_base_r50_s16_384, vit_tiny_r_s16_p8_224.
  (
    rf'vit_({_SIZES})_r(\d+)_s(\d+)(?:_\d+)?',
    lambda size, r, s: (f'R{r}+{_TIMM[size]}/{s}', {}),
  ),
  (rf'vit_({_SIZES})_r_s16_p8(?:_\d+)?', lambda size: (f'R+{_TIMM[size]}/16', {})),
  # DeiT (arXiv 2012.12877), FlexiViT (2212.08013: its patches are resized in training, the
  # published files hold 16).
  (r'deit_(tiny|small|base)_patch(16)(?:_\d+)?', _timm),
  (
    r'flexivit_(small|base|large)',
    lambda size: (f'{_TIMM[size]}/16', {'posemb_cls': False}),
  ),
  # Google: ViT-B_16, R50+ViT-B_16.
  (
    r'(R\d*\+)?ViT-([A-Za-z0-9]+)_(\d+)(-gap-norep)?',
    lambda r, size, patch, gap: (
      f'{r or ""}{size}/{patch}',
      {'classifier': 'gap'} if gap else {},
    ),
  ),
)

FAMILY = Family(
  model=ViT,
  variant=variant,
  blocks=r'(?P<block>Transformer/encoderblock)(?:_(?P<layer>\d+))?/.*',
  before=r'embedding/.*|cls|Transformer/posembed_input/.*|conv_root/.*|gn_root/.*|block\d+/.*',
  matrices=(
    (r'.*/(query|key|value)/kernel', ((-3,), (-2, -1))),
    (r'.*/MultiHeadDotProductAttention_\d+/out/kernel', ((-3, -2), (-1,))),
    (r'Transformer/encoderblock.*/Dense_\d+/kernel', ((-2,), (-1,))),
  ),
  branch_ends=r'Transformer/encoderblock_\d+/(?:\w+/)?MlpBlock_0',
  prompts=('prepend', 'before_positions', 'add'),
  stems=('conv_root/kernel', 'embedding/kernel'),
  positions=(
    (r'.*/posembed_input/pos_embedding', 'hw'),
    (r'.*/posembed_input/pos_embedding_y', 'h'),
    (r'.*/posembed_input/pos_embedding_x', 'w'),
  ),
  position='Transformer/posembed_input/pos_embedding',
  patches='embedding/kernel',
  stride=lambda f: tuple(
    n * resnet.stride(f.get('stem_blocks')) for n in f['patch_size']
  ),
  any_size=lambda fields: fields['posemb'] in ('sincos2d', 'rotary', 'none'),
  published=PUBLISHED,
  tiny=(
    dict(variant='mu/8', depth=2),
    dict(variant='R50+mu/16', depth=2, stem_blocks=(1,), stem_width=32),
  ),
)
