"""k-nearest neighbours, against scikit-learn and NumPy."""

import jax
import numpy as np
import pytest
from sklearn.neighbors import KNeighborsClassifier

from tests.support import probes
from tests.support.probes import TRAIN, assert_declared, example, run
from vit_jax.evaluators import neighbours


@pytest.fixture(scope='module')
def meshes():
  return probes.meshes()


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  return probes.write(tmp_path_factory.mktemp('data'))


@pytest.fixture
def small_chunks(monkeypatch):
  monkeypatch.setattr(neighbours, 'KEYS', 64)  # the last chunk of 150 keys is padded
  monkeypatch.setattr(neighbours, 'QUERIES', 8)


def test_neighbours_are_those_of_a_full_sort_on_every_mesh(small_chunks, meshes):
  keys, _ = example(150, 12, 5)
  keys[140] = keys[20]  # equally near: the lower row comes first
  keys[60] = 0
  queries, _ = example(41, 12, 5, seed=1)
  queries[3], queries[4] = keys[20], 0
  unit = lambda x: x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
  exact = unit(np.float64(queries)) @ unit(np.float64(keys)).T
  order = np.argsort(-exact, axis=1, kind='stable')[:, :20]
  found = []
  for mesh in meshes:
    with jax.set_mesh(mesh):
      found.append(neighbours.nearest(keys, queries, 20, mesh))
  for similarities, rows in found:
    np.testing.assert_array_equal(rows, order)
    # Sums of 12 products of numbers up to 1, in float32.
    expected = np.take_along_axis(exact, order, axis=1)
    np.testing.assert_allclose(similarities, expected, atol=1e-6)
    np.testing.assert_array_equal(similarities, found[0][0])
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
  similarities, rows = neighbours.nearest(keys, queries, 20, meshes[0])
  votes = neighbours.vote(similarities[:, :k], labels[rows][:, :k], temperature)
  np.testing.assert_array_equal(votes, expected)


def test_votes_in_closed_form():
  similarities = np.float32([[0.9, 0.8, 0.7], [0.5, 0.5, 0.5]])
  labels = np.array([[2, 1, 1], [7, 4, 5]])
  # exp(0.9 / T) against exp(0.8 / T) + exp(0.7 / T): equal at T = 0.2078.
  for temperature, first in ((0.20, 2), (0.22, 1), (None, 1), (1e-4, 2)):
    votes = neighbours.vote(similarities, labels, temperature)
    assert votes.tolist() == [first, 4]  # the lowest class wins a tie


@pytest.mark.parametrize('devices', [1, 8])
def test_knn(data, devices):
  section, x, y = data
  metrics = run('knn', section, devices, k=[1, 9])
  assert_declared('knn', metrics)
  reference = KNeighborsClassifier(
    9, metric='cosine', algorithm='brute', weights=lambda d: np.exp((1 - d) / 0.07)
  )
  for k in (1, 9):
    reference.set_params(n_neighbors=k).fit(x[:TRAIN], y[:TRAIN])
    assert metrics.pop(f'a_{k}nn') == reference.score(x[TRAIN:], y[TRAIN:])
  assert metrics == {}
