"""The two-layer perceptron of a Transformer block."""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.errors import choose
from vit_jax.nn.dense import Dense
from vit_jax.nn.dropout import Dropout

# The published Google files were trained with the tanh approximation (Flax's default);
# timm and transformers use the exact, erf form. They differ by up to 4.7e-4.
ACTIVATIONS = {
  'gelu_tanh': lambda x: jax.nn.gelu(x, approximate=True),
  'gelu_erf': lambda x: jax.nn.gelu(x, approximate=False),
}
_ALL = {**ACTIVATIONS, 'relu': jax.nn.relu}  # DETR's


class MlpBlock(nn.Module):
  """Dense, activation, dropout, Dense: [..., D] -> [..., D]; initialised as reference code.

  Attributes:
    hidden: width between the layers.
    outputs: that of the result; None: D.
  """

  hidden: int
  dropout: float = 0.0
  act: str = 'gelu_tanh'
  dtype: jnp.dtype = jnp.float32
  kernel_init: Callable = nn.initializers.xavier_uniform()
  bias_init: Callable = nn.initializers.normal(1e-6)
  outputs: int | None = None

  @nn.compact
  def __call__(self, x, *, train: bool = False):
    dense = functools.partial(
      Dense,
      kernel_init=self.kernel_init,
      bias_init=self.bias_init,
      dtype=self.dtype,
    )
    act = choose('activation', self.act, _ALL)
    y = act(dense(self.hidden, name='Dense_0')(x))
    y = Dropout(self.dropout)(y, deterministic=not train)
    return dense(self.outputs or x.shape[-1], name='Dense_1')(y)
