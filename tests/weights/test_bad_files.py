"""Files that are not what they say: one clear line, exit 2, nothing written, no crash."""

import functools
import pickle
import resource
import warnings
from pathlib import Path

import numpy as np
import pytest

import vit_jax
from tests.support import GOLDEN, fault_table, hostile_weights, naming
from vit_jax import cli, weights
from vit_jax.errors import UserError
from vit_jax.tools import convert
from vit_jax.weights import readers

TOKEN = GOLDEN / 'vit_google_token.npz'

# The beginning of a hostile case -> facts of the message.
BAD = {
  'kind: html as .npz': ('<!DOCTYP', '.npz', '.safetensors'),
  'kind: empty as .npz': ('empty', '.npz'),
  'kind: pickle as .pth': ('a.pth', 'truncated'),
  'zip: cut at 2': ('truncated',),
  'zip: checksum': ('CRC-32',),
  'zip: one holds objects': ("'cls'", 'allow_pickle'),
  'zip: one is a pickle': ("'data.pkl'", '.npz'),
  'zip: flags 0x1': ('encrypted',),
  '320 MB': ('decompress', 'bytes'),
  'zip: one holds text': ("'cls'", '<U1'),
  'npy: shape (1000000': ("'cls'",),
  'safetensors: cut at': ('a.safetensors',),
  'safetensors: shape [1000000': ('invalid shape',),
  'kind: empty folder': ('a.npz', 'model.safetensors'),
  "safetensors: index {'a': '../": ("'../model.safetensors'",),
  'config: b\'{"a"\'': ('config.json', 'JSON'),
  'other arrays': ("['a']", 'google (vit)'),
}


@pytest.mark.parametrize('name', BAD)
def test_bad_files_are_one_line(tmp_path, capsys, name):
  recipes = hostile_weights.recipes()
  make = next(make for case, make in recipes.items() if case.startswith(name))
  with warnings.catch_warnings(action='ignore'):  # zipfile's, of duplicate names
    path = make(tmp_path)
  with pytest.raises(UserError, match=naming(str(path), *BAD[name])) as caught:
    weights.read(str(path))
  assert '\n' not in str(caught.value)
  out = tmp_path / 'out.npz'
  assert cli.run(convert.main, [str(path), str(out)]) == 2
  assert capsys.readouterr().err.count('\n') == 1
  assert not out.exists()


class Call:
  """An object whose pickle calls `Path.touch` when it is read."""

  def __init__(self, path: Path):
    self.path = path

  def __reduce__(self):
    return Path.touch, (self.path,)


@pytest.mark.parametrize('protocol', range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_makes_arrays_and_calls_nothing_else(tmp_path, protocol):
  called, file = tmp_path / 'called', tmp_path / 'a.pkl'
  saved = {'model': {'a': np.ones(2), 'b': Call(called)}, 'best': np.float64(1)}
  file.write_bytes(pickle.dumps(saved, protocol))
  assert readers.read(file).arrays.keys() == {'a'}
  assert not called.exists()
  file.write_bytes(pickle.dumps(Call(called), protocol))
  with pytest.raises(UserError, match=naming(str(file), 'state_dict')):
    readers.read(file)
  assert not called.exists()


def test_a_compressed_file_of_zeros_is_no_lie(tmp_path):
  np.savez_compressed(tmp_path / 'a.npz', cls=np.zeros((1000, 1000), np.float32))
  assert readers.read(tmp_path / 'a.npz').arrays['cls'].shape == (1000, 1000)


# Beyond the memory of the process before: the largest honest file here is of 290 KB, and
# the largest that lies claims exabytes.
MOST_MEMORY = 400 << 20


def survived(folder, every: int, table) -> int:
  """Loads each `every`-th hostile case; returns how many were refused."""
  expected = weights.read(TOKEN).flat
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  refused = 0
  for name, path in hostile_weights.cases(folder, every):
    with warnings.catch_warnings(action='ignore'):  # numpy's, about what it parses
      load = functools.partial(vit_jax.load, str(path))
      loaded = table.tried('weight files', name, load)
    refused += loaded is None
    if loaded and name.startswith('zip: '):  # the change hit no array
      flat = weights.read(path).flat
      assert flat.keys() == expected.keys(), name
      assert all(np.array_equal(flat[n], expected[n]) for n in flat), name
  assert not table.wrong, '\n'.join(table.wrong)
  used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
  assert used << 10 < MOST_MEMORY, f'{used >> 10} MB'
  return refused


def test_some_hostile_files(tmp_path):
  assert survived(tmp_path, 8, fault_table.Table([])) > 40


@pytest.mark.faults
def test_all_hostile_files(tmp_path, faults_table):
  assert survived(tmp_path, 1, faults_table) > 350
