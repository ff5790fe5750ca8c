"""The pre-norm Transformer encoder (section 3.1 of the ViT paper, equations 2 to 4)."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.errors import UserError, did_you_mean
from vit_jax.nn.attention import MultiHeadDotProductAttention
from vit_jax.nn.layer_norm import LayerNorm
from vit_jax.nn.mlp import MlpBlock
from vit_jax.nn.posemb import add_posemb
from vit_jax.nn.stochastic_depth import StochasticDepth

# What of a block is kept for the backward pass. 'none': everything (no recompute).
REMAT = {
  'none': None,
  'full': 'nothing_saveable',
  'dots': 'dots_with_no_batch_dims_saveable',
}


class EncoderBlock(nn.Module):
  """x + attention(norm(x)), then x + mlp(norm(x)): [B, N, D] -> [B, N, D]."""

  num_heads: int
  mlp_dim: int
  dropout: float = 0.0
  attention_dropout: float = 0.0
  stochastic_depth: bool = False
  act: str = 'gelu_tanh'
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x, depth_rate, train: bool = False):
    """depth_rate: this block's rate of stochastic depth. Returns (carry, output)."""

    def branch(y):
      y = nn.Dropout(self.dropout)(y, deterministic=not train)
      return StochasticDepth()(y, depth_rate, train=train) if drops_depth else y

    drops_depth = self.stochastic_depth
    y = LayerNorm(self.dtype, name='LayerNorm_0')(x)
    y = MultiHeadDotProductAttention(
      self.num_heads,
      self.attention_dropout,
      dtype=self.dtype,
      name='MultiHeadDotProductAttention_0',
    )(y, train=train)
    x = x + branch(y)
    y = LayerNorm(self.dtype, name='LayerNorm_1')(x)
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
  scan: bool = False
  remat: str = 'none'
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x, grid: tuple[int, int], *, train: bool = False):
    """Maps tokens [B, N, D] to (normalised tokens [B, N, D], {name: [B, N, D]})."""
    out = {}
    x = add_posemb(self.posemb, x, grid, name='posembed_input')
    x = nn.Dropout(self.dropout)(x, deterministic=not train)
    out['tokens'] = x

    Block = EncoderBlock
    policy = remat_policy(self.remat)
    if policy is not None:
      # Inside a scan the loop already keeps XLA from merging the two computations.
      Block = nn.remat(
        Block, policy=policy, prevent_cse=not self.scan, static_argnums=(3,)
      )
    fields = dict(
      num_heads=self.num_heads,
      mlp_dim=self.mlp_dim,
      dropout=self.dropout,
      attention_dropout=self.attention_dropout,
      stochastic_depth=self.stochastic_depth > 0,
      act=self.act,
      dtype=self.dtype,
    )
    last = max(self.depth - 1, 1)
    rates = [self.stochastic_depth * i / last for i in range(self.depth)]
    if self.scan:
      x, blocks = nn.scan(
        Block,
        variable_axes={'params': 0, 'intermediates': 0},
        split_rngs={'params': True, 'dropout': True},
        in_axes=(0, nn.broadcast),
        length=self.depth,
      )(name='encoderblock', **fields)(x, jnp.asarray(rates), train)
    else:
      blocks = []
      for i, rate in enumerate(rates):
        x, block = Block(name=f'encoderblock_{i}', **fields)(x, rate, train)
        blocks.append(block)
    for i in range(self.depth):
      out[f'block{i:02d}'] = blocks[i]
    return LayerNorm(self.dtype, name='encoder_norm')(x), out


def remat_policy(name: str):
  """Returns the `jax.checkpoint` policy of that name, None for 'none'.

  Args:
    name: 'none', 'full', 'dots', or the name of a `jax.checkpoint_policies` member
      that takes no argument.

  Raises:
    UserError: for any other name.
  """
  plain = ('everything_saveable', 'nothing_saveable', 'dots_saveable')
  plain += ('dots_with_no_batch_dims_saveable',)
  if name not in REMAT and name not in plain:
    known = [*REMAT, *plain]
    raise UserError(
      f'Unknown remat policy {name!r}: one of {known}.{did_you_mean(name, known)}'
    )
  member = REMAT.get(name, name)
  return getattr(jax.checkpoint_policies, member) if member else None
