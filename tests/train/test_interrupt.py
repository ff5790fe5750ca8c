"""Ctrl-C before a run can save, and in long work of tools: one line, 130."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.support import runs
from vit_jax import cli

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


@pytest.mark.parametrize(
  'module',
  [
    'vit_jax.train.arguments',
    'numpy',
    pytest.param('jax.numpy', marks=pytest.mark.slow),
  ],
)
def test_during_imports(module, tmp_path):
  done = subprocess.run(
    [sys.executable, '-c', _AT_IMPORT, module, str(tmp_path)],
    capture_output=True,
    text=True,
    cwd=runs.ROOT,
    check=False,
  )
  assert (done.returncode, done.stderr) == (130, f'{cli.INTERRUPTED}\n')


def test_a_tool(capsys):
  def main(argv):
    raise KeyboardInterrupt

  assert cli.run(main, []) == 130
  assert capsys.readouterr().err == f'{cli.INTERRUPTED}\n'


@pytest.mark.faults
@pytest.mark.parametrize('tenths', range(2, 30, 3))
def test_at_any_time(tenths, tmp_path, faults_table):
  workdir = tmp_path / 'run'
  process = runs.Process('--config=configs/digits.py:debug', f'--workdir={workdir}')
  time.sleep(tenths / 10)
  process.popen.send_signal(signal.SIGINT)
  code, _, error = process.end()
  assert code in (75, 130)  # with a state to save, or before
  assert 'Traceback' not in error
  assert workdir.exists() == (code == 75)
  faults_table('signals', f'SIGINT after {tenths / 10} s', 'refused', error)


# One call that Python cannot leave, of half a minute.
_TERMINATED = """
import os, pathlib, signal, sys, time
from vit_jax import cli
def work():
  os.kill(os.getpid(), signal.SIGTERM)
  time.sleep(30)
cli.interruptible(work, pathlib.Path(sys.argv[1]).unlink)
"""


@pytest.fixture
def on_ctrl_c():
  """Returns a function that sets its handler: commands that were imported left theirs."""
  before = signal.getsignal(signal.SIGINT)
  yield lambda handler: signal.signal(signal.SIGINT, handler)
  signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_long_work(on_ctrl_c):
  on_ctrl_c(signal.default_int_handler)
  before, forgotten = signal.getsignal(signal.SIGTERM), []
  let_go = threading.Event()

  def work():
    os.kill(os.getpid(), signal.SIGINT)
    let_go.wait(30)

  with pytest.raises(KeyboardInterrupt):
    cli.interruptible(work, lambda: forgotten.append(let_go.is_set()))
  let_go.set()
  assert forgotten == [False]
  assert signal.getsignal(signal.SIGTERM) == before


def test_ctrl_c_that_is_ignored_ends_nothing(on_ctrl_c):
  on_ctrl_c(signal.SIG_IGN)  # as of a job in the background
  work = lambda: os.kill(os.getpid(), signal.SIGINT)
  assert cli.interruptible(work, pytest.fail) is None


def test_sigterm_ends_long_work(tmp_path):
  left = tmp_path / 'left'
  left.touch()
  ended = subprocess.run(
    [sys.executable, '-c', _TERMINATED, left],
    capture_output=True,
    text=True,
    timeout=20,
  )
  assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGTERM, '', '')
  assert not left.exists()


def test_long_work_that_ends(tmp_path):
  assert cli.interruptible(lambda: 3, tmp_path.rmdir) == 3
  with pytest.raises(ZeroDivisionError):
    cli.interruptible(lambda: 1 / 0, tmp_path.rmdir)
  assert tmp_path.exists()
