"""Sources of examples, one module for each kind.

A string names a source: 'digits', 'folder:PATH', 'tfds:NAME', 'records:PATH', ...
"""

import os
from collections.abc import Sequence

from vit_jax import files
from vit_jax.check import bind
from vit_jax.data.sources import folder, subset
from vit_jax.data.sources.base import Source, opening
from vit_jax.errors import UserError, did_you_mean
from vit_jax.registry import Registry

SOURCES = Registry(
  'source',
  {
    'digits': 'vit_jax.data.sources.arrays:Digits',
    'arrays': 'vit_jax.data.sources.arrays:Arrays',
    'synthetic': 'vit_jax.data.sources.arrays:Synthetic',
    'folder': 'vit_jax.data.sources.folder:Folder',
    'labels': 'vit_jax.data.sources.label_table:LabelTable',
    'tfds': 'vit_jax.data.sources.tfds:build',
    'records': 'vit_jax.data.sources.records:RecordFiles',
    'captions': 'vit_jax.data.sources.captions:Captions',
    'wds': 'vit_jax.data.sources.webdataset:WebDataset',
    'parquet': 'vit_jax.data.sources.parquet:Parquet',
  },
)
# Placeholders for the text after the colon, for sources that need one. Read them with
# `TARGETS.data`, because they are not objects to import.
TARGETS = Registry(
  'target of a source',
  {
    'arrays': 'FILE.npz',
    'folder': 'PATH',
    'labels': 'FILE.csv or FILE.parquet',
    'tfds': 'NAME',
    'records': 'FOLDER or PATTERN',
    'captions': 'FOLDER',
    'wds': 'FOLDER or PATTERN',
    'parquet': 'FOLDER or PATTERN',
  },
)

# Schemes that also read gs:// paths.
_IN_BUCKETS = ('records', 'tfds')


def build(
  source: str, split: str, *, classes: Sequence[int | str] | None = None, **options
) -> Source:
  """Opens the source of one split.

  Args:
    source: 'scheme:target', or a scheme that needs no target. Without a scheme, an existing
      directory is a folder, a name that ends in .npz is arrays, and any other name is one of
      TFDS.
    split: a split expression, see `splits`.
    classes: indices or names of the classes to keep, see `subset`; None: all classes.
    **options: the keyword arguments of the source's class.
  """
  check_options('config.data.source_options', options, {'source': source})
  with opening():
    if classes is None:
      return _open(source, split, options)
    subset.check_classes('config.data.classes', classes, {'source': source})
    return subset.build(lambda part: _open(source, part, options), split, classes)


def _open(source: str, split: str, options: dict) -> Source:
  scheme, target, cls = _resolve(source)
  try:
    opened = cls(target, split, **options)
    names, number = opened.class_names, opened.num_classes
    if names is not None and len(names) != number:
      raise ValueError(f'{opened.name} has {number} classes and {len(names)} names')
    return opened
  except UserError as error:
    if scheme != 'tfds' or source.startswith('tfds:'):
      raise
    # An unknown name counts as one of TFDS. The user may have meant a folder, or a source
    # that a config file registers.
    lines = [
      str(error),
      f'If a config file registers {source!r}, import that file first.',
    ]
    if ':' not in source:
      near = did_you_mean(source, [*folder.folders('.'), *SOURCES])
      missing = f'There is no folder {source!r} in {os.getcwd()}.{near}'
      lines = [missing] if near else [missing, *lines]
    raise type(error)(' '.join(lines)) from None


def check_options(where: str, options: dict, beside: dict) -> None:
  """Raises UserError for options that beside['source'] does not take; a rule for `check`."""
  scheme, *_ = _resolve(beside['source'])
  bind(where, options, SOURCES.signature(scheme))


def _resolve(source: str) -> tuple[str, str, type[Source]]:
  """Parses a source to (scheme, target, class)."""
  scheme, target = _scheme(source)
  if scheme in TARGETS and not target:
    raise UserError(f"Source {source!r}: give it as '{scheme}:{TARGETS.data[scheme]}'.")
  if '://' in target and not (files.is_url(target) and scheme in _IN_BUCKETS):
    raise UserError(
      f'Source {source!r}: only gs:// URLs are read, by {" and ".join(_IN_BUCKETS)}: '
      'prepare the images (vit_jax prepare), or mount the storage.'
    )
  return scheme, target, SOURCES[scheme]


def _scheme(source: str) -> tuple[str, str]:
  if not isinstance(source, str) or not source:
    raise UserError(
      f'data.source is {source!r}: name your data, as in --config=folder:data=FOLDER. It '
      f'is one of {_forms()}.'
    )
  scheme, colon, target = source.partition(':')
  if scheme in SOURCES:
    if not colon and scheme not in TARGETS and os.path.isdir(source):
      raise UserError(
        f'Source {source!r} is both bundled data and a folder here: write '
        f"'folder:{source}' for the folder, or rename it."
      )
    return scheme, target
  if os.path.isdir(os.path.expanduser(source)):
    return 'folder', source
  if source.endswith('.npz'):
    return 'arrays', source
  # 'cifar10:3.0.2' and 'name/config' are TFDS names; 'flder:/x' and './x' are not.
  if os.sep in target or source.startswith(('.', '~', os.sep)):
    missing = f'scheme {scheme!r}' if colon else f'directory {source!r}'
    raise UserError(
      f'Source {source!r}: there is no {missing}. Sources: {_forms()}.'
      f'{did_you_mean(scheme, SOURCES)}'
    )
  return 'tfds', source


def _forms() -> str:
  return ', '.join(f'{k}:{TARGETS.data[k]}' if k in TARGETS else k for k in SOURCES)
