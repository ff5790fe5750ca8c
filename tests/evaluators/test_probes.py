"""Linear probes and nearest neighbours against scikit-learn and NumPy."""

import functools
import re

import jax
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from tests.support import naming, probes, runs
from tests.support.probes import TEST, TRAIN, example, predict, run
from vit_jax.errors import Preempted, UserError
from vit_jax.evaluators import knn, logistic, lsr
from vit_jax.train import schema


@pytest.fixture(scope='module')
def meshes():
  return probes.meshes()


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  return probes.write(tmp_path_factory.mktemp('data'))


# Logistic regression. All tests have problems of one size, which compiles once.


@pytest.fixture(autouse=True)
def chunks_of_30_rows(monkeypatch):
  rows = functools.partial(logistic.Rows, most_logits=100)
  monkeypatch.setattr(logistic, 'Rows', rows)


def scikit_learn(x, y, l2):
  fitted = LogisticRegression(C=1 / l2, tol=1e-9, max_iter=10_000).fit(x, y)
  return fitted, _centered(fitted.coef_.T), _centered(fitted.intercept_)


def _centered(x):  # a number added to all logits changes nothing
  return np.asarray(x) - np.mean(x, axis=-1, keepdims=True)


@pytest.mark.parametrize(
  ('standardize', 'mesh'),
  [(True, 0), (True, 2), (False, 0)],
)
def test_coefficients_are_those_of_scikit_learn(meshes, mesh, standardize):
  x, y = example(60, 9, 3)
  x = x if standardize else x / 9
  weights = np.arange(60) % 5 > 0
  z = np.float64(x)
  if standardize:
    z = (z - z[weights].mean(0)) / (z[weights].std(0) + lsr.STD_EPSILON)
  fit = functools.partial(
    logistic.fit, standardize=standardize, tolerance=1e-6, max_iterations=500
  )
  rows, start = logistic.Rows(x, y, 3, meshes[mesh]), None
  for l2 in (30.0, 0.3):
    with jax.set_mesh(meshes[mesh]):
      start = fit(rows, weights, l2, start=start)
      right = logistic.count_right(rows, start, ~weights)
    expected, kernel, bias = scikit_learn(z[weights], y[weights], l2)
    assert start.gradient <= 1e-6
    # The penalty's curvature is l2 / 48 per row: 1e-6 of its derivative is 1.6e-4 of
    # a coefficient where l2 = 0.3.
    np.testing.assert_allclose(_centered(start.params['kernel']), kernel, atol=1.6e-4)
    np.testing.assert_allclose(_centered(start.params['bias']), bias, atol=1.6e-4)
    assert right == (expected.predict(z[~weights]) == y[~weights]).sum()
    assert np.abs(kernel).max() > 0.05


def test_a_fit_can_be_left_and_says_how_far_it_came(meshes):
  x, y = example(60, 9, 3)
  rows = logistic.Rows(x, y, 3, meshes[0])
  options = dict(standardize=True, tolerance=0.0)

  def stop():
    raise Preempted('Stopped.')

  fit = functools.partial(logistic.fit, rows, np.ones(60), 1.0, **options)
  with jax.set_mesh(meshes[0]):
    with pytest.raises(Preempted):
      fit(max_iterations=9, check_stop=stop)
    few = fit(max_iterations=2)
    # No derivative is 0 in float32: it ends where nothing gets better, not at the limit.
    most = fit(max_iterations=10**6)
  assert few.iterations == 2
  assert few.gradient > 1e-4
  assert most.iterations < 10_000
  assert most.gradient < 1e-5


# The evaluators, on images whose features a fixed random layer gives.


