"""A disk that fills up during any write: one line, exit code 74, older files intact."""

import errno
import logging
import os
import re
import resource

import pytest

from tests.support import naming, runs
from vit_jax import errors, files
from vit_jax.train import disk, metrics, status

pytestmark = pytest.mark.usefixtures('one_device')


@pytest.fixture
def half_done(short_run, tmp_path):
  return runs.killed(short_run, tmp_path / 'run')


def fill(monkeypatch, name: str, after: int) -> None:
  """Lets a file of that name take `after` writes and half of the next, then no more."""
  write, sync, count = os.write, os.fsync, [0]

  def is_full(file) -> bool:
    if not os.path.basename(os.readlink(f'/proc/self/fd/{file}')).startswith(name):
      return False
    count[0] += 1
    return count[0] > after

  def write_until_full(file, data):
    if not is_full(file):
      return write(file, data)
    if len(data) > 1 and count[0] == after + 1:
      return write(file, data[: len(data) // 2])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  def sync_unless_full(file):
    if is_full(file):
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    sync(file)

  monkeypatch.setattr(disk.os, 'write', write_until_full)
  monkeypatch.setattr(disk.os, 'fsync', sync_unless_full)


@pytest.mark.parametrize(
  ('name', 'after'),
  [
    pytest.param('config.json', 0, marks=pytest.mark.slow),
    pytest.param('metrics.jsonl', 1, marks=pytest.mark.slow),
    pytest.param('status.json', 1, marks=pytest.mark.slow),
  ],
)
def test_a_full_disk_costs_nothing_but_the_file(
  short_run, half_done, monkeypatch, name, after, faults_table
):
  config = (half_done / 'config.json').read_bytes()
  with monkeypatch.context() as patch:
    fill(patch, name, after)
    with pytest.raises(errors.DiskFull, match=naming('Disk full', half_done)) as error:
      runs.run(half_done, *runs.SHORT)
  assert '\n' not in str(error.value)
  said = runs.status(half_done)  # also where no new file has room
  assert (said['state'], said['exit']) == ('failed', 74)
  assert said['error'] == str(error.value)
  assert said['last_good_step'] >= 2
  assert (half_done / 'config.json').read_bytes() == config
  assert not list(half_done.glob('*.tmp'))
  runs.run(half_done, *runs.SHORT)  # there is room again
  assert runs.status(half_done) == runs.status(short_run)
  assert runs.rows(half_done) == runs.rows(short_run)
  faults_table('disk full', f'in {name}', 'refused', said['error'])


def test_tensorboard_has_no_room(half_done, monkeypatch, faults_table):
  class Full:
    def write_scalars(self, step, values):
      raise RuntimeError(f'events.out.tfevents: No space left on device\n\tstep {step}')

    def close(self):
      self.write_scalars(0, {})

  monkeypatch.setattr(metrics, '_tensorboard', lambda workdir: Full())
  with pytest.raises(errors.DiskFull, match=naming('events.out.tfevents')) as error:
    runs.run(half_done, *runs.SHORT, 'log.tensorboard=True')
  assert '\n' not in str(error.value)
  assert runs.status(half_done)['exit'] == 74
  faults_table('disk full', 'in TensorBoard events', 'refused', str(error.value))


def test_a_limit_of_the_kernel(tmp_path, faults_table):
  # Not faked: the largest file that this process may write.
  path, old = tmp_path / 'a.json', b'{"old": 1}' + b' ' * 500
  files.replace(path, old)
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
  try:
    with pytest.raises(errors.DiskFull) as error, disk.full_raises_disk_full(tmp_path):
      files.replace(path, bytes(2000))
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ['a.json']
    disk.overwrite(path, b'{"new": 1}')
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert re.search(naming(os.strerror(errno.EFBIG), tmp_path), str(error.value))
  assert path.read_bytes() == b'{"new": 1}'
  faults_table('disk full', 'the largest file allowed', 'refused', str(error.value))


def test_what_threads_meet_after_the_first_is_not_said(caplog):
  log = logging.getLogger('asyncio')
  log.error(
    'never retrieved', exc_info=OSError(errno.ENOSPC, 'No space left on device')
  )
  assert caplog.records == []
  log.error('never retrieved', exc_info=ValueError('of another kind'))
  assert len(caplog.records) == 1


def test_other_errors_are_not_a_full_disk(tmp_path):
  with pytest.raises(ZeroDivisionError), disk.full_raises_disk_full(tmp_path):
    raise ZeroDivisionError
  with pytest.raises(PermissionError), disk.full_raises_disk_full(tmp_path):
    raise PermissionError(errno.EACCES, 'no')
  assert status.read(tmp_path) is None
