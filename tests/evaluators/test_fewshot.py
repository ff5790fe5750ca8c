"""Few-shot linear regression against reference code and NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import naming
from tests.support.probes import PARAMS, build, example, predict, run, write
from vit_jax.errors import UserError
from vit_jax.evaluators import lsr


@pytest.mark.parametrize('name', ['primal', 'dual'])
def test_agrees_with_the_reference_code(name, golden):
  golden = golden(f'fewshot_{name}')
  train, test_y = (golden['train_x'], golden['train_y']), golden['test_y']
  K = golden['scores_l2_1024'].shape[-1]
  accuracy = lsr.accuracies(
    *train, golden['test_x'], test_y, golden['l2'], num_classes=K
  )
  # Accuracies are counts of 200: equal, but for the division in float32.
  np.testing.assert_allclose(accuracy, golden['accuracy'], atol=1e-6)
  scores = lsr.scores(lsr.fit_ridges(*train, golden['test_x'], K), 1024.0)
  # The constant feature makes eigenvalues of 1e4 N, of which float32 keeps 7 digits.
  np.testing.assert_allclose(scores, golden['scores_l2_1024'], atol=1e-3)


def least_squares(train_x, train_y, test_x, classes, l2):
  """The ridge as more rows of an ordinary least-squares problem, in float64."""
  train_x, test_x = np.float64(train_x), np.float64(test_x)
  mean, std = train_x.mean(0), train_x.std(0) + 1e-5
  x, z = ((a - mean) / std for a in (train_x, test_x))
  x, z = (np.concatenate([a, np.full((len(a), 1), 100.0)], axis=1) for a in (x, z))
  y = np.where(np.eye(classes, dtype=bool)[train_y], 1.0, -1.0)
  D = x.shape[1]
  rows = np.concatenate([x, np.sqrt(l2) * np.eye(D)])
  targets = np.concatenate([y, np.zeros((D, classes))])
  return z @ np.linalg.lstsq(rows, targets, rcond=None)[0]


@pytest.mark.parametrize(('n', 'd'), [(60, 20), (16, 40), (21, 20)])
def test_solves_the_least_squares_problem(n, d):
  train_x, train_y = example(n, d, 4)
  test_x, _ = example(50, d, 4, seed=1)
  factors = lsr.fit_ridges(train_x, train_y, test_x, 4)
  for ridge in (1.0, 1024.0):
    expected = least_squares(train_x, train_y, test_x, 4, ridge)
    # As above; near n = d + 1 with a ridge of 1 the problem is ill-conditioned.
    atol = 1e-3 if ridge > 1 else 0.02
    np.testing.assert_allclose(lsr.scores(factors, ridge), expected, atol=atol)


def test_primal_and_dual_are_the_same_function():
  rng = np.random.default_rng(0)
  x, y, z = (rng.normal(size=size) for size in ((12, 9), (12, 3), (5, 9)))
  x, y, z = (jnp.asarray(a, jnp.float32) for a in (x, y, z))
  primal, dual = (lsr.decompose(x, y, z, primal=form) for form in (True, False))
  for l2 in (0.5, 9.0):
    exact = z @ np.linalg.solve(x.T @ x + l2 * np.eye(9), x.T @ y)
    for factors in (primal, dual):
      # Scores of size 1, float32.
      np.testing.assert_allclose(lsr.scores(factors, l2), exact, atol=1e-5)


def test_draws_are_nested_balanced_and_those_of_the_reference():
  labels = np.random.default_rng(0).integers(0, 3, 60)
  drawn = lsr.draw(labels, 3, (5, 1, 10), seed=1)
  assert {k: len(v) for k, v in drawn.items()} == {1: 3, 5: 15, 10: 30}
  assert set(drawn[1]) < set(drawn[5]) < set(drawn[10])
  rng = np.random.default_rng(1)  # item 2 of the protocol, written out
  for c in range(3):
    order = rng.permutation(np.where(labels == c)[0])
    for shots, indices in drawn.items():
      np.testing.assert_array_equal(indices[c * shots : (c + 1) * shots], order[:shots])
  assert not np.array_equal(drawn[10], lsr.draw(labels, 3, (10,), seed=2)[10])


# The evaluator, on images whose features a fixed random layer gives.


def fewshot(sections, devices=1, predict=predict, **options):
  return run('fewshot', sections, devices, predict, **dict(shots=[1, 5]) | options)


def expected_accuracies(x, y, shots, seed, l2, classes=3, n=60):
  few = lsr.draw(y[:n], classes, (shots,), seed)[shots]
  return [
    (least_squares(x[few], y[few], x[n:], classes, r).argmax(-1) == y[n:]).mean()
    for r in l2
  ]


@pytest.mark.parametrize('devices', [1, 8])
def test_fixed_protocol(tmp_path, devices):
  section, x, y = write(tmp_path)
  metrics = fewshot({'a': section}, devices)
  for shots in (1, 5):
    each = [expected_accuracies(x, y, shots, s, [1024.0])[0] for s in (0, 1, 2)]
    key = f'a_{shots}shot'
    assert [metrics.pop(f'{key}_seed{s}') for s in (0, 1, 2)] == pytest.approx(each)
    assert metrics.pop(key) == pytest.approx(np.mean(each))
    assert metrics.pop(f'{key}_std') == pytest.approx(np.std(each, ddof=1))
  assert metrics == {}


def test_sweep_chooses_each_ridge_by_the_other_data_sets(tmp_path):
  data = {name: write(tmp_path, i) for i, name in enumerate('abc')}
  sections = {name: section for name, (section, *_) in data.items()}
  metrics = fewshot(sections, protocol='sweep', shots=[5], seeds=[0, 1])
  assert [np.log2(r) for r in lsr.SWEEP_L2] == list(range(-10, 20))
  table = {
    name: np.array([expected_accuracies(x, y, 5, s, lsr.SWEEP_L2) for s in (0, 1)])
    for name, (_, x, y) in data.items()
  }
  for name in 'abc':
    others = np.mean([table[o].mean(0) for o in 'abc' if o != name], axis=0)
    best = int(metrics[f'{name}_5shot_sweep_log2_l2']) + 10
    # One test image in 30 may sit on the border between two classes, in float32.
    assert others[best] >= others.max() - 1 / 30
    for seed in (0, 1):
      value = metrics[f'{name}_5shot_sweep_seed{seed}']
      assert value == pytest.approx(table[name][seed, best], abs=1.01 / 30)


def test_one_compilation_for_all_splits_and_runs(tmp_path):
  traced = []

  def counted(params, batch):
    traced.append(1)
    return predict(params, batch)

  sections = {name: write(tmp_path)[0] for name in 'ab'}
  evaluator = build('fewshot', sections, seeds=[0], shots=[1])
  assert evaluator.run(counted, PARAMS) == evaluator.run(counted, PARAMS)
  assert len(traced) == 1


# Options, and the words of the error: 21, 20 and 20 images of the classes.
REFUSED = [
  (dict(shots=[1, 21]), ('class 1', 'kind1', 20, 21)),
  (dict(protocol='sweep'), ("'sweep'", "['a']", "protocol='fixed'")),
  (dict(feature='tokens'), ("'tokens'", [16, 1, 9], "'pre_logits'")),
  (dict(feature='pre_logit'), ("'pre_logit'", 'pre_logits')),
]


@pytest.mark.parametrize(('options', 'words'), REFUSED)
def test_mistakes(tmp_path, options, words):
  section, *_ = write(tmp_path, train=61)
  with pytest.raises(UserError, match=naming(*words)):
    fewshot({'a': section}, **options)
