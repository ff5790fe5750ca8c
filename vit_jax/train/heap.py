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
# Elsewhere only images are worth keeping: each thread's arena grows by all that it can
# hold, once.
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
    cpu = jax.default_backend() == 'cpu'
    _set(glibc, _ON_CPU if cpu else _BESIDE_A_DEVICE)
    if cpu:
      _grow_by_huge_pages()


def return_freed_memory() -> None:
  """Lets threads return the free end of their arenas until the next `retain_freed_memory`.

  `trim` cannot: glibc's `malloc_trim` leaves the end of every arena but the main one. A
  thread returns it when it frees a block beside it. Evaluations and checkpoints start
  threads that come by one arena after the other, and each would keep up to 64 MiB.

  It costs 4 to 6 % of the CPU time that batches take. Does nothing beside a device.
  """
  if (glibc := _glibc()) and jax.default_backend() == 'cpu':
    _set(glibc, _RETURNED_ON_CPU)


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


@functools.cache  # once: `malloc_trim` leaves the addresses and their huge pages
def _grow_by_huge_pages() -> None:
  """Grows the heap by half of the machine's memory, in huge pages where Linux has them.

  This takes address space only: memory is allocated as it is used. With pages of 2 MiB the
  CPU misses fewer of its cached translations of addresses. A block that stays allocated,
  and is never touched, follows: else this would be the free end of the heap, which
  `return_freed_memory` gives away after every step. It is as large, so that no free block before
  can hold it.
  """
  glibc, size = _glibc(), machine.memory() // 2
  block, end = (glibc.malloc(ctypes.c_size_t(size)) for _ in range(2))
  if block and end:  # else the address space is limited
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
