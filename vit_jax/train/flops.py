"""Counts the floating-point operations of a JAX function from its shapes.

Counts matrix products and convolutions only, and a multiply-add as two operations, like the
compute columns of the ViT paper (Table 6). Like there, normalisation, softmax and activations
are left out, which are a few per cent of a ViT. Nothing runs: the function is traced on
abstract arrays.
"""

import contextlib
import math
from collections.abc import Callable

import jax
from jax.extend import core


def count(fn: Callable, *args) -> int:
  """Returns the operations of `fn(*args)`.

  Args:
    args: arrays or `jax.ShapeDtypeStruct`, in any tree.

  Raises:
    NotImplementedError: if the number does not follow from the shapes. This is so for a
      matrix product within a `while` loop, whose number of iterations is unknown, for a
      foreign kernel, and for a Pallas kernel without a `cost_estimate`.
  """
  return count_jaxpr(jax.make_jaxpr(fn)(*args).jaxpr)


def exa_training(forward: float, examples: float) -> float:
  """Returns the exaFLOPs of training on `examples` examples (epochs x data set size).

  A backward pass costs as much as two forward passes, because each layer has a product for
  the gradient of its inputs and one for the gradient of its weights. Training therefore costs
  3 x forward, which reproduces Table 6 of the ViT paper.
  """
  return 3 * forward * examples / 1e18


def count_jaxpr(jaxpr) -> int:
  """Counts the operations of a traced function, see `count`."""
  return sum(_count_equation(equation) for equation in jaxpr.eqns)


def _count_equation(equation) -> int:
  name, params = equation.primitive.name, equation.params
  if name == 'dot_general':
    return _dot_general(equation)
  if name == 'conv_general_dilated':
    return _convolution(equation)
  # cuDNN's fused attention.
  if name.startswith('dot_product_attention_fwd'):
    (B, N, M, D), (_, S, *_) = (v.aval.shape for v in equation.invars[:2])
    # Two products: q k', and weights times v.
    return 4 * B * N * M * S * D
  if name == 'pallas_call' and (declared := params['cost_estimate']):
    return declared.flops
  if name in ('pallas_call', 'ffi_call'):
    raise NotImplementedError(f'Cannot count the operations of a {name}.')

  if name == 'cond' and params.get('branches_platforms'):
    # Each branch computes the same on its platform: one that can be counted is enough.
    counts = []
    for branch in params['branches']:
      with contextlib.suppress(NotImplementedError):
        counts.append(count_jaxpr(branch.jaxpr))
    if counts:
      return max(counts)
  inner = [count_jaxpr(jaxpr) for jaxpr in inner_jaxprs(params)]
  if name == 'cond':
    return max(inner)
  if name == 'while' and any(inner):
    raise NotImplementedError('Cannot count matrix products in a while loop.')
  if name == 'scan':
    return params['length'] * sum(inner)
  # The inner shapes are those of one device, so multiply by the number of devices.
  if name == 'shard_map':
    return math.prod(params['mesh'].shape.values()) * sum(inner)
  return sum(inner)


def inner_jaxprs(params):
  """Yields the jaxprs among the parameters of an equation: bodies, branches, functions."""
  for value in params.values():
    for item in value if isinstance(value, tuple | list) else (value,):
      if isinstance(item, core.ClosedJaxpr):
        yield item.jaxpr
      elif isinstance(item, core.Jaxpr):
        yield item


def _dot_general(equation) -> int:
  lhs = equation.invars[0].aval.shape
  (contracted, _), _ = equation.params['dimension_numbers']
  depth = math.prod(lhs[axis] for axis in contracted)
  return 2 * math.prod(equation.outvars[0].aval.shape) * depth


def _convolution(equation) -> int:
  kernel = equation.invars[1].aval.shape
  features = kernel[equation.params['dimension_numbers'].rhs_spec[0]]
  depth = math.prod(kernel) // features  # kh kw C / groups
  # The zeros that a transposed convolution inserts are not multiplied.
  depth /= math.prod(equation.params['lhs_dilation'])
  return int(2 * math.prod(equation.outvars[0].aval.shape) * depth)
