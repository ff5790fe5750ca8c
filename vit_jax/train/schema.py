"""What a run's config may hold, and what of it may change before a run goes on."""

import json
from pathlib import Path

from vit_jax import config as config_lib
from vit_jax import evaluators, models, optim, pretrained, sharding, tasks
from vit_jax.checkpoint import checkpoints
from vit_jax.data import pipeline
from vit_jax.data.ops import registry
from vit_jax.errors import UserError
from vit_jax.train import metrics

DEFAULTS = {
  'weights': {},  # source, skip, ...: see pretrained.from_section; {}: from scratch
  'task': {'name': 'classify'},
  'mesh': {},  # data=-1: all devices
  'sharding': 'fsdp',  # see sharding.PRESETS; nothing is split while mesh.fsdp is 1
  'evals': {},
  'checkpoint': {},
  'log': {},
  'seed': 0,
  'max_bad_steps': 10,  # non-finite steps in a row before the run gives up
  'resume_allow': [],  # config keys that may differ from those of the run resumed
}
REQUIRED = ('model', 'data', 'optim')
PLAIN = {  # the keys above that are no sections
  'sharding': str | list[tuple[str, object]],
  'seed': int,
  'max_bad_steps': int,
  'resume_allow': str | list[str],
}

PERIODS = ('every', 'keep_every')  # keys of log, checkpoint and each evaluation

# Sections and keys that do not change what a step computes: they may differ between
# a run and its continuation. Devices change results in the last digits only.
NEUTRAL = ('log', 'checkpoint', 'evals', 'mesh', 'sharding', 'max_bad_steps')
NEUTRAL += ('resume_allow', 'resolved')
NEUTRAL += ('data.workers', 'data.prefetch', 'data.max_bad_fraction', 'model.remat')
NEUTRAL += ('model.placement', 'data.cache', 'data.cache_bytes')
# Parameters that the run gives.
PROVIDED_CHECKPOINT = ('directory', 'larger_is_better')
PROVIDED_EVAL = ('bad_log', 'host', 'hosts')
PROVIDED = ('seed', 'num_classes', 'bad_log', 'host', 'hosts')


def check(config: dict) -> dict:
  """Returns the config over its defaults, every key bound to the code that reads it.

  Raises:
    UserError: for unknown, missing or ill-typed keys; nothing was started.
  """
  sections = [*REQUIRED, *DEFAULTS, *config_lib.DURATIONS]
  config_lib.known_sections(config, sections)
  for section in REQUIRED:
    if section not in config:
      raise UserError(f'config lacks the section {section!r}.')
  config = DEFAULTS | config

  def named(section, key='name'):
    value = config_lib.section(config, section).get(key)
    if value is None:
      raise UserError(f'config.{section} lacks {key!r}.')
    config_lib.check_type(f'config.{section}.{key}', value, str)
    return value

  for key, kind in PLAIN.items():
    config_lib.check_type(f'config.{key}', config[key], kind)
  bind = config_lib.bind
  model = config['model']
  bind('model', model, models.signature(named('model')), extra=('name', 'variant'))
  config_lib.check_type('config.model.variant', model.get('variant'), str | None)
  if config['weights']:
    bind('weights', config['weights'], pretrained.from_section)
  bind('data', config['data'], pipeline.train, provided=PROVIDED)
  registry.parse(config['data']['pp'])
  bind('task', config['task'], tasks.signature(named('task')), extra=('name',))
  bind(
    'optim', config['optim'], optim.signature(named('optim')), ('total_steps', 'family')
  )
  bind('mesh', config['mesh'], sharding.make_mesh, provided=('devices',))
  sharding.resolve_rules(config['sharding'])
  for name in ('checkpoint', 'log'):
    _check_periods(name, config_lib.section(config, name))
  checkpoint = _in_steps(config['checkpoint'], 1)
  bind('checkpoint', checkpoint, checkpoints.Checkpoints, PROVIDED_CHECKPOINT)
  bind('log', _in_steps(config['log'], 1), metrics.Log)
  for name, section in config_lib.section(config, 'evals').items():
    where = f'evals.{name}'
    extra = ('type', 'every', 'use_ema')
    bind(where, section, evaluators.signature(named(where, 'type')), extra=extra)
    if 'data' in section:
      bind(f'{where}.data', section['data'], pipeline.evaluate, provided=PROVIDED_EVAL)
      registry.parse(section['data']['pp'])
    _check_periods(where, section)
    use_ema = section.get('use_ema', False)
    config_lib.check_type(f'config.{where}.use_ema', use_ema, bool)
    if use_ema and not optim.keeps_average(config['optim']):
      raise UserError(
        f'config.{where}.use_ema needs config.optim.ema, a decay, or config.optim.swa.'
      )
  if config['max_bad_steps'] < 1:
    raise UserError(
      f'config.max_bad_steps={config["max_bad_steps"]}: expected 1 or more.'
    )
  if best := config['checkpoint'].get('best'):
    metrics.larger_is_better(best, config['evals'])
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


def _in_steps(section: dict, total_steps: int) -> dict:
  periods = {k: v for k, v in section.items() if k in PERIODS and isinstance(v, float)}
  return section | {k: max(1, round(v * total_steps)) for k, v in periods.items()}


def _check_periods(where: str, section: dict) -> None:
  for key in PERIODS:
    period = section.get(key)
    config_lib.check_type(f'config.{where}.{key}', period, int | float | None)
    if period is None or (isinstance(period, int) and period >= 1) or 0 < period <= 1:
      continue
    raise UserError(
      f'config.{where}.{key}={period}: expected 1 or more steps, or a fraction of the '
      'run: a float above 0, up to 1.0.'
    )


def refuse_drift(workdir: Path, config: dict, resumes: bool) -> None:
  """Refuses to continue a run under a config of other mathematics."""
  path = workdir / 'config.json'
  if not resumes or not path.exists():
    return
  old = json.loads(path.read_text())
  changed = config_lib.differences(old, json.loads(json.dumps(config)))
  for key in ('fingerprint', 'num_examples'):
    pair = old['resolved'].get(key), config['resolved'][key]
    if pair[0] != pair[1]:
      changed[f'data.{key}'] = pair
  allowed = config['resume_allow']
  refused = {
    key: pair
    for key, pair in changed.items()
    if not any(key == n or key.startswith(f'{n}.') for n in NEUTRAL)
    and not any(key == n or key.endswith(f'.{n}') for n in allowed)
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
