"""The pre-norm Transformer encoder (section 3.1 of the ViT paper, equations 2 to 4)."""

import dataclasses
import functools

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.kernels.placement import place
from vit_jax.nn.attention import MultiHeadDotProductAttention
from vit_jax.nn.dropout import Dropout
from vit_jax.nn.embed import AddPositions
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
  posemb_std: float | None = 0.02
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
  """x + attention(norm(x)), then x + mlp(norm(x))."""

  config: EncoderConfig

  @nn.compact
  def __call__(self, x, depth_rate=None, *, train: bool = False, num_queries=None):
    """Maps [B, N, D] to [B, N, D], or to the first [B, num_queries, D] of it."""
    c = self.config

    def branch(y):
      y = Dropout(c.dropout)(y, deterministic=not train)
      return StochasticDepth()(y, depth_rate, train=train)

    x = place(x, c.placement)
    y = LayerNorm(c.dtype, c.norm_eps, name='LayerNorm_0')(x)
    attention = MultiHeadDotProductAttention(
      c.num_heads,
      c.attention_dropout,
      c.fused_attention,
      c.dtype,
      name='MultiHeadDotProductAttention_0',
    )
    x = x[:, :num_queries] + branch(attention(y[:, :num_queries], y, train=train))
    y = LayerNorm(c.dtype, c.norm_eps, name='LayerNorm_1')(x)
    mlp = MlpBlock(c.mlp_dim, c.dropout, c.act, c.dtype, name='MlpBlock_0')
    return x + branch(mlp(y, train=train))


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
    x = AddPositions(c.posemb, c.posemb_std, name='posembed_input')(x, grid)
    tokens = x = Dropout(c.dropout)(x, deterministic=not train)
    x, out = stack(
      functools.partial(EncoderBlock, c),
      x,
      name='encoderblock',
      rates=depth_rates(c.stochastic_depth, c.depth),
      scan=c.scan,
      remat=c.remat,
      train=train,
      between=between,
      last={} if num_queries is None else {'num_queries': num_queries},
    )
    x = LayerNorm(eps=c.norm_eps, name='encoder_norm')(x)
    return x, {'tokens': tokens, **out}
