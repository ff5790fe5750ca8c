"""What tuning adds to a source's parameters, and files that hold what was tuned alone.

Such a file has the parameters that a run trained, under our names, its batch statistics
below `batch_stats/`, and in its config the `tune` section, the model, how weights were
fitted to it, and the fingerprints of the parameters that were frozen: it goes with any copy
of the same weights.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import check, models, trees, tune
from vit_jax.checkpoint import fingerprint
from vit_jax.errors import UserError
from vit_jax.weights import export, readers
from vit_jax.weights.fitting import fit
from vit_jax.weights.opening import TUNED_ONLY
from vit_jax.weights.source import Source

_KINDS = {
  'tune': dict,
  'family': str,
  'fields': dict,
  'without': list[str],  # fields that are None: nulls are not read back
  'image_size': tuple[int, int],
  'pp': str | None,
  'class_names': list[str] | None,
  'fit': dict,
  'frozen': dict,
}
_LARGEST = 2**14  # pixels: positions are resized before anything is compared


def folded(found: Source) -> Source:
  """Returns a source with what was added worked into the model's own parameters.

  Raises:
    UserError: where these cannot express it.
  """
  if not found.tune:
    return found
  with check.reported(str(found.source)):
    flat = tune.build(**found.tune).folded(found.flat | found.added)
  return dataclasses.replace(found, flat=flat, tune={}, added={})


def write(found: Source, trained: list[str], section: dict, dest) -> list[Path]:
  """Writes what a run trained, and no more; returns the files.

  Args:
    trained: names of the parameters that the run stores.
    section: the config's `weights`, which the others are from.
    dest: FILE.safetensors, FILE.npz or a folder, see `weights.export.write`.

  Raises:
    UserError: for a run that trained everything, or a place that is taken.
  """
  every = found.flat | found.added
  stats = {name: x for name, x in every.items() if trees.is_statistic(name)}
  frozen = {n: x for n, x in every.items() if n not in stats and n not in trained}
  if not frozen:
    raise UserError(
      f'{found.source} trained all of its parameters: write it without --tuned_only.'
    )
  arrays = {name: every[name] for name in trained} | stats
  config = {
    'tune': found.tune,
    'family': found.family,
    'fields': found.fields,
    'without': [key for key, value in found.fields.items() if value is None],
    'image_size': found.image_size,
    'pp': found.pp,
    'class_names': found.class_names,
    'fit': {key: section[key] for key in ('skip', 'resize') if key in section},
    'frozen': fingerprint.fingerprints(frozen),
  }
  return export.write(dest, arrays, {TUNED_ONLY: config})


def apply(found: Source, path: str | Path) -> Source:
  """Returns a source with what a file of `write` holds, in place of its own.

  The model is that of the file, for images of its size.

  Raises:
    UserError: for another kind of file, or weights other than those that were tuned.
  """
  if str(path) in tune.METHODS and not Path(path).exists():
    raise UserError(
      f'tune={str(path)!r} is not a file. Of a method give the section: '
      f"tune={{'method': {str(path)!r}}}."
    )
  raw = readers.read(path)
  config = _checked(path, raw.config.get(TUNED_ONLY))
  if found.tune:
    raise UserError(f'{found.source} is tuned by {found.tune["method"]} already.')
  if found.family != config['family']:
    raise UserError(
      f'{path} was tuned on a {config["family"]}, {found.source} is a {found.family}.'
    )
  added, own = _sorted(path, raw.arrays)
  if added and not config['tune']:
    raise UserError(f'{path} holds {next(iter(added))}, and its config says no tune.')
  fields = found.fields | config['fields'] | dict.fromkeys(config['without'])
  size = tuple(config['image_size'])
  model = models.changed(models.build(found.family, **fields), scan=False)
  # As in the run: positions, say, were resized before they were frozen.
  options = config['fit'] | {'skip': [*config['fit'].get('skip', ()), *_skipping(own)]}
  start, _ = fit(found, model, size, **options)
  known = {name: start[name] for name in config['frozen'] if name in start}
  if missing := [name for name in config['frozen'] if name not in known]:
    raise UserError(
      f'{path} was tuned on weights with {missing[0]} (one of {len(missing)} that '
      f'{found.source} lacks): give the weights that the run started from.'
    )
  prints = fingerprint.fingerprints(known)
  if differ := [n for n, value in config['frozen'].items() if prints[n] != value]:
    raise UserError(
      f'{path} was tuned on other weights: {differ[0]} of {found.source} differs, one of '
      f'{len(differ)}. Give the weights that the run started from.'
    )
  if both := own.keys() & known.keys():
    raise UserError(f'{path} holds {min(both)}, which its config says was frozen.')
  classes = fields.get('num_classes')
  heads = [x for name, x in own.items() if re.fullmatch(r'head/(.*/)?bias', name)]
  if classes and [x.shape for x in heads] != [(classes,)]:
    raise UserError(f'{path} lacks the head of its {classes} classes.')
  return dataclasses.replace(
    found,
    fields=fields,
    flat=known | own,
    image_size=size,
    pp=config.get('pp'),
    class_names=config.get('class_names'),
    tune=config['tune'],
    added=added,
  )


def _skipping(own: Iterable[str]) -> list[str]:
  """Returns the rules by which `fit` leaves out what a file holds of the model."""
  return [re.escape(name.removeprefix(f'{trees.STATS}/')) for name in own]


def _sorted(path, arrays: dict) -> tuple[dict, dict]:
  """Returns what is added, and what is the model's, {name: float32}."""
  added, own = {}, {}
  folders = {name[: at.start()] for name in arrays for at in re.finditer('/', name)}
  if both := folders & arrays.keys():
    raise UserError(f'{path}: {min(both)} is an array, and others are below it.')
  for name, x in arrays.items():
    if not np.issubdtype(x.dtype, np.floating):
      raise UserError(f'{path}: {name} is {x.dtype}; parameters are float32.')
    (added if tune.is_added(name) else own)[name] = x.astype(np.float32)
  return added, own


