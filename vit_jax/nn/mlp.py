"""The two-layer perceptron of a Transformer block."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.errors import choose

# The published Google files were trained with the tanh approximation (Flax's default);
# timm and transformers use the exact, erf form. They differ by up to 4.7e-4.
ACTIVATIONS = {
  'gelu_tanh': lambda x: jax.nn.gelu(x, approximate=True),
  'gelu_erf': lambda x: jax.nn.gelu(x, approximate=False),
}


def activation(name: str):
  """Returns the activation of that name; UserError lists the known ones."""
  return choose('activation', name, ACTIVATIONS)


# On CPU the hidden layer is made in pieces of so many columns. Eigen's matrix product is
# slow where the rows of its result are a multiple of 4 KiB apart (3072 columns: 62
# GFLOP/s a core, 768: 120), and a piece is still in the cache when GELU reads it.
_COLUMNS = 768


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

    act = activation(self.act)
    if not (train and self.dropout) and self._in_pieces():
      params = self.variables['params']
      return _pieces(x, params['Dense_0'], params['Dense_1'], act).reshape(shape)
    x = act(dense(self.hidden, 'Dense_0')(x))
    x = nn.Dropout(self.dropout)(x, deterministic=not train)
    return dense(width, 'Dense_1')(x).reshape(shape)

  def _in_pieces(self) -> bool:
    """Whether this is a step on one CPU, where nobody looks at what is in between."""
    return (
      jax.default_backend() == 'cpu'
      and jax.sharding.get_abstract_mesh().size == 1  # `jax.set_mesh`, as steps have
      and self.hidden > _COLUMNS
      and self.dtype == jnp.float32
      and not self.is_initializing()
      and not self.is_mutable_collection('intermediates')
    )


def _pieces(x, inner: dict, outer: dict, act: Callable) -> jax.Array:
  """Returns act(x W + b) W' + b' of two layers' parameters, [..., D] -> [..., D']."""
  cuts = [*range(_COLUMNS, inner['bias'].size, _COLUMNS)]
  parts = zip(
    jnp.split(inner['kernel'], cuts, axis=1),
    jnp.split(inner['bias'], cuts),
    jnp.split(outer['kernel'], cuts, axis=0),
    strict=True,
  )
  return sum((act(x @ w + b) @ v for w, b, v in parts), outer['bias'])
