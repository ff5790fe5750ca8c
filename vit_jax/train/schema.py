"""What a run's config may hold, and what may change when it resumes."""

import inspect
import json
from pathlib import Path
from typing import Annotated

from vit_jax import config as config_lib
from vit_jax import (
  config_check,
  distributed,
  evaluators,
  models,
  optim,
  pretrained,
  run_config,
  sharding,
  tasks,
  tune,
)
from vit_jax.checkpoint import checkpoints
from vit_jax.config_check import each_of, keys_of
from vit_jax.data import pipeline
from vit_jax.errors import UserError, did_you_mean
from vit_jax.train import metrics, patience, ranges
from vit_jax.weights import zoo


def _named(signature, key: str = 'name', **extra):
  """Returns the check of a section whose keys depend on the name in it.

  Args:
    signature: name -> the signature of what has that name.
    extra: annotations of keys that the run itself reads.
  """

  def check(where, section, _):
    if section.get(key) is None:
      given = f': it has {sorted(section)} alone' if section else ''
      raise UserError(f'{where} lacks {key!r}{given}.')
    config_check.check_type(f'{where}.{key}', section[key], str)
    config_check.bind(where, section, signature(section[key]), (), {key: str, **extra})

  return check


def check_model(where: str, section: dict, config: dict) -> None:
  """Refuses fields that the model does not have; see `config.bind`.

  Where the section names no model, the weights do: those of the zoo by their name,
  others once they are open, when this is to be called again.
  """
  entry = zoo.find((config.get('weights') or {}).get('source', ''))
  named = {'name': entry.model} if entry else {}
  known = 'name' in section or entry or not config.get('weights')
  if known:
    _named(models.signature, variant=str | None)(where, named | section, config)
  for key, value in section.items():
    if isinstance(value, dict):  # a model within the model
      check_model(f'{where}.{key}', value, {})
  if known:
    models.build(**named | section)  # refuses values that are out of range


def _check_optim(where: str, section: dict, config: dict) -> None:
  _named(optim.signature)(where, section, config)
  # Refuses values out of range. How many steps there are is not known yet, and where the
  # weights tell the model, neither is that: a run without end, of a ViT.
  family = models.family(**{'name': 'vit', **config.get('model', {})})
  optim.build(**section, total_steps=10**9, family=family)


def _check_task(where: str, section: dict, config: dict) -> None:
  _named(tasks.signature)(where, section, config)
  if name := config.get('model', {}).get('name'):
    tasks.check_outputs(section['name'], name, models.family(name))
  classes = config.get('model', {}).get('num_classes')
  if classes is not None and not tasks.classifies(config):
    raise UserError(
      f'config.model.num_classes={classes}, but {where}.name={section["name"]} trains no '
      'head: leave it out. The classes of the data are config.data.num_classes.'
    )


def _check_weights(where: str, section: dict, config: dict) -> None:
  if section:
    config_check.bind(where, section, pretrained.from_section)


def _check_sharding(where: str, rules, config: dict) -> None:
  sharding.resolve_rules(rules)


PERIODS = ('every', 'keep_every')  # keys of log, checkpoint and each evaluation


def _with_periods(check):
  """Returns the check of a section whose periods may be fractions of the run."""

  def check_both(where, section, config):
    config_check.check_type(where, section, dict)
    for key in PERIODS:
      _check_period(f'{where}.{key}', section.get(key))
    check(where, _in_steps(section, 1), config)

  return check_both


def _check_period(where: str, period) -> None:
  config_check.check_type(where, period, int | float | None)
  if period is None or (isinstance(period, int) and period >= 1) or 0 < period <= 1:
    return
  raise UserError(
    f'{where}={period}: expected 1 or more steps, or a fraction of the run: a float '
    'above 0, up to 1.0.'
  )


def _in_steps(section: dict, total_steps: int) -> dict:
  periods = {k: v for k, v in section.items() if k in PERIODS and isinstance(v, float)}
  return section | {k: max(1, round(v * total_steps)) for k, v in periods.items()}


