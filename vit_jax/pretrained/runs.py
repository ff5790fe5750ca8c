"""A run's folder as a source of weights."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import config as config_lib
from vit_jax import models, trees
from vit_jax.checkpoint import checkpoints
from vit_jax.errors import UserError
from vit_jax.pretrained.source import Source
from vit_jax.weights import adapt


def folder_of(source) -> Path | None:
  """Returns the folder if the source is a run's, else None."""
  folder = Path(str(source)).expanduser()
  if not (folder / 'checkpoints').is_dir() or not (folder / 'config.json').is_file():
    return None
  return folder


def read(source, folder: Path, ema: bool, weights: str | None, fields: dict) -> Source:
  """Returns the newest intact parameters of a run.

  Args:
    ema: the averaged ones.
    weights: where the parameters that the run did not train are now, if they moved.
    fields: of the model, over the run's.

  Raises:
    UserError: for a folder that no run wrote, or frozen parameters that cannot be found.
  """
  config = config_lib.read_run(folder)
  resolved, section = config['resolved'], dict(config['model'])
  name, variant = section.pop('name'), section.pop('variant', None)
  family, told = models.resolve(name, variant, **section)
  H, W, C = resolved['image_shape']
  model = models.build(family, **told)
  images = jax.ShapeDtypeStruct((1, H, W, C), jnp.float32)
  abstract = jax.eval_shape(model.init, jax.random.key(0), images)['params']
  saved = checkpoints.Checkpoints(folder / 'checkpoints')
  try:
    frozen = _frozen(folder, config, model, saved.frozen(), weights)
    params, _ = saved.restore_params(abstract, ema=ema, frozen=frozen)
  finally:
    saved.close()
  flat = {name: np.asarray(x) for name, x in trees.flatten(params).items()}
  return Source(
    str(source),
    'run',
    family,
    told | fields,
    adapt.unstack(flat, models.family(family)),
    (H, W),
    C,
    resolved.get('class_names'),
    _pp(config),
    [],
  )


def _frozen(folder, config: dict, model, names: list[str], weights) -> dict:
  """Returns {name: array} of the parameters that the run took from its weights and kept.

  Args:
    names: of those parameters; the checkpoint compares their fingerprints.
    weights: see `read`.
  """
  if not names:
    if weights:
      raise UserError(
        f'weights={weights!r}: {folder} trained every parameter and needs no weights.'
      )
    return {}
  from vit_jax import pretrained  # its weights may be a run's in turn

  section = config['weights'] | ({'source': weights} if weights else {})
  try:
    source = pretrained.from_section(**section)
    options = {k: v for k, v in section.items() if k in ('skip', 'resize')}
    size = tuple(config['resolved']['image_shape'][:2])
    return pretrained.fit(source, model, size, **options)[0]
  except UserError as error:
    raise UserError(
      f'{error} {folder} holds what it trained; the other {len(names)} parameters are '
      f'those of config.weights.source={section["source"]!r}. If that has moved, pass '
      'weights=SOURCE (--weights SOURCE), or set the key in its config.json.'
    ) from error


def _pp(config: dict) -> str | None:
  """The pipeline of the run's first evaluation, for an image in a file."""
  for section in config.get('evals', {}).values():
    if section['type'] == 'classification':
      pp = section['data']['pp']
      if re.match(r'\s*decode\b', pp):
        return pp
      return f'decode({config["resolved"]["image_shape"][-1]})|{pp}'
  return None
