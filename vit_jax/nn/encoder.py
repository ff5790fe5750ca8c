"""The pre-norm Transformer encoder (section 3.1 of the ViT paper, equations 2 to 4)."""

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.nn.attention import MultiHeadDotProductAttention
from vit_jax.nn.layer_norm import LayerNorm
from vit_jax.nn.mlp import MlpBlock
from vit_jax.nn.placement import place
from vit_jax.nn.posemb import add_posemb
from vit_jax.nn.stack import stack
from vit_jax.nn.stochastic_depth import StochasticDepth


class EncoderBlock(nn.Module):
  """x + attention(norm(x)), then x + mlp(norm(x)): [B, N, D] -> [B, N, D]."""

  num_heads: int
  mlp_dim: int
  dropout: float = 0.0
  attention_dropout: float = 0.0
  stochastic_depth: bool = False
  act: str = 'gelu_tanh'
  norm_eps: float = 1e-6
  placement: str = 'batch'  # of tokens at block entry, see nn.placement
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x, depth_rate, train: bool = False, rows: int | None = None):
    """Returns (carry, output), the same array twice.

    Args:
      x: [B, N, D].
      depth_rate: this block's rate of stochastic depth.
      rows: how many of the first tokens are wanted: [B, rows, D]; None: all.
    """

    def branch(y):
      y = nn.Dropout(self.dropout)(y, deterministic=not train)
      return StochasticDepth()(y, depth_rate, train=train) if drops_depth else y

    drops_depth = self.stochastic_depth
    x = place(x, self.placement)
    y = LayerNorm(self.dtype, self.norm_eps, name='LayerNorm_0')(x)
    y = MultiHeadDotProductAttention(
      self.num_heads,
      self.attention_dropout,
      dtype=self.dtype,
      name='MultiHeadDotProductAttention_0',
    )(y[:, :rows], y, train=train)
    x = x[:, :rows] + branch(y)
    y = LayerNorm(self.dtype, self.norm_eps, name='LayerNorm_1')(x)
    y = MlpBlock(self.mlp_dim, self.dropout, self.act, self.dtype, name='MlpBlock_0')(
      y, train=train
    )
    x = x + branch(y)
    return x, x


class Encoder(nn.Module):
  """Position embedding, L blocks, final norm."""

  depth: int
  num_heads: int
  mlp_dim: int
  posemb: str = 'learn'
  dropout: float = 0.0
  attention_dropout: float = 0.0
  stochastic_depth: float = 0.0  # rate of the last block; the first has 0, linear
  act: str = 'gelu_tanh'
  norm_eps: float = 1e-6
  scan: bool = False
  remat: str = 'none'
  placement: str = 'batch'
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(
    self, x, grid: tuple[int, int], *, train: bool = False, rows: int | None = None
  ):
    """Runs the blocks on a grid (h, w) of tokens, others in front of them.

    Args:
      x: [B, N, D].
      rows: how many of the first tokens the caller needs; None: all. The last block
        spends nothing on others (see `nn.stack`).

    Returns:
      (normalised tokens in float32, {name: [B, N, D]}): [B, N, D], or at least the
      first `rows`, as is the last block's output.
    """
    out = {}
    x = add_posemb(self.posemb, x, grid, name='posembed_input')
    x = nn.Dropout(self.dropout)(x, deterministic=not train)
    out['tokens'] = x

    x, blocks = stack(
      EncoderBlock,
      x,
      name='encoderblock',
      depth=self.depth,
      scan=self.scan,
      remat=self.remat,
      train=train,
      last_rows=rows,
      num_heads=self.num_heads,
      mlp_dim=self.mlp_dim,
      dropout=self.dropout,
      attention_dropout=self.attention_dropout,
      stochastic_depth=self.stochastic_depth,
      act=self.act,
      norm_eps=self.norm_eps,
      placement=self.placement,
      dtype=self.dtype,
    )
    out |= blocks
    return LayerNorm(jnp.float32, self.norm_eps, name='encoder_norm')(x), out
