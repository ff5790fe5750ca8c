"""How every command ends."""

import errno
import os
import re
import subprocess
import sys

import pytest
from PIL import Image

from tests.support import naming, runs
from vit_jax import cli, errors
from vit_jax.tools import predict

CODE = """
import sys
from vit_jax import cli
def main(argv):
  for i in range(int(argv[0])):
    print('line', i, flush=argv[1] == 'flush')
  return 0
sys.exit(cli.run(main))
"""


@pytest.mark.parametrize(('lines', 'how'), [(100_000, ''), (3, ''), (3, 'flush')])
def test_nobody_reads_on(lines, how):
  """As in `inspect ... | head`: many lines, or a few that are buffered until the end."""
  read, write = os.pipe()
  args = [sys.executable, '-c', CODE, str(lines), how]
  process = subprocess.Popen(
    args, stdout=write, stderr=subprocess.PIPE, text=True, cwd=runs.ROOT
  )
  os.close(write)
  if lines > 3:
    assert os.read(read, 4) == b'line'
  os.close(read)
  _, error = process.communicate(timeout=60)
  assert (process.returncode, error) == (141, '')


def test_a_stop_is_no_error(capsys):
  def main(argv):
    raise errors.Preempted('Stopped at step 3 of 9.')

  assert cli.run(main, []) == 75
  assert capsys.readouterr().err == 'Stopped at step 3 of 9.\n'


def test_another_pipe_is_another_matter(capsys):
  def main(argv):
    raise BrokenPipeError

  with pytest.raises(BrokenPipeError):
    cli.run(main, [])


def test_a_full_disk_is_one_line(tmp_path, capsys):
  def main(argv):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), argv[0])

  assert cli.run(main, ['model.npz']) == 74
  line = capsys.readouterr().err
  assert line.count('\n') == 1
  assert 'model.npz' in line


def test_a_name_that_is_not_utf8_can_be_printed(tmp_path, capsys):
  name = os.fsdecode(os.fsencode(tmp_path) + b'/caf\xe9.png')
  Image.new('L', (8, 8)).save(tmp_path / 'x.png')
  os.rename(tmp_path / 'x.png', name)
  assert cli.run(lambda argv: print(predict.find(argv)[0]) or 0, [name]) == 0
  assert re.search(naming('caf\\udce9.png'), capsys.readouterr().out)
