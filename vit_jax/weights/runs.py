"""Reads weights from the folder of a run: RUN, RUN@best or RUN@STEP."""

import contextlib
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import config as config_lib
from vit_jax import distributed, files, models, tasks, trees, tune
from vit_jax.data.ops import registry
from vit_jax.errors import NoUsableCheckpoint, UserError
from vit_jax.tasks.distill import TEACHER
from vit_jax.weights import adapt, pipelines, readers
from vit_jax.weights.families import text
from vit_jax.weights.source import Header, Source


def find(source) -> tuple[Path, str | None] | None:
  """Returns (folder, text after the @ or None) if a source is a run; None otherwise."""
  name = str(source)
  # A URL is a run only if it is gs:// and has no suffix of a file of weights.
  if '://' in name and (not files.is_url(name) or name.endswith(readers.SUFFIXES)):
    return None
  base, _, step = name.rpartition('@')
  try:
    if _is_run(whole := files.path(name)):  # The folder's own name may have an @.
      return whole, None
    if not base or whole.exists():
      return None
    if _is_run(folder := files.path(base)):
      return folder, step
    if folder.exists():
      raise UserError(f'{base} is not a run of vit_jax: leave out @{step}.')
  # A name that is too long, or begins with an unknown ~USER, is no run.
  except (OSError, RuntimeError):
    pass
  return None


def _is_run(folder: Path) -> bool:
  return (folder / 'checkpoints').is_dir() and (folder / 'config.json').is_file()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RunHeader(Header):
  """The header of a run, which is read from its config."""

  folder: Path
  config: dict
  model: Any  # the model, before the caller's changes to its fields
  which: str | None  # the text after the @
  ema: bool
  weights: str | None  # new location of the frozen parameters, if they have moved

  def read(self) -> Source:
    """Restores the step, and reads the frozen parameters from the weights of the run."""
    # Imported late, because it imports Orbax, which is slow.
    from vit_jax.weights.steps import Steps

    H, W, C = self.config['resolved']['image_shape']
    section = self.config.get('tune', {})
    tuned, _ = tune.attach(self.model, self.model.family, (H, W, C), **section)
    abstract = tuned.shapes((H, W, C))
    saved = Steps(self.folder, self.config)
    step = saved.choose(self.source, self.which)
    key = tasks.class_of(self.config).OWN  # the key of the task's own parameters
    is_own = lambda name: name.partition('/')[0] == key
    with saved.checkpoints as checkpoints:
      frozen = checkpoints.list_frozen(step)
      frozen = self._read_frozen([n for n in frozen if not n.startswith(TEACHER)])

      def restore(step):
        shapes = saved.own_shapes(step, key) if key and step is not None else {}
        below = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
        variables, _ = checkpoints.restore_variables(
          trees.unflatten_variables(trees.flatten_variables(abstract) | below),
          ema=self.ema,
          frozen=frozen,
          step=step,
        )
        return variables

      if step is None:
        step, variables = _restore_newest(self.folder, saved.steps, restore)
      else:
        variables = restore(step)
    flat = trees.flatten_variables(jax.tree.map(np.asarray, variables))
    added = {name: flat.pop(name) for name in [*flat] if tune.is_added(name)}
    own = {name: flat.pop(name) for name in [*flat] if is_own(name)}
    # The task's statistics are of no use without its training.
    flat = {n: x for n, x in flat.items() if not n.startswith(f'{trees.STATS}/{key}/')}
    flat = adapt.unstack(flat, self.model.family)
    section = section if added else {}
    tower = text.split_run(own, self.config, self.folder.name)
    return self._add_arrays(
      flat, step=step, tune=section, added=added, own=own, text=tower
    )

  def _read_frozen(self, names: list[str]) -> dict:
    """Returns {name: array} of the frozen parameters.

    The caller compares their fingerprints with those in the checkpoint.
    """
    # Imported late, because `loading` imports this module.
    from vit_jax.weights import loading

    moved = self.weights
    if not names:
      if moved:
        raise UserError(
          f'weights={moved!r} is not used: {self.folder} trained every parameter.'
        )
      return {}
    section = self.config['weights'] | ({'source': moved} if moved else {})
    try:
      header = loading.from_section(**section)
      taken, _ = loading.fit_section(header, section, self.model, self.image_size)
      key = tasks.class_of(self.config).OWN
      if any(name.partition('/')[0] == key for name in names):
        taken |= loading.image_text.own_parameters(header.read(), key)
      return taken
    except UserError as error:
      raise UserError(
        f'{error} {self.folder} needs {len(names)} parameters of config.weights.source='
        f'{section["source"]!r}: if that has moved, pass weights=SOURCE '
        '(--weights SOURCE).'
      ) from error


def read_header(
  source,
  folder: Path,
  *,
  which: str | None,
  ema: bool,
  weights: str | None,
  fields: dict,
) -> _RunHeader:
  """Returns the header of a run. The arguments are those of `load` and `_RunHeader`."""
  config = config_lib.read(folder)
  resolved, section = config['resolved'], dict(config['model'])
  name, variant = section.pop('name'), section.pop('variant', None)
  family, own_fields = models.resolve(name, variant, **section)
  H, W, C = resolved['image_shape']
  return _RunHeader(
    source=str(source),
    format='run',
    family=family,
    fields=own_fields | fields,
    image_size=(H, W),
    channels=C,
    class_names=resolved.get('class_names'),
    pp=read_pipeline(config),
    folder=folder,
    config=config,
    model=models.build(family, **own_fields),
    which=which,
    ema=ema,
    weights=weights,
  )


def _restore_newest(folder, steps: list[int], restore: Callable) -> tuple[int, dict]:
  """Returns (step, variables) of the newest step that is not damaged."""
  for step in reversed(steps):
    with contextlib.suppress(NoUsableCheckpoint):
      variables = restore(step)
      if step != steps[-1]:
        distributed.say(f'{folder}: step {steps[-1]} is damaged; using step {step}')
      return step, variables
  # No checkpoint is usable. This raises the error that says what is wrong with each.
  return None, restore(None)


def read_pipeline(config: dict) -> str | None:
  """Returns the pipeline of the run's first evaluation, with a `decode` for image files.

  Without an evaluation on the data itself it is that of the first probe. Without any, a
  classifier or backbone has the geometry of the weights that the run started from, and the
  value range of training.
  """
  resolved, evals = config['resolved'], [*config.get('evals', {}).values()]
  H, W, C = resolved['image_shape']
  sections = [x['data'] for x in evals if isinstance(x.get('data'), dict)] + evals
  pp = next((x['pp'] for x in sections if 'pp' in x), None)
  if pp is None and tasks.class_of(config).OUTPUTS == 'classes':
    ops = registry.parse(config['data']['pp'])
    levels = next((op.text for op in ops if op.name == 'value_range'), 'value_range')
    size = H if H == W else (H, W)
    pp = f"decode({C})|resize_as_weights({size}, rounding='none')|{levels}"
    run = {'data': {'pp': pp}, 'evals': {}}
    filled, _ = pipelines.fill(run, resolved.get('pixels'))
    pp = filled['data']['pp']
  if pp is None or re.match(r'\s*decode\b', pp):
    return pp
  return f'decode({C})|{pp}'
