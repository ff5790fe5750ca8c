"""Every file of a run's folder, damaged in every way: resumed, loaded, inspected.

The result is that of an intact folder, or a line says why it differs.
"""

import functools
import os
import shutil

import jax
import pytest

import vit_jax
from tests.support import runs
from vit_jax.tools.inspect import __main__ as inspect

pytestmark = [
  pytest.mark.usefixtures('one_device'),
  # Hundreds of reads fail: Python frees Orbax's tasks, and their errors, at any time.
  pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning'),
]


def _write(data: bytes):
  return lambda path: path.write_bytes(data)


def _change(function):
  return lambda path: path.write_bytes(function(path.read_bytes()))


def _flip(data: bytes) -> bytes:
  middle = len(data) // 2
  return data[:middle] + bytes(255 - b for b in data[middle : middle + 1]) + data[-4:]


def _in_its_place(make):
  def damage(path):
    if path.is_dir():
      shutil.rmtree(path)
    else:
      path.unlink()
    make(path)

  return damage


DAMAGE = {
  'empty': _write(b''),
  'half': _change(lambda data: data[: len(data) // 2]),
  'twice': _change(lambda data: data * 2),
  'flipped and cut': _change(_flip),
  'NUL': _change(lambda data: bytes(len(data))),
  'not UTF-8': _write(b'{"step": "\xff\xfe"}'),
  'another type': _write(b'[1, 2]'),
  'deep': _write(b'[' * 100_000),
  'gone': _in_its_place(lambda path: None),
  'a folder': _in_its_place(os.mkdir),
  'a dangling link': _in_its_place(lambda path: path.symlink_to('nowhere')),
  'a link to itself': _in_its_place(lambda path: path.symlink_to(path.name)),
  'a pipe': _in_its_place(os.mkfifo),
}


def again(workdir):
  return runs.run(workdir, *runs.SHORT)


@pytest.fixture(scope='module')
def finished(short_run, tmp_path_factory):
  """Returns the folder of a finished run that met a bad image."""
  folder = shutil.copytree(short_run, tmp_path_factory.mktemp('finished') / 'run')
  (folder / 'bad_images.jsonl').write_text('{"path": "x", "error": "y"}\n')
  return folder


@pytest.fixture(scope='module')
def half_done(finished, tmp_path_factory):
  return runs.killed(finished, tmp_path_factory.mktemp('half') / 'run')


def files(folder) -> list:
  """Returns the paths below a folder, of its own files and of one step's."""
  step = min(map(int, os.listdir(folder / 'checkpoints')))
  own = [path for path in folder.iterdir() if path.is_file()]
  saved = folder / 'checkpoints' / str(step)
  below = [path for path in saved.rglob('*') if path.is_file()]
  paths = [*own, folder / 'checkpoints', saved, saved / 'params', *below]
  return sorted(path.relative_to(folder) for path in paths)


def damages(folder, tmp_path, of=lambda path: True):
  """Yields (name, damaged copy) for every file, and a folder for every way to damage it.

  Files of a step, which test_checkpoint_damage covers, are damaged in a few ways each.
  """
  for number, path in enumerate(p for p in files(folder) if of(p)):
    for way, (what, damage) in enumerate(DAMAGE.items()):
      if (folder / path).is_dir() and not what.startswith(('a ', 'gone')):
        continue
      if len(path.parts) > 3 and ((way + number) % 5 or what == 'a pipe'):
        continue  # Orbax would wait for a pipe
      copy = shutil.copytree(folder, tmp_path / f'{number} {what}')
      damage(copy / path)
      yield f'{path} {what}', copy
      shutil.rmtree(copy)


def said(capfd) -> bool:
  """Whether standard error holds lines, none of them of a traceback."""
  error = capfd.readouterr().err
  assert 'Traceback' not in error, error
  return bool(error)


@pytest.mark.faults
def test_resume(finished, half_done, tmp_path, faults_table, capfd):
  want = runs.status(finished), runs.rows(finished)
  for number, (name, folder) in enumerate(damages(half_done, tmp_path)):
    if 'checkpoints/' in name and number % 4:
      continue  # each takes seconds
    capfd.readouterr()
    result = faults_table.tried('run folder: resume', name, lambda f=folder: again(f))
    if result is None:
      continue
    same = runs.status(folder) == want[0] and runs.rows(folder) == want[1]
    if not same and not said(capfd):
      faults_table('run folder: resume', name, 'silent')


@pytest.mark.faults
def test_results_again(finished, tmp_path, faults_table, capfd):
  want = runs.status(finished)
  for name, folder in damages(finished, tmp_path, lambda path: len(path.parts) == 1):
    tried = functools.partial(faults_table.tried, 'run folder: results again', name)
    if (result := tried(lambda f=folder: again(f))) and result[0] != want:
      faults_table('run folder: results again', name, 'silent')


@pytest.mark.faults
def test_load(half_done, tmp_path, faults_table, capfd):
  want = jax.tree.leaves(vit_jax.load(half_done).variables)
  for name, folder in damages(half_done, tmp_path):
    tried = functools.partial(faults_table.tried, 'run folder: load', name)
    if loaded := tried(lambda f=folder: vit_jax.load(f)):
      got = jax.tree.leaves(loaded.variables)
      if not all(map(jax.numpy.array_equal, got, want)):
        faults_table('run folder: load', name, 'silent')


@pytest.mark.faults
def test_inspect(finished, tmp_path, faults_table, capsys):
  for name, folder in damages(finished, tmp_path):
    tried = functools.partial(faults_table.tried, 'run folder: inspect', name)
    tried(lambda f=folder: inspect.main([str(f), '--json']))
