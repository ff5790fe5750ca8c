"""Eight fake devices for every test, exact float32 products, a cache folder of its own."""

import importlib.metadata
import os

from tests.support import programs

# Before jax is imported: flags are read at its first use. Compiling takes longer than
# running here: without LLVM's optimizations it takes half as long. In jaxlib 0.10, of
# Python 3.11, three more flags halve it again. jaxlib 0.12 ends at the first of them and
# gains nothing by the others.
os.environ.setdefault(
  'XLA_FLAGS',
  '--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0'
  + (
    ' --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1'
    ' --xla_llvm_disable_expensive_passes=true'
  )
  * importlib.metadata.version('jaxlib').startswith('0.10.'),
)
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
os.environ.setdefault('JAX_DEFAULT_MATMUL_PRECISION', 'highest')
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# Runs of one config compile once, also in the processes that tests start.
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', programs.folder())
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.1')

import fcntl
import gc
import re
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tests.support import GOLDEN, fault_table, runs
from tests.support.emulator import (  # noqa: F401
  gcs,
  gcs_folder,
  gcs_proxy,
  gcs_without_tensorflow,
)
from tests.support.fault_table import (  # noqa: F401
  faults_table,
  pytest_configure,
  pytest_terminal_summary,
  pytest_testnodedown,
)
from tests.support.peers import timm, torch, transformers  # noqa: F401


def pytest_sessionfinish(session, exitstatus):
  fault_table.report(session)
  if programs.FIRST and exitstatus == 0:
    programs.keep()


@pytest.fixture
def golden():
  """Returns the arrays of tests/golden/NAME.npz: outputs of reference code."""

  def load(name):
    with np.load(GOLDEN / f'{name}.npz', allow_pickle=False) as file:
      return dict(file)

  return load


@pytest.fixture
def one_device(monkeypatch):
  """Lets runs in this process take one device of the eight: they compile sooner."""
  runs.on_one_device(monkeypatch)


def run_once(name, *changes):
  """Returns the folder of a finished run, which one process makes for all workers."""
  workdir = Path(os.environ['VIT_JAX_CACHE']) / name
  with open(f'{workdir}.lock', 'a+') as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    if not file.tell():  # no process has finished it
      shutil.rmtree(workdir, ignore_errors=True)
      runs.run_on_one_device(workdir, *changes)
      file.write('finished')
  return workdir


@pytest.fixture(scope='session')
def short_run():
  """Returns the folder of a finished run, `runs.SHORT`; copy it before you change it."""
  return run_once('short_run', *runs.SHORT)


@pytest.fixture(scope='session')
def reference():
  """Returns the folder of the small run, which nothing interrupted, on one device."""
  return run_once('reference')


@pytest.fixture
def mount_tmpfs(tmp_path):
  """Returns a function that mounts a file system in memory and returns its folder.

  Its argument holds the mount options, such as 'size=4m'. Only root may mount: the test
  is skipped where the system does not permit it.
  """
  mounted = []

  def mount(options):
    folder = tmp_path / f'tmpfs{len(mounted)}'
    folder.mkdir()
    command = ['mount', '-t', 'tmpfs', '-o', options, 'tmpfs', str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # Neither may root in some containers.
    if os.geteuid() != 0 or re.search('denied|not permitted', done.stderr):
      pytest.skip(f'mounting a tmpfs is not permitted here: {done.stderr.strip()}')
    assert done.returncode == 0, done.stderr
    mounted.append(folder)
    return folder

  yield mount
  for folder in mounted:
    subprocess.run(['umount', '-l', str(folder)], check=True)


@pytest.fixture(autouse=True, scope='module')
def little_to_collect():
  """Runs Python's garbage collector seldom, and excludes what a finished file left behind.

  Otherwise it traverses all imports and compiled functions again and again: the last
  files took four times as long.
  """
  gc.set_threshold(100_000)
  yield
  gc.collect()
  gc.freeze()


@pytest.fixture(autouse=True, scope='session')
def traces_kept():
  """Lets a grid of runs keep what JAX traced: else the tests after it trace all anew."""
  import jax

  real = jax.clear_caches
  with mock.patch('jax.clear_caches') as clear:
    clear.real = real  # for tests of what has to clear them
    yield clear


# Folders whose files take the longest; '.' is tests/ itself. They are run first. If a worker
# began such a file last, it would go on for minutes after all others had ended.
LONG = ('detection', 'weights', 'models', '.', 'train', 'tools')


def pytest_collection_modifyitems(items):
  fault_table.mark(items)
  here = Path(__file__).parent
  ranks = {here / name: rank for rank, name in enumerate(LONG)}
  items.sort(key=lambda item: ranks.get(item.path.parent, len(LONG)))
