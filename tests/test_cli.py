"""How every command ends."""

import errno
import os
import re
import subprocess
import sys
from unittest import mock

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


@pytest.mark.parametrize(
  ('error', 'code', 'line'),
  [
    (errors.Preempted('Stopped at step 3 of 9.'), 75, 'Stopped at step 3 of 9.'),
    (
      OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), 'a.npz'),
      74,
      "error: .*'a.npz'.*",
    ),
    (OSError(errno.ENAMETOOLONG, 'too long', 'a' * 5000), 2, r'error: .*aaa\.\.\.\.'),
  ],
)
def test_an_error_is_one_line(error, code, line, capsys):
  assert cli.run(mock.Mock(side_effect=error), []) == code
  assert re.fullmatch(f'{line}\n', capsys.readouterr().err)


def test_another_pipe_is_another_matter():
  with pytest.raises(BrokenPipeError):
    cli.run(mock.Mock(side_effect=BrokenPipeError), [])


def test_json_has_no_infinities(capsys):
  cli.print_json({'a': [float('nan'), 1.5], 'b': {'c': -float('inf')}})
  assert capsys.readouterr().out == '{"a": [null, 1.5], "b": {"c": null}}\n'


def test_a_name_that_is_not_utf8_can_be_printed(tmp_path, capsys):
  name = os.fsdecode(os.fsencode(tmp_path) + b'/caf\xe9.png')
  Image.new('L', (8, 8)).save(tmp_path / 'x.png')
  os.rename(tmp_path / 'x.png', name)
  assert cli.run(lambda argv: print(predict.find_images(argv)[0]) or 0, [name]) == 0
  assert re.search(naming('caf\\udce9.png'), capsys.readouterr().out)


def test_fields_are_parsed_as_overrides_of_a_config():
  parser = cli.Parser()
  parser.add_argument('--set', action=cli.Fields)
  args = parser.parse_args(['--set', 'a=true', '--set', 'b=(1, 2)', '--set', 'c=x'])
  assert args.set == {'a': True, 'b': [1, 2], 'c': 'x'}
