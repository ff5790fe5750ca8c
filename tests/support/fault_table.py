"""The table of faults: each fault, and the response of the library.

A test that asks for the fixture `faults_table` reports each fault and its outcome;
`make faults` runs all of these tests and those marked `faults`, and prints the sums:

  def test_hostile_weights(faults_table, tmp_path):
    for name, path in cases(tmp_path):
      faults_table.tried('weight files', name, lambda: vit_jax.load(path))

  def test_killed(faults_table):
    ...
    faults_table('kills, one process', f'at step {step}', 'handled')

The test fails at its end if an outcome is not one of GOOD, with the names of those.
"""

import collections
import signal
import time
from collections.abc import Callable

import pytest

from vit_jax.errors import RunError

GOOD = (
  'refused',  # one line that says why: a `RunError`, or a process that ended by one
  'handled',  # no harm: the result is that without the fault, or a line says otherwise
)
BAD = (
  'silent',  # another result, and no line that says so
  'traceback',  # any other exception, or more than one line
  'hang',
)
KINDS = {
  'refused': 'one line',
  'handled': 'handled',
  'silent': 'silent',
  'traceback': 'tracebacks',
  'hang': 'hangs',
}
_ROWS = pytest.StashKey[list]()
_START = pytest.StashKey[float]()


class Table:
  """The part of the session's table that one test adds."""

  def __init__(self, rows: list[dict]):
    self._rows = rows
    self.wrong: list[str] = []

  def __call__(self, category: str, name: str, outcome: str, detail: str = '') -> None:
    """Adds a fault.

    Args:
      category: a row of the table.
      name: which of its faults it is.
      outcome: one of GOOD or BAD.
      detail: the line that was printed, or the error.
    """
    assert outcome in GOOD + BAD, outcome
    self._rows.append(dict(category=category, outcome=outcome))
    if outcome in BAD:
      self.wrong.append(f'{category}: {name}: {outcome} {detail}')

  def tried(
    self,
    category: str,
    name: str,
    call: Callable[[], object],
    seconds: int = 120,
    also: tuple[type[Exception], ...] = (),
  ) -> object:
    """Adds what a call does: returns ('handled'), refuses, fails otherwise or hangs.

    Args:
      seconds: after which it counts as hanging; in the main thread only.
      also: errors other than `RunError` that refuse here.

    Returns:
      what `call` returns; None if it raises.
    """

    def stop(*_):
      raise _TookTooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
      result, error = call(), None
    except (Exception, SystemExit, RecursionError, _TookTooLong) as raised:
      result, error = None, raised
    finally:
      signal.alarm(0)
      signal.signal(signal.SIGALRM, before)
    detail = '' if error is None else f'{type(error).__name__}: {error}'
    if error is None:
      outcome = 'handled'
    elif isinstance(error, _TookTooLong):
      outcome, detail = 'hang', f'over {seconds} s'
    elif isinstance(error, (RunError, *also)) and '\n' not in str(error):
      outcome = 'refused'
    else:
      outcome = 'traceback'
    self(category, name, outcome, detail)
    return result


class _TookTooLong(BaseException):  # no `except Exception` on the way may take it
  pass


@pytest.fixture
def faults_table(request):
  """Adds faults to the table of the session, see the module."""
  table = Table(request.config.stash[_ROWS])
  yield table
  if table.wrong:
    pytest.fail('\n'.join(table.wrong), pytrace=False)


def render(rows: list[dict], seconds: float) -> str:
  """Returns the table: a line for each category, in the order in which they came."""
  counts: dict[str, collections.Counter] = {}
  for row in rows:
    counts.setdefault(row['category'], collections.Counter())[row['outcome']] += 1
  sums = sum(counts.values(), collections.Counter())
  lines = [('fault', 'inputs', *KINDS.values())]
  for name, count in [*counts.items(), ('all', sums)]:
    numbers = [count.total(), *(count[kind] for kind in KINDS)]
    lines.append((name, *(f'{number:,}' for number in numbers)))
  widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
  text = [
    '  '.join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])])
    for name, *cells in lines
  ]
  return '\n'.join([*text, f'in {seconds / 60:.1f} minutes'])


# -- hooks, which conftest takes over -------------------------------------------------


def pytest_configure(config):
  config.stash[_ROWS], config.stash[_START] = [], time.monotonic()


def pytest_sessionfinish(session):
  if hasattr(session.config, 'workeroutput'):  # a worker of xdist
    session.config.workeroutput['faults'] = session.config.stash[_ROWS]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
  node.config.stash[_ROWS] += getattr(node, 'workeroutput', {}).get('faults', [])


def mark(items) -> None:
  """Marks the tests that add to the table: `make faults` runs those too."""
  for item in items:
    if 'faults_table' in getattr(item, 'fixturenames', ()):
      item.add_marker('fault_table')


def pytest_terminal_summary(terminalreporter, config):
  rows = config.stash[_ROWS]
  if rows and 'fault_table' in config.getoption('-m'):
    terminalreporter.section('faults')
    terminalreporter.line(render(rows, time.monotonic() - config.stash[_START]))
