"""Vision Transformer: "An Image is Worth 16x16 Words", arXiv 2010.11929.

It differs from the paper in one default: the head is a single linear layer. In pre-training
the paper's head has a hidden layer with tanh before it, see `representation_size`.
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Literal

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.check import Depth, Share
from vit_jax.errors import UserError, choose, did_you_mean
from vit_jax.kernels import place
from vit_jax.models.base import Classifier, Family
from vit_jax.nn import resnet
from vit_jax.nn.layers import (
  Dropout,
  LayerNorm,
  MAPHead,
  MlpBlock,
  MultiHeadDotProductAttention,
  PatchEmbedding,
  check_images,
  crop_to_patches,
)
from vit_jax.nn.positions import (
  ADDED,
  POSEMBS,
  SINES,
  WHERE,
  PositionEmbedding,
  RelativePositions,
  Rope,
)
from vit_jax.nn.stack import StochasticDepth, depth_rates, stack

CLASSIFIERS = ('token', 'gap', 'map', 'none')
ATTENTION = ('full', 'axial')


class ViT(Classifier):
  """Patches, a Transformer and a head: equations 1 to 4 of the paper.

  Fields up to `num_heads` come from `variant`. `models.build` returns this class, or
  `models.vit_later.LaterViT` if a field of a later paper is set.
  """

  patch_size: tuple[int, int] = (16, 16)
  width: int = 768
  depth: Depth = 12
  mlp_dim: int = 3072
  num_heads: int = 12
  # Hybrid (section 3.1): units per stage of the ResNet whose last map is cut into patches.
  # (): the ResNet is only a root. None: no ResNet.
  stem_blocks: tuple[Depth, ...] | None = None
  stem_width: int = 64  # channels of the ResNet's root
  # token: a learned cls token. gap: the mean of the patches. map: attention pooling of the
  # patches. none: every patch is classified, and logits are [B, h w, K].
  classifier: Literal[CLASSIFIERS] = 'token'
  # Width of the tanh layer before the head in pre-training (section 3.1); None: no such
  # layer, as in fine-tuning.
  representation_size: int | None = None
  # Those in `positions.ADDED` are added to tokens; the others act in attention.
  posemb: Literal[POSEMBS] = 'learn'
  # Where positions are added (Table 8). stem: before the first block. every: before every
  # block, from a table per block. shared: before every block, from one table.
  posemb_where: Literal[WHERE] = 'stem'
  # Standard deviation of the initial position embeddings; None: 1 / sqrt(width).
  posemb_std: float | None = 0.02
  # axial (section D.6): each block is two blocks, one along rows and one along columns.
  attention: Literal[ATTENTION] = 'full'
  # Dropout after the embedding and after every dense layer, except the layers that make
  # queries, keys and values (appendix B.1).
  dropout: Share = 0.0
  stochastic_depth: Share = 0.0  # rate of the last block, rising linearly from 0
  # whether to run the blocks as a loop over one block, with stacked parameters
  scan: bool = False

  @nn.compact
  def __call__(self, images, *, train: bool = False, features: bool = True):
    """Classifies images.

    Args:
      images: [B, H, W, C] in [-1, 1]. Unless the model has a hybrid stem, pixels beyond the
        last whole patch are cut off, see `crop_to_patches`.
      train: whether to apply dropout and stochastic depth, which need the 'dropout' rng.
      features: whether the caller reads more of `out` than 'pre_logits'. If not, the
        last block (unless scanned) computes only the tokens that are classified.

    Returns:
      (logits [B, K] float32, out). `out` has named features: 'stem' [B, h, w, D], the
      patches; 'tokens' [B, N, D], the input of the first block; 'block00', ... [B, N, D];
      'encoded' [B, N, D], after the final norm; and 'pre_logits' [B, D]. For hybrids it also
      has 'root', 'stage1', ... [B, h, w, C]. With `features=False` only 'pre_logits' is
      defined.
    """
    check_images(images)
    self.check()

    # Patches.
    x, out = self.embed_patches(images)  # [B, h, w, D]
    B, h, w, D = x.shape
    grid = h, w
    x = x.reshape(B, h * w, D)  # [B, h w, D]

    # The class token.
    if self.classifier == 'token':
      cls = self.make_tokens('cls', 1, nn.initializers.zeros_init(), x)
      x = jnp.concatenate([cls, x], axis=1)  # [B, 1 + h w, D]

    # The Transformer.
    added, in_attention = self.make_positions(grid)
    every_block = self.posemb_where == 'every'
    heads = dict(num_heads=self.num_heads, dtype=self.dtype)
    block = functools.partial(
      EncoderBlock,
      attention=functools.partial(MultiHeadDotProductAttention, **heads),
      mlp=functools.partial(MlpBlock, self.mlp_dim, self.dropout, dtype=self.dtype),
      norm=functools.partial(LayerNorm, self.dtype),
      dropout=self.dropout,
      grid=grid,
      added=added if every_block else None,
      in_attention=in_attention,
    )
    if self.attention == 'axial':
      block = make_axial(block, heads, grid)
    encoder = Encoder(
      block,
      rates=tuple(depth_rates(self.stochastic_depth, self.depth)),
      dropout=self.dropout,
      added=None if every_block else added,
      shared=self.posemb_where == 'shared',
      scan=self.scan,
      remat=self.remat,
      name='Transformer',
    )
    # The logits need only the class token of the last block; computing only that saves 7 %
    # of a step at depth 12.
    num_queries = 1 if self.classifier == 'token' and not features else None
    x, blocks = encoder(x, grid, train=train, num_queries=num_queries)  # [B, N, D]
    out |= blocks
    out['encoded'] = x

    # The head works on one vector [B, D] per image; with 'none', on every patch.
    match choose('classifier', self.classifier, CLASSIFIERS):
      case 'token':
        x = x[:, 0]
      case 'gap':
        x = x.mean(axis=1)
      case 'map':
        x = MAPHead(self.num_heads, self.mlp_dim, name='MAPHead_0')(x)
    if self.representation_size is not None:
      x = nn.tanh(nn.Dense(self.representation_size, name='pre_logits')(x))
    return self.classify(x, out, features)  # [B, K]

  def embed_patches(self, images, use_bias: bool = True):
    """Returns (patches [B, h, w, D], {'stem': the same patches, and stages of the ResNet})."""
    if self.stem_blocks is None:
      x, out, stride = crop_to_patches(images, self.patch_size), {}, 1
    else:
      x, out = resnet.trunk(
        images, self.stem_blocks, self.stem_width, remat=self.remat, dtype=self.dtype
      )
      stride = resnet.stride(self.stem_blocks)
    embedding = PatchEmbedding(
      self.width, self.patch_size, self.dtype, stride, use_bias, name='embedding'
    )
    x = embedding(x)
    return x, {**out, 'stem': x}

  def make_tokens(self, name: str, number: int, init: Callable, x):
    """Returns learned tokens [B, number, D] to stand before x [B, N, D]."""
    B, _, D = x.shape
    tokens = self.param(name, init, (1, number, D), jnp.float32)
    return jnp.broadcast_to(tokens.astype(x.dtype), (B, number, D))

  def make_positions(self, grid: tuple[int, int], tokens: str = 'prefix'):
    """Returns two functions that make positions: those to add to tokens, those for attention.

    A function is None if the model has no such positions.

    Args:
      tokens: which tokens before the patches get added positions, see `PositionEmbedding`.
    """
    added, in_attention = None, None
    if self.posemb in ADDED:
      added = functools.partial(
        PositionEmbedding, self.posemb, self.posemb_std, tokens, name='posembed_input'
      )
    elif self.posemb == 'relative':
      in_attention = functools.partial(
        RelativePositions, grid, self.posemb_std, name='posembed_relative'
      )
    elif self.posemb == 'rotary':
      in_attention = functools.partial(Rope, 'rotary', grid)
    return added, in_attention

  @property
  def prefix(self) -> int:
    """The number of tokens before the patches."""
    return int(self.classifier == 'token')

  def check(self) -> None:
    """Raises UserError for fields that do not go together."""
    choose('posemb', self.posemb, POSEMBS)
    choose('posemb_where', self.posemb_where, WHERE)
    if self.posemb_where != 'stem' and self.posemb not in ADDED:
      raise UserError(
        f'posemb_where={self.posemb_where!r} is for positions that are added to tokens, '
        f'{list(ADDED)}, not for posemb={self.posemb!r}: leave it out.'
      )
    if choose('attention', self.attention, ATTENTION) == 'full':
      return
    if self.prefix:
      raise UserError(
        "attention='axial' works along rows and columns of patches, but a class token is in "
        "none of these: choose classifier='gap', 'map' or 'none'."
      )
    if self.posemb not in (*ADDED, 'none'):
      raise UserError(
        f"posemb={self.posemb!r} works only with attention='full': with 'axial' choose one "
        f'of {[*ADDED, "none"]}.'
      )


class Encoder(nn.Module):
  """Position embedding, L blocks, final norm: equations 1 to 4.

  Attributes:
    block: a function of `name` that makes a block.
    rates: rates of stochastic depth of the L blocks.
    dropout: dropout rate after the position embedding.
    added: a function that makes the positions that are added to tokens; None: no positions.
    shared: whether positions are added before every block, or only before the first.
    scan, remat: see `stack`.
  """

  block: Callable[..., nn.Module]
  rates: tuple[float, ...]
  dropout: float
  added: Callable[[], nn.Module] | None
  shared: bool
  scan: bool
  remat: str

  @nn.compact
  def __call__(self, x, grid, *, train=False, num_queries=None):
    """Runs the blocks on tokens, of which the last form a grid (h, w).

    Args:
      x: [B, N, D].
      num_queries: how many of the first tokens the caller needs; None: all. The last block
        computes only these, unless the blocks are scanned.

    Returns:
      (normalised tokens [B, N, D] in float32, {name: [B, N, D]}).
    """
    x, added = self.add_positions(x, grid, train)
    own = {} if num_queries is None else {'num_queries': num_queries}
    last = len(self.rates) - 1
    more = lambda i: own if i == last else {}
    x, out = self._run_blocks(x, added, train, more=more)
    return LayerNorm(name='encoder_norm')(x), out

  def add_positions(self, x, grid, train: bool):
    """Adds positions and applies dropout; returns (tokens, positions [1, N, D] or None).

    An interceptor of this method can leave out patches, as MAE's does.
    """
    added = None
    if self.added is not None:
      added = self.added()(x, grid)
      x = x + added
    return Dropout(self.dropout)(x, deterministic=not train), added

  def _run_blocks(self, x, added, train: bool, **options):
    """Runs the blocks by `stack`; returns (x, {'tokens': input, 'block00': ...})."""
    y, blocks = stack(
      self.block,
      x,
      name='encoderblock',
      rates=self.rates,
      scan=self.scan,
      remat=self.remat,
      train=train,
      added=added if self.shared else None,
      **options,
    )
    return y, {'tokens': x, **blocks}


class EncoderBlock(nn.Module):
  """x + attention(norm(x)), then x + mlp(norm(x)): equations 2 and 3.

  Attributes:
    attention, mlp, norm: functions of `name` that make these layers.
    dropout: dropout rate after attention and after the MLP.
    grid: (h, w); the last h * w tokens form this grid.
    added: a function that makes positions to add to the block's input, or None.
    in_attention: a function that makes positions for queries and keys, or None.
  """

  attention: Callable[..., nn.Module]
  mlp: Callable[..., nn.Module]
  norm: Callable[..., nn.Module]
  dropout: float
  grid: tuple[int, int]
  added: Callable[[], nn.Module] | None = None
  in_attention: Callable[[], nn.Module] | None = None

  @nn.compact
  def __call__(self, x, depth_rate=None, *, train: bool = False, num_queries=None):
    """Maps [B, N, D] to [B, N, D], or to its first tokens [B, num_queries, D]."""

    def drop(y):
      y = Dropout(self.dropout)(y, deterministic=not train)
      return StochasticDepth()(y, depth_rate, train=train)

    attention = self.attention(name='MultiHeadDotProductAttention_0')
    mlp = self.mlp(name='MlpBlock_0')
    positions = None if self.in_attention is None else self.in_attention()

    x = place(x)
    if self.added is not None:
      x = x + self.added()(x, self.grid)
    y = self.norm(name='LayerNorm_0')(x)
    # The last block computes only the tokens that are classified.
    x, queries = x[:, :num_queries], y[:, :num_queries]
    x = x + drop(attention(queries, y, positions=positions))
    y = self.norm(name='LayerNorm_1')(x)
    return x + drop(mlp(y, train=train))


class AxialAttention(MultiHeadDotProductAttention):
  """Attention among the tokens of each row, or of each column, of a grid (section D.6).

  Attributes:
    grid: (h, w) of the tokens.
    axis: 'rows' or 'columns'.
  """

  grid: tuple[int, int] = ()
  axis: Literal['rows', 'columns'] = 'rows'

  @nn.compact
  def __call__(self, inputs_q, inputs_kv, *, positions=None):
    """Maps tokens [B, h w, D] to [B, h w, D]; queries and keys are the same tokens."""
    y = super().__call__(_fold(inputs_kv, self.grid, self.axis))
    return _unfold(y, self.grid, self.axis)


class AxialBlock(nn.Module):
  """A block along rows, then a block along columns (section D.6).

  Attributes:
    rows, columns: functions of `name` that make the two blocks.
  """

  rows: Callable[..., nn.Module]
  columns: Callable[..., nn.Module]

  @nn.compact
  def __call__(self, x, depth_rate=None, *, train: bool = False):
    """Maps [B, h w, D] to [B, h w, D]."""
    x = self.rows(name='rows')(x, depth_rate, train=train)
    return self.columns(name='columns')(x, depth_rate, train=train)


def _fold(x, grid: tuple[int, int], axis: str):
  """Maps tokens [B, h w, D] to sequences: rows [B h, w, D] or columns [B w, h, D]."""
  (B, _, D), (h, w) = x.shape, grid
  x = x.reshape(B, h, w, D)
  if axis == 'columns':
    x = x.swapaxes(1, 2)
  return x.reshape(-1, x.shape[2], D)


def _unfold(x, grid: tuple[int, int], axis: str):
  """The inverse of `_fold`: sequences to tokens [B, h w, D]."""
  (h, w), D = grid, x.shape[-1]
  if axis == 'columns':
    return x.reshape(-1, w, h, D).swapaxes(1, 2).reshape(-1, h * w, D)
  return x.reshape(-1, h * w, D)


def make_axial(block: Callable, heads: dict, grid: tuple[int, int]) -> Callable:
  """Returns a function of `name` that makes an `AxialBlock` of two blocks.

  Args:
    block: makes an `EncoderBlock`.
    heads: the attention's fields about its heads.
  """
  along = functools.partial(AxialAttention, **heads, grid=grid)
  rows = functools.partial(along, axis='rows')
  columns = functools.partial(along, axis='columns')
  return functools.partial(
    AxialBlock,
    rows=functools.partial(block, attention=rows),
    # Both halves share one addition of positions, which is in the first half.
    columns=functools.partial(block, attention=columns, added=None),
  )


# Width, depth, MLP width and heads. B, L and H are from Table 1 of the paper; Ti and S from
# DeiT (arXiv 2012.12877); M, So400m and mu from big_vision; g and G from arXiv 2106.04560,
# Table 2; the *-opt shapes from arXiv 2305.13035; and e from arXiv 2209.06794.
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
      f"Unknown ViT variant {name!r}: expected SIZE/PATCH, such as 'B/16', or a hybrid, such "
      f"as 'R50+B/16', with SIZE one of {list(VARIANTS)}.{did_you_mean(size, VARIANTS)}"
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


def stride(fields: Mapping) -> tuple[int, int]:
  """Returns the pixels per token of a ViT with all these fields, down and across."""
  down, across = fields['patch_size']
  if (blocks := fields['stem_blocks']) is None:
    return down, across
  return down * resnet.stride(blocks), across * resnet.stride(blocks)


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
  stride=stride,
  any_size=lambda fields: fields['posemb'] in (*SINES, 'rotary', 'none'),
  # Google: ViT-B_16, R50+ViT-B_16.
  published=(
    (
      r'(R\d*\+)?ViT-([A-Za-z0-9]+)_(\d+)(-gap-norep)?',
      lambda r, size, patch, gap: (
        f'{r or ""}{size}/{patch}',
        {'classifier': 'gap'} if gap else {},
      ),
    ),
  ),
  tiny=(
    dict(variant='mu/8', depth=2),
    dict(variant='R50+mu/16', depth=2, stem_blocks=(1,), stem_width=32),
  ),
)
