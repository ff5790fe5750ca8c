"""Files that are not what they say: one clear line, exit 2, nothing written, no crash."""

import functools
import gzip
import pickle
import resource
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest

import vit_jax
from tests.support import (
  GOLDEN,
  commands,
  fault_table,
  hostile_images,
  hostile_weights,
  naming,
  pairs,
)
from vit_jax import cli, weights
from vit_jax.errors import UserError
from vit_jax.text.tokenizer import MERGES
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
  'pickle: holds itself': ('a.pkl', 'state_dict'),
  'pickle: index 2**30': ('1073741824', 'index'),
  'config: preprocess_cfg.mean is texts': ('mean', "'a'"),
  'config: preprocess_cfg.std is zeros': ('std', '[0, 0, 0]'),
  'config: preprocess_cfg.interpolation is texts': ('interpolation',),
  'config: preprocess_cfg.interpolation is text': ('no such', 'bicubic'),
  'config: model_cfg.vision_cfg.head_width': ('head_width', 'True'),
  'config: model_cfg.vision_cfg.norm_kwargs.eps': ('layer_norm_eps', 'nan'),
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
  saved['empty'] = np.zeros(0)
  file.write_bytes(pickle.dumps(saved, protocol))
  assert readers.read(file).arrays.keys() == {'a'}
  assert not called.exists()
  file.write_bytes(pickle.dumps(Call(called), protocol))
  with pytest.raises(UserError, match=naming(str(file), 'state_dict')):
    readers.read(file)
  assert not called.exists()


def test_a_compressed_file_of_zeros_is_no_lie(tmp_path):
  np.savez_compressed(tmp_path / 'a.npz', cls=np.zeros((1000, 1000), np.float32))
  stored = readers.read(tmp_path / 'a.npz').arrays['cls']
  assert not np.any(np.asarray(stored))
  assert stored.shape == (1000, 1000)


def test_the_header_of_an_npz_is_read_without_arrays(tmp_path):
  path, data = tmp_path / 'a.npz', bytearray(TOKEN.read_bytes())
  with zipfile.ZipFile(TOKEN) as archive:
    largest = max(archive.infolist(), key=lambda info: info.file_size)
  data[largest.header_offset + largest.file_size // 2] ^= 1
  path.write_bytes(data)
  header = weights.read_header(str(path))
  assert header.shapes == weights.read_header(TOKEN).shapes
  with pytest.raises(UserError, match=naming(str(path), 'array', 'CRC-32')):
    header.read()


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


# Runs a command within 30 seconds, then prints the most memory that it used. The second
# limit protects the machine.
LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
resource.setrlimit(resource.RLIMIT_AS, (24 << 30, 24 << 30))
try:
  runpy.run_module('vit_jax', run_name='__main__')
finally:
  print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
"""


@pytest.mark.faults
def test_no_file_takes_4_gb_or_30_s_before_it_is_refused(tmp_path, faults_table):
  calls = {}
  for number, (name, make) in enumerate(hostile_weights.recipes().items()):
    if name.startswith(('pickle: ', '320 MB', 'npy: header of 4', 'kind: endless')):
      (folder := tmp_path / str(number)).mkdir()
      calls[name] = ['inspect', make(folder)]
  image = tmp_path / 'a.png'
  hostile_images.picture().save(image)
  # The parts of this file follow one another: 2 GB in 2 MB.
  vocabularies = {MERGES: gzip.compress(bytes(20 << 20)) * 100}
  vocabularies['tokenizer.json'] = pairs.tokenizer_json(
    {'a': 0, '</s>': 1}, [('a', 'a' * 10)] * 10
  )
  for name, content in vocabularies.items():
    (folder := tmp_path / f'in {name}').mkdir()
    (folder / name).write_bytes(content)
    (folder / 'w.npz').symlink_to(GOLDEN / 'siglip_bigvision.npz')
    calls[name] = ['predict', folder / 'w.npz', image, '--labels', 'a,b']
  for name, argv in calls.items():
    process = commands.python('-c', LIMITED, *argv)
    refused = process.returncode == 2 and process.stderr.count('\n') == 1
    within = int(process.stdout or '0') < 4 << 30 and process.returncode >= 0
    outcome = ('refused' if refused else 'traceback') if within else 'hang'
    faults_table('memory and time', name, outcome, process.stdout + process.stderr)
