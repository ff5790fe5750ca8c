"""Vision Transformer: "An Image is Worth 16x16 Words", arXiv 2010.11929.

Differs from the paper in one default: the head is a single linear layer. The paper's
pre-training head has one tanh hidden layer before it; `representation_size` gives it.
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Literal

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.check import Count, Depth, Range, Share
from vit_jax.errors import UserError, choose, did_you_mean
from vit_jax.kernels import place
from vit_jax.models.base import Classifier, Family
from vit_jax.nn import positions, resnet
from vit_jax.nn.layers import (
  ACTIVATIONS,
  NORMS,
  Dropout,
  LayerScale,
  MAPHead,
  MlpBlock,
  MultiHeadDotProductAttention,
  PatchEmbedding,
  check_images,
  linear_head,
  unit,
)
from vit_jax.nn.positions import ADDED, POSEMBS, TABLES, TOKENS, WHERE, Posemb, Rope
from vit_jax.nn.stack import StochasticDepth, depth_rates, stack

CLASSIFIERS = ('token', 'gap', 'map', 'none', 'token_mean', 'distilled')
READS_PREFIX = {
  'token': 1,
  'token_mean': 1,
  'distilled': 2,
}  # tokens before the patches
ATTENTION = ('full', 'axial')
ROPES = ('none', *(kind for kind in positions.ROPES if kind != 'rotary'))
BIASES = {
  'qkv': ('query', 'key', 'value'),
  'qv': ('query', 'value'),
  'none': (),
}
BLOCKS = ('pre', 'post', 'parallel', 'branches')
FINAL_NORMS = ('tokens', 'pooled', 'none', 'untied')
EXTRA_NORMS = ('patches', 'tokens', 'qk', 'attention', 'mlp')

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


def has_cls(fields: Mapping) -> bool:
  """Whether a ViT of these fields has a class token."""
  if (stated := fields.get('cls_token')) is not None:
    return stated
  return fields.get('classifier', 'token') in READS_PREFIX


def prefix(fields: Mapping) -> int:
  """Returns the number of tokens before the patches of a ViT of these fields."""
  return has_cls(fields) + fields.get('registers', 0)


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
  block: str = 'pre'
  norm: str = 'layer'
  extra_norms: tuple[str, ...] = ()
  mlp: str = 'mlp'
  qkv_bias: str = 'qkv'
  dense_bias: bool = True
  layer_scale: float | None = None
  layer_scale_where: str = 'both'

  @nn.compact
  def __call__(
    self,
    x,
    depth_rate=None,
    *,
    train: bool = False,
    num_queries=None,
    bias=None,
    kv_heads=None,
  ):
    """Maps [B, N, D] to [B, N, D], or to the first [B, num_queries, D] of it.

    Args:
      bias: [1, M, N, N] of scores, shared by all blocks, or None.
      kv_heads: heads of keys and values; None: `num_heads`.
    """
    make_norm = functools.partial(NORMS[self.norm], self.dtype, self.norm_eps)
    extra = lambda place: make_norm if place in self.extra_norms else None
    norm = lambda i: make_norm(name=f'LayerNorm_{i}')
    biases = BIASES[self.qkv_bias] + ('out',) * self.dense_bias
    table = self.posemb.table('layer', x.shape[1], self.num_heads, self.grid)
    bias = bias if table is None else table
    positions = self.posemb.in_attention(self.grid, train=train, bias=bias)

    def attention(i=0):
      layer = MultiHeadDotProductAttention(
        self.num_heads,
        dtype=self.dtype,
        biases=biases,
        kv_heads=kv_heads,
        qk_norm=extra('qk'),
        norm=extra('attention'),
        name=f'MultiHeadDotProductAttention_{i}',
      )
      if self.axis is not None:
        return lambda y: unfold(
          layer(fold(y, self.grid, self.axis)), self.grid, self.axis
        )
      return lambda y: layer(y[:, :num_queries], y, positions=positions)

    def mlp(i=0):
      layer = MlpBlock(
        self.mlp_dim,
        self.dropout,
        self.act,
        self.dtype,
        use_bias=self.dense_bias,
        gated=self.mlp == 'swiglu',
        norm=extra('mlp'),
        name=f'MlpBlock_{i}',
      )
      return functools.partial(layer, train=train)

    def scale(i, y):
      if self.layer_scale is None or (i and self.layer_scale_where == 'attention'):
        return y
      return LayerScale(self.layer_scale, name=f'LayerScale_{i}')(y)

    def drop(y):
      y = Dropout(self.dropout)(y, deterministic=not train)
      return StochasticDepth()(y, depth_rate, train=train)

    x = place(x)
    # The two halves of an axial block share one addition, in the first.
    if self.posemb.where == 'every' and self.axis != 'columns':
      x = x + self.posemb.embedding()(x, self.grid)
    first = x[:, :num_queries]
    if self.block == 'pre':
      x = first + drop(scale(0, attention()(norm(0)(x))))
      return x + drop(scale(1, mlp()(norm(1)(x))))
    if self.block == 'post':
      x = first + drop(norm(0)(attention()(x)))
      return x + drop(norm(1)(mlp()(x)))
    if self.block == 'parallel':
      y = norm(0)(x)
      return first + drop(scale(0, attention()(y) + mlp()(y[:, :num_queries])))
    x = first + sum(drop(scale(i, attention(i)(norm(i)(x)))) for i in (0, 1))
    return x + sum(drop(scale(i + 2, mlp(i)(norm(i + 2)(x)))) for i in (0, 1))


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
    norm: makes a norm in float32, given `name`.
    rates: rates of stochastic depth of the L blocks.
    pre_norm: whether there is a norm before the first block.
  """

  block: Callable[..., EncoderBlock]
  num_heads: int
  posemb: Posemb
  attention: str
  rates: tuple[float, ...]
  dropout: float
  norm: Callable[..., nn.Module]
  scan: bool
  remat: str
  pre_norm: bool = False
  final_norm: str = 'tokens'
  kv_heads: tuple[int, ...] | None = None

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
    x = Dropout(self.dropout)(x, deterministic=not train)
    if self.pre_norm:
      x = self.norm(name='pre_norm')(x).astype(x.dtype)
    tokens = x
    block = functools.partial(self.block, grid=grid)
    if self.attention == 'axial':
      block = functools.partial(AxialBlock, block)
    last, own = len(self.rates) - 1, {}
    if num_queries is not None:
      own |= {last: {'num_queries': num_queries}}
    if self.kv_heads:
      own = {i: {'kv_heads': n} | own.get(i, {}) for i, n in enumerate(self.kv_heads)}
    bias = self.posemb.table('shared', x.shape[1], self.num_heads, grid)
    shared = {} if bias is None else {'bias': bias}
    x, out = stack(
      block,
      x,
      name='encoderblock',
      rates=self.rates,
      scan=self.scan,
      remat=self.remat,
      train=train,
      between=between,
      more=lambda i: own.get(i, {}),
      shared=shared,
    )
    x = _normalised(x, self.norm, self.final_norm, grid)
    return x, {'tokens': tokens, **out}


