"""Shared by all commands: one-line errors, exit codes, arguments and JSON output."""

import argparse
import errno
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

from vit_jax import terminal
from vit_jax.errors import (
  DiskFull,
  Interrupted,
  Preempted,
  RunError,
  UserError,
  did_you_mean,
  disk_is_full,
  one_line,
  printable,
)

INTERRUPTED = 'interrupted.'
# The exit code after SIGPIPE, 128 + 13, as programs in C have it.
_NO_READER = 141


def exit_on_interrupt() -> None:
  """From now on, Ctrl-C prints one line and exits.

  During an import, C extensions would turn an exception into errors of their own.
  """
  import signal

  def leave(number, frame):
    terminal.say(INTERRUPTED)
    os._exit(Interrupted.exit_code)

  signal.signal(signal.SIGINT, leave)


class Parser(argparse.ArgumentParser):
  """Parses a command's arguments, --import and --json. A mistake raises UserError."""

  def __init__(self, *args, json: bool = True, **options):
    super().__init__(*args, **options)
    if json:
      text = 'one JSON object instead of the text'
      self.add_argument('--json', action='store_true', help=text)
    text = 'a file that registers losses, ops, ... of your own, such as your config'
    self.add_argument('--import', action=_Import, metavar='FILE.py', help=text)

  def error(self, message: str) -> NoReturn:
    _, found, unknown = message.partition('unrecognized arguments: ')
    if found:
      flags = [flag for action in self._actions for flag in action.option_strings]
      message += f'.{did_you_mean(re.split("[ =]", unknown)[0], flags)}'
    raise UserError(f'{message} (see {self.prog} --help)')


class _Import(argparse.Action):
  """Executes a file, so that the command knows the names that the file registers."""

  def __call__(self, parser, namespace, file, flag=None):
    from vit_jax import config

    config.execute(file)


def count(text: str, least: int = 0) -> int:
  """Parses an argument as an integer of `least` or more; '303e6' is an integer."""
  try:
    value = float(text)
  except ValueError:
    value = -1.0
  if not value.is_integer() or value < least:
    raise argparse.ArgumentTypeError(f'{text!r} is not an integer of {least} or more')
  return int(value)


def positive(text: str) -> int:
  """Parses an argument as an integer of 1 or more."""
  return count(text, 1)


def resolution(text: str) -> tuple[int, int]:
  """Parses an argument '224' or '224x160' as (height, width) in pixels."""
  height, _, width = text.partition('x')
  return positive(height), positive(width or height)


def words(allowed: Sequence[str]) -> Callable[[str], list[str]]:
  """Returns an argparse type: a comma-separated list of some of the allowed words."""

  def parse(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(',')))
    for name in names:
      if name not in allowed:
        hint = did_you_mean(name, allowed)
        raise argparse.ArgumentTypeError(f'{name!r} is not one of {allowed}.{hint}')
    return names

  return parse


class Fields(argparse.Action):
  """Collects the KEY=VALUEs of a repeated flag in a dict; values are literals or text."""

  def __init__(self, option_strings, dest, **options):
    super().__init__(option_strings, dest, default={}, metavar='KEY=VALUE', **options)

  def __call__(self, parser, namespace, setting, flag=None):
    key, equals, value = setting.partition('=')
    if not equals:
      parser.error(f'{flag} {setting}: write KEY=VALUE')
    from vit_jax import config

    fields = {**getattr(namespace, self.dest), key: config.literal(value)}
    setattr(namespace, self.dest, fields)


def refuse(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
  """Raises UserError with the text '--NAME why.' if one of these options is set."""
  for name in names:
    if getattr(args, name, None) not in (None, {}):
      raise UserError(f'--{name} {why}.')


def run(main: Callable[[list[str]], int], argv: list[str] | None = None) -> int:
  """Runs `main`, by default with the arguments of this process, and returns the exit code.

  Prints `RunError`, a full disk and Ctrl-C as one line; raises other errors. Ends quietly
  when nobody reads the output any more (`inspect ... | head`).
  """
  if hasattr(sys.stdout, 'reconfigure'):
    # File names may have bytes that are not UTF-8. Print these as escapes.
    sys.stdout.reconfigure(errors='backslashreplace')
  # Pillow warns of odd images. Those that matter are reported as errors, with their names.
  warnings.filterwarnings('ignore', module=r'PIL\.')
  try:
    code = main(sys.argv[1:] if argv is None else argv)
    sys.stdout.flush()
    return code
  except BrokenPipeError:
    if not _nobody_reads():
      raise
    return _NO_READER
  except RunError as error:
    prefix = '' if isinstance(error, Preempted) else 'error: '
    print(f'{prefix}{printable(error, keep=chr(10))}', file=sys.stderr)
    return error.exit_code
  except OSError as error:
    if error.errno == errno.ENAMETOOLONG:
      print(f'error: No such path: {one_line(error.filename, 80)}.', file=sys.stderr)
      return UserError.exit_code
    if not disk_is_full(error):
      raise
    print(f'error: Disk full: {error}. Make room and run it again.', file=sys.stderr)
    return DiskFull.exit_code
  except KeyboardInterrupt:
    print(INTERRUPTED, file=sys.stderr)
    return Interrupted.exit_code


def _nobody_reads() -> bool:
  """Whether standard output is a pipe without a reader; if so, redirects it to nowhere."""
  import select

  try:
    file = sys.stdout.fileno()
  except OSError:
    # Standard output has no file descriptor, as in a test or a notebook.
    return False
  poll = select.poll()
  poll.register(file, select.POLLOUT)
  if not any(event & select.POLLERR for _, event in poll.poll(0)):
    return False
  # Python flushes once more when it exits, and would report an error.
  os.dup2(os.open(os.devnull, os.O_WRONLY), file)
  return True


def show(args: argparse.Namespace, record: dict, text: str) -> int:
  """Prints the record if --json is given, and otherwise the text; returns 0."""
  print_json(record) if args.json else print(text)
  return 0


def print_json(record: dict) -> None:
  """Prints one JSON object as one line, with null for NaN and infinities, which JSON lacks."""
  record = json.loads(json.dumps(record), parse_constant=lambda name: None)
  print(json.dumps(record), flush=True)
