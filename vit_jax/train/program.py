"""The program `vit_jax train`: arguments, run and exit code. Tools that train use it too.

It is quick to import, so that a bad command line ends at once.
"""

import argparse
import contextlib
import hashlib
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

from vit_jax import cli
from vit_jax import config as config_lib
from vit_jax.errors import (
  EXIT_CODES,
  SYNONYMS,
  DataError,
  DiskFull,
  Unreachable,
  UserError,
  nearest,
)
from vit_jax.registry import Registry

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

# Maximum length of the name of a run's folder. A fine-tuned run has its parent's name in its
# own.
_LONGEST = 100
_FLAGS = ('--config', '--workdir', '--distributed')

# Not empty once a write has failed for good, see `run_and_exit`.
_cut_off: list[bool] = []


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict, str]:
  """Returns (arguments, config, workdir); raises UserError for a bad command line."""
  recipes = config_lib.recipes()
  parser = cli.Parser(
    prog='vit_jax train',
    description='Trains and evaluates a model.',
    epilog=_EPILOG.format(
      names=textwrap.fill(', '.join(recipes), 84).replace('\n', '\n  '),
      folder=next(iter(recipes.values())).parent if recipes else 'vit_jax/configs',
      codes='\n'.join(f'{code:5} {meaning}' for code, meaning in EXIT_CODES.items()),
    ),
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
    json=False,
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
  keys = [*config_lib.flat(config), *config_lib.DURATIONS, *SYNONYMS.values()]
  # If several keys end in the same name, the shortest key comes last and wins.
  keys.sort(key=lambda key: -key.count('.'))
  flags = {f'--{key.rpartition(".")[2]}': f'--config.{key}' for key in keys}
  flags |= {name: name for name in _FLAGS}
  name = flag.partition('=')[0]
  # A key may be absent from this config, such as tune.method.
  flags |= {name: f'--config.{name.removeprefix("--")}'} if '.' in name else {}
  near = nearest(name, flags, 0.8)
  return f' Did you mean "{flags[near]}"?' if near else ''


def default_name(spec: str, assignments: list[str]) -> str:
  """Returns the name of a run's folder: 'vit_b16-debug' for 'configs/vit_b16.py:debug'."""
  file, _, arg = spec.partition(':')
  # Assignments that may change when a run is continued are not part of its name.
  words = [w for w in assignments if not w.startswith(('resume_allow', 'log.'))]
  return folder_name([Path(file).stem, *arg.split(','), *words])


def folder_name(words: Iterable[str]) -> str:
  """Joins the words 'a' and 'b=1' to 'a-b=1'; a long name is cut and ends in a hash."""
  name = '-'.join(word for word in words if word)
  if len(name) > _LONGEST:
    digest = hashlib.sha256(name.encode('utf-8', 'surrogateescape')).hexdigest()[:8]
    name = f'{name[: _LONGEST - 9]}-{digest}'
  return re.sub(r'[^A-Za-z0-9._=+-]+', '_', name)


def import_option(spec: str) -> str:
  """Returns ' --import FILE.py' if the config's file has registered an entry, or ''."""
  file = spec.partition(':')[0]
  return f' --import {file}' if Registry.extended and file.endswith('.py') else ''


def train(
  config: dict, workdir: str | os.PathLike, command: str, spec: str
) -> tuple[dict, list[dict]]:
  """Runs `run.train` with the compilation cache, and returns its (status, rows).

  Args:
    spec: 'NAME:ARGS' of the config. If its data is missing, the error suggests the recipe's
      `debug`, provided that it uses other data.
  """
  from vit_jax.train import run, runtime

  runtime.enable_compilation_cache()
  try:
    return run.train(config, workdir, command)
  except (DiskFull, Unreachable):
    _cut_off.append(True)
    raise
  except DataError as error:
    text, debug = str(error), f'{spec.partition(":")[0]}:debug'
    # A user's config file may not know the word `debug`.
    with contextlib.suppress(Exception):
      if config_lib.load(debug)['data']['source'] != config['data']['source']:
        # The text ends without a full stop, because that would be copied with the command.
        text = (
          f'{text.rstrip(".")}. Meanwhile, the same recipe, shrunk, on bundled data: '
          f'vit_jax train --config={debug}'
        )
    raise DataError(text) from error


def run_and_exit(main: Callable[[list[str]], int]) -> NoReturn:
  """Runs a command that trains, and ends the process with its exit code; see `cli.run`."""
  # Silences TensorFlow's messages at startup.
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  code = cli.run(main)
  if _cut_off:
    # Orbax's threads may wait forever for a file that could not be written.
    sys.stdout.flush()
    os._exit(code)
  sys.exit(code)
