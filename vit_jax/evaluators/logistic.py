"""Multinomial logistic regression, all rows at once: the mathematics, no data, no model.

Over weights W [D, K] and biases b [K] it minimises

  sum over rows of cross entropy(W' z + b, y)  +  l2 / 2 |W|^2,   z = (x - mean) / std,

the objective of scikit-learn's `LogisticRegression` with C = 1 / l2; z is x where
features are not standardised. L-BFGS (Liu and Nocedal 1989, as in optax) works on this
divided by the number of rows, in float32 with products at highest precision. Rows are
spread over the devices of a mesh.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from vit_jax import sharding
from vit_jax.evaluators.features import spread
from vit_jax.evaluators.lsr import STD_EPSILON

_LOGITS = 2**24  # logits in memory at once on each device: 64 MB
_STEPS = 25  # iterations of L-BFGS between two calls of `check_stop`
_AXES = ('data', 'fsdp')
_SOLVER = optax.lbfgs(memory_size=10)


class Fit(NamedTuple):
  """A solution, for features z = (x - mean) / std."""

  params: dict  # {'kernel': W [D, K], 'bias': b [K]}
  mean: jax.Array  # [D]; 0 if features are not standardised
  std: jax.Array  # [D]; 1 if they are not
  iterations: int
  gradient: float  # largest derivative, absolute, of the objective per row


class Rows:
  """Features and classes on the devices of a mesh, each with a part of the rows."""

  def __init__(self, x: np.ndarray, y: np.ndarray, num_classes: int, mesh):
    """Places x [N, D] float32 and y int [N], the same on every host."""
    self.num_rows, self.width, self.num_classes = *x.shape, num_classes
    self.mesh = mesh
    mine = -(-len(x) // sharding.batch_divisor(mesh))  # rows of a device
    chunks = -(-mine * num_classes // _LOGITS)
    self.chunk = -(-mine // chunks)
    self.x, self.y = (self.place(a) for a in (x, np.asarray(y, np.int32)))

  def place(self, a: np.ndarray) -> jax.Array:
    """Returns a value per row [N, ...] on the devices, 0 for padding."""
    return spread(a, self.chunk, self.mesh)


def fit(
  rows: Rows,
  weights: np.ndarray,
  l2: float,
  *,
  standardize: bool,
  tolerance: float,
  max_iterations: int,
  start: Fit | None = None,
  check_stop: Callable[[], None] = lambda: None,
) -> Fit:
  """Returns the solution, once no derivative of the objective exceeds the tolerance.

  It ends earlier after `max_iterations`, or where float32 has no better solution: the
  caller compares `Fit.gradient` with the tolerance.

  Args:
    weights: [N], 1 for rows to fit to, 0 for others.
    standardize: by mean and standard deviation of the rows to fit to.
    start: a fit to start from; None: zeros.
    check_stop: called every few iterations; raises to leave.
  """
  w = rows.place(np.asarray(weights, np.float32))
  mean, std = _moments(rows.x, w) if standardize else np.float32([[0.0], [1.0]])
  mean, std = (jnp.broadcast_to(a, rows.width) for a in (mean, std))
  problem = rows.x, rows.y, w, mean, std, np.float32(l2)
  K = rows.num_classes
  params = {
    'kernel': np.zeros((rows.width, K), np.float32),
    'bias': np.zeros(K, np.float32),
  }
  params = jax.device_put(
    params if start is None else start.params, sharding.replicated(rows.mesh)
  )
  static = {'chunk': rows.chunk, 'mesh': rows.mesh}
  state = _begin(params, problem, **static)
  iterations, value, gradient = jax.device_get(_progress(state))
  while gradient > tolerance and iterations < max_iterations:
    check_stop()
    last, before = min(iterations + _STEPS, max_iterations), (value, gradient)
    state = _advance(state, problem, last, tolerance, **static)
    iterations, value, gradient = jax.device_get(_progress(state))
    if not (value < before[0] or gradient < before[1]):
      break  # as close as float32 gets
  return Fit(state[0], mean, std, int(iterations), float(gradient))


def count_right(rows: Rows, fitted: Fit, weights: np.ndarray | None = None) -> int:
  """Returns the number of rows with weight 1 (None: of all) whose largest logit is right."""
  weights = np.ones(rows.num_rows) if weights is None else weights
  w = rows.place(np.asarray(weights, np.int32))
  args = rows.x, rows.y, w, fitted.mean, fitted.std
  return int(_count_right(fitted.params, args, chunk=rows.chunk, mesh=rows.mesh))


@jax.jit
def usable(x: jax.Array) -> jax.Array:
  """Whether all numbers and their squares, which are summed, are finite."""
  return jnp.isfinite(x * x).all()


@jax.jit
def _moments(x, w):
  total = w.sum()
  mean = (w[:, None] * x).sum(0) / total
  std = jnp.sqrt((w[:, None] * (x - mean) ** 2).sum(0) / total)
  return mean, std + STD_EPSILON


def _logits(params, x, mean, std):
  z = (x - mean) / std
  return jnp.dot(z, params['kernel'], precision='highest') + params['bias']


def _over_rows(function, params, args, chunk, mesh):
  """Returns the sum of function(params, x, y, w, mean, std) over chunks of all rows."""

  def mine(params, x, y, w, mean, std):
    def add(total, part):
      return jax.tree.map(jnp.add, total, function(params, *part, mean, std)), None

    parts = jax.tree.map(lambda a: a.reshape(-1, chunk, *a.shape[1:]), (x, y, w))
    first = jax.tree.map(lambda a: a[0], parts)
    shapes = jax.eval_shape(function, params, *first, mean, std)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.psum(jax.lax.scan(add, zeros, parts)[0], _AXES)

  shared, split = PartitionSpec(), PartitionSpec(_AXES)
  specs = (shared, split, split, split, shared, shared)
  total = jax.shard_map(
    mine, mesh=mesh, in_specs=specs, out_specs=shared, check_vma=False
  )
  return total(params, *args)


@functools.partial(jax.jit, static_argnames=('chunk', 'mesh'))
def _count_right(params, args, chunk, mesh):
  def right(params, x, y, w, mean, std):
    return (w * (_logits(params, x, mean, std).argmax(-1) == y)).sum()

  return _over_rows(right, params, args, chunk, mesh)


def _objective(problem, chunk, mesh):
  """Returns params -> the objective per row, whose derivative comes with its value."""
  *args, l2 = problem
  total = args[2].sum()

  def entropy(params, x, y, w, mean, std):
    logits = _logits(params, x, mean, std)
    return (w * optax.softmax_cross_entropy_with_integer_labels(logits, y)).sum()

  def both(params):
    value, grad = _over_rows(jax.value_and_grad(entropy), params, args, chunk, mesh)
    kernel = params['kernel']
    value += l2 / 2 * (kernel * kernel).sum()
    grad = grad | {'kernel': grad['kernel'] + l2 * kernel}
    return jax.tree.map(lambda a: a / total, (value, grad))

  # Reverse mode through the scan would keep the logits of all rows, or compute them twice.
  objective = jax.custom_vjp(lambda params: both(params)[0])
  objective.defvjp(both, lambda grad, g: (jax.tree.map(lambda a: g * a, grad),))
  return objective


# The state of a fit is (params, state of the solver). The value and the gradient in the
# solver's state belong to these params.


@functools.partial(jax.jit, static_argnames=('chunk', 'mesh'))
def _begin(params, problem, chunk, mesh):
  value, grad = jax.value_and_grad(_objective(problem, chunk, mesh))(params)
  state = params, optax.tree.set(_SOLVER.init(params), value=value, grad=grad)
  # Weak types, which optax starts with, would have `_advance` compiled twice.
  state = jax.tree.map(lambda a: jax.lax.convert_element_type(a, a.dtype), state)
  return jax.lax.with_sharding_constraint(state, sharding.replicated(mesh))


@functools.partial(jax.jit, static_argnames=('chunk', 'mesh'))
def _advance(state, problem, last, tolerance, chunk, mesh):
  """Returns the state after `last` iterations since the start, or at the tolerance."""
  objective = _objective(problem, chunk, mesh)

  def goes_on(state):
    iterations, _, gradient = _progress(state)
    return (iterations < last) & (gradient > tolerance)

  def step(state):
    params, solver = state
    value, grad = (optax.tree.get(solver, name) for name in ('value', 'grad'))
    updates, solver = _SOLVER.update(
      grad, solver, params, value=value, grad=grad, value_fn=objective
    )
    return optax.apply_updates(params, updates), solver

  state = jax.lax.while_loop(goes_on, step, state)
  return jax.lax.with_sharding_constraint(state, sharding.replicated(mesh))


@jax.jit
def _progress(state):
  """Returns iterations so far, the objective per row, its largest derivative."""
  count, value, grad = (optax.tree.get(state[1], x) for x in ('count', 'value', 'grad'))
  largest = [jnp.abs(x).max() for x in jax.tree.leaves(grad)]
  return count, value, jnp.max(jnp.stack(largest))
