"""predictions.npz: bounded, one part per evaluation, refused when damaged."""

import numpy as np
import pytest

from tests.support import naming
from vit_jax.errors import UserError
from vit_jax.evaluators import predictions
from vit_jax.train.evaluations import write_predictions


def rows(index, counted=None):
  """Rows as `make_rows` returns them, of three classes."""
  n = len(index)
  return {
    'index': np.int32(index),
    'label': np.int32(index) % 3,
    'top': np.tile(np.arange(3, dtype=np.int32), (n, 1)),
    'probability': np.full((n, 3), 1 / 3, np.float32),
    'right': np.eye(3, dtype=bool)[np.int32(index) % 3],
    'counted': np.ones(n, bool) if counted is None else np.array(counted),
  }


def test_of_many_examples_evenly_spaced_ones_are_stored():
  many = 3 * predictions.MOST - 1
  collector = predictions.Collector(many)
  for start in (300, 0):  # devices may bring them in any order
    collector.add(rows(range(start, start + 300)))
  assert collector.result()['index'].tolist() == list(range(0, 600, 3))
  few = predictions.Collector(predictions.MOST)
  few.add(rows([0, 1, 2, -1], counted=[True, True, False, False]))
  assert few.result()['index'].tolist() == [0, 1]


def test_each_evaluation_keeps_its_last(tmp_path):
  collector = predictions.Collector(5)
  collector.add(rows(range(5)))
  answers = collector.result()
  assert predictions.read(tmp_path) == {}
  write_predictions(tmp_path, 'a', 10, answers)
  write_predictions(tmp_path, 'b/c', 10, answers)
  write_predictions(tmp_path, 'a', 20, answers)
  write_predictions(tmp_path, 'fewshot', 20, None)  # has none
  parts = predictions.read(tmp_path)
  assert {name: int(x['step']) for name, x in parts.items()} == {'a': 20, 'b/c': 10}
  for key, value in answers.items():
    np.testing.assert_array_equal(parts['a'][key], value)
    assert parts['a'][key].dtype == value.dtype
  # A damaged file is refused, and replaced.
  path = tmp_path / predictions.FILE
  for data in (b'', b'no zip', path.read_bytes()[:300]):
    path.write_bytes(data)
    with pytest.raises(UserError, match=naming(path, 'evaluate')):
      predictions.read(tmp_path)
    write_predictions(tmp_path, 'b', 1, answers)
    assert set(predictions.read(tmp_path)) == {'b'}
