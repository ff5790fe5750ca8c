"""The pre-norm Transformer encoder (section 3.1 of the ViT paper, equations 2 to 4)."""

import dataclasses
import functools

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.errors import choose
from vit_jax.kernels.placement import place
from vit_jax.nn import axial, positions
from vit_jax.nn.attention import MultiHeadDotProductAttention
from vit_jax.nn.dropout import Dropout
from vit_jax.nn.layer_norm import LayerNorm
from vit_jax.nn.mlp import MlpBlock
from vit_jax.nn.stack import StochasticDepth, depth_rates, stack


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
  """Fields of an encoder; `models.vit.ViT`, which has them too, says what they mean."""

  depth: int
  num_heads: int
  mlp_dim: int
  act: str = 'gelu_tanh'
  norm_eps: float = 1e-6
  posemb: str = 'learn'
  posemb_where: str = 'stem'
  posemb_std: float | None = 0.02
  posemb_per_head: bool = False
  attention: str = 'full'
  dropout: float = 0.0
  attention_dropout: float = 0.0
  fused_attention: bool = True
  stochastic_depth: float = 0.0
  scan: bool = False
  remat: str = 'none'
  placement: str = 'batch'
  dtype: jnp.dtype = jnp.float32

  @classmethod
  def of(cls, model) -> 'EncoderConfig':
    """Returns the config of a model whose fields have these names."""
    return cls(**{f.name: getattr(model, f.name) for f in dataclasses.fields(cls)})


class EncoderBlock(nn.Module):
  """x + attention(norm(x)), then x + mlp(norm(x)).

  Attributes:
    grid: (h, w) of the last h * w tokens.
    axis: None, or along what tokens attend to each other: 'rows' or 'columns'.
  """

  config: EncoderConfig
  grid: tuple[int, int]
  axis: str | None = None

  @nn.compact
  def __call__(self, x, depth_rate=None, *, train: bool = False, num_queries=None):
    """Maps [B, N, D] to [B, N, D], or to the first [B, num_queries, D] of it."""
    c = self.config

    def branch(y):
      y = Dropout(c.dropout)(y, deterministic=not train)
      return StochasticDepth()(y, depth_rate, train=train)

    x = place(x, c.placement)
    if c.posemb_where == 'every' and self.axis != 'columns':  # once in an axial block
      x = x + position_embedding(c)(x, self.grid)
    norm = functools.partial(LayerNorm, c.dtype, c.norm_eps, fused=c.fused_attention)
    if num_queries is None:
      y, x = norm(name='LayerNorm_0')(x, and_input=True)
    else:
      y, x = norm(name='LayerNorm_0')(x), x[:, :num_queries]
    attention = MultiHeadDotProductAttention(
      c.num_heads,
      c.attention_dropout,
      c.fused_attention,
      c.dtype,
      name='MultiHeadDotProductAttention_0',
    )
    if self.axis is None:
      where = self._positions_in_attention()
      y = attention(y[:, :num_queries], y, train=train, positions=where)
    else:
      y = attention(axial.fold(y, self.grid, self.axis), train=train)
      y = axial.unfold(y, self.grid, self.axis)
    x = x + branch(y)
    y, x = norm(name='LayerNorm_1')(x, and_input=True)
    mlp = MlpBlock(
      c.mlp_dim,
      c.dropout,
      c.act,
      c.dtype,
      fused=c.fused_attention,
      name='MlpBlock_0',
    )
    # `branch` changes what is added only in training: else the MLP's kernel may add it.
    if train and (c.dropout or depth_rate is not None):
      return x + branch(mlp(y, train=train))
    return mlp(y, skip=x, train=train)

  def _positions_in_attention(self):
    c = self.config
    if c.posemb == 'relative':
      fields = self.grid, c.posemb_per_head, c.posemb_std
      return positions.RelativePositions(*fields, name='posembed_relative')
    return positions.rotate(self.grid) if c.posemb == 'rotary' else None


class AxialBlock(nn.Module):
  """A block whose tokens attend along rows, then one along columns (section D.6)."""

  config: EncoderConfig
  grid: tuple[int, int]

  @nn.compact
  def __call__(self, x, depth_rate=None, *, train: bool = False):
    """Maps [B, h w, D] to [B, h w, D]."""
    for axis in axial.AXES:
      x = EncoderBlock(self.config, self.grid, axis, name=axis)(
        x, depth_rate, train=train
      )
    return x


BLOCKS = {'full': EncoderBlock, 'axial': AxialBlock}


def position_embedding(config: EncoderConfig) -> positions.PositionEmbedding:
  """Returns the module of positions that are added to tokens."""
  return positions.PositionEmbedding(
    config.posemb, config.posemb_std, name='posembed_input'
  )


def _adds(added, then=None):
  """Returns a `between` of `stack` that adds to the input of every block but the first."""

  def between(i, x):
    x = x + jnp.where(i > 0, added, 0)
    return x if then is None else then(i, x)

  return between


class Encoder(nn.Module):
  """Position embedding, L blocks, final norm."""

  config: EncoderConfig

  @nn.compact
  def __call__(self, x, grid, *, train=False, num_queries=None, between=None):
    """Runs the blocks on a grid (h, w) of tokens, others in front of them.

    Args:
      x: [B, N, D].
      num_queries: how many of the first tokens the caller needs; None: all. The last
        block, unless scanned, computes no others.
      between: see `stack`.

    Returns:
      (normalised tokens [B, N, D] in float32, {name: [B, N, D]}).
    """
    c = self.config
    positions.check(c.posemb, c.posemb_where, c.posemb_per_head)
    block = choose('attention', c.attention, BLOCKS)
    if c.attention == 'axial':
      axial.check(x.shape[1], grid, c.posemb, (*positions.ADDED, 'none'))
    if c.posemb in positions.ADDED and c.posemb_where != 'every':
      added = position_embedding(c)(x, grid)
      x = x + added
      if c.posemb_where == 'shared':
        between = _adds(added, then=between)
    tokens = x = Dropout(c.dropout)(x, deterministic=not train)
    queries = lambda i: {'num_queries': num_queries} if i == c.depth - 1 else {}
    x, out = stack(
      functools.partial(block, c, grid),
      x,
      name='encoderblock',
      rates=depth_rates(c.stochastic_depth, c.depth),
      scan=c.scan,
      remat=c.remat,
      train=train,
      between=between,
      more=None if num_queries is None else queries,
    )
    x = LayerNorm(eps=c.norm_eps, name='encoder_norm')(x)
    return x, {'tokens': tokens, **out}