@pytest.mark.parametrize('named_val', [False, True])
def test_linear_probe(data, capfd, named_val):
  section, x, y = data
  rows = np.arange(TRAIN)
  held_out = np.isin(rows, np.random.default_rng(0).permutation(TRAIN)[:12])
  if named_val:
    section = section | {'train': 'train[:45]', 'val': 'train[45:60]'}
    held_out = rows >= 45
  l2 = [1e-3, 0.1, 1.0, 1.0, 1e3]
  metrics = run('linear_probe', {'a': section}, l2=l2)

  def accuracy(strength, fit_to, tested):
    mean, std = x[fit_to].mean(0), x[fit_to].std(0) + lsr.STD_EPSILON
    z = (x - mean) / std
    return scikit_learn(z[fit_to], y[fit_to], strength)[0].score(z[tested], y[tested])

  on_val = {s: accuracy(s, rows[~held_out], rows[held_out]) for s in l2}
  best = max(s for s in l2 if on_val[s] == max(on_val.values()))
  assert on_val[1e3] < on_val[best]
  assert metrics['a_l2'] == best
  assert metrics['a_top1_val'] == pytest.approx(on_val[best])
  expected = accuracy(best, rows, np.arange(TRAIN, TRAIN + TEST))
  assert metrics['a_top1'] == pytest.approx(expected)
  assert metrics['a_gradient'] <= logistic.TOLERANCE
  assert capfd.readouterr().err == ''


def test_one_penalty_holds_nothing_out(data):
  few = {'a': data[0] | {'train': 'train[:2]'}}
  with pytest.raises(UserError, match=naming('a', 2, 'val')):
    run('linear_probe', few)
  assert 'a_top1_val' not in run('linear_probe', few, l2=[0.5])


def test_a_fit_that_did_not_converge_is_said(data, capfd):
  section, *_ = data
  options = dict(l2=[1e-4, 10.0], max_iterations=3)
  metrics = run('linear_probe', {'a': section}, **options)
  line = capfd.readouterr().err
  assert re.search(naming('linear probe a', '0.0001', 'max_iterations', '1e-05'), line)
  assert line.count('\n') == 1
  assert metrics['a_iterations'] <= 3


@pytest.mark.parametrize(
  ('type', 'factor', 'options'),
  [
    ('knn', np.inf, {}),
    ('linear_probe', np.inf, {}),
    ('linear_probe', 1e20, {}),
    ('fewshot', np.inf, {'shots': [1]}),
  ],
)
def test_features_that_are_not_finite_give_nan(data, type, factor, options):
  def bad(params, batch):
    return {'pre_logits': predict(params, batch)['pre_logits'] * factor}

  metrics = run(type, {'a': data[0]}, predict=bad, **options)
  assert np.isnan(list(metrics.values())).all()


def test_the_scale_of_features_does_not_matter(data):
  def large(params, batch):
    return {'pre_logits': predict(params, batch)['pre_logits'] * 1e9}

  for type, options in (('knn', {}), ('linear_probe', dict(l2=[1.0]))):
    metrics = [
      run(type, {'a': data[0]}, predict=p, **options) for p in (predict, large)
    ]
    names = [name for name in metrics[0] if re.fullmatch('.*(nn|top1)', name)]
    assert [metrics[0][n] for n in names] == [metrics[1][n] for n in names]


def test_several_labels_are_refused(tmp_path):
  images = np.zeros((90, 2, 2, 3), np.uint8)
  np.savez(tmp_path / 'm.npz', images=images, labels=np.eye(90) > 0)
  section = {'source': f'arrays:{tmp_path}/m.npz', 'train': 'train', 'test': 'train'}
  with pytest.raises(UserError, match=naming('one label')):
    run('knn', {'a': section})


