"""Every key of two recipes, set to a wrong value: refused in one line, or legal."""

import copy
import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from vit_jax import config as config_lib
from vit_jax.errors import UserError
from vit_jax.train import schema

DEEP: list = []
for _ in range(500):
  DEEP = [DEEP]
# Values that are refused at any key: not finite, not JSON, or nested too deeply.
NEVER = [math.nan, math.inf, -math.inf, 10**400, b'x', {1}, Fraction(1, 3)]
NEVER += [np.ones(3), DEEP]
PERHAPS = [None, True, -1, 0, 3, 0.5, 1e30, -1e30, 10**30, np.float32(0.5), '', 'x']
PERHAPS += ['a\nb', 'a\x00b', 'a\udcffb', '((((', 'x' * 5000, [], [1, 'x', None]]
PERHAPS += [[['a', 1], ['(', 2]], {}, {'x': 1}]


def places(config: dict, path: tuple = ()) -> Iterator[tuple]:
  """Yields the path of every key, sections too."""
  for key, value in config.items():
    yield (*path, key)
    if isinstance(value, dict):
      yield from places(value, (*path, key))


def changed(config: dict, path: tuple, value=None, key: str | None = None) -> dict:
  """Returns the config with another value at a path, or another key for its value."""
  config = copy.deepcopy(config)
  section = config
  for name in path[:-1]:
    section = section[name]
  if key is None:
    section[path[-1]] = value
  else:
    section[key] = section.pop(path[-1])
  return config


def mutations(*names) -> Iterator[tuple[str, dict, bool]]:
  """Yields (name, config, whether it must be refused), each key once."""
  done = set()
  for name in names:
    config = config_lib.load(f'configs/{name}.py:debug')
    for path in places(config):
      if path in done:
        continue
      done.add(path)
      where = f'{name} {".".join(path)}'
      for i, value in enumerate(PERHAPS + NEVER):
        never = i >= len(PERHAPS)
        yield f'{where}: value {i}', changed(config, path, value), never
      named = path[-2:-1] in (('evals',), ('datasets',))  # their keys are names
      yield f'{where} misspelt', changed(config, path, key=f'{path[-1]}x'), not named
      yield f'{where} gone', changed(config, path, key='\x00'), not named


def test_a_wrong_value_is_one_line_and_never_another_exception():
  count = 0
  for name, config, must in mutations('digits', 'augreg_i1k'):
    count += 1
    message = ''
    try:
      schema.check(config)
    except UserError as error:
      message = str(error)
    assert '\n' not in message, name
    assert message or not must, name
  assert count > 1000
