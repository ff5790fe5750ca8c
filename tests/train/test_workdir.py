"""A run's folder: its lock, and its files damaged in every way: one line, or rebuilt."""

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from unittest import mock

import jax
import pytest

import vit_jax
from tests.support import naming, runs
from vit_jax import config as config_lib
from vit_jax import errors
from vit_jax.data import bad_images
from vit_jax.tools.inspect import __main__ as inspect
from vit_jax.train import metrics, process, status, workdir
from vit_jax.train import run as run_module
from vit_jax.train.workdir import LOCK_FILE, lock

pytestmark = [
  pytest.mark.usefixtures('one_device'),
  # Many reads fail: Python frees Orbax's tasks, and their errors, at any time.
  pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning'),
]


def again(folder, *changes):
  """Starts the short run once more; returns its (status, rows)."""
  return runs.run(folder, *runs.SHORT, *changes)


@pytest.fixture
def finished(short_run, tmp_path):
  return shutil.copytree(short_run, tmp_path / 'run')


# -- the lock ------------------------------------------------------------------------

HOLD = """
import sys, time
from vit_jax.train.workdir import lock
with lock(sys.argv[1]):
  from jax._src import xla_bridge
  print(xla_bridge.backends_are_initialized(), flush=True)
  time.sleep(60)
"""


def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path):
  folder = tmp_path / 'deep' / 'run'
  first = subprocess.Popen(
    [sys.executable, '-c', HOLD, folder],
    cwd=runs.ROOT,
    stdout=subprocess.PIPE,
    text=True,
  )
  assert first.stdout.readline() == 'False\n'  # locking starts no devices
  assert workdir.is_held(folder)
  with pytest.raises(errors.UserError) as caught, lock(folder):
    pass
  text = str(caught.value)
  assert re.search(naming(folder, first.pid, socket.gethostname(), '--workdir'), text)
  assert '\n' not in text
  first.kill()
  first.communicate(timeout=20)
  assert workdir.is_held(folder) is False
  with lock(folder) as path:  # kill -9 leaves the file, not the lock
    assert path == folder
    (folder / LOCK_FILE).write_bytes(b'\xff')  # a holder's line may be damaged
    with (
      pytest.raises(errors.UserError, match=naming(folder, '--workdir')),
      lock(folder),
    ):
      pass
  # A tool that asks whether the folder is held has the lock for a moment.
  with open(folder / LOCK_FILE) as file:
    fcntl.flock(file, fcntl.LOCK_SH)
    threading.Timer(0.02, fcntl.flock, (file, fcntl.LOCK_UN)).start()
    with lock(folder):
      pass


def test_files_of_a_scheduler_may_be_there_first(tmp_path):
  for name in ('.DS_Store', 'slurm-1.out'):
    (tmp_path / name).touch()
  with lock(tmp_path):
    (tmp_path / 'results').touch()
  with lock(tmp_path):  # the lock's file says that it is a run's
    pass


def test_a_file_system_without_locks_is_reported_and_used(tmp_path, monkeypatch, capfd):
  def refuse(*_):
    raise OSError(errno.ENOTSUP, 'Operation not supported')

  monkeypatch.setattr(workdir.fcntl, 'flock', refuse)
  with lock(tmp_path):
    pass
  assert str(tmp_path) in capfd.readouterr().err


def test_the_state_of_a_killed_run_is_interrupted(tmp_path):
  assert status.state(tmp_path) is None
  with lock(tmp_path):
    status.write(tmp_path, step=3, state='running')
    assert status.state(tmp_path) == 'running'
    with pytest.raises(errors.UserError, match=naming(tmp_path)):
      again(tmp_path)
  assert status.state(tmp_path) == 'interrupted'


# -- a start that fails ----------------------------------------------------------------


TOO_LARGE = errors.OutOfMemory('too large')


@pytest.mark.parametrize(
  ('changes', 'error'),
  [
    (["evals.test.data.split='tset'"], None),
    ([], TOO_LARGE),
    ([], KeyboardInterrupt()),
  ],
  ids=['a split that is not there', 'no memory', 'Ctrl-C'],
)
def test_a_failed_start_leaves_nothing(tmp_path, monkeypatch, changes, error):
  folder = tmp_path / 'runs' / 'run'
  if error:
    compile = mock.Mock(side_effect=error)
    monkeypatch.setattr(run_module.Trainer, 'compile', compile)
  with pytest.raises((errors.RunError, KeyboardInterrupt)):
    again(folder, *changes)
  assert not folder.parent.exists()
  folder.mkdir(parents=True)
  (folder / 'notes').write_text('mine')
  with pytest.raises((errors.RunError, KeyboardInterrupt)):
    again(folder, *changes)
  assert (folder / 'notes').read_text() == 'mine'


