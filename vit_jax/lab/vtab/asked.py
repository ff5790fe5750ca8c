"""The runs of a task: its protocol, with what the command line changes."""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path

from vit_jax import config as config_lib
from vit_jax import weights
from vit_jax.config import DURATIONS
from vit_jax.errors import UserError
from vit_jax.lab.grid import cells, search
from vit_jax.lab.sweep import asked as sweep
from vit_jax.lab.sweep.asked import Asked
from vit_jax.lab.vtab.benchmarks import Benchmark, Task
from vit_jax.lab.vtab.protocols import PROTOCOLS, Setting
from vit_jax.tools.inspect import cost
from vit_jax.train import arguments

# Of what a protocol says nothing about: weights, a new head, no pre_logits.
RECIPE = 'finetune'
PICK, REPORTED = 'val/top1', 'test/top1'
_MICRO_BATCH = 64  # of configs/finetune.py: images that a device is sure to hold
_EVAL_BATCH = 128
# Keys that a benchmark sets, and where else what is wanted can be said.
_FIXED = {
  'data.source': '--tasks',
  'data.source_options': '--data_dir',
  'data.split': 'vit_jax sweep, which has no benchmark',
}


def default_out(args: argparse.Namespace) -> str:
  """Returns the folder that --out does not name."""
  changes = [
    f'{key}={texts[0]}' for key, texts in sweep.parsed(args.set) if len(texts) == 1
  ]
  benchmark = 'fgvc' if args.fgvc else 'vtab'
  words = [benchmark, args.protocol, Path(args.source).name, *changes]
  return f'runs/{arguments.folder_name(words)}'


def told(source: str) -> dict:
  """Returns the model of weights, as a config's section `model`.

  Raises:
    UserError: for weights that cannot be read, or are not of colour images.
  """
  found = weights.from_section(source)
  if found.channels != 3:
    raise UserError(
      f'{source} is of {found.channels}-channel images; those of the tasks have 3 channels.'
    )
  return weights.complete({}, found)


def check_sizes(planned: Mapping[str, Asked], model: dict) -> None:
  """Refuses images of a size that a model does not take.

  Args:
    planned: {name of a task: what is to be done}.
    model: see `told`.

  Raises:
    UserError: naming the task.
  """
  for name, each in planned.items():
    config = each.search.planned[0].config
    section = {**model, **config['model'], 'num_classes': 10}
    shape = cells.image_shape(config)
    if shape is not None:  # --set data.pp may leave it open
      with cells.named(f'{name}, --resolution'):
        cost.of(section, shape)


def task(
  args: argparse.Namespace, benchmark: Benchmark, name: str, model: dict, out: Path
) -> Asked:
  """Returns what is to be done for a task; all of it checked, as far as without its data.

  Args:
    model: see `told`.
    out: the folder of all tasks.

  Raises:
    UserError: for a --set that cannot be.
  """
  task = benchmark.tasks[name]
  several, common, seeds = sweep.divided(args.set)
  fixed = [assignment.partition('=')[0] for assignment in common]
  _check_keys([*several, *fixed])
  protocol = PROTOCOLS[args.protocol]
  if unclear := protocol.one_value & several.keys():
    raise UserError(
      f'--set {min(unclear)}: what the protocol {args.protocol} tries follows from it: '
      'give one value, and the others in runs of their own.'
    )
  given: dict = {}
  with cells.named('--set'):
    config_lib.override(given, common)
  tune = given.get('tune', {})
  setting = protocol.setting(task, tune if isinstance(tune, dict) else {})
  config = _config(args, benchmark, task, setting, model)
  with cells.named('--set'):
    for assignment in common:
      cells.assign(config, assignment)
    if 'val' not in config['evals']:
      raise UserError('evals has no val, which measures the accuracy: change its keys.')
    grid = {
      k: [str(v) for v in each] for k, each in setting.grid.items() if k not in fixed
    }
    grid |= several
    found = sweep.grid(config, grid)
  seeds = seeds or setting.seeds
  follow = lambda cell, changes, examples: _following(
    cells.changed(config, {**cell.changes, **changes}), given, setting, examples
  )
  examples = task.trainval if setting.more_data else task.train
  split = benchmark.trainval if setting.more_data else benchmark.train
  final = {'data.split': split, 'evals': _reported(config)}
  if not grid:
    config = cells.changed(config, final)
    (base,) = found
    base = base._replace(changes=follow(base, {}, examples))
    planned = cells.plan(config, [base], seeds, out / name)
    return Asked(search.Search(planned), common, [], [], config['evals'])
  found = [
    cell._replace(changes={**cell.changes, **follow(cell, {}, task.train)})
    for cell in found
  ]
  planned = cells.plan(config, found, [0], out / name)
  changes = lambda cell: {**final, **follow(cell, final, examples)}
  again = search.again(config, changes, seeds, out / name)
  with cells.named(f'the final runs of {name}'):
    again(found[0])
  asked = search.Search(planned, search.Pick(PICK, larger_is_better=True), again)
  return Asked(
    asked,
    common,
    list(grid),
    [f'data.split={split}', 'the test split'],
    config['evals'] | final['evals'],
  )


