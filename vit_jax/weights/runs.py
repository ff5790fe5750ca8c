"""A run's folder as a source of weights: RUN, RUN@best or RUN@STEP."""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import config as config_lib
from vit_jax import distributed, files, models, tasks, trees, tune
from vit_jax.errors import NoUsableCheckpoint, UserError
from vit_jax.weights import adapt, readers
from vit_jax.weights.source import Source


def find(source) -> tuple[Path, str | None] | None:
  """Returns (folder, the text after the @ or None) if the source is a run's, else None."""
  text = str(source)
  # A file of weights: the bucket need not be asked.
  if '://' in text and (not files.is_url(text) or text.endswith(readers.SUFFIXES)):
    return None
  base, _, step = text.rpartition('@')
  try:
    if _is_run(whole := files.path(text)):  # its own name may hold an @
      return whole, None
    if not base or whole.exists():
      return None
    if _is_run(folder := files.path(base)):
      return folder, step
    if folder.exists():
      raise UserError(f'{base} is not a run of vit_jax: leave out @{step}.')
  except (OSError, RuntimeError):  # a name that is too long, an unknown ~user
    pass
  return None


def _is_run(folder: Path) -> bool:
  return (folder / 'checkpoints').is_dir() and (folder / 'config.json').is_file()


def read(
  source,
  folder: Path,
  which: str | None,
  ema: bool,
  weights: str | None,
  fields: dict,
  of_weights: Callable,
) -> Source:
  """Returns the parameters of a step of a run; arguments as those of `load`.

  Frozen ones are of_weights(section `weights`, model, image size) -> {name: array}.
  """
  from vit_jax.weights.steps import Steps  # imports Orbax

  config = config_lib.read(folder)
  resolved, section = config['resolved'], dict(config['model'])
  name, variant = section.pop('name'), section.pop('variant', None)
  family, own_fields = models.resolve(name, variant, **section)
  H, W, C = resolved['image_shape']
  model = models.build(family, **own_fields)
  section = config.get('tune', {})
  tuned, _ = tune.attach(model, model.family, (H, W, C), **section)
  abstract = tuned.shapes((H, W, C))
  saved = Steps(folder, config)
  step = saved.choose(source, which)
  with saved.checkpoints as checkpoints:
    names = checkpoints.list_frozen(step)
    frozen = _frozen(folder, config, model, names, weights, of_weights)
    own = tasks.class_of(config).OWN  # parameters below that name are the task's

    def restore(step):
      shapes = saved.shapes(step) if own and step is not None else {}
      below = {n: s for n, (s, _) in shapes.items() if n.partition('/')[0] == own}
      below = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in below.items()}
      params = trees.combine(abstract['params'], trees.unflatten(below))
      variables, _ = checkpoints.restore_variables(
        {**abstract, 'params': params}, ema=ema, frozen=frozen, step=step
      )
      variables['params'].pop(own, None)
      return variables

    if step is None:
      step, variables = _newest(folder, saved.steps, restore)
    else:
      variables = restore(step)
  flat = trees.flatten_variables(jax.tree.map(np.asarray, variables))
  added = {name: flat.pop(name) for name in [*flat] if tune.is_added(name)}
  flat = adapt.unstack(flat, model.family)
  classes, section = resolved.get('class_names'), section if added else {}
  arguments = (family, own_fields | fields, flat, (H, W), C, classes, pipeline(config))
  return Source(str(source), 'run', *arguments, [], step, section, added)


def _newest(folder, steps: list[int], restore: Callable) -> tuple[int, dict]:
  """Returns (step, variables) of the newest step that is not damaged."""
  for step in reversed(steps):
    with contextlib.suppress(NoUsableCheckpoint):
      variables = restore(step)
      if step != steps[-1]:
        distributed.say(f'{folder}: step {steps[-1]} is damaged; using step {step}')
      return step, variables
  return None, restore(None)  # raises, with what is wrong with each


def _frozen(folder, config, model, names: list[str], weights, of_weights) -> dict:
  """Returns {name: array} of a run's frozen parameters; their fingerprints are compared."""
  if not names:
    if weights:
      raise UserError(f'weights={weights!r}: {folder} trained every parameter.')
    return {}
  section = config['weights'] | ({'source': weights} if weights else {})
  try:
    size = tuple(config['resolved']['image_shape'][:2])
    return of_weights(section, model, size)
  except UserError as error:
    raise UserError(
      f'{error} {folder} has {len(names)} parameters of config.weights.source='
      f'{section["source"]!r}: if that has moved, pass weights=SOURCE (--weights SOURCE).'
    ) from error


def pipeline(config: dict) -> str | None:
  """Returns the pipeline of the run's first evaluation, for an image in a file."""
  for section in config.get('evals', {}).values():
    if isinstance(data := section.get('data'), dict) and 'pp' in data:
      pp = data['pp']
      if re.match(r'\s*decode\b', pp):
        return pp
      return f'decode({config["resolved"]["image_shape"][-1]})|{pp}'
  return None
