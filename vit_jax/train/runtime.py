"""What the machine is told, and tells: compilation, memory, profiles."""

import contextlib
import ctypes
import functools
import gc
import mmap
import os
import platform
import sys
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import jax

from vit_jax import machine, paths, sharding
from vit_jax.errors import OutOfMemory
from vit_jax.train.disk import LocalFolder

# XLA on CPUs gives matrix products to YNNPACK by default. Eigen's are up to 1.35 times as
# fast at a ViT's shapes (benchmarks/NOTES.md); reductions stay with YNNPACK.
_CPU_OPTIONS = {'xla_cpu_experimental_ynn_fusion_type': 'LIBRARY_FUSION_TYPE_REDUCE'}


# Steps that the host may run ahead of the device: enough to keep it busy, few enough
# that a run of bad steps is noticed at once.
MAX_IN_FLIGHT = 2


def options() -> dict[str, str]:
  """Returns the `compiler_options` of `jax.jit` under which a model is fast here."""
  return dict(_CPU_OPTIONS) if jax.default_backend() == 'cpu' else {}


def enable_compilation_cache() -> None:
  """Enables JAX's persistent compilation cache: a run that restarts compiles nothing.

  Below `paths.cache_dir()`, one for each machine, as a program for one CPU may not suit
  another. JAX_COMPILATION_CACHE_DIR, if set, takes precedence.
  """
  if 'JAX_COMPILATION_CACHE_DIR' in os.environ:
    return
  folder = paths.cache_dir() / 'programs' / (platform.node() or 'here')
  jax.config.update('jax_compilation_cache_dir', str(folder))


def lowered(step, abstract, spec, mesh):
  """Returns the lowered step: state donated and placed, batch split, metrics on all.

  Args:
    abstract: the state, see `sharding.abstract`.
  """
  batch = {
    key: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding.batch_sharding(mesh))
    for key, s in spec.items()
  }
  placed = jax.tree.map(lambda x: x.sharding, abstract)
  out_shardings = (placed, sharding.replicated(mesh))
  jitted = jax.jit(step, donate_argnums=0, out_shardings=out_shardings)
  return jitted.lower(abstract, batch)


def prepare_once(fn, abstract, *args) -> Callable[[], Any]:
  """Returns what runs `fn(*args)`, placed as `abstract` says: a program for one call.

  It is lowered here and compiled in a thread, beside what the caller does next. On CPU
  LLVM does not optimise it, which would take longer than all it can gain: 2 of 4 s for
  the initialisers of configs/digits.py.
  """
  cpu = jax.default_backend() == 'cpu'
  options = {'xla_backend_optimization_level': 0} if cpu else {}
  placed = jax.tree.map(lambda x: x.sharding, abstract)
  lowered = jax.jit(fn, out_shardings=placed).lower(*args)
  thread = futures.ThreadPoolExecutor(1)
  program = thread.submit(lowered.compile, options)
  thread.shutdown(wait=False)
  return lambda: program.result()(*args)


def compile_step(step, abstract, spec, mesh):
  """Returns the compiled step; says what memory it needs and refuses what cannot fit."""
  start = time.perf_counter()
  with out_of_memory():
    program = lowered(step, abstract, spec, mesh).compile(options())
  needs = memory(program)['bytes']
  has = device_memory(mesh.local_devices[0])
  print(
    f'Step compiled in {time.perf_counter() - start:.1f} s; it needs '
    f'{needs / 2**30:.2f} GiB per device of {has / 2**30:.1f} GiB.',
    flush=True,
  )
  if needs > has:
    raise OutOfMemory(
      f'A step needs {needs / 2**30:.1f} GiB per device, which has {has / 2**30:.1f} '
      f'GiB. {_SMALLER}'
    )
  return program


def memory(program) -> dict[str, int]:
  """Returns what one device allocates for a compiled program, by its compiler.

  Returns:
    temp_bytes; argument_bytes: the state and batch; bytes: both, and results that do not
    take an argument's place.
  """
  m = program.memory_analysis()
  held = m.argument_size_in_bytes + m.temp_size_in_bytes
  return {
    'temp_bytes': m.temp_size_in_bytes,
    'argument_bytes': m.argument_size_in_bytes,
    'bytes': held + m.output_size_in_bytes - m.alias_size_in_bytes,
  }


_SMALLER = (
  'Try a smaller config.data.batch_size, smaller images, config.optim.accum=2 or more, '
  "config.model.remat='full', config.model.dtype='bfloat16', or more devices with "
  'config.mesh.fsdp.'
)


def _step_too_large(why: str) -> OutOfMemory:
  return OutOfMemory(f'Out of memory: {why} {_SMALLER}')


