"""The search that the command line of `vit_jax sweep` asks for."""

import argparse
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from vit_jax import config as config_lib
from vit_jax.errors import UserError
from vit_jax.lab.grid import cells, search
from vit_jax.lab.grid.cells import Cell
from vit_jax.lab.sweep import values
from vit_jax.train import arguments, metrics


class Asked(NamedTuple):
  """What is asked for.

  Attributes:
    common: 'KEY=VALUE', of every cell.
    keys: those with several values.
    final: 'KEY=VALUE' of --final.
    evals: the section of the config, and of what is run in the end.
  """

  search: search.Search
  common: list[str]
  keys: list[str]
  final: list[str]
  evals: dict


def default_out(args: argparse.Namespace) -> str:
  """Returns the folder of a sweep that --out does not name.

  More values of a key that has several do not make another sweep.
  """
  common = [f'{key}={texts[0]}' for key, texts in parsed(args.set) if len(texts) == 1]
  return f'runs/sweep-{arguments.default_name(args.config, common)}'


def sweep(args: argparse.Namespace, out: Path) -> Asked:
  """Returns what --set, --pick and --final ask for; all of it checked.

  Raises:
    UserError: for a config, key, value or metric that cannot be. Nothing was run.
  """
  config = config_lib.load(args.config)
  several, common, seeds = divided(args.set)
  with cells.named('--set'):
    for assignment in common:
      key, _, text = assignment.partition('=')
      _values(config, {key: text})
      cells.assign(config, assignment)
    found = grid(config, several)
  planned = cells.plan(config, found, seeds or [config.get('seed', 0)], out)
  pick, again, evals = None, None, config.get('evals', {})
  if args.pick:
    larger = metrics.larger_is_better(args.pick, evals, '--pick')
    pick = search.Pick(args.pick, larger)
  if args.final:
    changes, seeds = _final(args.final, config, seeds)
    again = search.again(config, lambda cell: changes, seeds, out)
    with cells.named('--final'):
      evals = evals | again(found[0])[0].config.get('evals', {})
  asked = search.Search(planned, pick, again)
  return Asked(asked, common, list(several), args.final, evals)


def divided(
  assignments: Iterable[str],
) -> tuple[dict[str, list[str]], list[str], list[int] | None]:
  """Returns ({key: texts of its values}, 'KEY=VALUE' of those with one, seeds or None).

  Raises:
    UserError: see `parsed`, and for seeds that are not integers.
  """
  several, common, seeds = {}, [], None
  with cells.named('--set'):
    for key, texts in parsed(assignments):
      if key == 'seed':
        seeds = _seeds(texts)
      elif len(texts) == 1:
        common.append(f'{key}={texts[0]}')
      else:
        several[key] = texts
  return several, common, seeds


def grid(config: dict, several: dict[str, list[str]]) -> list[Cell]:
  """Returns a cell for each combination of values, the last key fastest.

  Args:
    several: {key: texts of its values}; {}: one cell, 'base', that changes nothing.

  Raises:
    UserError: for a value that the key of this config cannot have.
  """
  pairs = [[(key, text) for text in texts] for key, texts in several.items()]
  found = []
  for each in map(dict, itertools.product(*pairs)):
    changes = _values(config, each)
    words = [values.name_of(key, value) for key, value in changes.items()]
    found.append(Cell(arguments.folder_name(words) or 'base', changes))
  if len({cell.name for cell in found}) < len(found):
    raise UserError('the names of cells would be equal; write shorter values.')
  return found


def parsed(assignments: Iterable[str]) -> list[tuple[str, list[str]]]:
  """Returns [(key, texts of its values)].

  Raises:
    UserError: see `values.parse`, and for a key that is set twice, or two durations.
  """
  found: dict[str, list[str]] = {}
  for assignment in assignments:
    key, texts = values.parse(assignment)
    if key in found:
      raise UserError(
        f'{key} is set twice: give its values at once, {key}='
        f'{",".join([*found[key], *texts])}'
      )
    found[key] = texts
  durations = [
    key for key in config_lib.DURATIONS if found.get(key, ['None']) != ['None']
  ]
  if len(durations) > 1:
    raise UserError(f'{" and ".join(durations)} are both set: a run has one duration.')
  return list(found.items())


def _seeds(texts: list[str]) -> list[int]:
  if not all(text.strip().isdigit() for text in texts):
    raise UserError(f'seed={",".join(texts)}: expected whole numbers, seed=0,1,2')
  return [int(text) for text in texts]


def _values(config: dict, texts: dict[str, str]) -> dict:
  found = {key: config_lib.literal(text) for key, text in texts.items()}
  for key, text in texts.items():
    old = config_lib.lookup(config, key)
    if isinstance(old, list) and not isinstance(found[key], list | None):
      raise UserError(
        f'{key}={text}: config.{key} is a list, {old}, and a list is one value in '
        f'brackets, {key}=({text},...).'
      )
    if isinstance(found[key], list) and isinstance(old, int | float):
      raise UserError(
        f'{key}={text}: config.{key} is a number, {old}. Several values are separated by '
        'commas, without brackets.'
      )
    # For its checks: of a key that goes through no section, a number that becomes a text.
    cells.assign(cells.changed(config, {}), f'{key}={text}')
  return found


def _final(assignments: list[str], config: dict, seeds) -> tuple[dict, list[int]]:
  changes = {}
  with cells.named('--final'):
    for key, texts in parsed(assignments):
      if key == 'seed':
        seeds = _seeds(texts)
      elif len(texts) > 1:
        raise UserError(f'{key} has {len(texts)} values: only seed can have several.')
      else:
        changes |= _values(config, {key: texts[0]})
  return changes, seeds or [config.get('seed', 0)]
