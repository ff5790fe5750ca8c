"""Attention within windows on TPUs: a kernel for it and one for its derivative.

Windows are small and their heads narrow: [B n, M, 49, 49] scores and [B n, M, 49, 32]
queries fill a third and a tenth of the registers that they lie in, and XLA moves them
through memory several times. Here a step of the grid holds some windows whole, with all
channels side by side, and the bias of their positions, which is read once.
benchmarks/NOTES.md has what it costs.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from vit_jax.kernels.tpu_attention_plan import WindowPlan
from vit_jax.kernels.tpu_heads import Sum, average, derivative, dot, heads, only
from vit_jax.kernels.tpu_rows import NEVER, Rows, by_columns
from vit_jax.kernels.window_bias import WindowBias


def attend(query, key, value, bias: WindowBias, plan: WindowPlan) -> jax.Array:
  """Returns softmax(q k' / sqrt(Dh) + bias) v by the kernels, under any mesh or none.

  Reverse-mode differentiable only: the derivative is a kernel too.

  Args:
    query, key, value: [B n, N, M, Dh], one dtype.
    plan: of `tpu_attention_plan.plan_windows` for these shapes.

  Returns:
    [B n, N, M, Dh] in the dtype of `query`.
  """
  apart = None
  if bias.apart is not None:
    apart = jnp.where(bias.apart, bias.masked, 0.0).astype(plan.product)
  run = lambda *arrays: _attend(*arrays, plan)
  shape, spec = query.shape, PartitionSpec(('data', 'fsdp'), None, 'tensor')
  if not jax.sharding.get_abstract_mesh().empty:  # XLA does not split what it can't see
    specs = (spec, spec, spec, PartitionSpec('tensor'), PartitionSpec())
    run = jax.shard_map(run, in_specs=specs, out_specs=spec, check_vma=False)
  flat = (x.reshape(*x.shape[:2], -1) for x in (query, key, value))
  return run(*flat, bias.positions, apart).reshape(shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(query, key, value, positions, apart, plan):
  return _call(_forward, plan, [query, key, value], positions, apart)[0]


def _attend_fwd(query, key, value, positions, apart, plan):
  out = _attend(query, key, value, positions, apart, plan)
  return out, (query, key, value, positions, apart)


def _attend_bwd(plan, residuals, dout):
  *inputs, positions, apart = residuals
  # Scores lie as [S, N] there. Which tokens are apart does not depend on the order.
  turned = positions.swapaxes(1, 2)
  *found, dturned = _call(_backward, plan, [*inputs, dout], turned, apart)
  return *found, dturned.swapaxes(1, 2), None


_attend.defvjp(_attend_fwd, _attend_bwd)


# Traced and lowered once for each shape, not for each layer.
@functools.partial(jax.jit, static_argnames=('kernel', 'plan'), inline=True)
def _call(kernel, plan: WindowPlan, inputs, positions, apart) -> list[jax.Array]:
  """Runs a kernel over groups of heads and of windows.

  Args:
    inputs: query, key, value and, for the derivative, that of the result; [B n, N, M Dh].
    positions: float32 [M, N, N], or for the derivative [M, S, N].
    apart: [n, N, N], what is added for each window of an image, or None.

  Returns:
    the result; or the derivatives by the first three inputs and by `positions`.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  (batch, tokens, width), forward = inputs[0].shape, kernel is _forward
  how = Rows(plan.product, plan.interpret)
  rows, columns = how.block(tokens), how.columns(plan.lanes)
  group = plan.lanes // plan.head  # heads
  grid = (width // plan.lanes, batch // plan.windows)

  def block(columns=1, column=0):
    shape = (plan.windows, rows, plan.lanes // columns)
    return pl.BlockSpec(shape, lambda h, b: (b, 0, h * columns + column))

  added = [_ordered(positions.astype(jnp.float32), how)]
  added_specs = [pl.BlockSpec((group, rows, rows), lambda h, b: (h, 0, 0))]
  if apart is not None:
    added.append(_ordered(apart, how))
    every = len(apart) // plan.windows
    added_specs.append(
      pl.BlockSpec((plan.windows, rows, rows), lambda h, b: (b % every, 0, 0))
    )
  out_specs = [block() for _ in inputs[: 1 if forward else 3]]
  out_shape = [
    jax.ShapeDtypeStruct(inputs[0].shape, inputs[0].dtype) for _ in out_specs
  ]
  if not forward:  # of each step, summed afterwards: steps may run side by side
    out_specs.append(pl.BlockSpec((None, group, rows, rows), lambda h, b: (b, h, 0, 0)))
    shape = (grid[1], width // plan.head, rows, rows)
    out_shape.append(jax.ShapeDtypeStruct(shape, jnp.float32))
  products = 2 if forward else 5  # scores are computed again in the latter
  cost = pl.CostEstimate(  # of what is asked for, without padding
    flops=products * 2 * batch * tokens * tokens * width,
    transcendentals=batch * tokens * tokens * width // plan.head,
    bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*inputs, *out_shape)),
  )
  *found, last = pl.pallas_call(
    by_columns(functools.partial(kernel, plan, how, tokens), len(inputs), columns),
    grid=grid,
    cost_estimate=cost,
    in_specs=[block(columns, c) for _ in inputs for c in range(columns)] + added_specs,
    out_specs=out_specs,
    out_shape=out_shape,
    interpret=plan.interpret,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'parallel'), vmem_limit_bytes=plan.vmem
    ),
    metadata={'grid': 'x'.join(map(str, grid))},  # for `tools.tpu.cost`
    name=kernel.__name__.strip('_') + '_window_attention',
  )(*(x for x in inputs for _ in range(columns)), *added)
  if forward:
    return [last]
  there = how.order(tokens).argsort()[:tokens]
  return [*found, last.sum(0)[:, there][:, :, there]]