def _same_classes(where: str, section: dict, trained: dict) -> dict:
  """Returns an evaluation's section, with the classes of training on the same source.

  Raises:
    UserError: if it has others: labels would be compared with other classes of the model.
  """
  data = section.get('data')
  if section['type'] != 'classification' or data['source'] != trained['source']:
    return section
  ours, theirs = trained.get('classes'), data.get('classes')
  if 'classes' in data and theirs != ours:
    raise UserError(
      f'{where}.data.classes={theirs} is not config.data.classes={ours}, on the same '
      f'source {trained["source"]!r}: its labels would be compared with other classes of '
      'the model. Leave it out: then it is as in training.'
    )
  return section if ours is None else {**section, 'data': {**data, 'classes': ours}}


_evaluation = _named(evaluators.signature, 'type', every=int | None, use_ema=bool)


def _checkpoints(where: str, section: dict, config: dict) -> None:
  provided = ('directory', 'larger_is_better')
  extra = {'patience': int | None}  # for `patience`
  config_check.bind(where, section, checkpoints.Checkpoints, provided, extra)


SECTIONS = {
  'model': Annotated[dict, check_model],
  'weights': Annotated[dict, _check_weights],
  'data': Annotated[dict, pipeline.check_train],
  'tune': Annotated[dict, _named(tune.signature, 'method')],
  'task': Annotated[dict, _check_task],
  'optim': Annotated[dict, _check_optim],
  'mesh': Annotated[dict, keys_of(sharding.make_mesh, provided=('devices',))],
  'sharding': Annotated[str | list[tuple[str, object]], _check_sharding],
  'evals': Annotated[dict, each_of(_with_periods(_evaluation))],
  'checkpoint': Annotated[dict, _with_periods(_checkpoints)],
  'log': Annotated[dict, _with_periods(keys_of(metrics.Log))],
  'seed': int,
  'max_bad_steps': int,
  'resume_allow': str | list[str],
  **dict.fromkeys(config_lib.DURATIONS, object),  # see config.total_steps
}
REQUIRED = ('data', 'optim')
DEFAULTS = {
  'model': {},  # the weights tell it
  'weights': {},  # from scratch
  'tune': {'method': 'full'},
  'task': {'name': tasks.DEFAULT},
  'mesh': {},  # data=-1: all devices
  'sharding': 'fsdp',  # nothing is split while mesh.fsdp is 1
  'evals': {},
  'checkpoint': {},
  'log': {},
  'seed': 0,
  'max_bad_steps': 10,  # non-finite steps in a row before the run gives up
  'resume_allow': [],  # config keys that may differ from those of the run resumed
}

# Sections and keys that do not change what a step computes: they may differ between
# a run and its continuation. Devices change results in the last digits only.
NEUTRAL = ('log', 'checkpoint', 'evals', 'mesh', 'sharding', 'max_bad_steps')
NEUTRAL += ('resume_allow', 'resolved')
NEUTRAL += ('data.workers', 'data.prefetch', 'data.max_bad_fraction', 'model.remat')
NEUTRAL += ('model.placement', 'data.cache', 'data.cache_bytes')


def check(config: dict) -> dict:
  """Returns the config over its defaults, every key bound to the code that reads it.

  Where the weights name the model, its keys are left to `check_model`.

  Raises:
    UserError: for unknown, missing or ill-typed keys and numbers out of range; nothing
      was opened.
  """
  config_check.known_keys('config', config, SECTIONS)
  config_check.check_plain('config', config)
  if missing := [section for section in REQUIRED if section not in config]:
    raise UserError(f'config lacks the sections {missing}.')
  ranges.check(config)
  config_lib.total_steps(config, num_examples=1, batch_size=1)
  config = DEFAULTS | config
  config_check.bind('config', config, inspect.Signature(), extra=SECTIONS)
  config['evals'] = {
    name: _same_classes(f'config.evals.{name}', section, config['data'])
    for name, section in config['evals'].items()
  }
  for name, section in config['evals'].items():
    evaluators.check_task(name, section['type'], config['task']['name'])
    if section.get('use_ema') and not optim.keeps_average(config['optim']):
      raise UserError(
        f'config.evals.{name}.use_ema needs config.optim.ema, a decay, or '
        'config.optim.swa.'
      )
  if best := config['checkpoint'].get('best'):
    metrics.larger_is_better(best, config['evals'])
  patience.check(config)
  if isinstance(config['resume_allow'], str):
    config['resume_allow'] = config['resume_allow'].split(',')
  return config


