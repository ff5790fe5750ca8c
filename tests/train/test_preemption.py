"""Stopping on request, and one run per folder."""

import errno
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from tests.support import naming
from vit_jax import errors
from vit_jax.train import lock, preemption

ROOT = pathlib.Path(__file__).parents[2]


def start(code, *args):
  """Starts Python on `code`; its lines 'ready' and so on come through a pipe."""
  return subprocess.Popen(
    [sys.executable, '-u', '-c', textwrap.dedent(code), *map(str, args)],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def expect(process, word):
  line = process.stdout.readline().strip()
  assert line == word, process.communicate()


# -- signals ------------------------------------------------------------------------


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_flag_and_says_so(number, capfd):
  before = signal.getsignal(number)
  with preemption.StopSignal() as stop:
    assert not stop.requested
    assert not stop.should_stop()
    os.kill(os.getpid(), number)
    assert stop.requested
    assert stop.should_stop()
    assert stop.should_stop()
  error = capfd.readouterr().err
  assert error.startswith(f'{signal.Signals(number).name}: ')
  assert re.search(naming(75), error)
  assert error.count('\n') == 1
  assert signal.getsignal(number) is before


def test_handlers_are_restored_after_an_error():
  before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
  with pytest.raises(KeyError), preemption.StopSignal():
    raise KeyError
  assert before == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]


def test_one_within_another_passes_on_what_came_too_late_for_it():
  with preemption.StopSignal() as outer:
    with preemption.StopSignal() as inner:
      os.kill(os.getpid(), signal.SIGTERM)
      assert inner.requested
      assert not outer.requested
    assert outer.should_stop()


def test_in_another_thread_it_does_nothing():
  before = signal.getsignal(signal.SIGTERM)
  seen = []

  def work():
    with preemption.StopSignal() as stop:
      seen.append((stop.should_stop(), signal.getsignal(signal.SIGTERM) is before))

  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  assert seen == [(False, True)]


LOOP = """
  import ctypes, sys, time
  from vit_jax import errors
  from vit_jax.train import preemption
  def block():  # in C, where no handler of Python's runs: as a dead mount does
    mutex = ctypes.create_string_buffer(256)  # zeros are PTHREAD_MUTEX_INITIALIZER
    while True:
      ctypes.CDLL(None).pthread_mutex_lock(mutex)
  with preemption.StopSignal() as stop:
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


@pytest.mark.thorough
def test_the_first_signal_lets_the_run_save_and_the_second_does_not():
  slow, quick = start(LOOP, 'slow'), start(LOOP, 'quick')
  expect(slow, 'ready')
  expect(quick, 'ready')
  for process in (slow, quick):
    process.send_signal(signal.SIGTERM)
    expect(process, 'stopping')
  _, error = quick.communicate(timeout=20)
  assert quick.returncode == 75
  assert error.count('\n') == 1
  begin = time.monotonic()
  slow.send_signal(signal.SIGINT)
  _, error = slow.communicate(timeout=20)
  assert slow.returncode == 75
  assert time.monotonic() - begin < 10
  assert error.splitlines()[1] == 'second SIGINT: exiting at once, without saving.'


BLOCKED = LOOP.replace("print('ready')", "print('ready'); block()")


@pytest.mark.slow
def test_two_signals_end_a_run_that_is_blocked_from_its_start():
  process = start(BLOCKED, 'slow')
  expect(process, 'ready')
  time.sleep(0.2)
  for _ in range(2):
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
  _, error = process.communicate(timeout=20)
  assert process.returncode == 75
  first, second = error.splitlines()
  assert first.startswith('SIGTERM: ')
  assert second.startswith('second SIGTERM: ')


def test_several_processes_agree_by_call_number_and_install_no_handler(
  monkeypatch, capfd
):
  polls = []

  def reached(number):
    polls.append(number)
    return number == 3

  monkeypatch.setattr(preemption.jax.distributed, 'is_initialized', lambda: True)
  monkeypatch.setattr(preemption.jax, 'process_count', lambda: 2)
  monkeypatch.setattr(
    preemption.multihost_utils, 'reached_preemption_sync_point', reached
  )
  before = signal.getsignal(signal.SIGTERM)
  with preemption.StopSignal() as stop:
    assert signal.getsignal(signal.SIGTERM) is before
    assert [stop.should_stop() for _ in range(4)] == [False, False, True, True]
    assert stop.requested
  assert polls == [1, 2, 3]
  assert 'preemption' in capfd.readouterr().err


AGREED = (
  """
  import sys
  from vit_jax.train import preemption
  preemption.jax.distributed.is_initialized = lambda: True
  preemption.jax.process_count = lambda: 2
  preemption.jax.process_index = lambda: 1
  preemption.multihost_utils.reached_preemption_sync_point = lambda number: True