def _ordered(x, how: Rows):
  """Returns [n, N, N] as what the kernel computes with: rows in its order, and padded."""
  order = how.order(x.shape[1])
  more = (0, len(order) - x.shape[1])
  return jnp.pad(x, ((0, 0), more, more))[:, order][:, :, order]


def _forward(plan, how, tokens, q_ref, k_ref, v_ref, positions_ref, *refs):
  *apart, out_ref = refs
  absent = how.bias(how.block(tokens), tokens) if how.block(tokens) > tokens else None
  for i in range(plan.windows):
    out = Sum(how, out_ref, image=i)
    for number, (head, span) in enumerate(heads(plan.head, plan.lanes)):
      q = how.load(q_ref, span, image=i) * jnp.asarray(plan.head**-0.5, plan.product)
      k, v = (how.load(ref, span, tokens, image=i) for ref in (k_ref, v_ref))
      scores = dot(only(q, head, span), k, (1, 1)) + positions_ref[number]
      scores = scores + apart[0][i] if apart else scores
      scores = scores if absent is None else scores + absent
      out.add(average(scores, only(v, head, span)), head, span)


def _backward(plan, how, tokens, q_ref, k_ref, v_ref, g_ref, positions_ref, *refs):
  *apart, dq_ref, dk_ref, dv_ref, dpositions_ref = refs
  dpositions: dict[int, jax.Array] = {}
  for i in range(plan.windows):
    dq = Sum(how, dq_ref, plan.head**-0.5, image=i)
    dk, dv = Sum(how, dk_ref, image=i), Sum(how, dv_ref, image=i)
    for number, (head, span) in enumerate(heads(plan.head, plan.lanes)):
      q, k, v, g = (
        how.load(ref, span, tokens, image=i) for ref in (q_ref, k_ref, v_ref, g_ref)
      )
      q *= jnp.asarray(plan.head**-0.5, plan.product)
      q, g = only(q, head, span), only(g, head, span)
      scores = dot(k, q, (1, 1)) + positions_ref[number]
      scores = scores + apart[0][i] if apart else scores
      scores = how.only(scores, tokens, NEVER)
      weights, dscores = derivative(scores, v, g)
      dpositions[number] = dpositions.get(number, 0.0) + dscores
      dscores = dscores.astype(plan.product)
      dk.add(dot(dscores, q, (1, 0)), head, span)
      dv.add(dot(weights.astype(plan.product), g, (1, 0)), head, span)
      dq.add(dot(dscores, only(k, head, span), (0, 0)), head, span)
  for number, x in dpositions.items():
    dpositions_ref[number] = x
