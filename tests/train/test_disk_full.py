"""A disk that fills up during any write: one line, exit code 74, older files intact.

Faked in this process, and on small file systems in memory, which only root may mount.
"""

import contextlib
import errno
import os
import re
import resource

import pytest

from tests.support import naming, runs
from vit_jax import errors, files
from vit_jax.train.workdir import explain_errors

pytestmark = pytest.mark.usefixtures('one_device')


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

  monkeypatch.setattr(os, 'write', write_until_full)
  monkeypatch.setattr(os, 'fsync', sync_unless_full)


@pytest.mark.parametrize(
  ('name', 'after'),
  [
    ('metrics.jsonl', 1),
    pytest.param('config.json', 0, marks=pytest.mark.faults),
    pytest.param('status.json', 1, marks=pytest.mark.faults),
  ],
)
def test_a_full_disk_costs_nothing_but_the_file(
  short_run, tmp_path, monkeypatch, name, after, faults_table
):
  half_done = runs.killed(short_run, tmp_path / 'run')
  config = (half_done / 'config.json').read_bytes()
  with monkeypatch.context() as patch:
    fill(patch, name, after)
    with pytest.raises(errors.DiskFull, match=naming('Disk full', half_done)) as error:
      runs.run(half_done, *runs.SHORT)
  assert '\n' not in str(error.value)
  if name != 'status.json':
    ended = runs.status(half_done)
    assert (ended['state'], ended['exit']) == ('failed', 74)
    assert ended['error'] == str(error.value)
    assert ended['last_good_step'] >= 2
  assert (half_done / 'config.json').read_bytes() == config
  assert not list(half_done.glob('*.tmp'))
  runs.run(half_done, *runs.SHORT)  # there is room again
  assert runs.status(half_done) == runs.status(short_run)
  assert runs.rows(half_done) == runs.rows(short_run)
  faults_table('disk full', f'in {name}', 'refused', str(error.value))


def test_a_limit_of_the_kernel(tmp_path, faults_table):
  # Not faked: the largest file that this process may write.
  path, old = tmp_path / 'a.json', b'{"old": 1}' + b' ' * 500
  files.replace(path, old)
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
  try:
    with pytest.raises(errors.DiskFull) as error, explain_errors(tmp_path):
      files.replace(path, bytes(2000))
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ['a.json']
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert re.search(naming(os.strerror(errno.EFBIG), tmp_path), str(error.value))
  faults_table('disk full', 'the largest file allowed', 'refused', str(error.value))


def test_a_reader_has_the_old_file_or_the_new_one_whole(tmp_path):
  path = tmp_path / 'a.json'
  files.replace(path, 'old')
  with open(path) as reader:  # its file is replaced, not rewritten
    files.replace(path, lambda file: file.write(path.read_bytes() + b', then new'))
    assert reader.read() == 'old'
  assert path.read_text() == 'old, then new'


def test_other_errors_are_not_a_full_disk(tmp_path):
  with pytest.raises(PermissionError), explain_errors(tmp_path):
    raise PermissionError(errno.EACCES, 'no')


# -- mounted ------------------------------------------------------------------------


def ended(process) -> str:
  """Returns the line of a process that ended because the disk is full."""
  code, _, error = process.end()
  assert code == 74, error
  *_, last = error.splitlines()
  assert last.startswith('error: Disk full'), error
  assert 'Traceback' not in error
  return last


@pytest.mark.faults
@pytest.mark.parametrize('options', ['size=64k', 'size=20m,nr_inodes=12'])
def test_no_room_from_the_start(options, mount_tmpfs, faults_table):
  workdir = mount_tmpfs(options)
  line = ended(runs.Process(*runs.flags(), f'--workdir={workdir}'))
  assert re.search(naming(workdir), line)
  faults_table('disk full', f'mounted with {options}', 'refused', line)


@pytest.mark.faults
@pytest.mark.parametrize('resource', ['bytes', 'inodes'])
def test_full_in_the_middle(resource, mount_tmpfs, reference, faults_table):
  workdir = mount_tmpfs('size=20m,nr_inodes=1500') / 'run'
  arguments = [*runs.flags(), f'--workdir={workdir}']
  process = runs.Process(*arguments)
  process.until_step(12)  # the save at 10 has waited for that at 5
  room = workdir.parent / 'others'
  room.mkdir()
  with contextlib.suppress(OSError):
    while resource == 'inodes':
      (room / f'{os.statvfs(room).f_favail}').touch()
    with open(room / 'file', 'wb', 0) as file:
      while file.write(bytes(1 << 12)) == 1 << 12:
        pass
  line = ended(process)
  assert runs.status(workdir)['last_good_step'] >= 5
  faults_table('disk full', f'of {resource}, in the middle', 'refused', line)
  for path in room.iterdir():
    path.unlink()
  code, _, error = runs.Process(*arguments).end()
  assert (code, error) == (0, '')
  runs.assert_same(reference, workdir)
  faults_table('disk full', f'of {resource}, then there is room', 'handled')
