"""Dense layers."""

import math

import flax.linen as nn

from vit_jax.kernels.dense import dense, flattened
from vit_jax.nn.param import param


class Dense(nn.Dense):
  """`nn.Dense`, [..., D] -> [..., F], whose kernel may have more axes.

  Attributes:
    inputs, outputs: the axes of the kernel, and of the bias, that stand for D and for F,
      as (M, Dh) for heads; (): one. Initial values are those of a kernel [D, F].
  """

  inputs: tuple[int, ...] = ()
  outputs: tuple[int, ...] = ()

  def __call__(self, x):
    return dense(
      *self.promote_dtype(x, *self.parameters(x.shape[-1]), dtype=self.dtype)
    )

  @nn.compact
  def parameters(self, width: int):
    """Returns (kernel [D, F], bias [F] or None) for inputs of this width, as they are kept."""
    inputs = self.inputs or (width,)
    outputs = self.outputs or (self.features,)
    flat = (math.prod(inputs), math.prod(outputs))

    def make(name, init, flat, shape):
      start = lambda rng: init(rng, flat, self.param_dtype).reshape(shape)
      return param(self, name, start, shape)

    kernel = make('kernel', self.kernel_init, flat, inputs + outputs)
    bias = make('bias', self.bias_init, flat[1:], outputs) if self.use_bias else None
    return flattened(kernel, flat), None if bias is None else bias.reshape(-1)
