"""What a reader of a room must hold in the head: its public definitions, its options."""

import ast
import dataclasses
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.support import ROOT
from vit_jax import evaluators, losses, models, optim, tasks, tune
from vit_jax.data import sources
from vit_jax.data.ops import registry

PACKAGE = ROOT / 'vit_jax'


def definitions() -> dict[str, list[str]]:
  """Returns {room: names of its public functions, classes and methods}."""
  found = defaultdict(list)
  for path in PACKAGE.rglob('*.py'):
    for node in _public(ast.parse(path.read_text(encoding='utf-8')).body):
      found[_room(path)].append(node.name)
      if isinstance(node, ast.ClassDef):
        methods = _public(node.body)
        found[_room(path)] += [f'{node.name}.{method.name}' for method in methods]
  return found


def options() -> dict[str, list[tuple[str, str]]]:
  """Returns {room: (owner, option)} of all that a config or a command line may set."""
  found = defaultdict(list)
  for owner, cls, names in _entries():
    room = cls.__module__.removeprefix('vit_jax.').partition('.')[0]
    found[room] += [(owner, name) for name in names]
  for path in PACKAGE.rglob('*.py'):
    owner = path.parent.name if path.stem == '__main__' else path.stem
    found[_room(path)] += [(owner, flag) for flag in _flags(path)]
  return found


def setters() -> str:
  """Returns the text in which a used option stands.

  That is every recipe, reader of published files, experiment, guide and notebook.
  """
  patterns = (
    *('configs/*.py', 'README.md', 'docs/**/*.md', 'colabs/*.ipynb'),
    *('vit_jax/weights/**/*.py', 'vit_jax/detection/weights/*.py'),
    *('vit_jax/models/timm.py', 'vit_jax/models/hub.py', 'vit_jax/lab/**/*.py'),
    'vit_jax/**/*.json',
  )
  paths = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
  return '\n'.join(path.read_text(encoding='utf-8') for path in paths)


def by_position() -> set[tuple[str, str]]:
  """Returns the (op, argument) that a pipeline of a recipe or page gives by position."""
  given = set()
  # A call, whose arguments may hold one level of brackets: 'random_affine(8, (0.9, 1.1))'.
  for name, text in re.findall(r'(\w+)\(((?:[^()|]|\([^()]*\))*)\)', setters()):
    if name in registry.OPS:
      parameters = [*inspect.signature(registry.OPS[name]).parameters]
      arguments = re.sub(r'\([^()]*\)', 'pair', text).split(',')
      positional = [arg for arg in arguments if arg.strip() and '=' not in arg]
      given |= {(name, parameter) for parameter in parameters[: len(positional)]}
  return given


def _entries() -> Iterator[tuple[str, object, list[str]]]:
  """Yields (name, function or class, options) of the entries of all tables."""
  for name in models.MODELS:
    yield name, models.MODELS[name].model, [*models.signature(name).parameters]
  tables = (
    tasks.TASKS,
    evaluators.EVALUATORS,
    sources.SOURCES,
    optim.optimizers.OPTIMIZERS,
    losses.LOSSES,
  )
  for table in tables:
    for name in table:
      yield name, table[name], [*table.signature(name).parameters]
  for name in tune.METHODS:
    method = tune.METHODS[name]
    yield name, method, [field.name for field in dataclasses.fields(method)]
  for name, factory in registry.OPS.items():
    yield name, factory, [*inspect.signature(factory).parameters]


def _flags(path: Path) -> list[str]:
  """Returns the flags of the command-line parsers that a module fills."""
  flags = []
  for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
    if isinstance(node, ast.Call) and node.args:
      first = node.args[0]
      name = getattr(node.func, 'id', None) or getattr(node.func, 'attr', None)
      if name in ('add', 'add_argument') and isinstance(first, ast.Constant):
        flags += [first.value] if str(first.value).startswith('--') else []
  return flags


def _public(body: list[ast.stmt]) -> list:
  kinds = ast.FunctionDef | ast.ClassDef
  return [node for node in body if isinstance(node, kinds) and node.name[0] != '_']


def _room(path: Path) -> str:
  """Returns the first folder of a module in vit_jax, or 'modules' at the top."""
  parts = path.relative_to(PACKAGE).parts
  return parts[0] if len(parts) > 1 else 'modules'
