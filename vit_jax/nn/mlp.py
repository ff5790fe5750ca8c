"""The two-layer perceptron of a Transformer block."""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.errors import choose
from vit_jax.kernels import tpu_mlp
from vit_jax.nn.dense import Dense
from vit_jax.nn.dropout import Dropout

# The published Google files were trained with the tanh approximation (Flax's default);
# timm and transformers use the exact, erf form. They differ by up to 4.7e-4.
ACTIVATIONS = {
  'gelu_tanh': lambda x: jax.nn.gelu(x, approximate=True),
  'gelu_erf': lambda x: jax.nn.gelu(x, approximate=False),
}
_ALL = {**ACTIVATIONS, 'relu': jax.nn.relu}  # DETR's


def joined(y, scale=None, skip=None):
  """Returns y [..., D], times `scale` [D] and plus `skip` [..., D] where given."""
  y = y if scale is None else y * scale.astype(y.dtype)
  return y if skip is None else skip + y


class MlpBlock(nn.Module):
  """Dense, activation, dropout, Dense: [..., D] -> [..., D]; initialised as reference code.

  Attributes:
    hidden: width between the layers.
    outputs: that of the result; None: D.
    fused: whether a fused kernel may be used: see `kernels.tpu_mlp`.
    turned: whether that kernel reads x as [..., B, D], as other kernels of maps do.
  """

  hidden: int
  dropout: float = 0.0
  act: str = 'gelu_tanh'
  dtype: jnp.dtype = jnp.float32
  kernel_init: Callable = nn.initializers.xavier_uniform()
  bias_init: Callable = nn.initializers.normal(1e-6)
  outputs: int | None = None
  fused: bool = False
  turned: bool = False

  @nn.compact
  def __call__(
    self, x, scale=None, skip=None, *, train: bool = False, whole: bool = True
  ):
    """Maps [..., D] to [..., outputs], `joined` with `scale` [outputs] and `skip` of its shape.

    `whole` False: both layers are called as modules, so that an interceptor can replace one.
    """
    dense = functools.partial(
      Dense,
      kernel_init=self.kernel_init,
      bias_init=self.bias_init,
      dtype=self.dtype,
    )
    act = choose('activation', self.act, _ALL)
    outputs = self.outputs or x.shape[-1]
    first, second = dense(self.hidden, name='Dense_0'), dense(outputs, name='Dense_1')
    plan = None
    alike = all(a is None or a.dtype == self.dtype for a in (x, skip))
    if self.fused and whole and not (self.dropout and train) and alike:
      plan = tpu_mlp.plan(x, self.hidden, outputs, self.act, self.turned)
    if plan:
      params = [first.parameters(x.shape[-1]), second.parameters(self.hidden)]
      if scale is not None:
        params[1] = [p * scale for p in params[1]]
      params = jax.tree.map(lambda p: p.astype(self.dtype), params)
      return tpu_mlp.mlp(x, *zip(*params, strict=True), self.act, plan, skip)
    y = Dropout(self.dropout)(act(first(x)), deterministic=not train)
    return joined(second(y), scale, skip)
