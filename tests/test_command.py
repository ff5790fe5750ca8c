"""The command `vit_jax` itself; each subcommand has tests of its own."""

import re
import sys

import pytest

from tests.support import commands, naming
from vit_jax import __main__ as command


def test_help_lists_all_commands_without_their_imports():
  code = (
    'import sys; from vit_jax.__main__ import main; main(["--help"]); '
    'print(*sys.modules, file=sys.stderr)'
  )
  done = commands.python('-c', code)
  assert re.findall(r'^  (\w+) ', done.stdout, re.M) == list(command.COMMANDS)
  modules = set(done.stderr.split())
  assert 'vit_jax.cli' in modules
  heavy = {'numpy', 'jax', 'ml_collections', 'vit_jax.main', 'vit_jax.tools'}
  assert not modules & heavy


@pytest.mark.parametrize(
  ('argv', 'facts'),
  [
    (['trian'], ("'trian'", 'train', 'doctor')),
    (['--config=digits'], ("'--config=digits'", 'train')),
  ],
)
def test_an_unknown_command(argv, facts, capsys):
  assert command.main(argv) == 2
  assert re.search(naming(*facts), commands.one_line(capsys.readouterr().err))


def test_no_command_shows_the_help_and_fails(capsys):
  assert command.main([]) == 2
  out, err = capsys.readouterr()
  assert not out
  assert err.startswith('usage: vit_jax COMMAND')


@pytest.mark.filterwarnings('ignore:.*found in sys.modules:RuntimeWarning')
@pytest.mark.parametrize('name', ['train', 'inspect'])
def test_a_command_is_its_module(name, capsys, monkeypatch):
  # As `python -m` ends after a bad argument: one line, exit code 2.
  monkeypatch.setattr(sys, 'argv', ['vit_jax'])
  with pytest.raises(SystemExit, match='2'):
    command.main([name, '--nonsense'])
  assert f'(see vit_jax {name} --help)' in capsys.readouterr().err
