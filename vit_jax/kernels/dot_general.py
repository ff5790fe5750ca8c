"""Matrix products of dense layers, for `dot_general=` of `nn.Dense` and `DenseGeneral`.

What suits one platform is chosen here, when a program is lowered: layers, and whoever
intercepts them, see the same call everywhere.
"""

import functools
import math

import jax
from jax import lax


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def dot_general(x, kernel, dimension_numbers, precision=None):
  """`lax.dot_general`; on CPUs the gradient of the kernel is a product of two matrices.

  Contracted over [B, N], as it is derived, XLA's CPU compiler transposes the activations
  for it (a step of ViT-S takes 1.16 times as long). Flattened to [B N, D] it does not; on
  a TPU, whose arrays are tiled (8, 128), flattening 197 tokens moves every element.
  """
  return lax.dot_general(x, kernel, dimension_numbers, precision)


@dot_general.defjvp
def _jvp(dimension_numbers, precision, primals, tangents):
  (x, kernel), (dx, dkernel) = primals, tangents
  product = functools.partial(
    lax.dot_general, dimension_numbers=dimension_numbers, precision=precision
  )

  def flat(x, dkernel):  # contracted: the last axes of x, the first of the kernel
    n = len(dimension_numbers[0][0])
    size = math.prod(dkernel.shape[:n])
    y = lax.dot(x.reshape(-1, size), dkernel.reshape(size, -1), precision=precision)
    return y.reshape(*x.shape[:-n], *dkernel.shape[n:])

  # Not differentiated as it stands, a choice keeps what any of its branches would.
  by_kernel = jax.checkpoint(
    lambda *args: lax.platform_dependent(*args, cpu=flat, default=product),
    prevent_cse=False,
  )
  return product(x, kernel), product(dx, kernel) + by_kernel(x, dkernel)
