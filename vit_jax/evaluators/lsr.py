"""Few-shot linear regression in closed form. It depends on no data set or model.

A ridge regression of features on targets in {-1, 1}, by which the ViT paper measures
representations (section 4.1, "few-shot accuracies"). Constants are those of the reference
code: big_vision's `fewshot_lsr`, and the older code with its sweep of the ridge.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

# Value of the constant feature, so large that the ridge hardly affects its weight, the bias.
BIAS = 100.0
STD_EPSILON = 1e-5
FIXED_L2 = 2.0**10
SWEEP_L2 = tuple(2.0**exponent for exponent in range(-10, 20))


def draw(
  labels: np.ndarray, num_classes: int, shots: tuple[int, ...], seed: int
) -> dict[int, np.ndarray]:
  """Draws examples of each class: {shots: indices of the examples, class by class}.

  One generator permutes the examples of each class in turn. The first `shots` of them are
  taken, so that a larger number of shots contains a smaller one. Every class must have
  max(shots) examples.

  Args:
    labels: int [N].
  """
  rng = np.random.default_rng(seed)
  members = [rng.permutation(np.flatnonzero(labels == c)) for c in range(num_classes)]
  return {k: np.concatenate([m[:k] for m in members]) for k in shots}


@functools.partial(jax.jit, static_argnames='num_classes')
def accuracies(train_x, train_y, test_x, test_y, l2, *, num_classes: int) -> jax.Array:
  """Returns the fraction of right answers for each ridge, [R] float32.

  X [N, D] are the features, standardised by their mean and standard deviation and extended
  by the constant; Y is in {-1, 1}. The weights are (X'X + l2 I)^-1 X'Y if N >= D, and
  otherwise X'(XX' + l2 I)^-1 Y, which is the same. One eigendecomposition of the smaller
  Gram matrix serves every l2. Computed in float32 at highest precision, on the device of
  the inputs. NaN if features are not finite, because an argmax of NaN would be class 0.

  Args:
    train_x, test_x: [N, D - 1] and [n, D - 1].
    train_y, test_y: int [N] and [n].
    l2: ridges [R], positive.
  """
  fit = fit_ridges(train_x, train_y, test_x, num_classes)

  def accuracy(ridge):
    # One ridge at a time, because the scores of all ridges might not fit into memory.
    s = scores(fit, ridge)
    right = (s.argmax(-1) == test_y).mean(dtype=jnp.float32)
    return jnp.where(jnp.isfinite(s).all(), right, jnp.nan)

  return jax.lax.map(accuracy, jnp.float32(l2))


def fit_ridges(train_x, train_y, test_x, num_classes):
  """Returns the factors of the test scores, see `decompose`."""
  mean, std = train_x.mean(axis=0), train_x.std(axis=0) + STD_EPSILON
  x, z = ((array - mean) / std for array in (train_x, test_x))
  x, z = (jnp.pad(a, ((0, 0), (0, 1)), constant_values=BIAS) for a in (x, z))
  y = 2 * jax.nn.one_hot(train_y, num_classes, dtype=x.dtype) - 1  # [N, K]
  return decompose(x, y, z, primal=x.shape[0] >= x.shape[1])


@jax.default_matmul_precision('highest')
def decompose(x, y, z, *, primal: bool):
  """Returns the three factors of the scores; both forms give the same scores.

  Maps x [N, D], y [N, K] and z [n, D], which are training features, training targets and
  test features, to left [n, r], eigenvalues [r] and right [r, K]. The primal form has
  r = D, the dual form r = N.
  """
  eigenvalues, q = jnp.linalg.eigh(x.T @ x if primal else x @ x.T)
  # A Gram matrix has no negative eigenvalues. Rounding errors may give some, and a small l2
  # could cancel them.
  eigenvalues = jnp.maximum(eigenvalues, 0)
  left = z @ q if primal else z @ (x.T @ q)
  return left, eigenvalues, q.T @ (x.T @ y if primal else y)


@jax.default_matmul_precision('highest')
def scores(factors, ridge):
  """Returns test scores [n, K] with one ridge. The class with the largest score wins."""
  left, eigenvalues, right = factors
  return left @ (right / (eigenvalues + ridge)[:, None])
