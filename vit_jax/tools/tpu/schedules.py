"""How long a Pallas kernel takes: the bundles of instructions that libtpu made of it.

XLA has no estimate of a kernel. But a TPU core issues one bundle a cycle, in an order that
is fixed when compiling, so that a grid step without inner loops takes as many cycles as
its bundles, but for waiting on memory; libtpu writes their number to a folder if told to.
"""

import atexit
import os
import re
import shutil
import tempfile
from pathlib import Path

_FOLDER: list[Path] = []  # of this process, once `record` was called
_LABEL = 'schedule-analysis_final_bundles'


def record() -> None:
  """Has libtpu write down what it schedules; before it is loaded."""
  if _FOLDER:
    return
  folder = Path(tempfile.mkdtemp(prefix='vit_jax_schedules_'))
  _FOLDER.append(folder)
  atexit.register(shutil.rmtree, folder, ignore_errors=True)
  flags = (
    f'--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true '
    '--xla_jf_dump_llo_pass_label_regex=.*final_bundles.*'
  )
  os.environ['LIBTPU_INIT_ARGS'] = f'{os.environ.get("LIBTPU_INIT_ARGS", "")} {flags}'


def bundles(name: str) -> int | None:
  """Returns the bundles of one instruction of the program that was last compiled.

  None if they were not written down. The kernel's grid is one loop, counted once.
  """
  found = [
    path for folder in _FOLDER for path in folder.glob(f'*-{name}-*-{_LABEL}.txt')
  ]
  if not found:
    return None
  newest = max(found, key=lambda path: path.name)  # named by time
  match = re.search(r'total scheduled bundles:\s+(\d+)', newest.read_text())
  return int(match[1]) if match else None
