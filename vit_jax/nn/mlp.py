"""The two-layer perceptron of a Transformer block."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.errors import UserError, did_you_mean

# The published Google files were trained with the tanh approximation (Flax's default);
# timm and transformers use the exact, erf form. They differ by up to 4.7e-4.
ACTIVATIONS = {
  'gelu_tanh': lambda x: jax.nn.gelu(x, approximate=True),
  'gelu_erf': lambda x: jax.nn.gelu(x, approximate=False),
}


def activation(name: str):
  """Returns the activation of that name; UserError lists the known ones."""
  if name not in ACTIVATIONS:
    raise UserError(
      f'Unknown activation {name!r}: one of {sorted(ACTIVATIONS)}.'
      f'{did_you_mean(name, ACTIVATIONS)}'
    )
  return ACTIVATIONS[name]


class MlpBlock(nn.Module):
  """Dense, GELU, dropout, Dense: [..., D] -> [..., D].

  The initialisers are those of the ViT's reference code.
  """

  hidden: int
  dropout: float = 0.0
  act: str = 'gelu_tanh'
  dtype: jnp.dtype = jnp.float32
  kernel_init: Callable = nn.initializers.xavier_uniform()
  bias_init: Callable = nn.initializers.normal(1e-6)

  @nn.compact
  def __call__(self, x, *, train: bool = False):
    shape, width = x.shape, x.shape[-1]
    # One matrix product: as a contraction of [B, N, D] the backward pass transposes.
    x = x.reshape(-1, width)

    def dense(features, name):
      return nn.Dense(
        features,
        kernel_init=self.kernel_init,
        bias_init=self.bias_init,
        dtype=self.dtype,
        name=name,
      )

    x = activation(self.act)(dense(self.hidden, 'Dense_0')(x))
    x = nn.Dropout(self.dropout)(x, deterministic=not train)
    return dense(width, 'Dense_1')(x).reshape(shape)
