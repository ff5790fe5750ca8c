"""The cells of an ablation, as the command line asks for them."""

import argparse
import contextlib
import importlib

from vit_jax import config as config_lib
from vit_jax.errors import UserError, choose
from vit_jax.lab.ablate.ablation import Ablation
from vit_jax.lab.grid import cells as grid
from vit_jax.train import schema


def ablation(name: str) -> Ablation:
  """Returns the ablation of a name."""
  return importlib.import_module(f'vit_jax.lab.ablate.{name}').ABLATION


def cells(
  args: argparse.Namespace, ablation: Ablation
) -> tuple[str, dict, list[grid.Cell]]:
  """Returns ('NAME:ARGS', config, the cells that --cells names, or all of them).

  --data that is bundled chooses a base of the ablation; other data is the argument `data`
  of the config, which is `folder` unless --config names another.

  Raises:
    UserError: for a config, data, name of a cell or --set that cannot be, or a --set that
      would have no effect, as the cells set that key.
  """
  spec, config, found = _all(args, ablation, args.set)
  for i, assignment in enumerate(args.set):
    key = assignment.partition('=')[0]
    sections = [key.rsplit('.', n)[0] for n in range(key.count('.') + 1)]
    if any(section in cell.changes for cell in found for section in sections):
      with contextlib.suppress(UserError):  # then it does have an effect
        *_, without = _all(args, ablation, args.set[:i] + args.set[i + 1 :])
        if without == found:
          break
  else:
    return spec, config, _named(args, found)
  raise UserError(f'--set {key}: the cells of {args.name} set that themselves.')


def common(args: argparse.Namespace, ablation: Ablation) -> list[str]:
  """Returns what every cell changes in the config, 'KEY=VALUE', of a section 'KEY'."""
  _, changes, _ = _base(args, ablation)
  return [
    *(k if isinstance(value, dict) else f'{k}={value}' for k, value in changes.items()),
    *args.set,
  ]


def _base(args, ablation: Ablation) -> tuple[str, dict, dict]:
  known, data = ablation.bases, args.data
  spec, changes, options = args.config, {}, {}
  if spec is None and data is None:
    spec, changes, options = next(iter(known.values()))
  elif spec is None and data.partition(':')[0] in ('digits', 'shapes'):
    spec, changes, options = choose(f'bundled data of {args.name}', data, known)
  elif data is not None:
    spec = spec or 'folder'
    spec += f'{"," if ":" in spec else ":"}data={data}'
  return spec, changes, options


def _all(args, ablation: Ablation, assignments: list[str]) -> tuple[str, dict, list]:
  spec, changes, options = _base(args, ablation)
  config = grid.changed(config_lib.load(spec), changes)
  with grid.named('--set'):
    for assignment in assignments:
      if assignment.startswith('seed='):
        raise UserError('seed: use --seeds.')
      grid.assign(config, assignment)
  with grid.named(spec):
    schema.check(config)  # the cells look into it
    return spec, config, ablation.cells(config, **options)


def _named(args, found: list[grid.Cell]) -> list[grid.Cell]:
  if args.cells is None:
    return found
  names = {cell.name: cell for cell in found}
  wanted = dict.fromkeys(args.cells.split(','))
  chosen = {}

  def choose_with_needed(cell):
    for name in grid.needs(cell):  # a cell starts from the runs of these
      choose_with_needed(names[name])
    chosen[cell.name] = cell

  for name in wanted:
    choose_with_needed(choose(f'cell of {args.name}', name, names))
  return list(chosen.values())
