"""Attention on TPUs: a kernel for it and one for its derivative, both with scores on chip.

XLA moves the scores [B, M, N, S] of softmax(q k^T) v through memory several times. Here a
grid step holds a block of an image's queries, and all keys and values for some of its heads.
Because it has all keys, no statistics are carried from block to block. The derivative stores
no scores: it recomputes them from q and k, and weights from them and the log-sum-exp of
every query, one number a head. Softmax is in float32. docs/speed.md compares the
kernels with XLA's program.
"""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from vit_jax.kernels import ATTENDED, split, tpus

LANES = 128  # Lanes in a vector register; a matrix unit has at least as many.

# Maximum number of scores that one grid step computes. The loop over heads is unrolled, so
# this bounds the size of the program and the time to compile it.
_SCORES = 2**21


class Plan(NamedTuple):
  """How the work is divided into grid steps."""

  head: int  # Channels per head.
  lanes: int  # Channels per grid step, which holds whole heads.
  rows: int  # Queries per grid step.
  vmem: int  # Bytes of on-chip memory that a kernel may use.


def plan(query: jax.Array, key: jax.Array, bias=None) -> Plan | None:
  """Returns the plan for the TPUs of the mesh (`jax.set_mesh`).

  None if the dtype is not bfloat16, if the mesh does not divide the batch and the heads, or
  if a grid step would not fit on the chip.
  """
  (batch, queries, heads, head), keys = query.shape, key.shape[1]
  mesh = tpus(batch)
  if mesh is None or query.dtype != jnp.bfloat16 or heads % mesh.shape['tensor']:
    return None
  heads //= mesh.shape['tensor']
  added = sum(x.shape[-1] for x in bias or ())
  whole = math.lcm(head, LANES) // head  # Heads whose channels fill whole registers.
  groups = [n for n in range(1, heads) if heads % n == n % whole == 0] + [heads]
  # The compiler needs the rest.
  vmem = pltpu.get_tpu_info().vmem_capacity_bytes * 15 // 16
  fit = [
    (n * head, rows)
    for rows in {queries, *(_round_up(-(-queries // k), LANES) for k in range(2, 65))}
    for n in ([1] if bias else groups)
    if n * rows * keys <= _SCORES and _bytes(rows, n * head, keys, added) <= vmem
  ]
  # Prefer little padding of queries, then many queries, then many heads.
  order = lambda block: (_round_up(queries, block[1]), -block[1], -block[0])
  return Plan(head, *min(fit, key=order), vmem) if fit else None


def _bytes(rows: int, lanes: int, keys: int, added: int) -> int:
  """Estimates the on-chip memory of a grid step of the derivative.

  The derivative needs more than the forward pass. Blocks are bfloat16 and double-buffered;
  sums and scores are float32.
  """
  tall, keys = _round_up(rows, 16), _round_up(keys, 16)
  lanes = _round_up(lanes, LANES) + _round_up(added, LANES)
  blocks = 2 * 2 * lanes * (3 * tall + 4 * keys)
  sums = 4 * lanes * (tall + 2 * keys)
  return blocks + sums + 4 * 6 * _round_up(rows, LANES) * keys


def _round_up(n: int, unit: int) -> int:
  return -(-n // unit) * unit


def attend(query, key, value, bias, plan: Plan) -> jax.Array:
  """Computes `kernels.attention.attend` by the Pallas kernels, under any mesh or none.

  It is differentiable in reverse mode only, because the derivative is a kernel too. The
  bias is a `GridBias` or None.
  """
  if bias is not None:
    return _attend_by_head(query, key, value, bias, plan)
  run = lambda *arrays: _attend(arrays, (), plan)
  spec = PartitionSpec(('data', 'fsdp'), None, 'tensor')
  flat = (x.reshape(*x.shape[:2], -1) for x in (query, key, value))
  return split(run, (spec,) * 3)(*flat).reshape(query.shape)


def _attend_by_head(query, key, value, bias, plan) -> jax.Array:
  """Computes attention with a bias, one head per grid step.

  Heads stand before tokens, [B, M, N, Dh]. Arrays then fill their tiles even if M is 1 or 2,
  which arrays [B, N, M, Dh] do not.
  """

  def run(*by_head):
    *inputs, bias = (x.reshape(-1, *x.shape[2:]) for x in by_head)
    return _attend(tuple(inputs), (bias, places[None]), plan).reshape(by_head[0].shape)

  bias = jax.tree.map(
    lambda x: x * plan.head**0.5, bias
  )  # Kernels scale the whole scores.
  bias, places = _factors(bias, query.shape[1], key.shape[1], query.dtype)
  by_head = (x.swapaxes(1, 2) for x in (query, key, value))
  spec = PartitionSpec(('data', 'fsdp'), 'tensor')
  return split(run, (spec,) * 4)(*by_head, bias).swapaxes(1, 2)


def _factors(bias, queries: int, keys: int, dtype) -> tuple[jax.Array, jax.Array]:
  """Returns two factors [B, M, N, R] and [S, R] of a `GridBias`, with R = h + w.

  Their product is the bias, which is therefore never stored as [N, S]. The second factor has
  a 1 at a key's row and a 1 at its column, and zeros for keys before the map.
  """
  h, w = (x.shape[-1] for x in bias)
  bias = jnp.concatenate([x.swapaxes(1, 2) for x in bias], axis=-1).astype(dtype)
  bias = jnp.pad(bias, ((0, 0), (0, 0), (queries - bias.shape[2], 0), (0, 0)))
  # Computed, because these matrices would be most of the text of a ViTDet's program.
  key = jnp.arange(keys)[:, None] - (keys - h * w)
  lane = jnp.arange(h + w)
  places = (key >= 0) & ((key // w == lane) | (key % w + h == lane))
  return bias, places.astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _attend(inputs, bias, plan):
  return _call(_forward, plan, (*inputs, *bias), 'qkk' + 'bp' * bool(bias), 'q')[0]


def _attend_fwd(inputs, bias, plan):
  kinds = 'qkk' + 'bp' * bool(bias)
  out, logs = _call(_forward, plan, (*inputs, *bias), kinds, 'ql')
  # A policy of `jax.checkpoint` that keeps the result has to keep these, too.
  return out, (inputs, bias, checkpoint_name(logs, ATTENDED))


def _attend_bwd(plan, residuals, dout):
  inputs, bias, logs = residuals
  kinds = ('qkkqlbp', 'qkkb') if bias else ('qkkql', 'qkk')
  dq, dk, dv, *dbias = _call(_backward, plan, (*inputs, dout, logs, *bias), *kinds)
  constant = [jnp.zeros_like(places) for places in bias[1:]]
  return (dq, dk, dv), (*dbias, *constant)


_attend.defvjp(_attend_fwd, _attend_bwd)


# Inlined, but traced and lowered only once per shape, not once per layer.
@functools.partial(
  jax.jit, static_argnames=('kernel', 'plan', 'kinds', 'out_kinds'), inline=True
)
def _call(kernel, plan: Plan, arrays, kinds: str, out_kinds: str) -> list[jax.Array]:
  """Runs a kernel over images, groups of heads and blocks of queries.

  Args:
    kinds, out_kinds: a letter for each argument and result. 'q' is [B, N, lanes], 'k' is
      [B, S, lanes], and 'b' and 'p' are the factors of the bias, [B, N, R] and [1, S, R].
      'l' is float32 [B, groups, heads of a group, N], log2 of softmax's sums of exp.
  """
  like = dict(zip(kinds, arrays, strict=True))
  (batch, queries, width), keys = like['q'].shape, like['k'].shape[1]
  forward, added = kernel is _forward, like['b'].shape[2] if 'b' in like else 0
  lanes, rows = plan.lanes, plan.rows
  grid = (batch, width // lanes, pl.cdiv(queries, rows))
  specs = {
    'q': pl.BlockSpec((1, rows, lanes), lambda b, h, i: (b, i, h)),
    'k': pl.BlockSpec((1, keys, lanes), lambda b, h, i: (b, 0, h)),
    'b': pl.BlockSpec((1, rows, added), lambda b, h, i: (b, i, 0)),
    'p': pl.BlockSpec((1, keys, added), lambda b, h, i: (0, 0, 0)),
    'l': pl.BlockSpec((1, 1, lanes // plan.head, rows), lambda b, h, i: (b, h, 0, i)),
  }
  groups, heads = width // lanes, lanes // plan.head
  like['l'] = jax.ShapeDtypeStruct((batch, groups, heads, queries), jnp.float32)
  out_shape = [jax.ShapeDtypeStruct(like[k].shape, like[k].dtype) for k in out_kinds]
  # The derivative recomputes the scores, so it has more products.
  channels = 2 * width + added if forward else 5 * width + 2 * added
  carried = not forward and grid[2] > 1
  return pl.pallas_call(
    functools.partial(kernel, plan, queries, added > 0),
    grid=grid,
    in_specs=[specs[kind] for kind in kinds],
    out_specs=[specs[kind] for kind in out_kinds],
    out_shape=out_shape,
    scratch_shapes=[pltpu.VMEM((keys, lanes), jnp.float32)] * 2 if carried else [],
    cost_estimate=pl.CostEstimate(  # as if there were no padding
      flops=2 * batch * queries * keys * channels,
      transcendentals=batch * queries * keys * width // plan.head,
      bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*arrays, *out_shape)),
    ),
    compiler_params=pltpu.CompilerParams(
      # All blocks of queries add to the same gradient of the keys.
      dimension_semantics=('parallel', 'parallel', 'arbitrary'),
      vmem_limit_bytes=plan.vmem,
    ),
    # Read by the benchmark that counts cycles.
    metadata={'grid': 'x'.join(map(str, grid))},
    name=kernel.__name__.strip('_') + '_attention',
  )(*arrays)


def _forward(plan, queries, biased, q_ref, k_ref, v_ref, *refs):
  """Computes a grid step.

  `refs` are the factors of the bias, if any, then the result, and for a derivative the
  logarithms of softmax's sums.
  """
  bias_refs, (out_ref, *logs_ref) = refs[: 2 * biased], refs[2 * biased :]
  del queries  # Rows beyond the last query are computed but not written.
  # Scores are scaled, for powers of 2. Queries are not: bfloat16 would round them again,
  # unless heads have 4^n channels.
  out, scale = _Sum(out_ref), plan.head**-0.5 * math.log2(math.e)
  # Statistics of all heads, each in a lane of its own, so that one transposition does.
  heads = plan.lanes // plan.head
  number = lax.broadcasted_iota(jnp.int32, (plan.rows, _round_up(heads, LANES)), 1)
  highs, totals = jnp.zeros(number.shape), jnp.ones(number.shape)
  for at, (head, span) in enumerate(_heads(plan.head, plan.lanes)):
    q, k, v = (ref[0, :, span] for ref in (q_ref, k_ref, v_ref))
    scores = _dot(_only(q, head, span), k, (1, 1))
    if biased:
      bias, places = (ref[0] for ref in bias_refs)
      scores += _dot(bias, places, (1, 1))
    highest = scores.max(1, keepdims=True)
    weights = jnp.exp2((scores - highest) * scale)
    total = weights.sum(1, keepdims=True)
    average = _dot(weights.astype(v.dtype), _only(v, head, span), (1, 0))
    out.add(average * _reciprocal(total), head, span)
    if logs_ref:
      highs = jnp.where(number == at, highest, highs)
      totals = jnp.where(number == at, total, totals)
  if logs_ref:
    logs = highs * scale + jnp.log2(totals)
    logs_ref[0][0, 0] = logs.T[:heads]


def _backward(plan, queries, biased, q_ref, k_ref, v_ref, g_ref, logs_ref, *refs):
  """Computes the gradients of a grid step.

  `refs` are the factors of the bias, if any, then the results, then the sums over blocks.
  """
  if biased:
    bias_ref, places_ref, dq_ref, dk_ref, dv_ref, dbias_ref, *sums = refs
  else:
    dq_ref, dk_ref, dv_ref, *sums = refs
  dk_sum, dv_sum = sums or (None, None)
  scale, log2e = plan.head**-0.5, math.log2(math.e)
  dq, dk = _Sum(dq_ref, scale), _Sum(dk_ref, scale, dk_sum)
  dv = _Sum(dv_ref, total=dv_sum)
  for at, (head, span) in enumerate(_heads(plan.head, plan.lanes)):
    q, g = (_existing(ref[0, :, span], queries) for ref in (q_ref, g_ref))
    k, v = (ref[0, :, span] for ref in (k_ref, v_ref))
    q, g = _only(q, head, span), _only(g, head, span)
    # Scores are kept as [S, N], so that two of the three products need no transposition.
    scores = _dot(k, q, (1, 1))
    if biased:
      bias, places = _existing(bias_ref[0], queries), places_ref[0]
      scores += _dot(places, bias, (1, 1))
    logs = _existing(logs_ref[0, 0, at : at + 1], queries, axis=1)
    weights = jnp.exp2(scores * (scale * log2e) - logs)
    dweights = _dot(v, g, (1, 1))
    mean = (weights * dweights).sum(0, keepdims=True)
    dscores = (weights * (dweights - mean)).astype(q.dtype)
    dk.add(_dot(dscores, q, (1, 0)), head, span)
    dv.add(_dot(weights.astype(q.dtype), g, (1, 0)), head, span)
    dq.add(_dot(dscores, _only(k, head, span), (0, 0)), head, span)
    if biased:
      dbias = _dot(dscores, places, (0, 0)) * scale
      dbias_ref[0] = dbias.astype(dbias_ref.dtype)


def _heads(head: int, lanes: int) -> Iterator[tuple[slice, slice]]:
  """Yields (channels of a head, channels of the registers that hold it) for each head.

  Cutting a head out of a register would shift lanes. Instead one operand of every product is
  zero on the other channels. This costs nothing, because matrix units are as wide as a
  register.
  """
  for start in range(0, lanes, head):
    stop = start + head
    first = start // LANES * LANES
    yield slice(start, stop), slice(first, min(_round_up(stop, LANES), lanes))


def _only(x, head: slice, span: slice):
  """Zeroes the channels of x [R, span] that are not the head's."""
  if head == span:
    return x
  lane = lax.broadcasted_iota(jnp.int32, x.shape, 1) + span.start
  return jnp.where((lane >= head.start) & (lane < head.stop), x, jnp.zeros_like(x))


def _existing(x, queries: int, axis: int = 0):
  """Zeroes what lies beyond the last query in the last block; `axis` is that of queries."""
  size = x.shape[axis]
  if queries % size == 0:
    return x
  query = lax.broadcasted_iota(jnp.int32, x.shape, axis)
  left = queries - pl.program_id(2) * size
  return jnp.where(query < left, x, jnp.zeros_like(x))


class _Sum:
  """The sum over heads of [rows, lanes], written to a block register by register.

  Attributes:
    ref: reference to the block, [1, rows, lanes].
    scale: the number by which the sum is multiplied.
    total: None, or float32 [rows, lanes], the sum of earlier blocks of queries.
  """

  def __init__(self, ref, scale: float = 1.0, total=None):
    self.ref, self.scale, self.total = ref, scale, total
    self._columns: dict[int, jax.Array] = {}  # Incomplete registers, by first lane.

  def add(self, x, head: slice, span: slice):
    """Adds the result of one head to a span of channels.

    `x` [rows, channels of the span] is zero on the channels of other heads.
    """
    for start in range(span.start, span.stop, LANES):
      lanes = slice(start, min(start + LANES, span.stop))
      column = x[:, start - span.start : lanes.stop - span.start]
      if start in self._columns:
        column = self._columns.pop(start) + column
      if lanes.stop > head.stop:  # The next head has channels in this register too.
        self._columns[start] = column
        continue
      if self.scale != 1.0:
        column *= self.scale
      if self.total is not None:
        column += jnp.where(pl.program_id(2) > 0, self.total[:, lanes], 0.0)
        self.total[:, lanes] = column
      self.ref[0, :, lanes] = column.astype(self.ref.dtype)


def _dot(a, b, over: tuple[int, int]):
  """Returns the float32 product of two matrices, summed over an axis of each."""
  return lax.dot_general(
    a, b, (((over[0],), (over[1],)), ((), ())), preferred_element_type=jnp.float32
  )


def _reciprocal(total):
  """Returns 1 / total for totals of at least 1, without the special cases of a division."""
  # JAX 0.10, the last version for Python 3.11, has `reciprocal` in `pl`.
  reciprocal = getattr(pltpu, 'reciprocal', None) or pl.reciprocal
  return reciprocal(total, full_range=False)