def test_a_second_signal_during_the_start_leaves_nothing(tmp_path, monkeypatch):
  folder, ends = tmp_path / 'run', []

  def signals(*_):
    for _ in range(2):
      os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(500):
      if ends:
        break
      time.sleep(0.01)
    raise errors.UserError('the test is over')

  exit_at_once = lambda code: ends.append((code, folder.exists()))
  monkeypatch.setattr(process.os, '_exit', exit_at_once)
  monkeypatch.setattr(run_module.Trainer, 'compile', signals)
  with pytest.raises(errors.UserError, match='the test is over'):
    again(folder)
  assert ends == [(75, False)]


def test_processes_that_see_other_data_are_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(
    run_module.distributed, 'broadcast_first', lambda value: value + 1
  )
  with pytest.raises(errors.UserError, match=naming('digits', 'process 0', '1,437')):
    again(tmp_path / 'run')


def test_noise_is_in_the_log_and_a_later_failure_keeps_the_run(
  finished, capfd, monkeypatch
):
  def noisy(trainer):
    os.write(2, b'Premature end of JPEG file\n')
    raise TOO_LARGE

  before = runs.rows(finished), runs.saved(finished)
  monkeypatch.setattr(run_module.Trainer, 'compile', noisy)
  with pytest.raises(errors.OutOfMemory):
    again(finished, 'steps=6', 'resume_allow=steps')
  out, error = capfd.readouterr()
  assert error == ''
  assert (finished / 'log.txt').read_text() == 'Premature end of JPEG file\n'
  assert 'digits, train: 1,437 images, 10 classes of 133 to 154' in out
  assert 'test: digits, test: 360 images' in out
  assert (runs.rows(finished), runs.saved(finished)) == before
  ended = runs.status(finished)
  assert (ended['state'], ended['exit']) == ('failed', 77)


# -- damaged files -----------------------------------------------------------------------

TEXTS = {
  'empty': b'',
  'NUL': bytes(64),
  'not UTF-8': b'{"step": "\xff\xfe"}',
  'a list': b'[1, 2]',
  'null': b'null',
  'a number': b'3',
  'wrong types': b'{"step": [], "state": 3, "model": 5, "resolved": "x", "evals": 1}',
  'deep': b'[' * 100_000,
}


