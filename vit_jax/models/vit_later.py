"""Later Vision Transformers: the paper's model with parts that later papers changed.

`LaterViT` adds fields of later papers to those of `models.vit.ViT`, and is composed of the same
layers. `models.build` uses the paper's class for a model that sets none of these fields.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.check import Count, Range
from vit_jax.errors import UserError, choose
from vit_jax.kernels import place
from vit_jax.models import timm, vit
from vit_jax.models.base import ImageTower
from vit_jax.nn import positions
from vit_jax.nn.layers import (
  ACTIVATIONS,
  NORMS,
  Dropout,
  LayerScale,
  MAPHead,
  MlpBlock,
  MultiHeadDotProductAttention,
  QueryHead,
  check_images,
  linear_head,
)
from vit_jax.nn.positions import IN_ATTENTION, TABLES, TOKENS, Rope, TableOfOffsets
from vit_jax.nn.stack import StochasticDepth, depth_rates

DEPTH_RATES = ('linear', 'uniform')
CLASSIFIERS = (*vit.CLASSIFIERS, 'token_mean', 'distilled', 'query')
# {classifier: how many of the tokens before the patches it reads}.
READS_PREFIX = {'token': 1, 'token_mean': 1, 'distilled': 2}
ROPES = ('none', *(kind for kind in positions.ROPES if kind != 'rotary'))
BIASES = {
  'qkv': ('query', 'key', 'value'),
  'qv': ('query', 'value'),
  'none': (),
}
FINAL_NORMS = ('tokens', 'pooled', 'none', 'untied')
EXTRA_NORMS = ('patches', 'tokens', 'qk', 'attention', 'mlp')


def has_cls(fields: Mapping) -> bool:
  """Whether a ViT with all these fields has a class token."""
  if fields['cls_token'] is not None:
    return fields['cls_token']
  return fields['classifier'] in READS_PREFIX


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers:
  """The layers of a block. The name of each layer ends with a number."""

  x: Any  # the block's input [B, N, D], with positions
  # Returns the first num_queries of tokens [B, N, D]. Only these leave the block.
  first: Callable
  norm: Callable[[int], nn.Module]
  attention: Callable[[int], Callable]
  mlp: Callable[[int], Callable]
  scale: Callable  # (number, branch) -> branch; applies LayerScale if the block has it
  drop: Callable  # branch -> branch; applies dropout and stochastic depth


class Block(vit.EncoderBlock):
  """Base class of the blocks below. It makes the layers; each block writes out its equation.

  Blocks map [B, N, D] to [B, N, D], or to its first tokens [B, num_queries, D].

  Attributes:
    relpos: a function that makes the block's own table of relative positions, or None.
    layer_scale, layer_scale_where: see `LaterViT`.
  """

  relpos: Callable[[], nn.Module] | None = None
  layer_scale: float | None = None
  layer_scale_where: str = 'both'

  def layers(
    self,
    x,
    depth_rate=None,
    *,
    train: bool = False,
    num_queries=None,
    bias=None,
    kv_heads=None,
  ) -> Layers:
    """Returns the layers for x [B, N, D]. Call it within `__call__`.

    Args:
      bias: a bias [1, M, N, N] of the scores, shared by all blocks, or None.
      kv_heads: number of heads of keys and values; None: as many as query heads.
    """
    if self.relpos is not None:
      bias = self.relpos()(x.shape[1])
    module = None if self.in_attention is None else self.in_attention()

    def positions(query, key):
      own = None
      if module is not None:
        query, key, own = module(query, key)
      return query, key, own if bias is None else bias[:, :, : query.shape[1]]

    if module is None and bias is None:
      positions = None

    def norm(i):
      return self.norm(name=f'LayerNorm_{i}')

    def attention(i):
      name = f'MultiHeadDotProductAttention_{i}'
      layer = self.attention(kv_heads=kv_heads, name=name)
      return lambda y: layer(first(y), y, positions=positions)

    def mlp(i):
      return functools.partial(self.mlp(name=f'MlpBlock_{i}'), train=train)

    def scale(i, y):
      if self.layer_scale is None or (i and self.layer_scale_where == 'attention'):
        return y
      return LayerScale(self.layer_scale, name=f'LayerScale_{i}')(y)

    def drop(y):
      y = Dropout(self.dropout)(y, deterministic=not train)
      return StochasticDepth()(y, depth_rate, train=train)

    def first(x):
      return x[:, :num_queries]

    x = place(x)
    if self.added is not None:
      x = x + self.added()(x, self.grid)
    return Layers(
      x=x, first=first, norm=norm, attention=attention, mlp=mlp, scale=scale, drop=drop
    )


class PreNormBlock(Block):
  """x + attention(norm(x)), then x + mlp(norm(x)), as in the paper."""

  @nn.compact
  def __call__(self, x, depth_rate=None, **options):
    block = self.layers(x, depth_rate, **options)
    y = block.norm(0)(block.x)
    x = block.first(block.x) + block.drop(block.scale(0, block.attention(0)(y)))
    return x + block.drop(block.scale(1, block.mlp(0)(block.norm(1)(x))))


class PostNormBlock(Block):
  """x + norm(attention(x)), then x + norm(mlp(x)): Swin V2, EVA-02-E."""

  @nn.compact
  def __call__(self, x, depth_rate=None, **options):
    block = self.layers(x, depth_rate, **options)
    x = block.first(block.x) + block.drop(block.norm(0)(block.attention(0)(block.x)))
    return x + block.drop(block.norm(1)(block.mlp(0)(x)))


class ParallelBlock(Block):
  """x + attention(y) + mlp(y), y = norm(x): arXiv 2302.05442."""

  @nn.compact
  def __call__(self, x, depth_rate=None, **options):
    block = self.layers(x, depth_rate, **options)
    y = block.norm(0)(block.x)
    x = block.first(block.x)
    y = block.attention(0)(y) + block.mlp(0)(block.first(y))
    return x + block.drop(block.scale(0, y))


class BranchesBlock(Block):
  """The sum of x and two attentions, then of x and two MLPs: arXiv 2203.09795."""

  @nn.compact
  def __call__(self, x, depth_rate=None, **options):
    block = self.layers(x, depth_rate, **options)
    attend = lambda i: block.attention(i)(block.norm(i)(block.x))
    mix = lambda i, x: block.mlp(i)(block.norm(i + 2)(x))
    x = block.first(block.x) + sum(
      block.drop(block.scale(i, attend(i))) for i in (0, 1)
    )
    return x + sum(block.drop(block.scale(i + 2, mix(i, x))) for i in (0, 1))


BLOCKS = {
  'pre': PreNormBlock,
  'post': PostNormBlock,
  'parallel': ParallelBlock,
  'branches': BranchesBlock,
}


class Encoder(vit.Encoder):
  """The paper's `Encoder`, with more norms, positions and kinds of heads.

  Attributes:
    norm: a function of `name` that makes a norm in float32.
    pre_norm: whether there is a norm before the first block.
    final_norm: see `LaterViT`.
    relpos: a function that makes one table of relative positions for all blocks, or None.
    kv_heads: number of heads of keys and values, per block; None: as many as query heads.
  """

  norm: Callable[..., nn.Module]
  pre_norm: bool
  final_norm: str
  relpos: Callable[[], nn.Module] | None
  kv_heads: tuple[int, ...] | None

  @nn.compact
  def __call__(self, x, grid, *, train=False, num_queries=None):
    """Runs the blocks. Arguments and results are those of the paper's `Encoder`."""
    x, added = self.add_positions(x, grid, train)
    if self.pre_norm:
      x = self.norm(name='pre_norm')(x).astype(x.dtype)

    def arguments(i):
      own = {}
      if self.kv_heads:
        own['kv_heads'] = self.kv_heads[i]
      if num_queries is not None and i == len(self.rates) - 1:
        own['num_queries'] = num_queries
      return own

    bias = None if self.relpos is None else self.relpos()(x.shape[1])
    shared = {} if bias is None else {'bias': bias}
    x, out = self._run_blocks(x, added, train, more=arguments, shared=shared)
    if self.final_norm in ('none', 'pooled'):
      return x.astype(jnp.float32), out
    norm = self.norm(name='encoder_norm')
    if self.final_norm == 'tokens':
      return norm(x), out
    before = x.shape[1] - grid[0] * grid[1]
    first = self.norm(name='cls_norm')(x[:, :before])
    return jnp.concatenate([first, norm(x[:, before:])], axis=1), out


