"""Damaged, lying and malicious files of weights: hundreds of cases, the same at every run.

`cases(folder)` writes them one by one, `outcome(path)` loads one. They start from a few
tiny published files and change them systematically: `npz` the archive, its .npy headers
and its arrays, `safetensors` the header and the index, `configs` the JSON beside arrays;
`files` holds paths that are not files of weights at all.
"""

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

from tests.support.hostile_weights import configs, files, npz, safetensors
from tests.support.hostile_weights.files import Make
from vit_jax import weights
from vit_jax.errors import RunError


def outcome(path: Path) -> tuple[str, str]:
  """Loads what was made: ('refused', message), ('loaded', '') or ('crashed', why).

  A refusal is one line of one of our own errors; anything else raised is a crash.
  """
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')  # from numpy and Python, about what they parse
      weights.load(str(path))
  except RunError as error:
    text = str(error)
    return (
      ('crashed', f'{text!r} is not one line') if '\n' in text else ('refused', text)
    )
  except BaseException as error:
    if isinstance(error, KeyboardInterrupt):
      raise
    return 'crashed', f'{type(error).__name__}: {error}'
  return 'loaded', ''


def cases(folder: Path, every: int = 1) -> Iterator[tuple[str, Path]]:
  """Yields (name, path) of every `every`-th case.

  A case is deleted when the next one is asked for.
  """
  for number, (name, make) in enumerate(recipes().items()):
    if number % every:
      continue
    place = Path(folder) / f'{number:04d}'
    place.mkdir(parents=True)
    with warnings.catch_warnings(action='ignore'):  # zipfile's, of duplicate names
      path = make(place)
    yield name, path
    shutil.rmtree(place)


def recipes() -> dict[str, Make]:
  """Returns {name: how it is made}; names begin with what they are about."""
  groups = (
    files.kinds(),
    npz.zips(),
    npz.headers(),
    npz.arrays(),
    configs.comments(),
    safetensors.files(),
    safetensors.headers(),
    configs.hub_folders(),
    safetensors.indices(),
  )
  found = {}
  for group in groups:
    for name, make in group:
      assert name not in found, name
      found[name] = make
  return found
