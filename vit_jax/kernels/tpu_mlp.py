"""The two layers of an MLP on TPUs: a kernel for them and one for their derivative.

Where a model is narrow, its hidden layer takes longer to write to memory and read again than
to compute. Here a grid step computes that of some tokens on the chip, and the derivative
computes it again. benchmarks/NOTES.md has what it costs.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from vit_jax.kernels.placement import each_its_images, images_each
from vit_jax.kernels.tpu_rows import FEWEST, LANES, SUBLANES, largest_divisor, round_up

_WIDEST = 384  # channels: wider products take longer than their bytes
_HIDDEN = 393_216  # numbers of the hidden layer that a grid step computes

# jax.nn.gelu(approximate=False) is made of erfc, which Mosaic does not have.
_GELU_ERF = lambda x: 0.5 * x * (1 + lax.erf(x * 0.5**0.5))
ACTIVATIONS = {'gelu_tanh': jax.nn.gelu, 'gelu_erf': _GELU_ERF}


class Plan(NamedTuple):
  """How the kernels divide their work.

  Attributes:
    rows: tokens of a grid step, a divisor of a device's.
    vmem: bytes of on-chip memory that a kernel may use.
    interpret: run by JAX, not Mosaic.
  """

  rows: int
  vmem: int
  interpret: bool = False


def plan(x: jax.Array, hidden: int, outputs: int, act: str) -> Plan | None:
  """Returns how the TPUs of the mesh (`jax.set_mesh`) should compute an MLP of x.

  None if XLA should: for what is not bfloat16 [B, ..., D], for other activations than
  ACTIVATIONS, where the mesh splits channels or the number of images on a device is not a
  multiple of eight, for few tokens, for widths above 384, whose products take longer than the
  bytes that are saved, where a step does not fit on the chip (above 192 on v4), and before v4, where
  kernels multiply float32 only.

  Args:
    hidden, outputs: widths of the two layers. act: between them.
  """
  images = images_each(x.shape[0])
  if images is None or x.dtype != jnp.bfloat16 or x.ndim < 3 or images % SUBLANES:
    return None
  if act not in ACTIVATIONS or max(x.shape[-1], outputs) > _WIDEST:
    return None
  from jax.experimental.pallas import tpu as pltpu

  info, half = pltpu.get_tpu_info(), jnp.bfloat16.dtype
  if not info.is_matmul_supported(half, half):
    return None
  tokens = x.size // x.shape[-1] // x.shape[0] * images
  rows = largest_divisor(tokens, _HIDDEN // round_up(hidden, LANES), SUBLANES)
  vmem = info.vmem_capacity_bytes * 15 // 16  # the rest is the compiler's
  fits = _backward_bytes(rows, x.shape[-1], hidden, outputs) <= vmem
  return Plan(rows, vmem) if rows >= FEWEST and fits else None


def _backward_bytes(rows, width, hidden, outputs) -> int:
  """Returns an estimate of what the derivative's kernel keeps on the chip."""
  width, hidden, outputs = (round_up(n, LANES) for n in (width, hidden, outputs))
  blocks = 2 * 2 * rows * (2 * width + outputs)  # two of each, of two bytes
  # With their derivatives, in float32.
  kernels = 2 * (2 + 4) * hidden * (width + outputs)
  return blocks + kernels + 6 * 4 * rows * hidden


