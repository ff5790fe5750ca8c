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
from collections.abc import Container
from pathlib import Path

_FOLDER: list[Path] = []  # of this process, once `record` was called
_BUNDLES_OF = re.compile(r'\d+-(.+)-\d+-final_bundles\.txt')
_BUNDLE = re.compile(r'^ *0x[0-9a-f]+ ', re.M)
_DELAY = re.compile(r'\bvdelay (\d+)')  # cycles until a unit's result is there


def record() -> None:
  """Has libtpu write down what it schedules; before it is loaded."""
  if _FOLDER:
    return
  folder = Path(tempfile.mkdtemp(prefix='vit_jax_schedules_'))
  _FOLDER.append(folder)
  atexit.register(forget)
  flags = (
    f'--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true '
    '--xla_jf_dump_llo_pass_label_regex=.*final_bundles.*'
  )
  os.environ['LIBTPU_INIT_ARGS'] = f'{os.environ.get("LIBTPU_INIT_ARGS", "")} {flags}'


def forget() -> None:
  """Removes what libtpu wrote down, and the folder."""
  for folder in _FOLDER:
    shutil.rmtree(folder, ignore_errors=True)


def take(names: Container[str]) -> dict[str, int]:
  """Returns {instruction: cycles} of the program compiled since the last call.

  What libtpu wrote of it is removed. A kernel's grid is one loop, counted once. Of
  kernels that are alike libtpu makes one, under the name of any.

  Args:
    names: of the instructions that are asked for.
  """
  found = {}
  for folder in _FOLDER:
    for path in sorted(folder.iterdir()):  # by time
      match = _BUNDLES_OF.fullmatch(path.name)
      if match and match[1] in names:
        text = path.read_text()
        delays = sum(int(delay[1]) for delay in _DELAY.finditer(text))
        found[match[1]] = len(_BUNDLE.findall(text)) + delays
      path.unlink()
  return found
