"""Compiled programs, kept from one session of the tests for the next.

JAX names a program by a hash of all that it is compiled from: its operations, XLA's flags
and the versions. A program that has changed since is therefore compiled anew.
"""

import atexit
import os
import platform
import shutil
import tempfile
from pathlib import Path

from tests.support import ROOT

# `pytest --cache-clear` deletes it, and so does `make clean`. Every machine has its own,
# because a program for one CPU may not suit another.
KEPT = ROOT / '.pytest_cache' / 'd' / 'programs' / (platform.node() or 'here')
# Files, some 300 MB, of several whole sessions. With more, all are compiled anew.
MOST = 5_000
FIRST = 'VIT_JAX_CACHE' not in os.environ  # no worker, no process that a test starts


def folder() -> str:
  """Returns the folder of the session's programs, below `VIT_JAX_CACHE`.

  The first process makes it, and fills it with the programs that were kept.
  """
  if FIRST:
    os.environ['VIT_JAX_CACHE'] = cache = tempfile.mkdtemp(prefix='vit_jax-')
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    if KEPT.is_dir() and len(os.listdir(KEPT)) > MOST:
      shutil.rmtree(KEPT)
    if KEPT.is_dir():
      shutil.copytree(KEPT, os.path.join(cache, 'compiled'))
  return os.path.join(os.environ['VIT_JAX_CACHE'], 'compiled')


def keep() -> None:
  """Keeps the programs of a session that is over and failed no test."""
  KEPT.mkdir(parents=True, exist_ok=True)
  for file in Path(os.environ['VIT_JAX_CACHE'], 'compiled').glob('*'):
    if not (kept := KEPT / file.name).exists():
      # Another session may read the folder now: a program appears in it as a whole.
      os.replace(shutil.copyfile(file, f'{kept}.{os.getpid()}'), kept)
