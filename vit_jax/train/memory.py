"""Memory of the host: kept by the process that has freed it."""

import ctypes
import sys

import jax

# What `mallopt` sets, by the names of glibc's malloc.h. A step's temporaries on CPU are
# blocks of any size, which the main arena alone can hold, and keep.
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


def keep_freed() -> None:
  """Lets this process keep the memory that it frees, under glibc; else nothing.

  glibc gives large blocks back to the kernel, which zeroes their pages again when they
  are next wanted: a quarter of the time to make a batch of photographs, and 15 % of a
  training step of ViT-S/16 on CPU (benchmarks/NOTES.md). A process keeps its peak of
  memory for it.
  """
  if sys.platform != 'linux' or not hasattr(ctypes.CDLL(None), 'mallopt'):
    return
  settings = _ON_CPU if jax.default_backend() == 'cpu' else _BESIDE_A_DEVICE
  for name, value in settings.items():
    ctypes.CDLL(None).mallopt(_MALLOPT[name], value)
