"""Library noise goes to a file; messages to the user and crashes stay on the terminal."""

import faulthandler
import os
import sys
import time
import warnings
from types import SimpleNamespace

import pytest

from tests.support import commands
from vit_jax import distributed, errors, terminal
from vit_jax.tools import predict

CODE = """
import os, sys, warnings
from vit_jax import terminal
with terminal.noise_to(sys.argv[1]):
  os.write(2, b'noise\\n')
  os.system('echo child >&2')
  print('python', file=sys.stderr)
  warnings.warn('careful')
  terminal.say('said')
  if sys.argv[2] == 'abort':
    os.abort()
  if sys.argv[2] == 'raise':
    raise KeyError('raised')
os.write(2, b'after\\n')
print('python after', file=sys.stderr)
"""


@pytest.mark.parametrize('end', ['well', 'raise', 'abort'])
def test_in_a_process(tmp_path, end):
  done = commands.python('-c', CODE, tmp_path / 'log', end)
  assert (tmp_path / 'log').read_text() == 'noise\nchild\n'
  error = done.stderr
  assert 'noise' not in error
  assert error.index('python') < error.index('careful') < error.index('said')
  if end == 'well':
    assert done.returncode == 0
    assert error.endswith('said\nafter\npython after\n')
  if end == 'raise':
    assert error.endswith("KeyError: 'raised'\n")
  if end == 'abort':
    assert 'Fatal Python error: Aborted' in error
    assert 'in <module>' in error


def test_under_tests_and_in_notebooks(tmp_path, capfd):
  stream, enabled = sys.stderr, faulthandler.is_enabled()
  files = len(os.listdir('/proc/self/fd'))
  with pytest.raises(ZeroDivisionError), terminal.noise_to(tmp_path / 'log'):  # noqa: PT012
    os.write(2, b'noise\n')
    print('python', file=sys.stderr)
    distributed.say('said caf\udce9')
    with warnings.catch_warnings(), terminal.noise_to(tmp_path / 'inner'):
      os.write(2, b'more\n')
      terminal.say('inner')
    os.write(2, b'noise\n')
    raise ZeroDivisionError
  os.write(2, b'after\n')
  assert capfd.readouterr().err == 'python\nsaid caf\\udce9\ninner\nafter\n'
  assert (tmp_path / 'log').read_text() == 'noise\nnoise\n'
  assert (tmp_path / 'inner').read_text() == 'more\n'
  assert (sys.stderr, faulthandler.is_enabled()) == (stream, enabled)
  assert len(os.listdir('/proc/self/fd')) == files


def test_progress_is_a_line_now_and_then(capfd):
  numbers = terminal.progress(range(3), 3, 'photos, val', 'batches', every=0.02)
  assert next(numbers) + next(numbers) == 1
  time.sleep(0.1)
  assert 'photos, val: 1 of 3 batches' in capfd.readouterr().err
  numbers.close()
  time.sleep(0.05)
  capfd.readouterr()
  time.sleep(0.05)
  assert capfd.readouterr().err == ''
  assert list(terminal.progress(range(3), None, 'a', 'b', quiet=True)) == [0, 1, 2]


def test_names_cannot_move_the_cursor_or_look_like_lines(capsys):
  assert errors.printable('a\x1b[2J\nb\u202e\udce9') == r'a\x1b[2J\nb\u202e\udce9'
  image = {'path': 'a\nb.png', 'top': [{'name': 'cat\x1b]0;\7', 'probability': 0.5}]}
  args, loaded = SimpleNamespace(json=False, source='a'), SimpleNamespace(step=None)
  predict.finish(args, loaded, [image], predict._lines)
  assert capsys.readouterr().out.splitlines() == [
    'a\\nb.png',
    '   50.0 %  cat\\x1b]0;\\x07',
  ]
