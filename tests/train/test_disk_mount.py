"""File systems that are really full, of bytes or inodes, before a run or in the middle of it.

They are small and in memory, and only root may mount them; test_disk_full fakes the same.
"""

import os
import re

import pytest

from tests.support import naming, runs
from tests.train.test_resume import reference, same_as, shared  # noqa: F401

pytestmark = pytest.mark.faults


def fill(path) -> None:
  """Fills the file system that holds `path`."""
  with open(path, 'wb', 0) as file:
    try:
      for size in (1 << 16, 1 << 12, 1):
        while True:
          if file.write(bytes(size)) < size:
            break
    except OSError:
      pass


def ended(process) -> str:
  """Returns the line of a process that ended because the disk is full."""
  code, _, error = process.end()
  assert code == 74, error
  last = error.splitlines()[-1]
  assert last.startswith('error: Disk full'), error
  assert 'Traceback' not in error
  return last


@pytest.mark.parametrize('options', ['size=64k', 'size=20m,nr_inodes=12'])
def test_no_room_from_the_start(options, mount_tmpfs, shared, faults_table):  # noqa: F811
  workdir = mount_tmpfs(options)
  process = runs.Process(*runs.flags(), f'--workdir={workdir}', **shared)
  line = ended(process)
  assert re.search(naming(workdir), line)
  faults_table('disk full', f'mounted with {options}', 'refused', line)


@pytest.mark.parametrize('what', ['bytes', 'inodes'])
def test_full_in_the_middle(
  what,
  mount_tmpfs,
  reference,  # noqa: F811
  shared,  # noqa: F811
  faults_table,
):
  workdir = mount_tmpfs('size=20m,nr_inodes=1500') / 'run'
  arguments = [*runs.flags(), f'--workdir={workdir}']
  process = runs.Process(*arguments, **shared)
  process.until_step(12)  # the save at 10 has waited for that at 5
  room = workdir.parent / 'others'
  room.mkdir()
  if what == 'bytes':
    fill(room / 'file')
  else:
    while os.statvfs(room).f_favail:
      (room / f'{os.statvfs(room).f_favail}').touch()
  line = ended(process)
  assert runs.status(workdir)['exit'] == 74
  assert runs.status(workdir)['last_good_step'] >= 5
  faults_table('disk full', f'of {what}, in the middle', 'refused', line)
  for path in room.iterdir():
    path.unlink()
  code, _, error = runs.Process(*arguments, **shared).end()
  assert (code, error) == (0, '')
  same_as(reference, workdir)
  faults_table('disk full', f'of {what}, then there is room', 'handled')
