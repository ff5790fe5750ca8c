"""Common parts of all commands: one line per error, exit codes, arguments, JSON."""

import argparse
import ast
import contextlib
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from vit_jax import terminal
from vit_jax.errors import (
  DiskFull,
  Interrupted,
  Preempted,
  RunError,
  UserError,
  did_you_mean,
  disk_is_full,
)

INTERRUPTED = 'interrupted.'
# The exit code after SIGPIPE, as that of programs in C: 128 + 13.
_NO_READER = 141


def exit_on_interrupt() -> None:
  """Makes Ctrl-C print one line and exit, from now on.

  An exception would surface in the import under way, where C extensions turn it into
  errors of their own. A run installs its own handler once it can save.
  """
  import signal

  def leave(number, frame):
    terminal.say(INTERRUPTED)
    os._exit(Interrupted.exit_code)

  signal.signal(signal.SIGINT, leave)


def interruptible(work: Callable[[], Any], forget: Callable[[], None]) -> Any:
  """Returns `work()`, and lets Ctrl-C and SIGTERM end the process meanwhile.

  Python runs signal handlers between its own instructions, so that a compiler which takes
  minutes delays them as long. Here `work` runs in a thread and the main thread waits for
  it, which handlers can interrupt. Outside the main thread `work` is simply called. A
  handler that C code installed, such as libtpu's for SIGTERM, gives way to Python's.

  Args:
    forget: removes files that `work` leaves behind; called first when a signal arrives.

  Raises:
    KeyboardInterrupt: on Ctrl-C, if its handler is Python's; `work` goes on meanwhile.
  """
  import signal
  import threading
  from concurrent.futures import Future

  if threading.current_thread() is not threading.main_thread():
    return work()
  result = Future()

  def run_work():
    try:
      result.set_result(work())
    except BaseException as error:
      result.set_exception(error)

  def end(number, frame):
    forget()
    if callable(then := before[number]):
      return then(number, frame)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)

  handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
  # A background job ignores Ctrl-C; None stands for a handler that Python cannot restore.
  before = {n: h for n, h in handlers.items() if h not in (signal.SIG_IGN, None)}
  try:
    for number in before:
      signal.signal(number, end)
    threading.Thread(target=run_work, daemon=True).start()
    return result.result()
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


class Parser(argparse.ArgumentParser):
  """Raises `UserError` where argparse would print its usage and exit."""

  def error(self, message: str) -> NoReturn:
    raise UserError(f'{message} (see {self.prog} --help)')


def positive(text: str) -> int:
  """Returns an argument as an integer of 1 or more."""
  value = int(text) if text.isdigit() else 0
  if value < 1:
    raise argparse.ArgumentTypeError(f'{text!r} is not a positive integer')
  return value


def resolution(text: str) -> tuple[int, int]:
  """Returns an argument '224' or '224x160' as (height, width), pixels."""
  height, _, width = text.partition('x')
  return positive(height), positive(width or height)


def count(text: str) -> int:
  """Returns an argument as an integer of 0 or more; '303e6' is one."""
  try:
    value = float(text)
  except ValueError:
    value = -1.0
  if not value.is_integer() or value < 0:
    raise argparse.ArgumentTypeError(f'{text!r} is not a whole number')
  return int(value)


def words(allowed: Sequence[str]) -> Callable[[str], list[str]]:
  """Returns the argument type of a comma-separated list of some of these words."""

  def parse(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(',')))
    for name in names:
      if name not in allowed:
        hint = did_you_mean(name, allowed)
        raise argparse.ArgumentTypeError(f'{name!r} is not one of {allowed}.{hint}')
    return names

  return parse


class Fields(argparse.Action):
  """Collects KEY=VALUE of a repeated flag in a dict; values are Python literals or text."""

  def __init__(self, option_strings, dest, **options):
    super().__init__(option_strings, dest, default={}, metavar='KEY=VALUE', **options)

  def __call__(self, parser, namespace, setting, flag=None):
    key, equals, value = setting.partition('=')
    if not equals:
      parser.error(f'{flag} {setting}: write KEY=VALUE, such as {flag} depth=6')
    with contextlib.suppress(ValueError, SyntaxError):
      value = ast.literal_eval(value)
    setattr(namespace, self.dest, {**getattr(namespace, self.dest), key: value})


def add_json_option(parser: argparse.ArgumentParser) -> None:
  """Adds --json."""
  parser.add_argument(
    '--json', action='store_true', help='one JSON object instead of the text'
  )


def run(main: Callable[[list[str]], int], argv: list[str] | None = None) -> int:
  """Returns the exit code of `main(argv)`; prints an error as one line.

  Such errors are `RunError`, a full disk and Ctrl-C; others are raised. Ends quietly when
  nobody reads the output any more (`inspect ... | head`).

  Args:
    main: takes the arguments, returns the exit code.
    argv: the arguments; by default those of this process.
  """
  if hasattr(sys.stdout, 'reconfigure'):  # names of files may not be UTF-8
    sys.stdout.reconfigure(errors='backslashreplace')
  # Odd images: those that matter are reported as errors, with the file's name.
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
    # Stopping on request is not an error.
    prefix = '' if isinstance(error, Preempted) else 'error: '
    print(f'{prefix}{error}', file=sys.stderr)
    return error.exit_code
  except OSError as error:
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
  except OSError:  # no file, in a test or a notebook
    return False
  poll = select.poll()
  poll.register(file, select.POLLOUT)
  if not any(event & select.POLLERR for _, event in poll.poll(0)):
    return False
  # Python flushes once more at its end, and would complain.
  os.dup2(os.open(os.devnull, os.O_WRONLY), file)
  return True


def print_json(record: dict) -> None:
  """Prints one JSON object as one line; NaN and infinities, which JSON lacks, as null."""
  print(json.dumps(_plain(record), allow_nan=False), flush=True)


def _plain(value):
  if isinstance(value, dict):
    return {key: _plain(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(item) for item in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value