@pytest.mark.parametrize('damage', ['wrong types', 'gone', 'half'])
def test_a_lost_config_is_that_of_the_checkpoints(finished, capfd, damage):
  path = finished / 'config.json'
  before = path.read_bytes()
  path.write_bytes(TEXTS.get(damage, before[: len(before) // 2]))
  if damage == 'gone':
    path.unlink()
  # For a tool that reads the folder it is one line.
  with pytest.raises(errors.UserError, match=naming(path)) as error:
    config_lib.read(finished)
  assert '\n' not in str(error.value)
  # Other mathematics is still refused, and a run of the same reports its results.
  with pytest.raises(errors.UserError, match=naming('optim.lr', 0.003, 0.5)):
    again(finished, 'optim.lr=0.5')
  capfd.readouterr()
  assert again(finished)[0] == runs.status(finished)
  assert path.read_bytes() == before
  error = capfd.readouterr().err
  assert re.search(naming(path, 'checkpoints'), error)
  assert error.count('\n') == 1


@pytest.mark.parametrize('value', [7, [1]])
@pytest.mark.parametrize(
  'key',
  [
    *('model', 'weights', 'data', 'tune', 'task', 'optim', 'evals', 'evals.test'),
    *('checkpoint', 'resolved', 'model.name', 'resolved.image_shape'),
  ],
)
def test_a_wrong_value_in_config_json_is_named(short_run, tmp_path, key, value):
  config = json.loads((short_run / 'config.json').read_text())
  section, _, name = key.partition('.')
  holder = config[section] if name else config
  holder[name or section] = value
  (tmp_path / 'config.json').write_text(json.dumps(config))
  with pytest.raises(errors.UserError, match=naming(tmp_path, key)):
    config_lib.read(tmp_path)


@pytest.mark.parametrize(
  ('name', 'make'), [('config.json', os.mkdir), ('metrics.jsonl', os.mkfifo)]
)
def test_something_else_in_a_files_place(finished, name, make):
  (finished / name).unlink()
  make(finished / name)
  with pytest.raises(errors.UserError, match=naming(finished / name, '--workdir')):
    again(finished)
  shutil.rmtree(finished / 'checkpoints')
  (finished / 'checkpoints').touch()
  with pytest.raises(errors.UserError, match='--workdir'):
    again(finished)


@pytest.mark.parametrize('text', TEXTS.values(), ids=TEXTS)
def test_damaged_lines_are_left_out(tmp_path, text):
  (tmp_path / 'status.json').write_bytes(text)
  assert status.read(tmp_path) is None
  path = tmp_path / 'metrics.jsonl'
  good = [{'step': 1, 'a': 0.5}, {'step': 2, 'a': 1}]
  first, second = map(metrics.line, good)
  path.write_bytes(first + text + b'\n' + second)
  assert metrics.read_rows(path) == (good, 1)
  path.write_bytes(first + second + second[:6])  # a kill's
  assert metrics.read_rows(path) == (good, 0)
  path.write_bytes(text + b'\n{"path": "x"}')
  assert bad_images.read_log(path) == [{'path': 'x'}]


def test_all_at_once_is_rebuilt(finished, capfd):
  before = runs.status(finished), runs.rows(finished)
  files = [finished / name for name in ('config.json', 'status.json', 'metrics.jsonl')]
  first, *_ = lines = files[2].read_bytes().splitlines(keepends=True)
  for path in files:
    path.write_bytes(TEXTS['not UTF-8'])
  files[2].write_bytes(b''.join([first, b'\xff\n', *lines[2:]]))
  result, _ = again(finished)
  assert (result, runs.status(finished)) == (before[0], before[0])
  assert runs.rows(finished) == [before[1][0], *before[1][2:]]
  error = capfd.readouterr().err
  assert re.search(naming(*files), error)
  assert error.count('\n') == 3
  assert again(finished)[0] == before[0]


# -- every file of a run's folder, damaged in every way: resumed, loaded, inspected ------


CONTENT = {
  'empty': lambda data: b'',
  'half': lambda data: data[: len(data) // 2],
  'flipped': lambda data: data[:-9] + bytes(255 - b for b in data[-9:]),
  'not UTF-8': lambda data: TEXTS['not UTF-8'],
  'another type': lambda data: TEXTS['a list'],
}
IN_ITS_PLACE = {
  'gone': lambda path: None,
  'a folder': os.mkdir,
  'a dangling link': lambda path: path.symlink_to('nowhere'),
}


def damages(folder, tmp_path):
  """Yields (name, damaged copy) for every file, and a folder for every way to damage it.

  Each is damaged in every second way, and files of a step, which tests/checkpoint covers,
  in a few.
  """
  own = [path for path in folder.iterdir() if path.is_file()]
  saved = min((folder / 'checkpoints').iterdir(), key=lambda path: int(path.name))
  below = [path for path in saved.rglob('*') if path.is_file()]
  paths = sorted([*own, saved.parent, saved, saved / 'params', *below])
  for number, path in enumerate(path.relative_to(folder) for path in paths):
    for way, name in enumerate([*CONTENT, *IN_ITS_PLACE]):
      if (folder / path).is_dir() and name in CONTENT:
        continue
      if (way + number) % (5 if len(path.parts) > 3 else 2):
        continue
      copy = shutil.copytree(folder, tmp_path / f'{number} {name}')
      target = copy / path
      if name in CONTENT:
        target.write_bytes(CONTENT[name](target.read_bytes()))
      else:
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        IN_ITS_PLACE[name](target)
      yield f'{path} {name}', copy
      shutil.rmtree(copy)


@pytest.fixture
def met_a_bad_image(finished):
  (finished / 'bad_images.jsonl').write_text('{"path": "x", "error": "y"}\n')
  return finished


@pytest.mark.faults
def test_resume(met_a_bad_image, tmp_path, faults_table, capfd):
  half_done = runs.killed(met_a_bad_image, tmp_path / 'half')
  expected = runs.status(met_a_bad_image), runs.rows(met_a_bad_image)
  for number, (name, folder) in enumerate(damages(half_done, tmp_path)):
    if 'checkpoints/' in name and number % 4:
      continue  # each takes seconds
    capfd.readouterr()
    result = faults_table.tried('run folder: resume', name, lambda f=folder: again(f))
    error = capfd.readouterr().err
    assert 'Traceback' not in error
    same = (runs.status(folder), runs.rows(folder)) == expected if result else True
    if not same and not error:
      faults_table('run folder: resume', name, 'silent')


@pytest.mark.faults
def test_load_and_inspect(met_a_bad_image, tmp_path, faults_table, capsys):
  expected = jax.tree.leaves(vit_jax.load(met_a_bad_image).variables)
  for name, folder in damages(met_a_bad_image, tmp_path):
    load = lambda f=folder: vit_jax.load(f)
    loaded = faults_table.tried('run folder: load', name, load)
    # Where the newest step is damaged, a line says so, and an older one is used.
    if loaded and loaded.step == 4:
      leaves = jax.tree.leaves(loaded.variables)
      if not all(map(jax.numpy.array_equal, leaves, expected)):
        faults_table('run folder: load', name, 'silent')
    look = lambda f=folder: inspect.main([str(f), '--json'])
    faults_table.tried('run folder: inspect', name, look)
