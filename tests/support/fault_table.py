"""The table of faults: each fault, and the response of the library.

A test that asks for the fixture `faults_table` reports each fault and its outcome;
`make faults` runs all of these tests and those marked `faults`, and prints the sums. A
test fails at its end if an outcome is none of GOOD, with the names of those faults.
"""

import collections
import signal
import time
from collections.abc import Callable

import pytest

from vit_jax.errors import RunError

GOOD = {
  'refused': 'one line',  # a `RunError`, or a process that ended by one
  'handled': 'handled',  # no harm: the result is the right one, or a line says otherwise
}
BAD = {
  'silent': 'silent',  # another result, and no line that says so
  'traceback': 'tracebacks',  # any other exception, or more than one line
  'hang': 'hangs',
}
_SECONDS = 120  # after which a call counts as hanging
_ROWS = pytest.StashKey[list]()
_START = pytest.StashKey[float]()


class Table:
  """Adds the faults of one test to `rows`, (category, outcome) of each."""

  def __init__(self, rows: list[tuple[str, str]]):
    self._rows, self.wrong = rows, []

  def __call__(self, category: str, name: str, outcome: str, detail: str = '') -> None:
    """Adds a fault to the row of its category; `detail` is the printed line or error."""
    self._rows.append((category, outcome))
    if outcome not in GOOD:
      self.wrong.append(f'{category}: {name}: {outcome} {detail}')

  def tried(self, category: str, name: str, call: Callable[[], object]) -> object:
    """Adds the outcome of a call; returns its result, or None if it raises."""

    def stop(*_):
      raise _TookTooLong

    result, outcome, detail = None, 'handled', ''
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_SECONDS)
    try:
      result = call()
    except _TookTooLong:
      outcome, detail = 'hang', f'over {_SECONDS} s'
    except (Exception, SystemExit) as error:
      refused = isinstance(error, RunError) and '\n' not in str(error)
      outcome = 'refused' if refused else 'traceback'
      detail = f'{type(error).__name__}: {error}'
    finally:
      signal.alarm(0)
      signal.signal(signal.SIGALRM, before)
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


def render(rows: list[tuple[str, str]], seconds: float) -> str:
  """Returns the table: a line for each category, in the order in which they came."""
  kinds = GOOD | BAD
  table = [('fault', 'inputs', *kinds.values())]
  for category in [*dict(rows), 'all']:
    count = collections.Counter(x for name, x in rows if category in (name, 'all'))
    table.append((category, count.total(), *(count[kind] for kind in kinds)))
  text = [f'{name:<28}' + ''.join(f'{x:>12}' for x in cells) for name, *cells in table]
  return '\n'.join([*text, f'in {seconds / 60:.1f} minutes'])


# -- hooks, which conftest takes over -------------------------------------------------


def pytest_configure(config):
  config.stash[_ROWS], config.stash[_START] = [], time.monotonic()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
  output = getattr(node, 'workeroutput', {})  # none of a worker that died
  node.config.stash[_ROWS] += map(tuple, output.get('faults', []))


def report(session) -> None:
  """Sends the rows of a worker of xdist to the first process, at the session's end."""
  if hasattr(session.config, 'workeroutput'):
    session.config.workeroutput['faults'] = session.config.stash[_ROWS]


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
