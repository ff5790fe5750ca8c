"""The two layers of an MLP on TPUs: a kernel for them and one for their derivative.

Where a model is narrow, its hidden layer takes longer to write to memory and read again than
to compute. Here a grid step computes that of some tokens on the chip, and the derivative
computes it again. benchmarks/NOTES.md has what it costs.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from vit_jax.kernels.placement import each_its_images, images_each
from vit_jax.kernels.tpu_rows import FEWEST, LANES, SUBLANES, largest_divisor, round_up

_SAVED = 3.4  # bytes not moved for a hidden number that is computed again, as measured
_HIDDEN = 5 * 2**18  # numbers of the hidden layer that a grid step computes
_IMAGES = 8  # of a grid step: they are unrolled

# jax.nn.gelu(approximate=False) is made of erfc, which Mosaic does not have.
_GELU_ERF = lambda x: 0.5 * x * (1 + lax.erf(x * 0.5**0.5))
ACTIVATIONS = {'gelu_tanh': jax.nn.gelu, 'gelu_erf': _GELU_ERF}


class Plan(NamedTuple):
  """How the kernels divide their work.

  Attributes:
    rows: tokens that are taken together, a divisor of those of an image or, if `turned`, of
      a device.
    vmem: bytes of on-chip memory that a kernel may use.
    images: how many images a grid step takes, one after the other, `rows` tokens of each;
      1 if `turned`.
    turned: whether x is read as [..., B, D], as other kernels of maps have it.
    interpret: run by JAX, not Mosaic.
  """

  rows: int
  vmem: int
  images: int = 1
  turned: bool = False
  interpret: bool = False


def plan(
  x: jax.Array, hidden: int, outputs: int, act: str, turned: bool = False
) -> Plan | None:
  """Returns how the TPUs of the mesh (`jax.set_mesh`) should compute an MLP of x.

  None if XLA should: for what is not bfloat16 [B, ..., D], for other activations than
  ACTIVATIONS, where the mesh splits channels or does not divide the batch, for few tokens,
  where a step does not fit on the chip, and before v4, where kernels multiply float32 only.
  None, too, for widths at which the hidden layer takes longer to compute again than to write and
  read: above 408 on v5e, 317 on v5p, 953 on v6e.

  Args:
    hidden, outputs: widths of the two layers. act: between them.
    turned: x is to be read and written as [..., B, D]. If so, None where a device's images
      are not a multiple of eight; if not, None where D is not a multiple of 128, as XLA has a
      better layout for such tokens than kernels can read, and where the hidden layer fits in
      half of the chip's memory, as XLA need not move that either.
  """
  images, width = images_each(x.shape[0]), x.shape[-1]
  if not images or x.dtype != jnp.bfloat16 or x.ndim < 3 or act not in ACTIVATIONS:
    return None
  from jax.experimental.pallas import tpu as pltpu

  info, half = pltpu.get_tpu_info(), jnp.bfloat16.dtype
  if not info.is_matmul_supported(half, half):
    return None
  again = 2 * width / info.bf16_ops_per_second  # a multiply-add is two operations
  if again > _SAVED / info.mem_bw_bytes_per_second:
    return None
  vmem = info.vmem_capacity_bytes * 15 // 16  # the rest is the compiler's
  most = _most_rows(vmem, width, hidden, outputs)
  tokens = math.prod(x.shape[1:-1])
  if turned:
    rows = largest_divisor(tokens * images, most, SUBLANES)
    fills, together = images % SUBLANES == 0, 1
  else:
    rows = tokens if tokens <= most else largest_divisor(tokens, most, 2 * SUBLANES)
    # A smaller hidden layer XLA keeps on the chip, too.
    fills = width % LANES == 0 and 2 * images * tokens * hidden > vmem // 2
    together = largest_divisor(images, min(_IMAGES, most // max(rows, 1)))
  return Plan(rows, vmem, together, turned) if fills and rows >= FEWEST else None


def _most_rows(vmem, width, hidden, outputs) -> int:
  """Returns how many rows a grid step may have: by _HIDDEN, and by what fits on the chip."""
  width, hidden, outputs = (round_up(n, LANES) for n in (width, hidden, outputs))
  # In the derivative: each of the kernels twice, in bfloat16, and its gradient in float32.
  left = vmem - 2 * (2 + 4) * hidden * (width + outputs)
  # Each row: two copies of each block, in bfloat16, and an estimated six hidden layers in
  # float32.
  row = 2 * 2 * (2 * width + outputs) + 6 * 4 * hidden
  return min(_HIDDEN // hidden, max(left, 0) // row)


def mlp(x, kernels, biases, act: str, plan: Plan, skip=None) -> jax.Array:
  """Returns act(x W + b) V + c, plus `skip`, by the kernels, under any mesh or none.

  Reverse-mode differentiable only: the derivative is a kernel too. The hidden layer is in
  float32, but for the products' operands.

  Args:
    x: [B, ..., D].
    kernels: [D, F] and [F, E]. biases: [F] and [E]. All of the dtype of x.
    act: of ACTIVATIONS.
    plan: of `plan` for x.
    skip: None or [B, ..., E] of the dtype of x, a residual connection.

  Returns:
    [B, ..., E] in the dtype of x.
  """
  return _mlp(x, *kernels, *biases, skip, act, plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
@functools.partial(jax.jit, static_argnames=('act', 'plan'), inline=True)
def _mlp(x, w, v, b, c, skip, act, plan):
  kernel = functools.partial(_forward, ACTIVATIONS[act])
  arrays = [x] if skip is None else [x, skip]
  params, products = [w, v, b, c], (1, 1)
  return _call(kernel, 'forward_mlp', plan, arrays, params, v.shape[1], [], products)[0]


def _mlp_fwd(x, w, v, b, c, skip, act, plan):
  kernels = w.perturbed or v.perturbed
  args = [None if p is None else p.value for p in (x, w, v, b, c, skip)]
  # Residuals are arrays: what is known while tracing is kept as the structure of a tree.
  facts = () if kernels else None, None if skip is None else ()
  return _mlp(*args, act, plan), (args[:5], facts)


def _mlp_bwd(act, plan, residuals, dy):
  args, (kernels, added) = residuals
  if isinstance(dy, SymbolicZero):
    dy = jnp.zeros(dy.shape, dy.dtype)
  gradients = _derivative(*args, dy, act, plan, kernels is not None)
  return *gradients, None if added is None else dy


_mlp.defvjp(_mlp_fwd, _mlp_bwd, symbolic_zeros=True)


@functools.partial(jax.jit, static_argnames=('act', 'plan', 'kernels'), inline=True)
def _derivative(x, w, v, b, c, dy, act, plan, kernels):
  """Returns gradients of x, w, v, b, c; None for w and v if not `kernels`: they are frozen."""
  kernel = functools.partial(_backward, ACTIVATIONS[act])
  arrays, params = [x, dy], [w, v, b]
  sums, products = ([b, c, w, v], (3, 2)) if kernels else ([b, c], (2, 1))
  dx, *found = _call(
    kernel, 'backward_mlp', plan, arrays, params, x.shape[-1], sums, products
  )
  found = (d.astype(s.dtype) for d, s in zip(found, sums, strict=True))
  db, dc, *found = found
  return dx, *(found or (None, None)), db, dc


def _call(kernel, name, plan, arrays, params, width, sums, products) -> list[jax.Array]:
  """Runs a kernel over blocks of tokens, each device its own images.

  Args:
    arrays: [B, ..., D], one dtype.
    params: what each grid step reads whole, [D, F], [F, E], [F], ...
    width: of the first result, which is otherwise like the arrays.
    sums: arrays of whose shapes the other results are, in float32, summed over the tokens.
    products: how many the kernel computes of the size of each of the first two `params`.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  two = lambda x: x.reshape(-1, x.shape[-1])

  def run(*operands):
    images, params = operands[: len(arrays)], operands[len(arrays) :]
    if plan.turned:
      # The images of a token lie side by side: they fill tiles, whatever the tokens' number.
      images = [jnp.moveaxis(x, 0, -2) for x in images]
    shape = images[0].shape[:-1]
    # If turned, blocks of tokens take the place of images.
    tokens = plan.rows if plan.turned else math.prod(shape[1:])
    images = [x.reshape(-1, tokens, x.shape[-1]) for x in images]
    params = [two(x) for x in params]
    count, dtype = len(images[0]), images[0].dtype
    grid = (count // plan.images, tokens // plan.rows)

    def block(width):
      return pl.BlockSpec((plan.images, plan.rows, width), lambda b, i: (b, i, 0))

    whole = lambda x: pl.BlockSpec(x.shape, lambda b, i: (0, 0))
    outs = [jax.ShapeDtypeStruct((count, tokens, width), dtype)]
    outs += [jax.ShapeDtypeStruct(two(x).shape, jnp.float32) for x in sums]
    multiplied = sum(n * x.size for n, x in zip(products, params[:2], strict=True))
    cost = pl.CostEstimate(
      flops=2 * count * tokens * multiplied,
      transcendentals=count * tokens * params[0].shape[1],
      bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*images, *params, *outs)),
    )
    y, *found = pl.pallas_call(
      kernel,
      grid=grid,
      in_specs=[*(block(x.shape[-1]) for x in images), *map(whole, params)],
      out_specs=[block(width), *map(whole, outs[1:])],
      out_shape=outs,
      cost_estimate=cost,
      interpret=plan.interpret,
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=('arbitrary' if sums else 'parallel',) * 2,
        vmem_limit_bytes=plan.vmem,
      ),
      metadata={'grid': 'x'.join(map(str, grid))},  # for `tools.tpu.cost`
      name=name,
    )(*images, *params)
    y = y.reshape(*shape, width)
    y = jnp.moveaxis(y, -2, 0) if plan.turned else y
    return [y, *(x[None] for x in found)]

  y, *found = each_its_images(run, len(arrays), len(params))(*arrays, *params)
  return [y, *(d.sum(0).reshape(s.shape) for d, s in zip(found, sums, strict=True))]