def _checked(path, config) -> dict:
  """Returns the config of a file of `write`; UserError for anything else."""
  if not isinstance(config, dict):
    raise UserError(
      f'{path} is not a file of tuned parameters, which vit_jax convert RUN FILE '
      '--tuned_only writes.'
    )
  where = f'{path}: its config'
  for key, kind in _KINDS.items():
    check.check(f'{where}.{key}', config.get(key), kind)
  for size in config['image_size']:
    check.Range(1, _LARGEST)(f'{where}.image_size', size, config)
  keys = inspect.signature(fit).parameters.values()
  options = inspect.Signature([p for p in keys if p.kind is p.KEYWORD_ONLY])
  check.bind(f'{where}.fit', config['fit'], options)
  if config['tune']:
    _check_section(f'{where}.tune', config['tune'])
  return config


def _check_section(where: str, section) -> None:
  if not isinstance(section, dict):
    raise UserError(
      f"{where}={section!r}: expected a section, {{'method': 'lora', 'rank': 4}}, or a file "
      'of what was tuned.'
    )
  signature = tune.METHODS.signature(section.get('method', 'full'))
  check.bind(where, section, signature, (), {'method': str})


def asked(found: Source, section: dict) -> Source:
  """Returns a source to which a `tune` section adds parameters that are not there yet."""
  _check_section('tune', section)
  if found.tune:
    raise UserError(
      f'{found.source} is tuned by {found.tune["method"]} already: leave tune out.'
    )
  return dataclasses.replace(found, tune=section, added=None)


def attached(model, found: Source, shape: tuple[int, int, int], flat: dict):
  """Returns (model, {name: array}) with what the source's tuning adds.

  Args:
    model: of the source, for images of `shape` (H, W, C).
    flat: of the model, by the names of `trees.named`.

  Raises:
    UserError: for parameters of other shapes, made for images of another size.
  """
  family = models.family_of(model)
  tuned, _ = tune.attach(model, family, shape, **found.tune)

  def init(key):
    every = trees.named(tuned.init(key, jnp.zeros((1, *shape))))
    return {name: x for name, x in every.items() if name not in flat}

  if found.added is None:
    made = jax.tree.map(np.asarray, jax.jit(init)(jax.random.key(0)))
  else:
    made = found.added
    _check_made(found, made, jax.eval_shape(init, jax.random.key(0)), shape)
  return tuned, flat | made


def _check_made(found: Source, made: dict, wanted: dict, shape) -> None:
  """Raises UserError unless what was added is what the method adds to this model."""
  size = lambda of, name: getattr(of.get(name), 'shape', None)
  differ = [n for n in {**wanted, **made} if size(wanted, n) != size(made, n)]
  if differ:
    raise UserError(
      f'{found.source}: {differ[0]} (one of {len(differ)}) is '
      f'{size(made, differ[0])}, and tune.method={found.tune["method"]} makes it '
      f'{size(wanted, differ[0])} for this model and images of {shape[0]}x{shape[1]} px: '
      'leave image_size and the fields of the model as they were.'
    )
