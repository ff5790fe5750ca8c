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
_BUNDLE = re.compile(r'^ *0x[0-9a-f]+ ', re.M)
_DELAY = re.compile(r'\bvdelay (\d+)')  # cycles until a unit's result is there


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


def cycles(name: str) -> int | None:
  """Returns the cycles of one instruction of the program that was last compiled.

  None if its bundles were not written down. The kernel's grid is one loop, counted once.
  """
  found = [
    path for folder in _FOLDER for path in folder.glob(f'*-{name}-*-final_bundles.txt')
  ]
  if not found:
    return None
  text = max(found, key=lambda path: path.name).read_text()  # named by time
  delays = sum(int(match[1]) for match in _DELAY.finditer(text))
  return len(_BUNDLE.findall(text)) + delays