def _dot(x, y, axes) -> jax.Array:
  """Returns the product over an axis of each, in float32."""
  a, b = axes
  return lax.dot_general(
    x, y, (((a,), (b,)), ((), ())), preferred_element_type=jnp.float32
  )


def _forward(act, x_ref, *refs):
  """x_ref [images, rows, D]; `refs`: of [images, rows, E] to be added, if anything is;
  parameters [D, F], [F, E], [1, F], [1, E]; the result, [images, rows, E].
  """
  *added, w_ref, v_ref, b_ref, c_ref, y_ref = refs
  for image in range(len(x_ref)):
    hidden = act(_dot(x_ref[image], w_ref[...], (1, 0)) + b_ref[...])
    y = _dot(hidden.astype(x_ref.dtype), v_ref[...], (1, 0)) + c_ref[...]
    for ref in added:
      y += ref[image].astype(jnp.float32)
    y_ref[image] = y.astype(y_ref.dtype)


def _backward(act, x_ref, dy_ref, w_ref, v_ref, b_ref, dx_ref, *sums):
  """dy_ref [images, rows, E]; `sums`: of the gradients, float32, of the biases and maybe of
  the kernels; else as `_forward`.
  """
  from jax.experimental import pallas as pl

  db_ref, dc_ref, *kernels = sums

  @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0))
  def _():
    for ref in sums:
      ref[...] = jnp.zeros(ref.shape, ref.dtype)

  for image in range(len(x_ref)):
    x, dy = x_ref[image], dy_ref[image]
    hidden, pullback = jax.vjp(act, _dot(x, w_ref[...], (1, 0)) + b_ref[...])
    (dz,) = pullback(_dot(dy, v_ref[...], (1, 1)))
    db_ref[...] += dz.sum(0, keepdims=True)
    dc_ref[...] += dy.astype(jnp.float32).sum(0, keepdims=True)
    dz, hidden = dz.astype(x.dtype), hidden.astype(x.dtype)
    dx_ref[image] = _dot(dz, w_ref[...], (1, 1)).astype(dx_ref.dtype)
    if kernels:
      dw_ref, dv_ref = kernels
      dw_ref[...] += _dot(x, dz, (0, 0))
      dv_ref[...] += _dot(hidden, dy, (0, 0))