def _check_keys(keys: list[str]) -> None:
  for key in keys:
    for name, instead in _FIXED.items():
      if key in (name, 'data') or key.startswith(f'{name}.'):
        raise UserError(
          f'--set {key}: a task has data and splits of its own. See {instead}.'
        )


def _config(args, benchmark: Benchmark, task: Task, setting: Setting, model) -> dict:
  size = args.resolution or setting.resolution
  resize = lambda size: f"resize({size}, rounding='nearest')"
  small = lambda size: f"resize_small({size}, rounding='nearest')"
  before = round(size * (setting.precrop or 1))
  crops = setting.precrop and task.crop
  first = resize if setting.square else small
  ops = [first(before), f'random_crop({size})'] if crops else [resize(size)]
  if setting.precrop and task.flip:
    ops.append('flip_lr')
  tests = [resize(size)] if setting.square else [small(before), f'central_crop({size})']
  pp = lambda ops: '|'.join(['decode(3)', *ops, 'value_range(-1, 1)'])
  data = {'source': task.source}
  if args.data_dir:
    data['source_options'] = {'data_dir': args.data_dir}
  val = dict(data, split=benchmark.val, batch_size=_EVAL_BATCH, pp=pp(tests))
  train = dict(data, split=benchmark.train, batch_size=setting.batch_size, pp=pp(ops))
  recipe = config_lib.load(RECIPE)
  recipe = {k: v for k, v in recipe.items() if k not in DURATIONS}
  # The recipe's keys are those of a ViT; another family has no pre_logits to leave out.
  section = {k: v for k, v in recipe['model'].items() if k in (*model, 'dtype')}
  return cells.changed(
    recipe,
    {
      'model': section,
      'weights.source': args.source,
      'data': train,
      'evals': {'val': dict(type='classification', data=val)},
      'checkpoint': {'every': 0.25, 'keep_latest': 2},
      'log': {'every': 0.1, 'tensorboard': False},
      **setting.changes,
    },
  )


def _reported(config: dict) -> dict:
  """Returns the section `evals` with the test split in the place of the validation split."""
  evals = cells.changed(config, {})['evals']
  evals['test'] = evals.pop('val')
  evals['test']['data']['split'] = 'test'
  return evals


def _following(config: dict, given: dict, setting: Setting, examples: int) -> dict:
  """Returns the changes that follow from steps and batch size, but for what is given.

  Args:
    given: the config as --set alone would make it.
    examples: of the training split.
  """
  changes, batch = {}, config['data']['batch_size']
  if _warmup(given) is None and isinstance(config['optim'].get('schedule'), dict):
    steps = config_lib.total_steps(config, examples, batch)
    changes['optim.schedule.warmup'] = math.floor(steps * setting.warmup)
  if given.get('optim', {}).get('accum') is None:
    parts = max(batch // _MICRO_BATCH, 1)
    changes['optim.accum'] = parts if batch % parts == 0 else 1
  return changes


def _warmup(given: dict):
  schedule = given.get('optim', {}).get('schedule')
  return schedule.get('warmup') if isinstance(schedule, dict) else None
