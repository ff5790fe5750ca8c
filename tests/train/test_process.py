"""Signals that stop a run, Ctrl-C before it can save, and aborts because of a dead peer."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from unittest import mock

import pytest

from tests.support import commands, naming, runs
from vit_jax import cli
from vit_jax.train import process
from vit_jax.train.process import StopSignal


def start(code, *args):
  """Starts Python on `code`; its lines 'ready' and so on come through a pipe."""
  return subprocess.Popen(
    [sys.executable, '-u', '-c', textwrap.dedent(code), *map(str, args)],
    cwd=runs.ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def expect(started, word):
  line = started.stdout.readline().strip()
  assert line == word, started.communicate()


# -- signals ------------------------------------------------------------------------


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_with_a_line(number, capfd):
  before = signal.getsignal(number)
  with StopSignal() as outer:
    with StopSignal() as inner:
      assert not inner.should_stop()
      os.kill(os.getpid(), number)
      assert inner.should_stop()
      assert inner.should_stop()
      assert not outer.requested
    assert outer.should_stop()  # one within another passes it on
  error = capfd.readouterr().err
  assert error.startswith(f'{signal.Signals(number).name}: ')
  assert re.search(naming(75), error)
  assert error.count('\n') == 1
  assert signal.getsignal(number) is before


def test_in_another_thread_it_does_nothing():
  before = signal.getsignal(signal.SIGTERM)
  results = []

  def work():
    with StopSignal() as stop:
      results.append((stop.should_stop(), signal.getsignal(signal.SIGTERM) is before))

  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  assert results == [(False, True)]


LOOP = """
  import ctypes, sys, time
  from vit_jax import errors
  from vit_jax.train import process
  def block():  # in C, where no handler of Python's runs: as a dead mount does
    mutex = ctypes.create_string_buffer(256)  # zeros are PTHREAD_MUTEX_INITIALIZER
    while True:
      ctypes.CDLL(None).pthread_mutex_lock(mutex)
  with process.StopSignal() as stop:
    print('ready')
    step = 0
    while not stop.should_stop():
      step += 1
      time.sleep(0.01)
    print('stopping')
    if sys.argv[1] == 'slow':  # in saving
      block()
  sys.exit(errors.Preempted.exit_code)
"""
BLOCKED = LOOP.replace("print('ready')", "print('ready'); block()")
AGREED = LOOP.replace(
  '  with process',
  '  process.jax.distributed.is_initialized = lambda: True\n'
  '  process.jax.process_count = lambda: 2\n'
  '  process.jax.process_index = lambda: 1\n'
  '  process.multihost_utils.reached_preemption_sync_point = lambda number: True\n'
  '  with process',
)


def test_the_first_signal_lets_the_run_save_and_the_second_does_not():
  """Also where Python runs no handler, and where the first was sent to every peer."""
  quick, slow = start(LOOP, 'quick'), start(LOOP, 'slow')
  blocked, agreed = start(BLOCKED, ''), start(AGREED, 'slow')
  for started in (quick, slow, blocked, agreed):
    expect(started, 'ready')
  for started in (quick, slow):
    started.send_signal(signal.SIGTERM)
  for started in (quick, slow, agreed):
    expect(started, 'stopping')
  _, error = quick.communicate(timeout=20)
  assert (quick.returncode, error.count('\n')) == (75, 1)
  for started in (blocked, agreed):
    started.send_signal(signal.SIGTERM)
  time.sleep(0.3)
  assert [started.poll() for started in (slow, blocked, agreed)] == [None] * 3
  for started in (slow, blocked, agreed):
    started.send_signal(signal.SIGINT)
    _, error = started.communicate(timeout=20)
    assert started.returncode == 75
    assert error.splitlines()[-1] == 'second SIGINT: exiting at once, without saving.'


def test_several_processes_agree_by_call_number_and_install_no_handler(monkeypatch):
  reached = mock.Mock(side_effect=lambda number: number == 3)
  monkeypatch.setattr(process.jax.distributed, 'is_initialized', lambda: True)
  monkeypatch.setattr(process.jax, 'process_count', lambda: 2)
  monkeypatch.setattr(process.multihost_utils, 'reached_preemption_sync_point', reached)
  before = signal.getsignal(signal.SIGTERM)
  with StopSignal() as stop:
    assert signal.getsignal(signal.SIGTERM) is before
    assert [stop.should_stop() for _ in range(4)] == [False, False, True, True]
  assert [call.args for call in reached.mock_calls] == [(1,), (2,), (3,)]


# -- Ctrl-C before a run can save ------------------------------------------------------

# Sends itself the signal at the first import of a module named in argv[1].
_AT_IMPORT = """
import os, runpy, signal, sys
class Finder:
  def find_spec(self, name, path=None, target=None):
    if name == module:
      os.kill(os.getpid(), signal.SIGINT)
