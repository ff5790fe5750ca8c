"""Parameters that tuning adds to weights, and files that hold tuned parameters alone.

Such a file has the parameters that a run trained, and its batch statistics. Its config has
the `tune` section, the model, the options by which weights were fitted to it, and
fingerprints of the frozen parameters, so that any copy of the same weights will do.
"""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import check, models, trees, tune
from vit_jax.checkpoint import fingerprint
from vit_jax.errors import UserError
from vit_jax.weights import readers
from vit_jax.weights.adapt import check_finite, fit
from vit_jax.weights.source import Source, name_source

# The key of the record in the config of a tuned file.
KEY = 'vit_jax_tuned'
_Side = Annotated[int, check.Range(1, 2**14)]  # pixels


# The keys and types of a record.
def _record(
  *,
  tune: dict,
  family: str,
  fields: dict,
  image_size: tuple[_Side, _Side],
  fit: dict,
  frozen: dict,
  pp: str | None = None,
  class_names: list[str] | None = None,
): ...


def merge(source: Source) -> Source:
  """Merges the parameters that tuning added into the model's own."""
  if not source.tune:
    return source
  with check.prefix_errors(str(source.source)):
    flat = tune.build(**source.tune).merge_added(source.flat | source.added)
  return dataclasses.replace(source, flat=flat, tune={}, added={})


def make_record(source: Source, trained: list[str], section: dict) -> tuple[dict, dict]:
  """Returns (arrays, config) of a file that holds the parameters `trained` alone.

  Args:
    section: `config.weights`, which names the source of all other parameters.
  """
  every = source.flat | source.added
  stats = {name: x for name, x in every.items() if trees.is_statistic(name)}
  frozen = {n: x for n, x in every.items() if n not in stats and n not in trained}
  if not frozen:
    raise UserError(f'{source.source} trained every parameter: omit --tuned_only.')
  config = {
    'tune': source.tune,
    'family': source.family,
    'fields': source.fields,
    'image_size': source.image_size,
    'pp': source.pp,
    'class_names': source.class_names,
    'fit': {key: section[key] for key in ('skip', 'resize') if key in section},
    'frozen': fingerprint.fingerprints(frozen),
  }
  return {name: every[name] for name in trained} | stats, {KEY: config}


def apply(source: Source, path: str | Path) -> Source:
  """Puts the parameters of a tuned file in place of those of the source.

  The model and the image size are then those of the file.
  """
  _check_untuned(source)
  raw = readers.read(path)
  config = _check_record(path, raw.config.get(KEY))
  with name_source(path):
    added, own = _split_added(raw.arrays)
    if added and not config['tune']:
      raise ValueError(f'it holds {next(iter(added))}, but its config has no tune')
    if source.family != config['family']:
      raise ValueError(f'it was tuned on a {config["family"]}, not a {source.family}')
    fields = source.fields | config['fields']
    size = tuple(config['image_size'])
    model = models.build(source.family, **fields).change(scan=False)
    # Fit the arrays of the source as the run did: it resized positions, for example, before
    # it froze them.
    skip = [re.escape(name.removeprefix(f'{trees.STATS}/')) for name in own]
    options = config['fit'] | {'skip': [*config['fit'].get('skip', ()), *skip]}
    start, _ = fit(source, model, size, **options)
    frozen = {name: start[name] for name in config['frozen'] if name in start}
    prints = fingerprint.fingerprints(frozen)
    differ = [n for n, value in config['frozen'].items() if prints.get(n) != value]
    if differ:
      raise ValueError(f'it was tuned on other weights: {differ[0]} differs')
    if both := own.keys() & frozen.keys():
      raise ValueError(f'it holds {min(both)}, which its config lists as frozen')
    classes = fields.get('num_classes')
    heads = [x for name, x in own.items() if re.fullmatch(r'head/(.*/)?bias', name)]
    if classes and [x.shape for x in heads] != [(classes,)]:
      raise ValueError(f'it lacks the head of its {classes} classes')
  return dataclasses.replace(
    source,
    fields=fields,
    flat=frozen | own,
    image_size=size,
    pp=config.get('pp'),
    class_names=config.get('class_names'),
    tune=config['tune'],
    added=added,
  )


def _split_added(arrays: dict) -> tuple[dict, dict]:
  """Splits arrays into (added, the model's own), both {name: float32 array}."""
  if odd := [n for n, x in arrays.items() if not np.issubdtype(x.dtype, np.floating)]:
    raise ValueError(f'{odd[0]} is {arrays[odd[0]].dtype}, but parameters are floats')
  flat = {name: np.asarray(x, np.float32) for name, x in arrays.items()}
  added = {name: flat.pop(name) for name in arrays if tune.is_added(name)}
  return added, flat


def _check_record(path, config) -> dict:
  """Returns the record of a tuned file; raises UserError for anything else."""
  if not isinstance(config, dict):
    raise UserError(f'{path} is not a file of vit_jax convert RUN FILE --tuned_only.')
  where = f'{path}: its config'
  check.bind(where, config, _record)
  keys = inspect.signature(fit).parameters.values()
  options = inspect.Signature([p for p in keys if p.kind is p.KEYWORD_ONLY])
  check.bind(f'{where}.fit', config['fit'], options)
  if config['tune']:
    _check_section(f'{where}.tune', config['tune'])
  return config


def _check_section(where: str, section) -> None:
  signature = tune.METHODS.signature(section.get('method', 'full'))
  check.bind(where, section, signature, (), {'method': str})


def _check_untuned(source: Source) -> None:
  if source.tune:
    raise UserError(f'{source.source} is tuned already, by {source.tune["method"]}.')


def add_section(source: Source, section: dict) -> Source:
  """Adds a `tune` section to a source. The added parameters get their initial values."""
  _check_section('tune', section)
  _check_untuned(source)
  return dataclasses.replace(source, tune=section, added=None)


def attach(model, source: Source, shape: tuple[int, int, int], flat: dict):
  """Adds the tuned parameters of a source to a model; returns (model, {name: array})."""
  family = model.family
  model, _ = tune.attach(model, family, shape, **source.tune)

  def init(key):
    every = trees.flatten_variables(model.init(key, jnp.zeros((1, *shape))))
    return {name: x for name, x in every.items() if name not in flat}

  key = jax.random.key(0)
  if (added := source.added) is None:
    added = jax.tree.map(np.asarray, jax.jit(init)(key))
  expected = {name: x.shape for name, x in jax.eval_shape(init, key).items()}
  sizes = {name: x.shape for name, x in added.items()}
  if differ := [n for n in {**expected, **sizes} if expected.get(n) != sizes.get(n)]:
    raise UserError(
      f'{source.source}: {differ[0]} has shape {sizes.get(differ[0])}, but '
      f'{source.tune["method"]} makes it {expected.get(differ[0])} here: leave image_size and '
      'fields as they were.'
    )
  with name_source(source.source):
    check_finite(added)
  return model, flat | added
