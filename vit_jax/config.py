"""Loads configs, which are Python data, parses their arguments and applies overrides.

A config file defines `get_config(arg)`, which returns an `ml_collections.ConfigDict`; the
rest of the code sees plain dicts. Loading a config file executes its code, by design. A run
writes its resolved config to its folder as JSON, which `read` reads.
"""

import ast
import contextlib
import importlib.util
import json
import sys
import types
from pathlib import Path

from vit_jax import files
from vit_jax.check import FLOAT32, INT32, Count, Positive, check
from vit_jax.errors import UserError, did_you_mean, one_line

DURATIONS = ('steps', 'epochs', 'examples')


def parse_arg(arg: str | None, *, debug: dict, **defaults) -> types.SimpleNamespace:
  """Parses the arguments of a config file, 'variant=L/16,epochs=30'.

  Args:
    arg: the text after the colon in `--config=FILE:ARG`. Values get the type of the
      default. The word `debug` stands for the arguments of `debug`, a shrunk recipe.
    debug: {argument: value}, applied before the other arguments.
  """
  values, own = dict(defaults), {}
  for item in filter(None, (arg or '').split(',')):
    key, equals, text = item.partition('=')
    if key == 'debug' and not equals:
      values |= debug
    elif key not in defaults or not equals:
      near = did_you_mean(key, [*defaults, 'debug'])
      # Only keys of the config itself have sections.
      hint = f' Write --config.{item} after a space.' if '.' in key else near
      raise UserError(
        f'Unknown config argument {item!r}: expected "debug", or KEY=VALUE with KEY one of '
        f'{sorted(defaults)}.{hint}'
      )
    else:
      own[key] = _parse_value(key, text, defaults[key])
  # In a recipe `examples` may be the size of its data.
  lengths = [f'{key}={own[key]}' for key in ('epochs', 'steps') if key in own]
  if len(lengths) > 1:
    raise UserError(f'{" and ".join(lengths)} both set the length of a run: keep one.')
  return types.SimpleNamespace(**values | own)


def _parse_value(key, text, default):
  kind, value = type(default), literal(text)
  if kind not in (bool, int, float):
    return text
  if kind is bool and value in (True, False):
    return bool(value)
  if kind is not bool and type(value) in (int, kind) and abs(value) <= FLOAT32:
    return kind(value)
  raise UserError(f'Config argument {key}={text!r}: expected a finite {kind.__name__}.')


def recipes() -> dict[str, Path]:
  """Returns {name: file} of `configs/`, which an installed vit_jax contains."""
  package = Path(__file__).parent
  folders = (package / 'configs', package.parent / 'configs')
  folder = next((f for f in folders if f.is_dir()), folders[0])
  paths = sorted(folder.glob('[!_]*.py'))
  return {path.stem: path for path in paths if path.stem != 'common'}


def load(spec: str) -> dict:
  """Loads the config 'FILE.py:ARG' or 'NAME:ARG' as nested plain dicts.

  NAME is one of `recipes()`; `:ARG` can be left out.
  """
  file, _, arg = spec.partition(':')
  module = execute(file)
  if not hasattr(module, 'get_config'):
    raise UserError(f'Config file {file!r} defines no get_config(arg).')
  return to_dicts(module.get_config(arg or None))


def execute(file: str) -> types.ModuleType:
  """Executes a config file, so that names that it registers are known; returns its module."""
  path = _find(file)
  module_spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(module_spec)
  with _importable(path.resolve().parent):
    module_spec.loader.exec_module(module)
  return module


@contextlib.contextmanager
def _importable(folder: Path):
  """Lets a config file import the files in its folder, anew for each config."""
  before = set(sys.modules)
  sys.path.insert(0, str(folder))
  try:
    yield
  finally:
    sys.path.remove(str(folder))
    for name in set(sys.modules) - before:
      file = getattr(sys.modules[name], '__file__', None)
      if file and Path(file).parent == folder:
        del sys.modules[name]


def _find(file: str) -> Path:
  path, names = Path(file), recipes()
  if path.suffix == '.py' and path.is_file():
    return path
  if file in names:
    return names[file]
  if path.stem in names:
    # The user gave the path of a file in a clone, but this is an installed package.
    hint = f' Did you mean "{path.stem}"?'
  else:
    hint = did_you_mean(file, [*names, *map(str, path.parent.glob('*.py'))])
  raise UserError(
    f'No config {file!r}: expected a FILE.py, or one of {", ".join(names)}.{hint}'
  )


def to_dicts(config) -> dict:
  """Converts a config to nested dicts, lists and scalars, as if it was read from JSON."""
  if hasattr(config, 'items'):
    return {str(key): to_dicts(value) for key, value in config.items()}
  if isinstance(config, list | tuple):
    return [to_dicts(value) for value in config]
  return config


