"""Decides which changes of a config between a run and its continuation are allowed."""

from pathlib import Path

from vit_jax import config as config_lib
from vit_jax import distributed
from vit_jax.checkpoint import checkpoints
from vit_jax.errors import UserError
from vit_jax.train import metrics, schema
from vit_jax.weights import pipelines

# Sections and keys that do not change the computation of a step: they may differ between
# a run and its continuation. Devices change results in the last digits only.
NEUTRAL = ('log', 'checkpoint', 'evals', 'mesh', 'sharding', 'max_bad_steps')
NEUTRAL += ('resume_allow', 'resolved', 'kernels')
NEUTRAL += ('data.workers', 'data.max_bad_fraction', 'model.remat')


def read_older(workdir: Path) -> dict | None:
  """Returns the config of the run that a folder holds; None if it has no checkpoint.

  If config.json is missing or damaged, the copy in the checkpoints takes its place.

  Raises:
    NoUsableCheckpoint: if neither config.json nor any copy can be read.
  """
  with checkpoints.Checkpoints(workdir / 'checkpoints') as saved:
    if saved.latest() is None:
      return None
    try:
      return config_lib.read(workdir)
    except config_lib.Unreadable as error:
      where = f'The copy of the config in {saved.directory}'
      older = config_lib.check_written(saved.meta().get('config'), where)
      distributed.say(f'{error} The copy in the checkpoints takes its place.')
      return older


def complete(config: dict, older: dict) -> dict:
  """Fills in the model and the preprocessing that the older run took from its weights."""
  taken = older['resolved']
  keys = taken.get('inferred', older['model'])
  if 'name' in config['model']:  # Only the backbone came from the weights.
    keys = {'backbone'} & {*taken.get('inferred', ())}
  if inferred := {key: older['model'][key] for key in keys if key in older['model']}:
    config = schema.fill_model(config, inferred)
  task = {key: older['task'][key] for key in taken.get('of_task', ())}
  config = config | {'task': {**task, **config['task']}}
  resolved = {
    key: taken[key] for key in ('inferred', 'of_task', 'pixels') if key in taken
  }
  config, _ = pipelines.fill(config, taken.get('pixels'))
  return config | {'resolved': resolved | config.get('resolved', {})}


def refuse_changes(config: dict, older: dict, workdir: Path) -> None:
  """Raises UserError for a config that would change the computation of the older run.

  Changes in `resume_allow` are allowed. A config.json that is missing or damaged is then
  written anew.
  """
  older = schema.DEFAULTS | older
  changed = config_lib.differences(*map(schema.write_defaults, (older, config)))
  for key in ('fingerprint', 'num_examples'):
    pair = older['resolved'].get(key), config['resolved'][key]
    if pair[0] != pair[1]:
      changed[f'data.{key}'] = pair
  allowed = [*NEUTRAL, *config['resume_allow']]
  # A source may differ, because frozen parameters are compared bit by bit anyway.
  allowed.append('task.teacher.source')
  if config['tune']['method'] != 'full':
    allowed.append('weights.source')
  refused = {
    key: pair
    for key, pair in changed.items()
    if not any(key == name or key.startswith(f'{name}.') for name in allowed)
  }
  if refused:
    raise UserError(
      f'{workdir} holds a run of another config:\n{_format_changes(refused)}\nUse another '
      f'--workdir, or allow the change by name: --config.resume_allow={",".join(refused)}'
    )
  if not _is_readable(workdir):
    metrics.write_json(workdir / 'config.json', older)


def _is_readable(workdir: Path) -> bool:
  try:
    config_lib.read(workdir)
  except config_lib.Unreadable:
    return False
  return True


def _format_changes(changed: dict[str, tuple]) -> str:
  rows = [('key', 'in the folder', 'now')]
  rows += [(key, str(old), str(new)) for key, (old, new) in changed.items()]
  first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
  return '\n'.join(f'  {k:<{first}}  {old:<{second}}  {new}' for k, old, new in rows)
