"""Attention on TPUs: a kernel for it and one for its derivative, scores kept on chip.

What XLA makes of softmax(q k') v moves [B, M, N, S] scores through memory several times,
39 % of the cycles of a training step of ViT-B/16. Here a step of the grid holds the keys
and values of some heads of one image and a block of its queries, so that no statistics
need to be carried from block to block, and the derivative computes the scores again from
q and k, which is all it keeps. Softmax is in float32. benchmarks/NOTES.md has what it
costs, and what else was tried.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from vit_jax.kernels.tpu_attention_plan import Plan
from vit_jax.kernels.tpu_heads import Sum, average, derivative, dot, heads, only
from vit_jax.kernels.tpu_rows import NEVER, Rows, by_columns


def attend(query, key, value, plan: Plan) -> jax.Array:
  """Returns softmax(q k' / sqrt(Dh)) v by the kernels, under any mesh or none.

  Reverse-mode differentiable only: the derivative is a kernel too.

  Args:
    query: [B, N, M, Dh]; key and value: [B, S, M, Dh]; one dtype.
    plan: of `tpu_attention_plan.plan` for these shapes.

  Returns:
    [B, N, M, Dh] in the dtype of `query`.
  """
  run = lambda *arrays: _attend(*arrays, plan)
  shape, spec = query.shape, PartitionSpec(('data', 'fsdp'), None, 'tensor')
  if not jax.sharding.get_abstract_mesh().empty:  # XLA does not split what it can't see
    run = jax.shard_map(run, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
  return run(*(x.reshape(*x.shape[:2], -1) for x in (query, key, value))).reshape(shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend(query, key, value, plan):
  return _call(_forward, plan, [query, key, value], 'qkk', 'q')[0]


def _attend_fwd(query, key, value, plan):
  return _attend(query, key, value, plan), (query, key, value)


def _attend_bwd(plan, residuals, dout):
  return tuple(_call(_backward, plan, [*residuals, dout], 'qkkq', 'qkk'))


_attend.defvjp(_attend_fwd, _attend_bwd)


# Traced and lowered once for each shape, not for each layer.
@functools.partial(
  jax.jit, static_argnames=('kernel', 'plan', 'kinds', 'out_kinds'), inline=True
)
def _call(kernel, plan: Plan, inputs, kinds: str, out_kinds: str) -> list[jax.Array]:
  """Runs a kernel over images, groups of heads and blocks of queries.

  Args:
    kinds, out_kinds: of each array, 'q' where it has a row for each query, 'k' for each
      key.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  (batch, queries, width), keys = inputs[0].shape, inputs[1].shape[1]
  forward = kernel is _forward
  lanes, rows = plan.forward if forward else plan.backward
  grid = (batch, width // lanes, pl.cdiv(queries, rows))
  how = Rows(plan.product, plan.interpret)
  run = functools.partial(kernel, plan, how, queries, keys)
  columns = how.columns(lanes)
  tall, row = {'q': rows, 'k': keys}, {'q': lambda i: i, 'k': lambda i: 0}

  def block(kind, columns=1, column=0):
    shape = (1, how.block(tall[kind]), lanes // columns)
    return pl.BlockSpec(shape, lambda b, h, i: (b, row[kind](i), h * columns + column))

  shapes = {
    'q': jax.ShapeDtypeStruct((batch, queries, width), inputs[0].dtype),
    'k': jax.ShapeDtypeStruct((batch, keys, width), inputs[0].dtype),
  }
  products = 2 if forward else 5  # scores are computed again in the latter
  out_shape = [shapes[kind] for kind in out_kinds]
  cost = pl.CostEstimate(  # of what is asked for, without padding
    flops=products * 2 * batch * queries * keys * width,
    transcendentals=batch * queries * keys * width // plan.head,
    bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*inputs, *out_shape)),
  )
  return pl.pallas_call(
    by_columns(run, len(inputs), columns),
    grid=grid,
    cost_estimate=cost,
    scratch_shapes=[]
    if grid[2] == 1 or forward
    else 2 * [pltpu.VMEM((how.block(keys), lanes), jnp.float32)],
    in_specs=[block(kind, columns, c) for kind in kinds for c in range(columns)],
    out_specs=[block(kind) for kind in out_kinds],
    out_shape=out_shape,
    interpret=plan.interpret,
    compiler_params=pltpu.CompilerParams(
      # Blocks of queries add to one gradient of the keys.
      dimension_semantics=('parallel', 'parallel', 'arbitrary'),
      vmem_limit_bytes=plan.vmem,
    ),
    metadata={'grid': 'x'.join(map(str, grid))},  # for `tools.tpu.cost`
    name=kernel.__name__.strip('_') + '_attention',
  )(*(x for x in inputs for _ in range(columns)))


def _forward(plan, how, queries, keys, q_ref, k_ref, v_ref, out_ref):
  del queries  # rows beyond the last query are computed, and not written
  out = Sum(how, out_ref)
  bias = how.bias(how.block(keys), keys) if how.block(keys) > keys else None
  for head, span in heads(plan.head, plan.forward.lanes):
    q = how.load(q_ref, span) * jnp.asarray(plan.head**-0.5, plan.product)
    k, v = (how.load(ref, span, there=keys) for ref in (k_ref, v_ref))
    scores = dot(only(q, head, span), k, (1, 1))
    scores = scores if bias is None else scores + bias
    out.add(average(scores, only(v, head, span)), head, span)


def _backward(
  plan, how, queries, keys, q_ref, k_ref, v_ref, g_ref, dq_ref, dk_ref, dv_ref, *sums
):
  dk_sum, dv_sum = sums or (None, None)
  dq = Sum(how, dq_ref, plan.head**-0.5)
  dk, dv = Sum(how, dk_ref, total=dk_sum), Sum(how, dv_ref, total=dv_sum)
  there = _queries_there(queries, plan.backward.rows)
  for head, span in heads(plan.head, plan.backward.lanes):
    q = how.load(q_ref, span, there=there)
    q *= jnp.asarray(plan.head**-0.5, plan.product)
    g = how.load(g_ref, span, there=there)
    k, v = (how.load(ref, span, there=keys) for ref in (k_ref, v_ref))
    q, g = only(q, head, span), only(g, head, span)
    scores = how.only(dot(k, q, (1, 1)), keys, NEVER)
    weights, dscores = derivative(scores, v, g)
    dscores = dscores.astype(plan.product)
    dk.add(dot(dscores, q, (1, 0)), head, span)
    dv.add(dot(weights.astype(plan.product), g, (1, 0)), head, span)
    dq.add(dot(dscores, only(k, head, span), (0, 0)), head, span)


def _queries_there(queries: int, rows: int):
  """Returns how many of this block's queries there are; None: as many as it has rows."""
  from jax.experimental import pallas as pl

  if queries <= rows:
    return queries
  return queries - pl.program_id(2) * rows if queries % rows else None