def in_steps(config: dict, total_steps: int) -> dict:
  """Returns the config with its periods, where they are fractions of the run, in steps."""
  sections = {
    name: _in_steps(config[name], total_steps) for name in ('log', 'checkpoint')
  }
  evals = {k: _in_steps(section, total_steps) for k, section in config['evals'].items()}
  return {**config, **sections, 'evals': evals}


def with_model(config: dict, told: dict) -> dict:
  """Returns a config whose section `model` has what the weights told, under its own.

  A part that is not wanted (None), such as `representation_size`, may be one that models
  of the weights' family never have.
  """
  own = config['model']
  if 'name' in told:
    known = models.signature(told['name']).parameters
    own = {
      key: value for key, value in own.items() if value is not None or key in known
    }
  told = {key: value for key, value in told.items() if key not in own}
  model = {**told, **own}
  check_model('config.model', model, {})
  resolved = {**config['resolved'], 'told': list(told)}
  return {**config, 'model': model, 'resolved': resolved}


def resumed(config: dict, workdir: Path, saved: checkpoints.Checkpoints) -> dict:
  """Returns the config of a resumed run, its model as the folder has it.

  What the weights told of the model is in the folder's config.json: they are not read
  again, and need not be there any more. If that file is missing or damaged, it is
  written anew from the copy in the checkpoints.

  Raises:
    UserError: for a config that would change the computation, unless allowed by name.
    NoUsableCheckpoint: if neither config.json nor any copy can be read.
  """
  lost = False
  try:
    old = run_config.read(workdir)
  except run_config.Unreadable as error:
    where = f'The copy of the config in {saved.directory}'
    old = run_config.in_todays_words(saved.meta().get('config'), where)
    distributed.say(f'{error} The copy in the checkpoints takes its place.')
    lost = True
  if 'name' not in config['model']:
    keys = old['resolved'].get('told', old['model'])
    told = {key: old['model'][key] for key in keys if key in old['model']}
    config = with_model(config, told)
  changed = config_lib.differences(DEFAULTS | old, json.loads(json.dumps(config)))
  for key in ('fingerprint', 'num_examples'):
    pair = old['resolved'].get(key), config['resolved'][key]
    if pair[0] != pair[1]:
      changed[f'data.{key}'] = pair
  allowed = list(config['resume_allow'])
  absent = object()
  for name in allowed:
    found = (config_lib.lookup(c, name, absent) for c in (config, old))
    if name not in changed and all(value is absent for value in found):
      raise UserError(
        f'config.resume_allow={name}: no such key. Write it whole, as optim.lr, or a '
        f'section, as optim.{did_you_mean(name, changed, 0.3)}'
      )
  if config['tune']['method'] != 'full':  # frozen parameters are checked bit by bit
    allowed.append('weights.source')
  refused = {
    key: pair
    for key, pair in changed.items()
    if not any(key == n or key.startswith(f'{n}.') for n in (*NEUTRAL, *allowed))
  }
  if refused:
    rows = [('key', 'in the folder', 'now')]
    rows += [(key, str(old), str(new)) for key, (old, new) in refused.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    table = '\n'.join(
      '  ' + '  '.join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
      for row in rows
    )
    raise UserError(
      f'{workdir} holds a run of another config:\n{table}\nUse another --workdir, or '
      f'allow the change by name: --config.resume_allow={",".join(refused)}'
    )
  if lost:
    metrics.write_json(workdir / 'config.json', old)
  return config
