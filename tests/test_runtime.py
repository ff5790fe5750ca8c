"""`runtime`: the process keeps memory that is freed, until it is told to return it."""

import subprocess
import sys

import pytest

CODE = """
import resource, sys, jax, numpy as np
from vit_jax.train import runtime
jax.default_backend = lambda: sys.argv[1]
if sys.argv[2] == 'keep':
  runtime.retain_freed_memory()
for _ in range(3):
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  [np.ones(24 << 17) for _ in range(4)]  # of 24 MiB each
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='of glibc')
@pytest.mark.parametrize('backend', ['cpu', 'tpu'])
def test_no_page_is_asked_for_again(backend):
  def faults(word):
    args = [sys.executable, '-c', CODE, backend, word]
    return int(subprocess.run(args, check=True, capture_output=True).stdout)

  assert faults('keep') < 100 < faults('leave')


PIECES = """
import numpy as np
from vit_jax.train import runtime
resident = lambda: int(open('/proc/self/statm').read().split()[1]) // 256  # MiB
runtime.retain_freed_memory()
blocks = [(np.ones(1 << 17), np.ones(1 << 10)) for _ in range(100)]  # 1 MiB and 8 KiB
blocks = [small for _, small in blocks]
before = resident()
runtime.release_freed_memory()
print(before - resident())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='of glibc')
def test_what_lies_free_between_kept_blocks_goes_back():
  command = [sys.executable, '-c', PIECES]
  assert int(subprocess.run(command, check=True, capture_output=True).stdout) > 90