class LaterViT(vit.ViT, ImageTower):
  """Patches, a Transformer and a head, with the fields of later papers."""

  # token_mean: the cls token and the mean of the patches, side by side (DINOv2's linear
  # probes). distilled: the mean of two heads, one on the cls token and one on the first
  # register (DeiT, arXiv 2012.12877). query: attention pooling by a query without MLP
  # (AIMv2). For the other values see `models.vit`.
  classifier: Literal[CLASSIFIERS] = 'token'
  # Whether the model has a cls token; None: only if the classifier reads it.
  cls_token: bool | None = None
  # Number of register tokens, which follow the cls token (arXiv 2309.16588). DeiT's
  # distillation token counts as one.
  registers: Annotated[int, Range(0, 2**16)] = 0
  # Which tokens before the patches have a learned position. prefix: all. cls: only the cls
  # token (DINOv2). patches: none (big_vision, DeiT III, FlexiViT).
  posemb_tokens: Literal[TOKENS] = 'prefix'
  rope: Literal[ROPES] = 'none'  # rotary positions of patches, see `nn.positions.ROPES`
  # Base of the rotary frequencies, or a tuple of all periods; None: the kind's default.
  rope_base: float | tuple[float, ...] | None = None
  # The rope kinds 'eva' and 'pe' scale positions to the size of this grid; None: unscaled.
  rope_reference: tuple[int, int] | None = None
  # (shift, jitter, rescale), the augmentation of rotary positions in training
  # (arXiv 2508.10104, section 3.2).
  rope_augment: tuple[float, float, float] | None = None
  # Learned biases of scores, one per offset (BEiT, arXiv 2106.08254). layer: each layer has
  # a table of its own. shared: all layers share one table.
  relpos: Literal[TABLES] = 'none'
  # Width of an MLP that computes the biases from the logarithms of the offsets, for grids of
  # any size (timm's vit_relpos_*); None: the biases are parameters.
  relpos_dim: Count | None = None
  block: Literal[tuple(BLOCKS)] = 'pre'  # see the classes in BLOCKS
  mlp: Literal['mlp', 'swiglu'] = 'mlp'  # swiglu: gated (arXiv 2002.05202)
  act: Literal[tuple(ACTIVATIONS)] = 'gelu_tanh'
  # The projections that have a bias. BEiT and DINOv3 have 'qv'.
  qkv_bias: Literal[tuple(BIASES)] = 'qkv'
  # Whether the attention's last projection and the MLP have biases; False in AIMv2.
  dense_bias: bool = True
  patch_bias: bool = True  # whether the patch embedding has a bias; False in CLIP
  # Heads of keys and values, per layer (arXiv 2305.13245); None: num_heads.
  kv_heads: tuple[int, ...] | None = None
  # Initial value of LayerScale (CaiT, arXiv 2103.17239); None: no LayerScale.
  layer_scale: float | None = None
  layer_scale_where: Literal['both', 'attention'] = 'both'
  norm: Literal[tuple(NORMS)] = 'layer'
  norm_eps: float = 1e-6  # epsilon of all norms; transformers' ViT has 1e-12 by default
  # More norms: of patches before positions (AIMv2), of tokens before the first block
  # (CLIP), of queries and keys, of the attention's output and the MLP's hidden layer
  # (EVA-02).
  extra_norms: tuple[Literal[EXTRA_NORMS], ...] = ()
  # pooled: the final norm comes after the pooling, as in timm's models with mean pooling.
  # untied: cls token and registers have their own norm (arXiv 2508.10104).
  final_norm: Literal[FINAL_NORMS] = 'tokens'
  # uniform: stochastic depth has the same rate in all blocks, as in DeiT III.
  depth_rates: Literal[DEPTH_RATES] = 'linear'
  map_heads: Count | None = None  # heads of attention pooling; None: num_heads
  map_mlp_dim: Count | None = None  # MLP width of attention pooling; None: mlp_dim
  # Whether attention pooling also reads the cls token and registers (Perception Encoder).
  map_prefix: bool = False

  @nn.compact
  def __call__(self, images, *, train: bool = False, features: bool = True):
    """Classifies images. Arguments and results are those of the paper's `ViT`."""
    check_images(images)
    self.check()
    # One norm in float32, and one in the body's dtype.
    norm = functools.partial(NORMS[self.norm], eps=self.norm_eps)
    body_norm = functools.partial(norm, self.dtype)

    # Patches.
    x, out = self.embed_patches(images, self.patch_bias)  # [B, h, w, D]
    B, h, w, D = x.shape
    grid = h, w
    x = x.reshape(B, h * w, D)  # [B, h w, D]
    if 'patches' in self.extra_norms:
      x = body_norm(name='embedding_norm')(x)

    # The class token and registers; initial values are timm's.
    first = []
    if has_cls(vars(self)):
      first.append(self.make_tokens('cls', 1, nn.initializers.zeros_init(), x))
    if self.registers:
      init = nn.initializers.normal(1e-6)
      first.append(self.make_tokens('registers', self.registers, init, x))
    if first:
      x = jnp.concatenate([*first, x], axis=1)  # [B, P + h w, D]

    # Positions.
    added, in_attention = self.make_positions(grid, self.posemb_tokens)
    if self.rope != 'none':
      in_attention = functools.partial(
        Rope,
        self.rope,
        grid,
        base=self.rope_base,
        reference=self.rope_reference,
        first=int(self.rope == 'pe' and has_cls(vars(self))),
        augment=self.rope_augment,
        train=train,
        name='rope',
      )
    relpos = None
    if self.relpos != 'none':
      relpos = functools.partial(
        TableOfOffsets,
        self.num_heads,
        grid,
        self.relpos_dim,
        train=train,
        name='relpos',
      )

    # The Transformer.
    every_block = self.posemb_where == 'every'
    extra_norm = lambda name: body_norm if name in self.extra_norms else None
    heads = dict(
      num_heads=self.num_heads,
      dtype=self.dtype,
      biases=BIASES[self.qkv_bias] + ('out',) * self.dense_bias,
      qk_norm=extra_norm('qk'),
      norm=extra_norm('attention'),
    )
    mlp = functools.partial(
      MlpBlock,
      self.mlp_dim,
      self.dropout,
      self.act,
      self.dtype,
      use_bias=self.dense_bias,
      gated=self.mlp == 'swiglu',
      norm=extra_norm('mlp'),
    )
    block = functools.partial(
      BLOCKS[self.block],
      attention=functools.partial(MultiHeadDotProductAttention, **heads),
      mlp=mlp,
      norm=body_norm,
      dropout=self.dropout,
      grid=grid,
      added=added if every_block else None,
      in_attention=in_attention,
      relpos=relpos if self.relpos == 'layer' else None,
      layer_scale=self.layer_scale,
      layer_scale_where=self.layer_scale_where,
    )
    if self.attention == 'axial':
      block = vit.make_axial(block, heads, grid)
    rates = depth_rates(self.stochastic_depth, self.depth)
    if choose('depth_rates', self.depth_rates, DEPTH_RATES) == 'uniform':
      rates = [self.stochastic_depth] * self.depth
    encoder = Encoder(
      block,
      rates=tuple(rates),
      dropout=self.dropout,
      added=None if every_block else added,
      shared=self.posemb_where == 'shared',
      scan=self.scan,
      remat=self.remat,
      norm=norm,
      pre_norm='tokens' in self.extra_norms,
      final_norm=self.final_norm,
      relpos=relpos if self.relpos == 'shared' else None,
      kv_heads=self.kv_heads,
      name='Transformer',
    )
    num_queries = None
    if not features and self.final_norm != 'untied':
      num_queries = {'token': 1, 'distilled': 2}.get(self.classifier)
    x, blocks = encoder(x, grid, train=train, num_queries=num_queries)
    out |= blocks
    out['encoded'] = x

    # The vectors to classify: [B, D], or [B, 2, D] for 'distilled'.
    patches = x[:, self.prefix :] if self.prefix else x
    match choose('classifier', self.classifier, CLASSIFIERS):
      case 'token':
        x = x[:, 0]
      case 'distilled':
        x = x[:, :2]
      case 'token_mean':
        x = jnp.concatenate([x[:, 0], patches.mean(axis=1)], axis=-1)
      case 'gap':
        x = patches.mean(axis=1)
      case 'map':
        pool = MAPHead(
          self.map_heads or self.num_heads,
          self.map_mlp_dim or self.mlp_dim,
          self.act,
          self.norm_eps,
          name='MAPHead_0',
        )
        x = pool(x if self.map_prefix else patches)
      case 'query':
        x = QueryHead(self.num_heads, name='QueryHead_0')(patches)
      case 'none':
        x = patches
    if self.final_norm == 'pooled':
      x = norm(name='pooled_norm')(x)

    # The head.
    if self.representation_size is not None:
      x = nn.tanh(nn.Dense(self.representation_size, name='pre_logits')(x))
    if self.classifier != 'distilled':
      return self.classify(x, out, features)
    options = dict(use_bias=self.head_bias, name='head_dist')
    other = linear_head(x[:, 1], self.num_classes, self.head_bias_init, **options)
    logits, out = self.classify(x[:, 0], out, features)
    out |= {'class_logits': logits, 'distilled_logits': other}
    return (logits + other) / 2, out | {'pre_logits': x.mean(axis=1)}

  @property
  def prefix(self) -> int:
    """The number of tokens before the patches: cls token and registers."""
    return has_cls(vars(self)) + self.registers

  def check(self) -> None:
    """Raises UserError for fields that do not go together."""
    super().check()
    choose('posemb_tokens', self.posemb_tokens, TOKENS)
    choose('relpos', self.relpos, TABLES)
    needs = READS_PREFIX.get(self.classifier, 0)
    if self.prefix < needs or (needs and not has_cls(vars(self))):
      more = 'a class token' + (' and registers=1' if needs == 2 else '')
      raise UserError(f'classifier={self.classifier!r} needs {more}.')
    if needs == 2 and (self.projection or self.unit):
      raise UserError(
        "classifier='distilled' has two heads: leave out projection and unit."
      )
    heads = self.kv_heads or [1] * self.depth
    shared = all(n > 0 and self.num_heads % n == 0 for n in heads)
    if not shared or len(heads) != self.depth or (self.kv_heads and self.scan):
      raise UserError(
        f'kv_heads={self.kv_heads}: expected a divisor of num_heads={self.num_heads} for '
        f'each of the {self.depth} blocks, and scan=False.'
      )
    in_scores = self.rope != 'none' or self.relpos != 'none'
    relative = self.posemb == 'relative' and self.relpos != 'none'
    if relative or (self.posemb in IN_ATTENTION and self.rope != 'none'):
      other = f'relpos={self.relpos!r}' if relative else f'rope={self.rope!r}'
      raise UserError(
        f'posemb={self.posemb!r} cannot be combined with {other}: leave one of them out.'
      )
    if self.attention == 'axial' and in_scores:
      raise UserError(
        f"rope={self.rope!r} and relpos={self.relpos!r} work only with attention='full': "
        'leave them out.'
      )


def _class_of(model: type, fields: Mapping) -> type:
  """Returns the paper's class instead of `LaterViT` if its own fields have their defaults."""
  paper = {f.name for f in dataclasses.fields(vit.ViT)}
  defaults = {f.name: f.default for f in dataclasses.fields(LaterViT)}
  same = all(fields[name] == defaults[name] for name in fields if name not in paper)
  plain = same and fields.get('classifier', 'token') in vit.CLASSIFIERS
  return vit.ViT if plain and model is LaterViT else model


FAMILY = dataclasses.replace(
  vit.FAMILY,
  model=LaterViT,
  class_of=_class_of,
  before=rf'{vit.FAMILY.before}|embedding_norm/.*|registers|Transformer/(pre_norm|relpos)/.*',
  matrices=(
    *vit.FAMILY.matrices,
    (r'Transformer/encoderblock.*/gate/kernel', ((-2,), (-1,))),
  ),
  pairs=r'Transformer/(encoderblock_\d+/)?relpos/table',
  any_size=lambda fields: (
    vit.FAMILY.any_size(fields)
    and (fields['relpos'] == 'none' or fields['relpos_dim'] is not None)
  ),
  published=(*timm.PUBLISHED, *vit.FAMILY.published),
)
