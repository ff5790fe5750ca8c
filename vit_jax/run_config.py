"""A run's config.json: read back, and translated to today's names and meanings."""

import json
import re
from pathlib import Path

from vit_jax import buckets
from vit_jax import config as config_lib
from vit_jax.config_check import RENAMED, check_type
from vit_jax.errors import UserError

# The version of config.json. Version 1, of the first release, lacks `resolved.format`.
FORMAT = 2


class Unreadable(UserError):
  """A run's config that is missing or damaged."""


def read(folder: str | Path) -> dict:
  """Returns the resolved config of a run's folder, as this version would write it.

  Raises:
    Unreadable: if config.json is missing, or is not what a run wrote.
    UserError: if a newer version wrote it.
  """
  path = buckets.path(folder) / 'config.json'
  if path.exists() and not path.is_file():  # a pipe would be waited for
    raise Unreadable(f'{path} is not a file.')
  try:
    config = json.loads(path.read_bytes())
  except OSError as error:
    raise Unreadable(
      f'{path}: {error.strerror}. It says what the run in this folder is: put it back, '
      'or use another --workdir.'
    ) from None
  except (ValueError, RecursionError):
    raise Unreadable(f'{path} is damaged: not the JSON that a run wrote.') from None
  return in_todays_words(config, str(path))


def in_todays_words(config, where: str) -> dict:
  """Returns a resolved config as this version would have written it.

  A config of the first release comes back with what its words mean today: models of
  other names, and resizing that rounds to the nearest level.

  Args:
    config: what was read, of any type.
    where: the file, or what else it comes from, for messages.

  Raises: as `read`.
  """
  try:
    _check_written(config)
  except UserError as error:
    raise Unreadable(f'{where} is not what a run wrote: {error}') from None
  version = config['resolved'].get('format', 1)
  if version > FORMAT:
    raise UserError(
      f'{where} is of format {version}, from a newer vit_jax: this one reads up to '
      f'{FORMAT}.'
    )
  if version < 2:
    family, colon, variant = config['model']['name'].partition(':')
    family = {'bit': 'resnet_gn', 'bit_paper': 'bit'}.get(family, family)
    config = _rounding_nearest(_renamed(config))
    config['model']['name'] = f'{family}{colon}{variant}'
  return config


_ABSENT = object()
# Path -> type, of what readers of a run's config require, and what they read if present.
_WRITTEN = {'model': dict, 'resolved': dict, 'model.name': str}
_WRITTEN |= {'resolved.image_shape': list[int]}
_LOOKED_AT = dict.fromkeys(('weights', 'data', 'tune', 'task', 'optim', 'evals'), dict)
_LOOKED_AT |= {'resolved.format': int, 'resolved.total_steps': int}
_LOOKED_AT |= {
  'task.name': str,
  'resolved.told': list[str],
  'resolved.class_names': list[str] | None,
}


def _check_written(config) -> None:
  check_type('config', config, dict)
  for path, kind in (_WRITTEN | _LOOKED_AT).items():
    value = config_lib.lookup(config, path, _ABSENT)
    if value is not _ABSENT:
      check_type(path, value, kind)
    elif path in _WRITTEN:
      raise UserError(f'it lacks {path}.')
  if len(shape := config['resolved']['image_shape']) != 3:
    raise UserError(f'resolved.image_shape={shape}: expected three numbers.')
  for name, evaluation in config.get('evals', {}).items():
    check_type(f'evals.{name}', evaluation, dict)


def _renamed(value, where: str = 'config'):
  """Returns a config of the first release with today's names of keys."""
  if not isinstance(value, dict):
    return value
  paths = {key: f'{where}.{key}' for key in value}
  return {
    RENAMED.get(paths[key], key): _renamed(item, paths[key])
    for key, item in value.items()
  }


def _rounding_nearest(value, key: str = ''):
  """Returns a config with every `pp` as the first release, which rounded, meant it."""
  if isinstance(value, dict):
    return {k: _rounding_nearest(v, k) for k, v in value.items()}
  if key != 'pp':
    return value
  arguments = r'\(((?:[^()]|\([^()]*\))*)\)'  # with brackets in them, one level deep
  value = re.sub(
    rf'\b(resize|resize_small|inception_crop){arguments}',
    r"\1(\2, rounding='nearest')",
    value,
  )
  # 3 / 4 to 4 / 3, where it is 0.75 to 1.33 today.
  ratio = f', ratio={(3 / 4, 4 / 3)})'
  wide = lambda match: match[0] if 'ratio' in match[0] else match[0][:-1] + ratio
  return re.sub(rf'\binception_crop{arguments}', wide, value)