def test_evaluations_of_a_run():
  data = {'source': 'digits', 'train': 'train[:90%]', 'test': 'test'}
  common = {'pp': 'value_range(-1, 1)', 'batch_size': 8, 'every': 0.5, 'use_ema': True}
  knn = {'type': 'knn', 'datasets': {'d': data}, 'k': [5], **common}
  data = data | {'val': 'train[90%:]'}
  probe = {'type': 'linear_probe', 'datasets': {'d': data}, 'l2': [0.1, 1], **common}
  evals = {'near': knn, 'linear': probe}
  for best in ('near/d_5nn', 'linear/d_top1', 'linear/d_top1_val'):
    schema.check(runs.small(f'checkpoint.best={best}', evals=evals))
  for key, value in {'datasets': {'d': data}, 'temperature': -1, 'ks': [5]}.items():
    with pytest.raises(UserError, match=naming(f'config.evals.near.{key}')):
      schema.check(runs.small(evals=evals | {'near': knn | {key: value}}))
  with pytest.raises(UserError, match=naming('config.checkpoint.best', 'near/d_6n')):
    schema.check(runs.small('checkpoint.best=near/d_6n', evals=evals))


# Nearest neighbours, against scikit-learn and NumPy.


def test_neighbours_are_those_of_a_full_sort_on_every_mesh(meshes, monkeypatch):
  monkeypatch.setattr(knn, 'QUERIES', 8)  # the last of 41 are padded
  keys, _ = example(150, 12, 5)
  keys[140] = keys[20]  # equally near: the lower row comes first
  keys[60] = 0
  queries, _ = example(41, 12, 5, seed=1)
  queries[3], queries[4] = keys[20], 0
  unit = lambda x: x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
  exact = unit(np.float64(queries)) @ unit(np.float64(keys)).T
  order = np.argsort(-exact, axis=1, kind='stable')[:, :20]
  results = []
  for mesh in meshes:
    with jax.set_mesh(mesh):
      results.append(knn.nearest(keys, queries, 20, mesh))
  for similarities, rows in results:
    np.testing.assert_array_equal(rows, order)
    # Sums of 12 products of numbers up to 1, in float32.
    expected = np.take_along_axis(exact, order, axis=1)
    np.testing.assert_allclose(similarities, expected, atol=1e-6)
    np.testing.assert_array_equal(similarities, results[0][0])
  assert order[3, :2].tolist() == [20, 140]
  assert order[4].tolist() == list(range(20))  # a query of zeros is equally near to all


@pytest.mark.parametrize('temperature', [0.07, None])
@pytest.mark.parametrize('k', [1, 5, 20])
def test_votes_are_those_of_scikit_learn(meshes, k, temperature):
  keys, labels = example(150, 12, 5)
  queries, _ = example(100, 12, 5, seed=1)
  weights = lambda distance: np.exp((1 - distance) / temperature)
  reference = KNeighborsClassifier(
    k,
    metric='cosine',
    algorithm='brute',
    weights='uniform' if temperature is None else weights,
  )
  expected = reference.fit(keys, labels).predict(queries)
  similarities, rows = knn.nearest(keys, queries, 20, meshes[0])
  votes = knn.vote(similarities[:, :k], labels[rows][:, :k], temperature)
  np.testing.assert_array_equal(votes, expected)


def test_votes_in_closed_form():
  similarities = np.float32([[0.9, 0.8, 0.7], [0.5, 0.5, 0.5]])
  labels = np.array([[2, 1, 1], [7, 4, 5]])
  # exp(0.9 / T) against exp(0.8 / T) + exp(0.7 / T): equal at T = 0.2078.
  for temperature, first in ((0.20, 2), (0.22, 1), (None, 1), (1e-4, 2)):
    votes = knn.vote(similarities, labels, temperature)
    assert votes.tolist() == [first, 4]  # the lowest class wins a tie


@pytest.mark.parametrize('devices', [1, 8])
def test_knn(data, devices):
  section, x, y = data
  metrics = run('knn', {'a': section}, devices, k=[1, 9])
  reference = KNeighborsClassifier(
    9, metric='cosine', algorithm='brute', weights=lambda d: np.exp((1 - d) / 0.07)
  )
  for k in (1, 9):
    reference.set_params(n_neighbors=k).fit(x[:TRAIN], y[:TRAIN])
    assert metrics.pop(f'a_{k}nn') == reference.score(x[TRAIN:], y[TRAIN:])
  assert metrics == {}
