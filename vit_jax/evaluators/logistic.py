"""Multinomial logistic regression on all rows at once. It depends on no data set or model.

It minimises, over weights W [D, K] and biases b [K],

  sum over rows of cross entropy(W' z + b, y)  +  l2 / 2 |W|^2,   z = (x - mean) / std,

which is the objective of scikit-learn's `LogisticRegression` with C = 1 / l2. If features
are not standardised, z = x. L-BFGS (Liu and Nocedal 1989, as in optax) minimises this sum
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
from jax.sharding import NamedSharding, PartitionSpec

from vit_jax import sharding
from vit_jax.evaluators.lsr import STD_EPSILON

# A fit ends when no derivative of the mean loss exceeds this, a tenth of scikit-learn's
# default.
TOLERANCE = 1e-5
# Number of iterations of L-BFGS between two calls of `check_stop`.
_STEPS = 25
_SOLVER = optax.lbfgs(memory_size=10)


class Fit(NamedTuple):
  """A solution, for features z = (x - mean) / std."""

  params: dict  # {'kernel': W [D, K], 'bias': b [K]}
  mean: jax.Array  # [D], 0 if features are not standardised
  std: jax.Array  # [D], 1 if features are not standardised
  iterations: int
  # Largest absolute derivative of the objective divided by the number of rows.
  gradient: float


class Rows:
  """Features and classes in chunks; each device of a mesh holds a part of every chunk."""

  def __init__(
    self, x: np.ndarray, y: np.ndarray, num_classes: int, mesh, most_logits: int = 2**24
  ):
    """Places x [N, D] float32 and y int [N], the same on every host.

    A device holds at most `most_logits` at a time, 64 MB.
    """
    self.num_rows, self.width, self.num_classes = *x.shape, num_classes
    self.mesh = mesh
    devices = sharding.batch_divisor(mesh)
    self._chunks = -(-len(x) * num_classes // (most_logits * devices))
    self._size = -(-len(x) // (self._chunks * devices)) * devices
    self.x, self.y = (self.place(a) for a in (x, np.asarray(y, np.int32)))

  def place(self, a: np.ndarray) -> jax.Array:
    """Places an array with N rows on the mesh as [chunks, size, ...], padded with 0."""

    def part(index):
      rows = np.arange(self._chunks * self._size).reshape(self._chunks, -1)[index[:2]]
      values = a[np.minimum(rows, len(a) - 1)]
      values[rows >= len(a)] = 0
      return values

    spec = PartitionSpec(None, *sharding.batch_sharding(self.mesh).spec)
    shape = (self._chunks, self._size, *a.shape[1:])
    return jax.make_array_from_callback(shape, NamedSharding(self.mesh, spec), part)


def fit(
  rows: Rows,
  weights: np.ndarray,
  l2: float,
  *,
  standardize: bool,
  max_iterations: int,
  tolerance: float = TOLERANCE,
  start: Fit | None = None,
  check_stop: Callable[[], None] = lambda: None,
) -> Fit:
  """Minimises the objective until no derivative exceeds the tolerance.

  It also ends after `max_iterations`, or when float32 has no better solution. The caller
  therefore compares `Fit.gradient` with the tolerance.

  Args:
    weights: [N], 1 for rows to fit, 0 for others.
    standardize: whether to standardise features by the mean and standard deviation of the
      rows to fit.
    start: a fit to start from; None: start from zeros.
    check_stop: called every few iterations; may raise an exception to stop.
  """
  w = rows.place(np.asarray(weights, np.float32))
  mean, std = np.zeros(rows.width, np.float32), np.ones(rows.width, np.float32)
  if standardize:
    mean, std = _moments(rows.x, w)
  problem = rows.x, rows.y, w, mean, std, np.float32(l2)
  K = rows.num_classes
  zeros = {'kernel': np.zeros((rows.width, K)), 'bias': np.zeros(K)}
  zeros = jax.tree.map(np.float32, zeros)
  state = _begin(zeros if start is None else start.params, rows.mesh)
  before, iterations = (np.inf, np.inf), 0
  while True:
    check_stop()
    last = min(iterations + _STEPS, max_iterations)
    state, progress = _advance(state, problem, last, tolerance, rows.mesh)
    iterations, value, gradient = jax.device_get(progress)
    # Float32 gets no closer once neither the value nor the gradient falls.
    better = value < before[0] or gradient < before[1]
    if gradient <= tolerance or iterations >= max_iterations or not better:
      return Fit(state[0], mean, std, int(iterations), float(gradient))
    before = value, gradient


def count_right(rows: Rows, fitted: Fit, weights: np.ndarray | None = None) -> int:
  """Counts the rows with weight 1 (None: all rows) whose largest logit is right."""
  weights = np.ones(rows.num_rows) if weights is None else weights
  w = rows.place(np.asarray(weights, np.int32))
  return int(_count_right(fitted[:3], (rows.x, rows.y, w)))


@jax.jit
def usable(x: jax.Array) -> jax.Array:
  """Whether all numbers and their squares are finite; the fit sums the squares."""
  return jnp.isfinite(x * x).all()


@jax.jit
def _moments(x, w):
  w = w[..., None] / w.sum()
  mean = (w * x).sum((0, 1))
  return mean, jnp.sqrt((w * (x - mean) ** 2).sum((0, 1))) + STD_EPSILON


def _logits(params, x, mean, std):
  z = (x - mean) / std
  return jnp.dot(z, params['kernel'], precision='highest') + params['bias']


@jax.jit
def _count_right(fitted, chunks):
  params, *moments = fitted

  def right(chunk):
    x, y, w = chunk
    return (w * (_logits(params, x, *moments).argmax(-1) == y)).sum()

  return jax.lax.map(right, chunks).sum()


def _objective(problem):
  """Returns a function of the parameters: the objective divided by the number of rows."""
  *chunks, mean, std, l2 = problem

  # Recompute this, so that the derivative does not hold the logits of all rows.
  @jax.checkpoint
  def entropy(params, chunk):
    x, y, w = chunk
    logits = _logits(params, x, mean, std)
    return (w * optax.softmax_cross_entropy_with_integer_labels(logits, y)).sum()

  def objective(params):
    total = jax.lax.map(functools.partial(entropy, params), tuple(chunks)).sum()
    return (total + l2 / 2 * (params['kernel'] ** 2).sum()) / chunks[2].sum()

  return objective


@functools.partial(jax.jit, static_argnames='mesh')
def _begin(params, mesh):
  """Returns (params, state of the solver) on every device."""
  state = params, _SOLVER.init(params)
  # optax starts with weak types, with which `_advance` would be compiled twice.
  state = jax.tree.map(lambda a: jax.lax.convert_element_type(a, a.dtype), state)
  return jax.lax.with_sharding_constraint(state, sharding.replicated_sharding(mesh))


@functools.partial(jax.jit, static_argnames='mesh')
def _advance(state, problem, last, tolerance, mesh):
  """Iterates up to iteration `last`, or until no derivative exceeds the tolerance.

  Returns:
    (state, (iterations, the objective divided by the number of rows, its largest
    derivative)).
  """
  objective = _objective(problem)
  value_and_grad = optax.value_and_grad_from_state(objective)

  def progress(state):
    count, value, grad = (
      optax.tree.get(state[1], x) for x in ('count', 'value', 'grad')
    )
    return (
      count,
      value,
      jnp.stack([jnp.abs(x).max() for x in jax.tree.leaves(grad)]).max(),
    )

  def goes_on(state):
    count, _, largest = progress(state)
    return (count == 0) | ((count < last) & (largest > tolerance))

  def step(state):
    params, solver = state
    value, grad = value_and_grad(params, state=solver)
    updates, solver = _SOLVER.update(
      grad, solver, params, value=value, grad=grad, value_fn=objective
    )
    return optax.apply_updates(params, updates), solver

  state = jax.lax.while_loop(goes_on, step, state)
  state = jax.lax.with_sharding_constraint(state, sharding.replicated_sharding(mesh))
  return state, progress(state)
