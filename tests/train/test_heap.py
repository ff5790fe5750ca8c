"""`heap`: the process keeps memory that is freed, until it is told to return it."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.support import runs
from vit_jax.train import loop

HUGE_PAGES = '/sys/kernel/mm/transparent_hugepage/enabled'

CODE = """
import resource, sys, jax, numpy as np
from vit_jax.train import heap
jax.default_backend = lambda: sys.argv[1]
if sys.argv[2] == 'keep':
  heap.retain_freed_memory()
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


STEP = """
import re, resource, sys, jax, jax.numpy as jnp
from vit_jax.train import heap
if sys.argv[1] != 'leave':
  heap.retain_freed_memory()
x = jnp.ones((6144, 8))
step = jax.jit(lambda x: x @ x.T @ x)  # 144 MiB in between
for _ in range(3):
  step(x).block_until_ready()
if sys.argv[1] == 'return':
  heap.return_freed_memory(), heap.trim()
  step(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
huge = re.findall(r'AnonHugePages: *(\\d+) kB', open('/proc/self/smaps').read())
print(sum(map(int, huge)) >> 10)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='of glibc')
def test_a_step_on_a_cpu_uses_its_memory_again_and_huge_pages():
  def faults_and_huge_pages(word):
    args = [sys.executable, '-c', STEP, word]
    env = {**os.environ, 'XLA_FLAGS': runs.one_device()}
    done = subprocess.run(args, check=True, capture_output=True, env=env)
    return map(int, done.stdout.split())

  kept, huge = faults_and_huge_pages('keep')
  again, huge_again = faults_and_huge_pages('return')
  left, none = faults_and_huge_pages('leave')
  assert left > 30_000  # 144 MiB in pages of 4 KiB are 36,864
  assert kept < left / 10 > again
  if '[never]' not in Path(HUGE_PAGES).read_text():
    assert huge > 100 > none
    assert huge_again > 100


PIECES = """
import numpy as np
from vit_jax.train import heap
resident = lambda: int(open('/proc/self/statm').read().split()[1]) // 256  # MiB
heap.retain_freed_memory()
blocks = [(np.ones(1 << 17), np.ones(1 << 10)) for _ in range(100)]  # 1 MiB and 8 KiB
blocks = [small for _, small in blocks]
before = resident()
heap.trim()
print(before - resident())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='of glibc')
def test_what_lies_free_between_kept_blocks_goes_back():
  command = [sys.executable, '-c', PIECES]
  assert int(subprocess.run(command, check=True, capture_output=True).stdout) > 90


THREAD = """
import ctypes, threading
from vit_jax.train import heap
resident = lambda: int(open('/proc/self/statm').read().split()[1]) // 256  # MiB
heap.retain_freed_memory()
glibc, size = heap._glibc(), 1 << 20
blocks, turn = [None] * 40, threading.Barrier(2)
def work():
  for _ in range(3):
    for i in range(40):
      blocks[i] = ctypes.c_void_p(glibc.malloc(size))
      ctypes.memset(blocks[i], 1, size)
    for block in blocks:
      glibc.free(block)
    turn.wait(), turn.wait()
threading.Thread(target=work, daemon=True).start()
turn.wait()
held = resident()
heap.return_freed_memory(), heap.trim()
turn.wait(), turn.wait()
print(held - resident())
heap.retain_freed_memory()
turn.wait(), turn.wait()
print(held - resident())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='of glibc')
def test_other_threads_return_what_they_free_until_it_is_retained():
  # On eight devices JAX's threads take all arenas that glibc allows on a few cores.
  env = {**os.environ, 'XLA_FLAGS': runs.one_device()}
  command = [sys.executable, '-c', THREAD]
  done = subprocess.run(command, check=True, capture_output=True, env=env).stdout
  returned, retained = map(int, done.split())
  assert returned > 30 > 10 > retained


@pytest.mark.parametrize('on_cpu', [True, False])
def test_memory_is_returned_from_a_pause_on_and_trimmed_again(on_cpu, monkeypatch):
  done = []

  def named(word, result=None):
    return lambda *_: done.append((run.step, word)) or result

  monkeypatch.setattr(loop, 'Record', mock.Mock())
  monkeypatch.setattr(loop, 'Patience', mock.Mock())
  monkeypatch.setattr(loop, 'TRIM_EVERY', 10)
  monkeypatch.setattr(loop.heap, 'serves_steps', lambda: on_cpu)
  for name in ('return_freed_memory', 'trim', 'retain_freed_memory'):
    monkeypatch.setattr(loop.heap, name, named(name.split('_')[0]))
  config = {'resolved': {'total_steps': 50}}
  state, checkpoints = mock.Mock(step=0, params={}), mock.Mock(every=25)
  run = loop.Loop(config, None, state, None, checkpoints, {}, None)
  checkpoints.saving.side_effect = lambda: 25 <= run.step < 37
  run._due_evals = lambda: ['test'] if run.step in (3, 25, 30) else []
  run._evaluate, run._save = named('evaluate'), named('save')
  run._write_status = lambda *_: None
  run._observe, run.record.pause = named('observe'), named('pause')
  for run.step in range(1, 51):
    run._pause()
  start, end = ['observe'], ['pause']
  evaluates = [*start, 'return', 'evaluate', 'trim', *end]
  saves = [*start, 'return', 'evaluate', 'save', 'trim', *end]
  again = [*start, 'trim', 'retain', *end]
  steps = {1: again, 3: evaluates, 4: again, 14: again, 24: again, 25: saves}
  steps |= {30: evaluates, 37: again, 47: again, 50: saves}
  if not on_cpu:  # steps use another memory: once after compiling, once after a save
    del steps[4], steps[14], steps[24], steps[47]
  assert done == [(step, word) for step, words in steps.items() for word in words]
