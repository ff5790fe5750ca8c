"""Hostile weights are refused in one line or load as the same model; they never crash.

The quick tests take every 12th case; those marked `faults` take all.
"""

import resource

import numpy as np
import pytest

from tests.support import hostile_weights
from vit_jax import weights

# Beyond what the process held: the largest honest file here is of 290 KB, and the largest
# that lies claims exabytes.
_MOST_MEMORY = 400 << 20


# As the table of faults has it.
_OUTCOMES = {'refused': 'refused', 'loaded': 'handled', 'crashed': 'traceback'}


def survived(folder, every: int, faults_table=lambda *_: None) -> int:
  """Loads each `every`-th case; returns how many were refused."""
  expected = weights.read(hostile_weights.files.NPZ).flat
  assert hostile_weights.outcome(hostile_weights.files.NPZ) == ('loaded', '')
  # After an honest file was loaded and the corpus made: they are not what is measured.
  hostile_weights.recipes()
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  crashed, refused = [], 0
  for name, path in hostile_weights.cases(folder, every):
    what, why = hostile_weights.outcome(path)
    refused += what == 'refused'
    faults_table('weight files', name, _OUTCOMES[what], str(why))
    if what == 'crashed':
      crashed.append(f'{name}: {why}')
    if what == 'loaded' and name.startswith('zip: '):  # what was changed says nothing
      found = weights.read(path).flat
      assert found.keys() == expected.keys(), name
      assert all(np.array_equal(found[n], expected[n]) for n in found), name
  assert not crashed, '\n'.join(crashed)
  used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
  assert used << 10 < _MOST_MEMORY, f'{used >> 10} MB'
  return refused


def test_some_hostile_files(tmp_path):
  assert survived(tmp_path, every=12) > 80


@pytest.mark.faults
def test_all_hostile_files(tmp_path, faults_table):
  assert len(hostile_weights.recipes()) >= 1_100
  assert survived(tmp_path, 1, faults_table) > 1_000


def test_a_head_that_does_not_fit_itself_is_refused(tmp_path):
  # It was taken for one of another number of classes, and initialised afresh.
  make = hostile_weights.recipes()
  for i, name in enumerate(('head/bias cut', 'head/kernel missing')):
    (tmp_path / str(i)).mkdir()
    what, why = hostile_weights.outcome(make[f'array: {name}'](tmp_path / str(i)))
    assert what == 'refused'
    assert 'head/' in why
