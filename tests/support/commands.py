"""Commands run in this process or another: their output and their errors."""

import csv
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support import ROOT, naming
from vit_jax import cli


def run(main: Callable, captured, *argv) -> tuple[int, str, str]:
  """Runs a command; returns its exit code, stdout and stderr.

  Args:
    captured: the fixture capsys or capfd.
  """
  code = cli.run(main, [str(arg) for arg in argv])
  return code, *captured.readouterr()


def python(*args, **environment: str) -> subprocess.CompletedProcess:
  """Runs Python in the repository's folder, to its end."""
  return subprocess.run(
    [sys.executable, *map(str, args)],
    cwd=ROOT,
    env=os.environ | environment,
    capture_output=True,
    text=True,
    check=False,
  )


def one_line(error: str) -> str:
  """Asserts that stderr holds one line, of an error; returns it."""
  assert error.startswith('error: '), error
  assert error.endswith('\n'), error
  assert error.count('\n') == 1, error
  return error.strip()


def assert_refused(main: Callable, captured, argv, facts) -> None:
  """Asserts exit code 2, nothing on stdout, and one line that names every fact."""
  code, out, error = run(main, captured, *argv)
  assert (code, out) == (2, '')
  assert re.search(naming(*facts), one_line(error)), error


def results(out: Path) -> list[dict[str, str]]:
  """Returns the rows of the results.csv of a grid."""
  with (out / 'results.csv').open() as file:
    return list(csv.DictReader(file))
