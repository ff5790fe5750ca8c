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
  run = lambda *arrays: _attend(arrays, (), plan)
  shape, spec = query.shape, PartitionSpec(('data', 'fsdp'), None, 'tensor')
  if not jax.sharding.get_abstract_mesh().empty:  # XLA does not split what it can't see
    run = jax.shard_map(run, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
  return run(*(x.reshape(*x.shape[:2], -1) for x in (query, key, value))).reshape(shape)


def attend_by_head(query, key, value, bias, places, plan: Plan) -> jax.Array:
  """Returns softmax(q k' / sqrt(Dh) + bias places') v, as `attend` does, heads first.

  The bias is given as two factors, so that it is never stored as [N, S]. A grid step takes one
  head: with heads before tokens, an array fills its tiles even where M is 1 or 2, which
  [B, N, M, Dh] does not.

  Args:
    query: [B, M, N, Dh]; key and value: [B, M, S, Dh]; one dtype.
    bias: [B, M, N, R]. places: [S, R], a constant: its gradient is returned as zero.
    plan: of `tpu_attention_plan.plan_by_head` for these shapes.

  Returns:
    [B, M, N, Dh] in the dtype of `query`.
  """

  def run(*by_head):
    *inputs, bias = (x.reshape(-1, *x.shape[2:]) for x in by_head)
    return _attend(tuple(inputs), (bias, places[None]), plan).reshape(by_head[0].shape)

  spec = PartitionSpec(('data', 'fsdp'), 'tensor')
  if not jax.sharding.get_abstract_mesh().empty:
    run = jax.shard_map(run, in_specs=(spec,) * 4, out_specs=spec, check_vma=False)
  return run(query, key, value, bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _attend(inputs, bias, plan):
  return _call(_forward, plan, inputs, bias, 'qkk', 'q')[0]


def _attend_fwd(inputs, bias, plan):
  return _attend(inputs, bias, plan), (inputs, bias)


def _attend_bwd(plan, residuals, dout):
  inputs, bias = residuals
  dq, dk, dv, *dbias = _call(_backward, plan, (*inputs, dout), bias, 'qkkq', 'qkk')
  constant = [jnp.zeros_like(places) for places in bias[1:]]
  return (dq, dk, dv), (*dbias, *constant)


_attend.defvjp(_attend_fwd, _attend_bwd)


# Traced and lowered once for each shape, not for each layer.
@functools.partial(
  jax.jit, static_argnames=('kernel', 'plan', 'kinds', 'out_kinds'), inline=True
)
def _call(
  kernel, plan: Plan, inputs, bias, kinds: str, out_kinds: str
) -> list[jax.Array]:
  """Runs a kernel over images, groups of heads and blocks of queries.

  Args:
    bias: (), or the two factors of one, [B, N, R] and [1, S, R]; `_backward` returns the
      first one's gradient, too, after the others.
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
  run = functools.partial(kernel, plan, how, queries, keys, bool(bias))
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
  channels = products * width
  in_specs = [block(kind, columns, c) for kind in kinds for c in range(columns)]
  out_specs = [block(kind) for kind in out_kinds]
  out_shape = [shapes[kind] for kind in out_kinds]
  if bias:
    added = bias[0].shape[2]
    channels += (1 if forward else 2) * added
    of_queries = pl.BlockSpec((1, how.block(rows), added), lambda b, h, i: (b, i, 0))
    of_keys = pl.BlockSpec((1, how.block(keys), added), lambda b, h, i: (0, 0, 0))
    in_specs += [of_queries, of_keys]
    if not forward:
      out_specs.append(of_queries)
      out_shape.append(jax.ShapeDtypeStruct(bias[0].shape, bias[0].dtype))
  cost = pl.CostEstimate(  # of what is asked for, without padding
    flops=2 * batch * queries * keys * channels,
    transcendentals=batch * queries * keys * width // plan.head,
    bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*inputs, *bias, *out_shape)),
  )
  return pl.pallas_call(
    by_columns(run, len(inputs), columns),
    grid=grid,
    cost_estimate=cost,
    scratch_shapes=[]
    if grid[2] == 1 or forward
    else 2 * [pltpu.VMEM((how.block(keys), lanes), jnp.float32)],
    in_specs=in_specs,
    out_specs=out_specs,
    out_shape=out_shape,
    interpret=plan.interpret,
    compiler_params=pltpu.CompilerParams(
      # Blocks of queries add to one gradient of the keys.
      dimension_semantics=('parallel', 'parallel', 'arbitrary'),
      vmem_limit_bytes=plan.vmem,
    ),
    metadata={'grid': 'x'.join(map(str, grid))},  # for `tools.tpu.cost`
    name=kernel.__name__.strip('_') + '_attention',
  )(*(x for x in inputs for _ in range(columns)), *bias)


def _forward(plan, how, queries, keys, biased, q_ref, k_ref, v_ref, *refs):
  """`refs`: the bias and the places, if there is a bias; the result."""
  *bias_refs, out_ref = refs
  del queries  # rows beyond the last query are computed, and not written
  out = Sum(how, out_ref)
  mask = how.bias(how.block(keys), keys) if how.block(keys) > keys else None
  for head, span in heads(plan.head, plan.forward.lanes):
    q = how.load(q_ref, span) * jnp.asarray(plan.head**-0.5, plan.product)
    k, v = (how.load(ref, span, there=keys) for ref in (k_ref, v_ref))
    scores = dot(only(q, head, span), k, (1, 1))
    if biased:
      bias_ref, places_ref = bias_refs
      bias, places = how.load([bias_ref]), how.load([places_ref], there=keys)
      scores += dot(bias, places, (1, 1))
    scores = scores if mask is None else scores + mask
    out.add(average(scores, only(v, head, span)), head, span)


def _backward(plan, how, queries, keys, biased, q_ref, k_ref, v_ref, g_ref, *refs):
  """`refs`: the bias and the places, if there is a bias; the results; the sums, if any."""
  if biased:
    bias_ref, places_ref, dq_ref, dk_ref, dv_ref, dbias_ref, *sums = refs
  else:
    dq_ref, dk_ref, dv_ref, *sums = refs
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
    scores = dot(k, q, (1, 1))
    if biased:
      bias = how.load([bias_ref], there=there)
      places = how.load([places_ref], there=keys)
      scores += dot(places, bias, (1, 1))
    scores = how.only(scores, keys, NEVER)
    weights, dscores = derivative(scores, v, g)
    dscores = dscores.astype(plan.product)
    dk.add(dot(dscores, q, (1, 0)), head, span)
    dv.add(dot(weights.astype(plan.product), g, (1, 0)), head, span)
    dq.add(dot(dscores, only(k, head, span), (0, 0)), head, span)
    if biased:
      how.store(dbias_ref, dot(dscores, places, (0, 0)))


def _queries_there(queries: int, rows: int):
  """Returns how many of this block's queries there are; None: as many as it has rows."""
  from jax.experimental import pallas as pl

  if queries <= rows:
    return queries
  return queries - pl.program_id(2) * rows if queries % rows else None
