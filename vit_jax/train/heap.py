"""The process's heap: glibc keeps what is freed, or returns it to the kernel."""

import ctypes
import functools
import gc
import mmap
import sys

import jax

from vit_jax import machine

# What `mallopt` sets, by the names of glibc's malloc.h: large blocks come from the heap, not
# from `mmap`.
_ON_CPU = {'M_MMAP_MAX': 0, 'M_TRIM_THRESHOLD': -1}
# Beside a device only images are worth keeping: each thread's arena grows to all that it
# can hold, 64 MiB, at once.
_BESIDE_A_DEVICE = {
  'M_TRIM_THRESHOLD': -1,
  'M_MMAP_THRESHOLD': 32 << 20,
  'M_TOP_PAD': 64 << 20,
}
_RETURNED_ON_CPU = {'M_TRIM_THRESHOLD': 128 << 10}  # glibc's default
_MALLOPT = {
  'M_TRIM_THRESHOLD': -1,
  'M_TOP_PAD': -2,
  'M_MMAP_THRESHOLD': -3,
  'M_MMAP_MAX': -4,
}


def serves_steps() -> bool:
  """Whether steps take their temporaries from this heap: with glibc, on a CPU.

  They move when something that stays takes their place, and what they leave remains
  resident until `trim`.
  """
  return _glibc() is not None and jax.default_backend() == 'cpu'


def retain_freed_memory() -> None:
  """Keeps glibc from returning freed memory to the kernel; elsewhere does nothing.

  The kernel zeroes the pages of large blocks again when they are next allocated: a
  quarter of the time to make a batch of photographs, and 14 to 32 % of a ViT's training
  step on a CPU. There the heap also gets huge pages, which save another 8 to 22 %
  (benchmarks/NOTES.md). The price: the process stays at its peak size, until `trim`.

  Call it before JAX initialises its backends: steps on a CPU gain nothing afterwards.
  """
  if glibc := _glibc():
    # A step on one CPU device then runs in the thread that calls it, so that its temporaries
    # come from the main arena. In others glibc maps blocks above 64 MiB anew each time.
    jax.config.update('jax_cpu_enable_async_dispatch', False)
    _set(glibc, _ON_CPU if serves_steps() else _BESIDE_A_DEVICE)
    if serves_steps():
      _grow_by_huge_pages()


def return_freed_memory() -> None:
  """Lets threads return the free end of their arenas until the next `retain_freed_memory`.

  `trim` cannot: of arenas other than the main one, glibc's `malloc_trim` leaves the free
  end, and only freeing a large block of the same arena returns it. The threads of
  compiling, evaluations and checkpoints are spread over many arenas, each of which would
  keep up to 64 MiB. Meanwhile batches take 4 to 6 % more CPU time. Beside a device it does
  nothing.
  """
  if serves_steps():
    _set(_glibc(), _RETURNED_ON_CPU)


def trim() -> None:
  """Collects garbage and returns freed memory to the kernel, the latter with glibc only.

  Evaluations and checkpoints leave the heap in pieces: without this a run grows for
  thousands of steps. What the next step needs it takes again.
  """
  gc.collect(1)  # the oldest objects have been looked at before
  if glibc := _glibc():
    glibc.malloc_trim(0)


def _set(glibc: ctypes.CDLL, values: dict[str, int]) -> None:
  for name, value in values.items():
    glibc.mallopt(_MALLOPT[name], value)


@functools.cache  # once: `malloc_trim` returns pages, but keeps the range and its advice
def _grow_by_huge_pages() -> None:
  """Grows the heap by half of the machine's memory, in huge pages where Linux has them.

  This takes address space only: memory is allocated as it is used. With pages of 2 MiB the
  CPU misses fewer of its cached translations of addresses. A guard behind it, never
  touched or freed, keeps it from being the free end of the heap, which glibc would return
  after every step once `return_freed_memory` has been called. The guard is larger than any
  free block of a heap that no step has used yet, so that it is placed at the end.
  """
  glibc, size = _glibc(), machine.memory() // 2
  if block := glibc.malloc(ctypes.c_size_t(size)):  # else the address space is limited
    glibc.malloc(ctypes.c_size_t(64 << 20))
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
