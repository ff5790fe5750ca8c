"""One process of a run dies: the others end soon, with one line and exit code 75."""

import signal
import subprocess
import sys
import time

import pytest

from tests.support import runs
from tests.train.test_processes import run_two, shared, start_two  # noqa: F401
from vit_jax.train import peers

# What jaxlib 0.10.2 logs before it aborts, shortened.
PAGE = (
  'E1122 18:50:10.68 30209 coordination_service_agent.cc:289] Polled an error from '
  'coordination service.\nF1122 18:50:10.68 30209 client.h:80] Terminating process '
  'because the JAX distributed service detected fatal errors. This most likely '
  'indicates that another task died. absl::Status: {}\n*** Check failure stack trace: '
  '***\n    @     0x7f2dcf940634  absl::lts_20260107::log_internal::LogMessage\n'
)
LOST = {
  'UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n'
  '1\nThe tasks have crashed.\n\nRPC: /x.CoordinationService/PollForError': 'process 1',
  'INTERNAL: Shutdown barrier has failed.\nBarrier failed because: task is set to '
  'ERROR: UNAVAILABLE: Task 12 heartbeat timeout.': 'process 12',
  "INTERNAL: Barrier result: 'DEADLINE_EXCEEDED: Barrier timed out.\n# of tasks that "
  'reached the barrier: 1/2.\nThe first task at the barrier: 3. Some timed out task '
  'names:\n0\n': 'process 3',
  'UNAVAILABLE: Failed to send RPC to coordination service.': 'process 0',
  'DEADLINE_EXCEEDED: Deadline Exceeded\n\nRPC: /x.CoordinationService/Heartbeat': (
    'process 0'
  ),
  'DEADLINE_EXCEEDED\n\nRPC: /x.CoordinationService/RegisterTask': '300 s',
  'in words of another version': 'another process',
}


@pytest.mark.parametrize('status', LOST, ids=LOST.values())
def test_what_the_last_words_mean(status):
  assert LOST[status] in peers.meaning(f'W1122 noise\n{PAGE.format(status)}')


def test_other_aborts_are_not_about_others():
  assert (
    peers.meaning('F1122 18:50:10.68 1 shape.cc:80] Check failed: rank > 0') is None
  )


# Forks: JAX is imported once, for all the ways to end.
_ENDS = """
import os, sys, threading, warnings
from vit_jax import errors
from vit_jax.train import peers
warnings.simplefilter('ignore')

def abort(text):
  os.write(2, text.encode())
  thread = threading.Thread(target=os.abort)
  thread.start()
  thread.join()

def lost():
  with peers.watched(), peers.recorded(lambda error: print(error.exit_code, flush=True)):
    peers.doing('process 0 was at step 3 of 9')
    abort(sys.argv[1])

def fails_first():
  try:
    with peers.watched():
      raise errors.UserError('x')
  except errors.UserError:
    abort(sys.argv[1])

def crashes():
  with peers.watched():
    abort('Check failed: rank > 0')

for end in (lost, fails_first, crashes):
  child = os.fork()
  if not child:
    end()
  print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.slow
def test_an_abort_is_one_line():
  status = 'UNAVAILABLE: (stopped sending heartbeats):\n1\n'
  done = subprocess.run(
    [sys.executable, '-c', _ENDS, PAGE.format(status)],
    capture_output=True,
    text=True,
    cwd=runs.ROOT,
    check=False,
  )
  assert done.stdout.split() == ['75', '75', '2', '-6']
  first, second, *more = done.stderr.splitlines()
  assert first == (
    'error: process 1 died or cannot be reached; process 0 was at step 3 of 9. Rerun the '
    'same command in all processes to resume.'
  )
  assert second == 'Check failed: rank > 0'
  assert more[0].startswith('Fatal Python error: Aborted')  # a defect, and where


# -- two processes ------------------------------------------------------------------

# Where it dies, or hangs -> code that does so.
_AT = 'import os, signal, {module}\n{module}.{name} = lambda *_, **__: {end}'
POINTS = {
  'joining': ('jax', 'distributed.initialize'),
  'compiling': ('vit_jax.train.run', 'compile_step'),
  'a step': ('vit_jax.train.loop', 'Loop._pause'),
  'saving': ('vit_jax.checkpoint.storage', 'Storage.write'),
  'waiting for a save': ('vit_jax.checkpoint.storage', 'Storage.wait'),
  'ending': (None, None),
}
_ENDING = (
  'import atexit, os, signal, jax\natexit.register(lambda: {end})'  # before JAX's
)
# Shorter than those of a real run, so that ten cases take minutes.
_SOON = (
  'from vit_jax import distributed\ndistributed.HEARTBEAT = distributed.JOIN = 8\n'
)


def dies_at(point: str, number: int) -> str:
  module, name = POINTS[point]
  end = f'os.kill(os.getpid(), {number:d})'
  code = _AT.format(module=module, name=name, end=end)
  return code if module else _ENDING.format(end=end)


ENDS = [(point, signal.SIGKILL) for point in POINTS]
ENDS += [(point, signal.SIGSTOP) for point in ('compiling', 'a step')]


@pytest.mark.faults
@pytest.mark.parametrize('victim', [0, 1])
@pytest.mark.parametrize(('point', 'number'), ENDS)
def test_the_other_ends_too(
  point,
  number,
  victim,
  shared,  # noqa: F811
  tmp_path,
  faults_table,
):
  sabotage = [_SOON, _SOON]
  sabotage[victim] += dies_at(point, number)
  processes = start_two(tmp_path, shared, sabotage=sabotage)
  if number == signal.SIGKILL:
    assert processes[victim].popen.wait() == -number
  start = time.monotonic()
  code, _, error = processes[1 - victim].end()
  seconds = time.monotonic() - start
  processes[victim].popen.kill()
  processes[victim].end()
  assert code == 75, error
  *before, line = error.splitlines()
  assert before == []
  assert line.startswith('error: ')
  if number == signal.SIGKILL:
    assert seconds < 30
  if point != 'joining':
    assert f'process {victim}' in line
  if point in ('a step', 'saving', 'waiting for a save'):
    assert f'process {1 - victim} was at step' in line
    # Also where process 0 died, which writes it otherwise; one that hangs holds the lock.
    if number == signal.SIGKILL:
      assert runs.status(tmp_path)['state'] == 'preempted'
  name = f'process {victim}, {point}, {signal.Signals(number).name}'
  faults_table('kills, one of two processes', name, 'refused', line)
  if number == signal.SIGKILL and point == 'saving':
    ends = run_two(tmp_path, shared)
    assert [code for code, *_ in ends] == [0, 0], ends
    assert runs.status(tmp_path)['state'] == 'finished'


@pytest.mark.faults
def test_an_error_of_one_alone_ends_the_other(shared, tmp_path, faults_table):  # noqa: F811
  raises = (
    'from vit_jax import errors\nfrom vit_jax.train import run\n'
    "def fail(*_): raise errors.UserError('its data are gone')\nrun.compile_step = fail"
  )
  first, second = run_two(tmp_path, shared, sabotage=('', raises))
  assert (second[0], second[2]) == (2, 'error: its data are gone\n')
  assert first[0] == 75
  assert 'process 1 has ended' in first[2]
  assert first[2].count('\n') == 1
  faults_table('kills, one of two processes', 'its own error', 'refused', first[2])
