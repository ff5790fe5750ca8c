"""A run's folder as a source of weights: RUN, RUN@best or RUN@STEP."""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import distributed, files, models, run_config, tasks, trees, tune
from vit_jax.checkpoint import checkpoints
from vit_jax.errors import NoUsableCheckpoint, UserError
from vit_jax.weights import adapt, readers, steps
from vit_jax.weights.source import Source


def find(source) -> tuple[Path, str | None] | None:
  """Returns (folder, what follows the @ or None) if the source is a run's, else None.

  Raises:
    UserError: for `@best` or `@STEP` after a file or folder that is not a run.
  """
  if files.is_url(source) and str(source).endswith(readers.SUFFIXES):
    return None  # a file of weights: the bucket need not be asked
  whole = _place(str(source))
  if whole is None:
    return None
  if _is_run(whole):  # its own name may hold an @
    return whole, None
  base, _, wanted = str(source).rpartition('@')
  folder = _place(base)
  if not base or folder is None or whole.exists():
    return None
  if _is_run(folder):
    return folder, wanted
  if folder.exists():
    raise UserError(
      f'{base} is not a run of vit_jax, which alone has steps: leave out @{wanted}.'
    )
  return None


def _place(text: str) -> Path | None:
  """Returns a path; None for text that cannot be one: too long, or an unknown ~user."""
  if files.is_url(text):
    return files.path(text)
  try:
    path = Path(text).expanduser()
    path.exists()
  except (OSError, RuntimeError, ValueError):
    return None
  return path


def _is_run(folder) -> bool:
  return (folder / 'checkpoints').is_dir() and (folder / 'config.json').is_file()


def read(
  source,
  folder: Path,
  wanted: str | None,
  ema: bool,
  weights: str | None,
  fields: dict,
  of_weights: Callable,
) -> Source:
  """Returns the parameters of a step of a run.

  Args:
    wanted: 'best', a step, or None: the newest that is not damaged.
    ema: the averaged ones.
    weights: where the parameters that the run did not train are now, if they moved.
    fields: of the model, over the run's.
    of_weights: (section `weights`, model, image size) -> {name: array}, for the parameters
      that the run did not train.

  Raises:
    UserError: for a folder that no run wrote, a step that is not there, or frozen
      parameters that cannot be found.
  """
  config = run_config.read(folder)
  resolved, section = config['resolved'], dict(config['model'])
  name, variant = section.pop('name'), section.pop('variant', None)
  family, told = models.resolve(name, variant, **section)
  H, W, C = resolved['image_shape']
  model = models.build(family, **told)
  section = config.get('tune', {})
  tuned, _ = tune.attach(model, models.family_of(model), (H, W, C), **section)
  abstract = models.shapes_of(tuned, (H, W, C))
  kept = steps.Kept(folder, config)
  chosen = kept.choose(source, wanted)
  saved = checkpoints.Checkpoints(folder / 'checkpoints')
  try:
    names = saved.frozen(chosen)
    frozen = _frozen(folder, config, model, names, weights, of_weights)
    own = tasks.own(config)

    def restore(step):
      there = trees.combine(abstract['params'], _of_task(own, kept, step))
      options = dict(ema=ema, frozen=frozen, step=step)
      variables, _ = saved.restore_variables({**abstract, 'params': there}, **options)
      variables['params'].pop(own, None)
      return variables

    if chosen is None:
      chosen, variables = _newest(folder, kept.steps, restore)
    else:
      variables = restore(chosen)
  finally:
    saved.close()
  variables = jax.tree.map(np.asarray, variables)
  flat = trees.named(variables)
  added = {name: flat.pop(name) for name in [*flat] if tune.is_added(name)}
  return Source(
    str(source),
    'run',
    family,
    told | fields,
    adapt.unstack(flat, models.family_of(model)),
    (H, W),
    C,
    resolved.get('class_names'),
    pipeline(config),
    [],
    chosen,
    section if added else {},
    added,
  )


def _newest(folder, known: list[int], restore: Callable) -> tuple[int, dict]:
  """Returns (step, variables) of the newest step that is not damaged."""
  for step in reversed(known):
    with contextlib.suppress(NoUsableCheckpoint):
      variables = restore(step)
      if step != known[-1]:
        distributed.say(f'{folder}: step {known[-1]} is damaged; using step {step}')
      return step, variables
  return None, restore(None)  # raises, with what is wrong with each


def _of_task(own: str | None, kept: steps.Kept, step: int | None) -> dict:
  """Returns the shapes of parameters that are the task's, not the model's.

  Args:
    own: the name below which they are, see `tasks`.
    step: None: there is none to read.
  """
  shapes = kept.shapes(step) if own and step is not None else {}
  return trees.unflatten(
    {
      name: jax.ShapeDtypeStruct(shape, jnp.float32)
      for name, (shape, _) in shapes.items()
      if name.partition('/')[0] == own
    }
  )


def _frozen(folder, config, model, names: list[str], weights, of_weights) -> dict:
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
  section = config['weights'] | ({'source': weights} if weights else {})
  try:
    size = tuple(config['resolved']['image_shape'][:2])
    return of_weights(section, model, size)
  except UserError as error:
    raise UserError(
      f'{error} {folder} holds what it trained; the other {len(names)} parameters are '
      f'those of config.weights.source={section["source"]!r}. If that has moved, pass '
      'weights=SOURCE (--weights SOURCE), or set the key in its config.json.'
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
