"""Changes of a config between a run and its continuation: refused, allowed, neutral."""

import json
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


def resumed(config: dict, workdir: Path, saved: checkpoints.Checkpoints) -> dict:
  """Returns the config of a resumed run, its model and pixels as the folder has them.

  What was taken from the weights is in the folder's config.json: they need not be there
  any more. If that file is missing or damaged, it is written anew from the copy in
  the checkpoints.

  Raises:
    UserError: for a config that would change the computation, unless allowed by name.
    NoUsableCheckpoint: if neither config.json nor any copy can be read.
  """
  lost = None
  try:
    old = config_lib.read(workdir)
  except config_lib.Unreadable as error:
    lost, where = error, f'The copy of the config in {saved.directory}'
    old = config_lib.check_written(saved.meta().get('config'), where)
    distributed.say(f'{error} The copy in the checkpoints takes its place.')
  keys = old['resolved'].get('inferred', old['model'])
  if 'name' in config['model']:  # the weights told the backbone alone
    keys = {'backbone'} & {*old['resolved'].get('inferred', ())}
  if inferred := {key: old['model'][key] for key in keys if key in old['model']}:
    config = schema.with_model(config, inferred)
  pixels = old['resolved'].get('pixels')
  config, _ = pipelines.fill(config, pixels)
  config['resolved'] = old['resolved'] | config['resolved']
  new = json.loads(json.dumps(config))
  changed = config_lib.differences(schema.DEFAULTS | old, new)
  for key in ('fingerprint', 'num_examples'):
    pair = old['resolved'].get(key), new['resolved'][key]
    if pair[0] != pair[1]:
      changed[f'data.{key}'] = pair
  allowed = [*NEUTRAL, *config['resume_allow']]
  if config['tune']['method'] != 'full':  # frozen parameters are checked bit by bit
    allowed.append('weights.source')
  refused = {
    key: pair
    for key, pair in changed.items()
    if not any(key == name or key.startswith(f'{name}.') for name in allowed)
  }
  if refused:
    raise UserError(
      f'{workdir} holds a run of another config:\n{_table(refused)}\nUse another '
      f'--workdir, or allow the change by name: --config.resume_allow={",".join(refused)}'
    )
  if lost:
    metrics.write_json(workdir / 'config.json', old)
  return config


def _table(changed: dict[str, tuple]) -> str:
  rows = [('key', 'in the folder', 'now')]
  rows += [(key, str(old), str(new)) for key, (old, new) in changed.items()]
  first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
  return '\n'.join(f'  {k:<{first}}  {old:<{second}}  {new}' for k, old, new in rows)
