"""A failed start leaves nothing behind in a new folder; a successful one prints no noise."""

import os
import signal
import time

import pytest

from tests.support import naming, runs
from vit_jax import errors
from vit_jax.train import folder, preemption, start
from vit_jax.train import run as run_module

SHORT = ('steps=2', 'optim.schedule.warmup=1', 'checkpoint.every=1')


pytestmark = pytest.mark.usefixtures('one_device')


def too_large(*_):
  raise errors.OutOfMemory('too large')


def raise_keyboard_interrupt(*_):
  raise KeyboardInterrupt


FAILURES = {
  'data that are not there': dict(change='data.source=folder:/no/such'),
  'a split that is not there': dict(change="evals.test.data.split='tset'"),
  'no memory': dict(patch=(run_module, 'compile_step', too_large)),
  'Ctrl-C': dict(patch=(run_module, 'make_step', raise_keyboard_interrupt)),
}


LATER = ('Ctrl-C',)  # test_a_second_signal_during_the_start_leaves_nothing goes further


@pytest.mark.parametrize(
  'name',
  [pytest.param(n, marks=pytest.mark.slow if n in LATER else ()) for n in FAILURES],
)
def test_a_failed_start_leaves_nothing(tmp_path, monkeypatch, name):
  failure, workdir = FAILURES[name], tmp_path / 'runs' / 'deep' / 'run'
  if 'patch' in failure:
    monkeypatch.setattr(*failure['patch'])
  changes = [*SHORT, *([failure['change']] if 'change' in failure else [])]
  with pytest.raises((errors.RunError, KeyboardInterrupt)):
    runs.run(workdir, *changes)
  assert os.listdir(tmp_path) == []
  # Others' runs stay.
  (tmp_path / 'runs' / 'other').mkdir(parents=True)
  with pytest.raises((errors.RunError, KeyboardInterrupt)):
    runs.run(workdir, *changes)
  assert os.listdir(tmp_path / 'runs') == ['other']


def test_what_was_there_stays(tmp_path):
  (tmp_path / 'notes').write_text('mine')
  with pytest.raises(errors.UserError):
    runs.run(tmp_path, 'data.source=folder:/no/such')
  assert (tmp_path / 'notes').read_text() == 'mine'


def test_a_second_signal_during_the_start_leaves_nothing(tmp_path, monkeypatch):
  workdir, left = tmp_path / 'run', []

  def exit_at_once(code):
    left.append((code, workdir.exists()))

  def signals(*_):
    for _ in range(2):
      os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(500):
      if left:
        break
      time.sleep(0.01)
    raise errors.UserError('the test is over')

  monkeypatch.setattr(preemption.os, '_exit', exit_at_once)
  monkeypatch.setattr(run_module, 'make_step', signals)
  with pytest.raises(errors.UserError, match='the test is over'):
    runs.run(workdir, *SHORT)
  assert left == [(75, False)]


def test_a_refused_second_run_removes_nothing(tmp_path):
  made = folder.missing(tmp_path / 'a' / 'b')
  assert [p.name for p in made] == ['b', 'a']
  assert folder.missing(tmp_path) == []
  workdir = tmp_path / 'run'
  with run_module.lock(workdir), pytest.raises(errors.UserError, match=naming(workdir)):
    runs.run(workdir, *SHORT)
  assert workdir.exists()


def test_processes_that_see_other_data_are_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(start.distributed, 'from_first', lambda value: value + 1)
  with pytest.raises(errors.UserError, match=naming('digits', 'process 0', '1,437')):
    runs.run(tmp_path / 'run', *SHORT)


@pytest.mark.slow
def test_noise_is_in_the_log(tmp_path, capfd, monkeypatch):
  make_step = run_module.make_step

  def noisy(*args):
    os.write(2, b'Premature end of JPEG file\n')
    return make_step(*args)

  with monkeypatch.context() as patch:
    patch.setattr(run_module, 'make_step', noisy)
    runs.run(tmp_path, *SHORT)
  out, error = capfd.readouterr()
  assert 'JPEG' not in error
  assert (tmp_path / 'log.txt').read_text() == 'Premature end of JPEG file\n'
  assert 'digits, train: 1,437 images, 10 classes of 133 to 154' in out
  assert 'test: digits, test: 360 images' in out
  # Nothing to say, no file.
  (tmp_path / 'log.txt').unlink()
  runs.run(tmp_path, *SHORT)
  assert not (tmp_path / 'log.txt').exists()
  # What a run wrote stays when its next start fails.
  before = runs.rows(tmp_path)
  monkeypatch.setattr(run_module, 'compile_step', too_large)
  with pytest.raises(errors.OutOfMemory):
    runs.run(tmp_path, *SHORT[1:], 'steps=3', "resume_allow=('steps',)")
  assert runs.rows(tmp_path) == before
  assert runs.saved(tmp_path)
  assert runs.status(tmp_path)['exit'] == 77