def _normalised(x, norm, kind: str, grid):
  if kind in ('none', 'pooled'):
    return x.astype(jnp.float32)
  last = norm(name='encoder_norm')
  if kind == 'tokens':
    return last(x)
  before = x.shape[1] - grid[0] * grid[1]
  first = norm(name='cls_norm')(x[:, :before])
  return jnp.concatenate([first, last(x[:, before:])], axis=1)


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
  if posemb.rope or posemb.relpos != 'none':
    raise UserError("rope and relpos work only with attention='full': leave them out.")
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
  # token: a learned cls token; gap: mean of patches; map: attention pooling of them;
  # none: every patch is classified, logits are [B, h w, K]; token_mean: cls token and mean
  # side by side (DINOv2's linear probes); distilled: the mean of two heads, on the cls
  # token and the first register (DeiT, arXiv 2012.12877).
  classifier: Literal[CLASSIFIERS] = 'token'
  cls_token: bool | None = None  # None: only where the classifier reads it
  # Register tokens behind the cls token (arXiv 2309.16588). DeiT's distillation token is one.
  registers: Annotated[int, Range(0, 2**16)] = 0
  # Width of the tanh layer before the head (paper 3.2); None: no such layer.
  representation_size: int | None = None
  projection: Count | None = None  # width of a linear layer there (CLIP's)
  unit: bool = False  # scales the head's input to unit length, as for texts
  # learn, learn2d, sincos2d are added to tokens; relative and rotary act in attention.
  posemb: Literal[POSEMBS] = 'learn'
  # Where positions are added (Table 8). stem: before the first block; every: before every
  # block, each with a table of its own; shared: before every block, from one table.
  posemb_where: Literal[WHERE] = 'stem'
  posemb_std: float | None = 0.02  # deviation of initial values; None: 1 / sqrt(width)
  # Tokens with a learned position beside the patches: all; the cls token alone (DINOv2);
  # none (big_vision, DeiT III, FlexiViT).
  posemb_tokens: Literal[TOKENS] = 'prefix'
  rope: Literal[ROPES] = 'none'  # rotary positions of patches, see `nn.positions.ROPES`
  rope_base: float | tuple[float, ...] | None = None  # None: the kind's; or all periods
  rope_reference: tuple[int, int] | None = (
    None  # grid that 'eva' and 'pe' scale places to
  )
  # (shift, jitter, rescale) of places in training, arXiv 2508.10104, section 3.2.
  rope_augment: tuple[float, float, float] | None = None
  # Learned biases of scores by offset (BEiT, arXiv 2106.08254), of each layer or of all.
  relpos: Literal[TABLES] = 'none'
  # axial (section D.6): each block is one along rows, then one along columns.
  attention: Literal[ATTENTION] = 'full'
  # post: x + norm(f(x)) (Swin V2, EVA-02-E); parallel: x + attention(y) + mlp(y), with one
  # norm (arXiv 2302.05442); branches: two attentions, then two MLPs (arXiv 2203.09795).
  block: Literal[BLOCKS] = 'pre'
  mlp: Literal['mlp', 'swiglu'] = 'mlp'  # swiglu: gated (arXiv 2002.05202)
  act: Literal[tuple(ACTIVATIONS)] = 'gelu_tanh'
  qkv_bias: Literal[tuple(BIASES)] = (
    'qkv'  # projections with a bias; qv in BEiT, DINOv3
  )
  dense_bias: bool = True  # the attention's last projection and the MLP; not in AIMv2
  patch_bias: bool = True  # not in CLIP
  head_bias: bool = True  # not in CLIP's projection
  kv_heads: tuple[int, ...] | None = (
    None  # per layer (arXiv 2305.13245); None: num_heads
  )
  layer_scale: float | None = None  # initial value (CaiT, arXiv 2103.17239); None: none
  layer_scale_where: Literal['both', 'attention'] = 'both'
  norm: Literal[tuple(NORMS)] = 'layer'
  norm_eps: float = 1e-6  # every norm's; transformers' ViT has 1e-12 by default
  # Further norms: patches before positions (AIMv2), tokens before the first block (CLIP),
  # queries and keys, the attention's output and the MLP's hidden layer (EVA-02).
  extra_norms: tuple[Literal[EXTRA_NORMS], ...] = ()
  # pooled: behind the pooling, as timm's for means; untied: cls token and registers have
  # one of their own (arXiv 2508.10104).
  final_norm: Literal[FINAL_NORMS] = 'tokens'
  map_heads: Count | None = None  # heads of attention pooling; None: num_heads
  map_mlp_dim: Count | None = None  # None: mlp_dim
  map_prefix: bool = (
    False  # whether it sees cls token and registers (Perception Encoder)
  )
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
        last block (unless scanned) computes only the tokens that are classified.

    Returns:
      (logits [B, K] float32, out): named features, 'stem' [B, h, w, D], 'tokens'
      [B, N, D] before the first block, 'block00', ... [B, N, D], 'encoded' [B, N, D]
      after the final norm of tokens, 'pre_logits' [B, D]; of hybrids also 'root', 'stage1', ...
      [B, h, w, C]. With `features=False` only 'pre_logits'.
    """
    check_images(images)
    self._check()
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
      self.width, self.patch_size, self.dtype, stride, self.patch_bias, name='embedding'
    )
    out['stem'] = x = embedding(x)
    B, h, w, D = x.shape
    x = x.reshape(B, h * w, D)
    if 'patches' in self.extra_norms:
      x = NORMS[self.norm](self.dtype, self.norm_eps, name='embedding_norm')(x)
    prefix = self._prefix(x)
    if prefix:
      x = jnp.concatenate([*prefix, x], axis=1)  # [B, P + h w, D]

    # Nothing else of the last block reaches the logits: 7 % of a step at depth 12.
    read = {'token': 1, 'distilled': 2}.get(self.classifier)
    num_queries = None if features or self.final_norm == 'untied' else read
    x, blocks = self._encoder()(x, (h, w), train=train, num_queries=num_queries)
    out |= blocks
    out['encoded'] = x
    x = self._pooled(x)
    if self.final_norm == 'pooled':
      x = NORMS[self.norm](eps=self.norm_eps, name='pooled_norm')(x)
    if self.representation_size is not None:
      x = nn.tanh(nn.Dense(self.representation_size, name='pre_logits')(x))
    if self.projection is not None:
      x = nn.Dense(self.projection, name='projection')(x)
    if self.unit:
      x = unit(x)
    head = functools.partial(linear_head, use_bias=self.head_bias)
    if self.classifier != 'distilled':
      return self.classify(x, out, features, head)
    other = head(x[:, 1], self.num_classes, self.head_bias_init, name='head_dist')
    logits, out = self.classify(x[:, 0], out, features, head)
    return (logits + other) / 2, out | {'pre_logits': x.mean(axis=1)}

  @property
  def prefix(self) -> int:
    """The number of tokens before the patches: cls token and registers."""
    return prefix(vars(self))

  def _check(self) -> None:
    choose('classifier', self.classifier, CLASSIFIERS)
    needs = READS_PREFIX.get(self.classifier, 0)
    if self.prefix < needs or (needs and not has_cls(vars(self))):
      more = 'a class token' + (' and registers=1' if needs == 2 else '')
      raise UserError(f'classifier={self.classifier!r} needs {more}.')
    heads = self.kv_heads or [1] * self.depth
    shared = all(n > 0 and self.num_heads % n == 0 for n in heads)
    if not shared or len(heads) != self.depth or (self.kv_heads and self.scan):
      raise UserError(
        f'kv_heads={self.kv_heads}: expected a divisor of num_heads={self.num_heads} for '
        f'each of the {self.depth} blocks, and scan=False.'
      )

  def _prefix(self, x) -> list:
    """Returns the cls token [B, 1, D] and the registers [B, R, D], those that exist."""
    (B, _, D), prefix = x.shape, []
    starts = nn.initializers.zeros_init(), nn.initializers.normal(1e-6)  # timm's
    names = {'cls': int(has_cls(vars(self))), 'registers': self.registers}
    for (name, number), start in zip(names.items(), starts, strict=True):
      if number:
        tokens = self.param(name, start, (1, number, D), jnp.float32)
        prefix.append(jnp.broadcast_to(tokens.astype(x.dtype), (B, number, D)))
    return prefix

  def _pooled(self, x):
    """Returns the vectors [B, D] that are classified; [B, 2, D] if 'distilled'."""
    P = self.prefix
    patches = x[:, P:] if P else x
    match self.classifier:
      case 'token':
        return x[:, 0]
      case 'distilled':
        return x[:, :2]
      case 'token_mean':
        return jnp.concatenate([x[:, 0], patches.mean(axis=1)], axis=-1)
      case 'gap':
        return patches.mean(axis=1)
      case 'map':
        return MAPHead(
          self.map_heads or self.num_heads,
          self.map_mlp_dim or self.mlp_dim,
          self.act,
          self.norm_eps,
          name='MAPHead_0',
        )(x if self.map_prefix else patches)
    return patches

  def _encoder(self) -> Encoder:
    rope = None
    if self.rope != 'none':
      rope = functools.partial(
        Rope,
        self.rope,
        base=self.rope_base,
        reference=self.rope_reference,
        first=int(self.rope == 'pe' and has_cls(vars(self))),
        augment=self.rope_augment,
      )
    posemb = Posemb(
      self.posemb,
      self.posemb_where,
      self.posemb_std,
      self.posemb_tokens,
      rope,
      self.relpos,
    )
    block = functools.partial(
      EncoderBlock,
      posemb=posemb,
      **{
        name: getattr(self, name)
        for name in EncoderBlock.__dataclass_fields__
        if name in ViT.__dataclass_fields__ and name not in ('posemb', 'parent', 'name')
      },
    )
    return Encoder(
      block,
      self.num_heads,
      posemb,
      attention=self.attention,
      rates=tuple(depth_rates(self.stochastic_depth, self.depth)),
      dropout=self.dropout,
      norm=functools.partial(NORMS[self.norm], eps=self.norm_eps),
      scan=self.scan,
      remat=self.remat,
      pre_norm='tokens' in self.extra_norms,
      final_norm=self.final_norm,
      kv_heads=self.kv_heads,
      name='Transformer',
    )


# timm's words for the sizes.
_TIMM = dict(tiny='Ti', small='S', medium='M', base='B', large='L', so400m='So400m')
_TIMM |= dict(huge='H', giant='g', giantopt='g-opt', gigantic='G')
_SIZES = '|'.join(_TIMM)


def _timm(name: str) -> tuple[str | None, dict] | None:
  from vit_jax.models import timm  # its table is read where a name is not ours

  if (row := timm.options(name)) is None:
    return None
  fields, usual = timm.fields_of(row), ViT.__dataclass_fields__
  shape = tuple(fields[key] for key in ('width', 'depth', 'mlp_dim', 'num_heads'))
  size = next((size for size, numbers in VARIANTS.items() if numbers == shape), None)
  if size is None:
    return None, fields
  variant = f'{size}/{fields["patch_size"][0]}'  # timm's patches are square
  shown = {'patch_size', 'width', 'depth', 'mlp_dim', 'num_heads'}
  return variant, {
    key: value
    for key, value in fields.items()
    if key not in shown and value != usual[key].default
  }


# See `Family.published`.
PUBLISHED = (
  (r'(\w+)', _timm),
  # timm's hybrids: vit_base_r50_s16_384, vit_tiny_r_s16_p8_224.
  (
    rf'vit_({_SIZES})_r(\d+)_s(\d+)(?:_\d+)?',
    lambda size, r, s: (f'R{r}+{_TIMM[size]}/{s}', {}),
  ),
  (rf'vit_({_SIZES})_r_s16_p8(?:_\d+)?', lambda size: (f'R+{_TIMM[size]}/16', {})),
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
  before=r'embedding(_norm)?/.*|cls|registers|Transformer/(posembed_input|pre_norm|relpos)/.*'
  r'|conv_root/.*|gn_root/.*|block\d+/.*',
  matrices=(
    (r'.*/(query|key|value)/kernel', ((-3,), (-2, -1))),
    (r'.*/MultiHeadDotProductAttention_\d+/out/kernel', ((-3, -2), (-1,))),
    (r'Transformer/encoderblock.*/(Dense_\d+|gate)/kernel', ((-2,), (-1,))),
  ),
  branch_ends=r'Transformer/encoderblock_\d+/(?:\w+/)?MlpBlock_0',
  prompts=('prepend', 'before_positions', 'add'),
  stems=('conv_root/kernel', 'embedding/kernel'),
  positions=(
    (r'.*/posembed_input/pos_embedding', 'hw'),
    (r'.*/posembed_input/pos_embedding_y', 'h'),
    (r'.*/posembed_input/pos_embedding_x', 'w'),
  ),
  pairs=r'Transformer/(encoderblock_\d+/)?relpos/table',
  position='Transformer/posembed_input/pos_embedding',
  patches='embedding/kernel',
  stride=lambda f: tuple(
    n * resnet.stride(f.get('stem_blocks')) for n in f['patch_size']
  ),
  any_size=lambda fields: (
    fields['posemb'] in ('sincos2d', 'rotary', 'none') and fields['relpos'] == 'none'
  ),
  published=PUBLISHED,
  tiny=(
    dict(variant='mu/8', depth=2),
    dict(variant='R50+mu/16', depth=2, stem_blocks=(1,), stem_width=32),
  ),
)