class ByMethod(float):
  """A learning rate that depends on `config.tune.method`, which may still be overridden.

  As a number it is the rate of full fine-tuning; `others` has those of other methods.
  """

  others: dict[str, float]

  def __new__(cls, full: float, **others: float):
    rate = super().__new__(cls, full)
    rate.others = others
    return rate


def override(config: dict, assignments: list[str]) -> None:
  """Applies 'a.b=value' to a config in place; 'a.b' without a value means True.

  Values are Python literals, otherwise strings. A key need not be in the config, so that the
  command line can change every default. `check` validates keys and types later.
  """
  for assignment in assignments:
    key, equals, text = assignment.partition('=')
    value = literal(text) if equals else True
    *parents, last = key.split('.')
    node = config
    for depth, parent in enumerate(parents, 1):
      node = node.setdefault(parent, {})
      if not isinstance(node, dict):
        raise UserError(f'config.{".".join(parents[:depth])} is not a section.')
    old = node.get(last)
    if isinstance(old, dict) and not isinstance(value, dict):
      raise UserError(
        f'config.{key}={text} is a section: set one of its keys {sorted(old)}, or '
        f'empty it with --config.{key}={{}}'
      )
    node[last] = value


def literal(text: str):
  """Parses a text as a Python literal; returns the text if it is not a literal."""
  try:
    return to_dicts(ast.literal_eval(text))
  except (ValueError, SyntaxError, RecursionError, MemoryError):
    return {'true': True, 'false': False}.get(text, text)


def lookup(config: dict, path: str):
  """Returns the value at 'a.b.c' of nested dicts, or None if there is none."""
  value = config
  for key in path.split('.'):
    value = value.get(key) if isinstance(value, dict) else None
  return value


def total_steps(config: dict, num_examples: int, batch_size: int) -> int:
  """Returns the number of steps, given by exactly one of steps, epochs and examples.

  Epochs and examples are rounded to whole steps, at least one (as in big_vision).
  """
  durations = {key: config[key] for key in DURATIONS if config.get(key) is not None}
  if len(durations) != 1:
    raise UserError(
      f'A config needs exactly one of {", ".join(DURATIONS)}, not {durations or "none"}; '
      'unset one with --config.KEY=None.'
    )
  ((key, value),) = durations.items()
  if key == 'steps':
    # A value such as 1e4 is a float.
    if isinstance(value, float) and value.is_integer():
      value = int(value)
    check('config.steps', value, Count)
    return value
  check(f'config.{key}', value, Positive)
  examples = value * num_examples if key == 'epochs' else value
  steps = max(1, round(examples / batch_size))
  if steps > INT32:
    raise UserError(f'config.{key}={value!r} is {steps:.3g} steps, more than {INT32}.')
  return steps


def flat(config: dict, prefix: str = '') -> dict:
  """Flattens nested dicts to {'a.b': value}."""
  result = {}
  for key, value in config.items():
    nested = isinstance(value, dict)
    result |= flat(value, f'{prefix}{key}.') if nested else {prefix + key: value}
  return result


def differences(old: dict, new: dict) -> dict[str, tuple]:
  """Returns {'a.b': (old, new)} for every leaf that differs; an absent leaf is None."""
  old, new = flat(old), flat(new)
  pairs = {key: (old.get(key), new.get(key)) for key in sorted({*old, *new})}
  return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


# -- the config of a run ---------------------------------------------------------------


class Unreadable(UserError):
  """A run's config is missing or damaged."""


def read(folder: str | Path) -> dict:
  """Returns the resolved config from a run's folder."""
  path = files.path(folder) / 'config.json'
  try:
    with files.outages(path):
      # Reading a named pipe would block.
      if path.exists() and not path.is_file():
        raise Unreadable(f'{path} is not a file: remove it, or use another --workdir.')
      config = json.loads(path.read_bytes())
  except UserError:
    raise
  except (OSError, ValueError, RecursionError) as error:
    what = f'{path} is damaged ({one_line(error)})'
    if isinstance(error, FileNotFoundError):
      what = f'There is no {path}'
    raise Unreadable(
      f'{what}: name the folder of a run, or train in another --workdir.'
    ) from None
  return check_written(config, str(path))


# {path: type} of the values of a run's config that other code reads.
_WRITTEN = {
  **dict.fromkeys(('model', 'data', 'resolved'), dict),
  **dict.fromkeys(('weights', 'optim', 'tune', 'task', 'checkpoint'), dict | None),
  'evals': dict[str, dict] | None,
  'model.name': str,
  'task.name': str | None,
  'resolved.image_shape': tuple[int, int, int],
  'resolved.total_steps': int,
  'resolved.inferred': list[str] | None,
  'resolved.class_names': list[str] | None,
}


def check_written(config, where: str) -> dict:
  """Checks a config that a run wrote and returns it; `where` is its origin, for errors."""
  try:
    check('config', config, dict)
    for path, kind in _WRITTEN.items():
      check(path, lookup(config, path), kind)
  except UserError as error:
    raise Unreadable(f'{where} is not a config that a run wrote: {error}') from None
  return config