"""
  + LOOP
)


@pytest.mark.slow
def test_after_several_agreed_the_second_signal_exits_at_once():
  process = start(AGREED, 'slow')
  expect(process, 'ready')
  expect(process, 'stopping')
  # The first may be what every machine of a pod is sent.
  process.send_signal(signal.SIGTERM)
  time.sleep(0.2)
  assert process.poll() is None
  process.send_signal(signal.SIGTERM)
  _, error = process.communicate(timeout=20)
  assert process.returncode == 75
  assert [line.partition(':')[0] for line in error.splitlines()] == [
    'SIGTERM',
    'second SIGTERM',
  ]


# -- one run per folder -------------------------------------------------------------


HOLD = """
  import sys, time
  from vit_jax.train import lock
  with lock.lock(sys.argv[1]):
    print('ready')
    time.sleep(60)
"""


@pytest.mark.thorough
def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path):
  workdir = tmp_path / 'deep' / 'run'
  first = start(HOLD, workdir)
  expect(first, 'ready')
  with pytest.raises(errors.UserError) as caught, lock.lock(workdir):
    pass
  text = str(caught.value)
  assert re.search(naming(workdir, first.pid, socket.gethostname(), '--workdir'), text)
  assert '\n' not in text
  first.kill()
  first.communicate(timeout=20)
  with lock.lock(workdir) as held:  # kill -9 leaves the file, not the lock
    assert held.workdir == workdir
    holder = json.loads((workdir / lock.LOCK_FILE).read_text())
    assert holder['pid'] == os.getpid()
  with lock.lock(workdir):
    pass


def test_a_lock_is_released_after_an_error(tmp_path):
  with pytest.raises(KeyError), lock.lock(tmp_path):
    raise KeyError
  with lock.lock(tmp_path), pytest.raises(errors.UserError) as caught:
    lock._take(tmp_path)
  assert re.search(naming(tmp_path, os.getpid()), str(caught.value))


@pytest.mark.slow
def test_locking_starts_no_devices(tmp_path):
  code = """
    import sys
    from vit_jax.train import lock
    with lock.lock(sys.argv[1]):
      from jax._src import xla_bridge
      print(xla_bridge.backends_are_initialized())
  """
  process = start(code, tmp_path)
  assert process.communicate(timeout=30)[0] == 'False\n'


def test_a_holder_that_has_not_written_yet(tmp_path):
  with lock.lock(tmp_path):
    (tmp_path / lock.LOCK_FILE).write_text('')
    with pytest.raises(errors.UserError, match=naming(tmp_path, '--workdir')):
      lock._take(tmp_path)


def test_an_unwritable_workdir(tmp_path):
  (tmp_path / 'file').write_text('')
  for bad in (tmp_path / 'file', tmp_path / 'file' / 'run', '/proc/run'):
    with pytest.raises(errors.UserError, match=naming(bad, '--workdir')):  # noqa: SIM117
      with lock.lock(bad):
        pass
  with (
    pytest.raises(errors.UserError, match=naming('s3://b/run', 'mount')),
    lock.lock('s3://b/run'),
  ):
    pass


def test_a_file_system_without_locks_is_said_and_used(tmp_path, monkeypatch, capfd):
  def refuse(*_):
    raise OSError(errno.ENOTSUP, 'Operation not supported')

  monkeypatch.setattr(lock.fcntl, 'flock', refuse)
  with lock.lock(tmp_path):
    pass
  assert str(tmp_path) in capfd.readouterr().err