_, module, workdir = sys.argv
sys.meta_path.insert(0, Finder())
sys.argv[1:] = ['--config=configs/digits.py:debug', f'--workdir={workdir}']
runpy.run_module('vit_jax.main', run_name='__main__', alter_sys=True)
"""


@pytest.mark.parametrize('module', ['vit_jax.train.program', 'jax.numpy'])
def test_ctrl_c_during_imports(module, tmp_path):
  done = commands.python('-c', _AT_IMPORT, module, tmp_path)
  assert (done.returncode, done.stderr) == (130, f'{cli.INTERRUPTED}\n')


@pytest.mark.faults
@pytest.mark.parametrize('tenths', range(2, 30, 3))
def test_ctrl_c_at_any_time(tenths, tmp_path, faults_table):
  workdir = tmp_path / 'run'
  started = runs.Process('--config=configs/digits.py:debug', f'--workdir={workdir}')
  time.sleep(tenths / 10)
  started.popen.send_signal(signal.SIGINT)
  code, _, error = started.end()
  assert code in (75, 130)  # with a state to save, or before
  assert 'Traceback' not in error
  assert workdir.exists() == (code == 75)
  faults_table('signals', f'SIGINT after {tenths / 10} s', 'refused', error)


# -- a dead peer ---------------------------------------------------------------------

# The page that jaxlib 0.10.2 logs before it aborts, shortened.
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
def test_the_reason_of_an_abort(status):
  assert LOST[status] in process.reason_of_abort(f'W1122 noise\n{PAGE.format(status)}')
  assert process.reason_of_abort('F1122 1 shape.cc:80] Check failed: rank > 0') is None


# Forks: JAX is imported once, for all the ways to end.
_ENDS = """
import os, sys, threading, warnings
from vit_jax import errors
from vit_jax.train import process
warnings.simplefilter('ignore')

def abort(text):
  os.write(2, text.encode())
  thread = threading.Thread(target=os.abort)
  thread.start()
  thread.join()

def lost():
  with process.watch_peers():
    abort(sys.argv[1])

def fails_first():
  try:
    with process.watch_peers():
      raise errors.UserError('x')
  except errors.UserError:
    abort(sys.argv[1])

def crashes():
  with process.watch_peers():
    abort('Check failed: rank > 0')

for end in (lost, fails_first, crashes):
  child = os.fork()
  if not child:
    end()
  print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_an_abort_is_one_line():
  status = 'UNAVAILABLE: (stopped sending heartbeats):\n1\n'
  done = commands.python('-c', _ENDS, PAGE.format(status))
  assert done.stdout.split() == ['75', '2', '-6']
  first, second, *more = done.stderr.splitlines()
  assert first == (
    'error: process 1 died or cannot be reached. Rerun the same command in all processes '
    'to resume.'
  )
  assert second == 'Check failed: rank > 0'
  assert more[0].startswith('Fatal Python error: Aborted')  # a defect, and where