@contextlib.contextmanager
def out_of_memory(error_of: Callable[[str], Exception] = _step_too_large):
  """Replaces XLA's error for a lack of memory, a page long, by one of ours.

  Args:
    error_of: takes the first line of XLA's error, returns what to raise.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    raise error_of(str(error).splitlines()[0]) from error


def device_memory(device) -> int:
  """Returns the bytes that one device may use; on CPU its share of the machine's."""
  stats = device.memory_stats() or {}
  if 'bytes_limit' in stats:
    return stats['bytes_limit']
  return machine.memory() // max(jax.local_device_count(), 1)


PROFILED = (3, 8)  # the steps after start that a profile holds: compiled, warmed up


@contextlib.contextmanager
def profiler(enabled: bool, workdir: Path):
  """Gives `at(step)`, which profiles steps PROFILED after the first one seen."""
  first, active = None, False
  local = LocalFolder(workdir / 'profile') if enabled else None
  options = jax.profiler.ProfileOptions()
  # Python's calls, thousands per step, would be most of the profile and of its cost.
  options.python_tracer_level = 0

  def at(step: int) -> None:
    nonlocal first, active
    first = step if first is None else first
    if enabled and step - first == PROFILED[0]:
      jax.profiler.start_trace(str(local.folder), profiler_options=options)
      active = True
    elif active and step - first == PROFILED[1]:
      jax.profiler.stop_trace()
      active = False

  try:
    yield at
  finally:
    if active:
      jax.profiler.stop_trace()
    if local:
      local.close()


# What `mallopt` sets, by the names of glibc's malloc.h: large blocks come from the heap, not
# from `mmap`, and no arenas are added, so that the threads that make batches reuse one
# another's blocks. JAX's threads have their own arenas by then: in a single one they would
# wait for its lock.
_ON_CPU = {'M_ARENA_MAX': 1, 'M_MMAP_MAX': 0, 'M_TRIM_THRESHOLD': -1}
# Elsewhere only images are worth keeping, and hundreds of data threads would wait for
# one arena: each may have its own, which grows by all that it can hold, once.
_BESIDE_A_DEVICE = {
  'M_TRIM_THRESHOLD': -1,
  'M_MMAP_THRESHOLD': 32 << 20,
  'M_TOP_PAD': 64 << 20,
}
_MALLOPT = {
  'M_TRIM_THRESHOLD': -1,
  'M_TOP_PAD': -2,
  'M_MMAP_THRESHOLD': -3,
  'M_MMAP_MAX': -4,
  'M_ARENA_MAX': -8,
}


def retain_freed_memory() -> None:
  """Keeps glibc from returning freed memory to the kernel; elsewhere does nothing.

  The kernel zeroes the pages of large blocks again when they are next allocated: a
  quarter of the time to make a batch of photographs, and 14 to 32 % of a ViT's training
  step on a CPU. There the heap also gets huge pages, which save another 8 to 22 %
  (benchmarks/NOTES.md). The price: the process stays at its peak size, until
  `release_freed_memory`.

  Call it before JAX initialises its backends: steps on a CPU gain nothing afterwards.
  """
  if glibc := _glibc():
    # A step on one CPU device then runs in the thread that calls it, so that its temporaries
    # come from the main arena. In others glibc maps blocks above 64 MiB anew each time.
    jax.config.update('jax_cpu_enable_async_dispatch', False)
    cpu = jax.default_backend() == 'cpu'
    for name, value in (_ON_CPU if cpu else _BESIDE_A_DEVICE).items():
      glibc.mallopt(_MALLOPT[name], value)
    if cpu:
      _grow_by_huge_pages(glibc)


def release_freed_memory() -> None:
  """Collects garbage and returns freed memory to the kernel, the latter with glibc only.

  Evaluations and checkpoints leave the heap in pieces: without this a run grows for
  thousands of steps. What the next step needs it takes again.
  """
  gc.collect(1)  # the oldest objects have been looked at before
  if glibc := _glibc():
    glibc.malloc_trim(0)
    if jax.default_backend() == 'cpu':
      _grow_by_huge_pages(glibc)


def _grow_by_huge_pages(glibc: ctypes.CDLL) -> None:
  """Grows the heap by half of the machine's memory, in huge pages where Linux has them.

  This takes address space only: memory is allocated as it is used. With pages of 2 MiB the
  CPU misses fewer of its cached translations of addresses.
  """
  size = machine.memory() // 2
  block = glibc.malloc(ctypes.c_size_t(size))
  if block:  # else the address space is limited
    start = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
    length = ctypes.c_size_t(block + size - start)
    glibc.madvise(ctypes.c_void_p(start), length, mmap.MADV_HUGEPAGE)
    glibc.free(ctypes.c_void_p(block))


@functools.cache
def _glibc() -> ctypes.CDLL | None:
  """Returns the C library if it is glibc."""
  library = ctypes.CDLL(None) if sys.platform == 'linux' else None
  if not hasattr(library, 'mallopt'):
    return None
  library.malloc.restype = ctypes.c_void_p
  return library