def mlp(x, kernels, biases, act: str, plan: Plan) -> jax.Array:
  """Returns act(x W + b) V + c by the kernels, under any mesh or none.

  Reverse-mode differentiable only: the derivative is a kernel too. The hidden layer is in
  float32, but for the products' operands.

  Args:
    x: [B, ..., D].
    kernels: [D, F] and [F, E]. biases: [F] and [E]. All of the dtype of x.
    act: of ACTIVATIONS.
    plan: of `plan` for x.

  Returns:
    [B, ..., E] in the dtype of x.
  """
  return _mlp(x, *kernels, *biases, act, plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
@functools.partial(jax.jit, static_argnames=('act', 'plan'), inline=True)
def _mlp(x, w, v, b, c, act, plan):
  kernel = functools.partial(_forward, ACTIVATIONS[act])
  return _call(kernel, 'forward_mlp', plan, [x], [w, v, b, c], v.shape[1], [])[0]


def _mlp_fwd(x, w, v, b, c, act, plan):
  return _mlp(x, w, v, b, c, act, plan), (x, w, v, b, c)


def _mlp_bwd(act, plan, residuals, dy):
  return _derivative(*residuals, dy, act, plan)


_mlp.defvjp(_mlp_fwd, _mlp_bwd)


@functools.partial(jax.jit, static_argnames=('act', 'plan'), inline=True)
def _derivative(x, w, v, b, c, dy, act, plan):
  kernel = functools.partial(_backward, ACTIVATIONS[act])
  sums = [w, v, b, c]
  dx, *found = _call(
    kernel, 'backward_mlp', plan, [x, dy], [w, v, b], x.shape[-1], sums
  )
  return dx, *(d.astype(s.dtype) for d, s in zip(found, sums, strict=True))


def _call(kernel, name, plan, arrays, params, width, sums) -> list[jax.Array]:
  """Runs a kernel over blocks of tokens, each device its own images.

  Args:
    arrays: [B, ..., D], one dtype.
    params: what each grid step reads whole.
    width: of the first result, which is otherwise like the arrays.
    sums: arrays of whose shapes the other results are, in float32, summed over the tokens.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  two = lambda x: x.reshape(-1, x.shape[-1])

  def run(*operands):
    # The images of a token lie side by side: they fill tiles, whatever the tokens' number.
    turned = [jnp.moveaxis(x, 0, -2) for x in operands[: len(arrays)]]
    shape = (*turned[0].shape[:-1], width)
    operands = [*map(two, turned), *map(two, operands[len(arrays) :])]
    rows, dtype = len(operands[0]), operands[0].dtype
    grid = (rows // plan.rows,)
    block = lambda width: pl.BlockSpec((plan.rows, width), lambda i: (i, 0))
    whole = lambda x: pl.BlockSpec(x.shape, lambda i: (0, 0))
    outs = [jax.ShapeDtypeStruct((rows, width), dtype)]
    outs += [jax.ShapeDtypeStruct(two(x).shape, jnp.float32) for x in sums]
    w, v = (x.size for x in params[:2])
    cost = pl.CostEstimate(
      # Forward a product with each; backward three of the size of w and two of that of v.
      flops=2 * rows * (3 * w + 2 * v if sums else w + v),
      transcendentals=rows * params[0].shape[1],
      bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*operands, *outs)),
    )
    y, *found = pl.pallas_call(
      kernel,
      grid=grid,
      in_specs=[block(x.shape[1]) for x in operands[: len(arrays)]]
      + [whole(x) for x in operands[len(arrays) :]],
      out_specs=[block(width), *map(whole, outs[1:])],
      out_shape=outs,
      cost_estimate=cost,
      interpret=plan.interpret,
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=('arbitrary' if sums else 'parallel',),
        vmem_limit_bytes=plan.vmem,
      ),
      metadata={'grid': 'x'.join(map(str, grid))},  # for `tools.tpu.cost`
      name=name,
    )(*operands)
    return [jnp.moveaxis(y.reshape(shape), -2, 0), *(x[None] for x in found)]

  y, *found = each_its_images(run, len(arrays), len(params))(*arrays, *params)
  return [y, *(d.sum(0).reshape(s.shape) for d, s in zip(found, sums, strict=True))]


def _dot(x, y, axes) -> jax.Array:
  """Returns the product over an axis of each, in float32."""
  a, b = axes
  return lax.dot_general(
    x, y, (((a,), (b,)), ((), ())), preferred_element_type=jnp.float32
  )


def _forward(act, x_ref, w_ref, v_ref, b_ref, c_ref, y_ref):
  hidden = act(_dot(x_ref[...], w_ref[...], (1, 0)) + b_ref[...])
  y = _dot(hidden.astype(x_ref.dtype), v_ref[...], (1, 0)) + c_ref[...]
  y_ref[...] = y.astype(y_ref.dtype)


def _backward(
  act, x_ref, dy_ref, w_ref, v_ref, b_ref, dx_ref, dw_ref, dv_ref, db_ref, dc_ref
):
  from jax.experimental import pallas as pl

  sums = (dw_ref, dv_ref, db_ref, dc_ref)

  @pl.when(pl.program_id(0) == 0)
  def _():
    for ref in sums:
      ref[...] = jnp.zeros(ref.shape, ref.dtype)

  x, dy = x_ref[...], dy_ref[...]
  hidden, pullback = jax.vjp(act, _dot(x, w_ref[...], (1, 0)) + b_ref[...])
  (dz,) = pullback(_dot(dy, v_ref[...], (1, 1)))
  db_ref[...] += dz.sum(0, keepdims=True)
  dc_ref[...] += dy.astype(jnp.float32).sum(0, keepdims=True)
  dz, hidden = dz.astype(x.dtype), hidden.astype(x.dtype)
  dx_ref[...] = _dot(dz, w_ref[...], (1, 1)).astype(dx_ref.dtype)
  dw_ref[...] += _dot(x, dz, (0, 0))
  dv_ref[...] += _dot(hidden, dy, (0, 0))
