"""A run's config.json, read back."""

import json
from pathlib import Path

from vit_jax import config as config_lib
from vit_jax import files
from vit_jax.check import check
from vit_jax.errors import UserError


class Unreadable(UserError):
  """A run's config is missing or damaged."""


def read(folder: str | Path) -> dict:
  """Returns the resolved config of a run's folder.

  Raises:
    Unreadable: if config.json is missing, or is not the file that a run wrote.
  """
  path = files.path(folder) / 'config.json'
  if path.exists() and not path.is_file():  # reading a pipe would wait
    raise Unreadable(f'{path} is not a file.')
  try:
    with files.outages(path):
      config = json.loads(path.read_bytes())
  except OSError as error:
    raise Unreadable(
      f'{path}: {error.strerror}. It says what the run in this folder is: put it back, '
      'or use another --workdir.'
    ) from None
  except (ValueError, RecursionError):
    raise Unreadable(f'{path} is damaged: not the JSON that a run wrote.') from None
  return checked(config, str(path))


# {path: type} of the values that readers of a run's config need, and of those that they
# use if present.
_NEEDED = {
  'model': dict,
  'resolved': dict,
  'model.name': str,
  'resolved.image_shape': tuple[int, int, int],
}
_OPTIONAL = {
  **dict.fromkeys(('weights', 'data', 'tune', 'task', 'optim'), dict),
  'evals': dict[str, dict],
  'task.name': str,
  'resolved.total_steps': int,
  'resolved.inferred': list[str],
  'resolved.class_names': list[str] | None,
}
_ABSENT = object()


def checked(config, where: str) -> dict:
  """Returns a resolved config after a check of the values that its readers use.

  Args:
    where: the file, or another origin of the config, for messages.

  Raises:
    Unreadable: for a value that no run wrote.
  """
  try:
    check('config', config, dict)
    for path, kind in (_NEEDED | _OPTIONAL).items():
      value = config_lib.lookup(config, path, _ABSENT)
      if value is not _ABSENT:
        check(path, value, kind)
      elif path in _NEEDED:
        raise UserError(f'it lacks {path}.')
  except UserError as error:
    raise Unreadable(f'{where} is not what a run wrote: {error}') from None
  return config
