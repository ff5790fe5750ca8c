"""The command line of `vit_jax.main`."""

import argparse
import contextlib
import difflib
import hashlib
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from vit_jax import cli
from vit_jax import config as config_lib
from vit_jax.errors import EXIT_CODES, UserError, did_you_mean

_EPILOG = """\
NAME is one of
  {names}
of {folder}; copy a file to change it.
FILE.py is executed: it is code. ARGS are its arguments, KEY=VALUE,...; the word
`debug` stands for the recipe shrunk to seconds on bundled data. --config.KEY=VALUE sets
any key of the resolved config (--config.optim.lr=3e-4); a bare --config.KEY means True.
The same command again resumes where the run stopped.
Exit codes:
{codes}"""

# Longest name of a run's folder: a fine-tuned run's name contains its parent's.
_LONGEST = 100

_FLAGS = ('--config', '--workdir', '--distributed')


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict, str]:
  """Returns (arguments, config, workdir); UserError for a bad command line."""
  parser = cli.Parser(
    prog='vit_jax train',
    description='Trains and evaluates a model.',
    epilog=_epilog(),
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument('--config', required=True, metavar='NAME|FILE.py[:ARGS]')
  parser.add_argument(
    '--workdir', metavar='DIR', help='default: runs/<config and arguments>'
  )
  parser.add_argument(
    '--distributed',
    nargs='?',
    const='auto',
    metavar='HOST:PORT,COUNT,INDEX',
    help='one of several processes; without a value: as the cluster says',
  )
  args, rest = parser.parse_known_args(argv)
  config = config_lib.load(args.config)
  for flag in rest:
    if not flag.startswith('--config.'):
      raise UserError(
        f'Unknown argument {flag!r}: {", ".join(_FLAGS)} or --config.KEY=VALUE (with '
        f'"=").{_did_you_mean(flag, config)}'
      )
  assignments = [flag.removeprefix('--config.') for flag in rest]
  config_lib.override(config, assignments)
  workdir = args.workdir or f'runs/{default_name(args.config, assignments)}'
  return args, config, workdir


def _did_you_mean(flag: str, config: dict) -> str:
  """Returns ' Did you mean "--config.data.batch_size"?' for '--batch_size=64', or ''."""
  word = flag.partition('=')[0]
  if near := did_you_mean(word, _FLAGS):
    return near
  keys = [*_keys(config), *config_lib.DURATIONS]
  keys.sort(key=lambda key: -key.count('.'))  # of one name, the shortest wins
  by_name = {f'--{key.rpartition(".")[2]}': key for key in keys}
  near = difflib.get_close_matches(word, by_name, 1, cutoff=0.8)
  return f' Did you mean "--config.{by_name[near[0]]}"?' if near else ''


def _keys(config: dict, prefix: str = '') -> Iterator[str]:
  """Yields 'a.b' for each value of nested dicts."""
  for key, value in config.items():
    nested = isinstance(value, dict)
    yield from _keys(value, f'{prefix}{key}.') if nested else [f'{prefix}{key}']


def _epilog() -> str:
  recipes = config_lib.recipes()
  return _EPILOG.format(
    names=textwrap.fill(', '.join(recipes), 84).replace('\n', '\n  '),
    folder=next(iter(recipes.values())).parent if recipes else 'vit_jax/configs',
    codes='\n'.join(f'{code:5} {meaning}' for code, meaning in EXIT_CODES.items()),
  )


def default_name(spec: str, assignments: list[str]) -> str:
  """Returns the run's folder name: 'vit_b16-debug' for 'configs/vit_b16.py:debug'."""
  file, _, arg = spec.partition(':')
  # A change that a continuation may have does not make another run.
  words = [w for w in assignments if not w.startswith(('resume_allow', 'log.'))]
  return folder_name([Path(file).stem, *arg.split(','), *words])


def folder_name(words: Iterable[str]) -> str:
  """Returns 'a-b=1' for the words 'a' and 'b=1', as the name of a folder.

  A long name is cut, and ends in a hash of the whole.
  """
  name = '-'.join(word for word in words if word)
  if len(name) > _LONGEST:
    digest = hashlib.sha256(name.encode('utf-8', 'surrogateescape')).hexdigest()[:8]
    name = f'{name[: _LONGEST - 9]}-{digest}'
  return re.sub(r'[^A-Za-z0-9._=+-]+', '_', name)


def without_data(spec: str, config: dict) -> str:
  """Returns a command that needs no data of the user's, or ''."""
  debug = f'{spec.partition(":")[0]}:debug'
  with contextlib.suppress(Exception):  # a config of the user's may not know the word
    if config_lib.load(debug)['data']['source'] != config['data']['source']:
      return f'the same recipe, shrunk, on bundled data: vit_jax train --config={debug}'
  return ''
