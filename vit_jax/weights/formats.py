"""The formats that are read and written, and whose file a file is."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax import models
from vit_jax.registry import Registry
from vit_jax.weights import adapt, readers, rename
from vit_jax.weights.configs import Facts, Reader
from vit_jax.weights.rename import Arrays, Table

# The formats of each module; the first of two formats that fit a file is taken. Those of
# rings come first: a detector's file has the arrays of its backbone, too.
FORMATS = Registry(
  'format',
  {
    'vit_hf': 'vit_jax.weights.families.vit_hf:FORMATS',
    'convnext': 'vit_jax.weights.families.convnext:FORMATS',
    'mixer': 'vit_jax.weights.families.mixer:FORMATS',
    'mvit': 'vit_jax.weights.families.mvit:FORMATS',
    'resnet': 'vit_jax.weights.families.resnet:FORMATS',
    'swin': 'vit_jax.weights.families.swin:FORMATS',
    'vit_originals': 'vit_jax.weights.families.vit_originals:FORMATS',
    'vit': 'vit_jax.weights.families.vit:FORMATS',
    # A hybrid of `vit` has the arrays of its ResNet, too.
    'bit': 'vit_jax.weights.families.bit:FORMATS',
  },
  rings_first=True,
)

# Prefixes of the parameters in files that hold more. Arrays without the prefix, such as
# the optimizer's state, are left out and reported.
_PREFIXES = ('opt/target/', 'params/', 'target/')
# Arrays of state dicts that are not parameters of the classifier.
_NOT_PARAMETERS = re.compile(
  r'(.*\.)?(num_batches_tracked|position_ids|relative_position_index|attn_mask'
  r'|relative_coords_table)|.*embeddings\.mask_token'
)
# Largest number in the name of a model, far beyond that of every published model.
_LARGEST_NUMBER = 9_999

# Fields for training alone, and those that change only the precision of outputs: the formats
# of others have no place for them. Any other field must survive a file.
TRAINING = {'dropout', 'attention_dropout', 'stochastic_depth', 'head_bias_init'}
TRAINING |= {'posemb_std', 'layer_scale', 'rope_augment', 'zero_init', 'frozen_norm'}
TRAINING |= {'remat', 'scan', 'dtype'}

Fields = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writer:
  """How a model of ours is written in a format.

  Attributes:
    config: `(fields, image size, class names) -> config`, of a model with all of its
      fields. It looks at every field but those in TRAINING, and raises ValueError for a
      value that the format cannot express.
    rules: `(parameters, fields) -> table`; None: the table that reads such a file.
    buffers: `(parameters, fields) -> arrays`, further arrays that the publisher's code
      demands.
    alike: fields that may have another value after writing and reading, without a change
      in what the model computes.
  """

  config: Callable[[Fields, tuple[int, int], list[str] | None], dict]
  rules: Callable[[Arrays, Fields], Table] | None = None
  buffers: Callable[[Arrays, Fields], Arrays] = lambda flat, fields: {}
  alike: tuple[str, ...] = ()


class _Parsed(NamedTuple):
  """A model as the names and shapes of a file's arrays tell it."""

  fields: Fields
  table: Table  # renames the arrays
  blanks: Arrays  # zeros without memory, of the parameters' shapes, under our names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
  """How one publisher stores the models of one family.

  A file is of the first format whose `marker` it has. Then `facts` reads its config,
  `rules` names its arrays as ours, and `infer` sees in them what the config leaves out.
  Everything else has a default that suits most formats.

  Attributes:
    name: the publisher's: google, big_vision, timm, hf, bit, authors, open_clip, ...
    family: a key of `models.MODELS`.
    marker: regex of an array's name, or several, that every such file has and few others.
    facts: `(config, source) -> Facts`, what the config and the file's name say.
    rules: the rename table, or `(arrays, facts) -> table`.
    infer: `parameters -> fields` of the model; the facts win over them.

    when: `(config, file name) -> bool`, for files that arrays alone do not tell apart.
    within: regex of a prefix that the model's arrays have in files that hold more models.
    ignored: regex of arrays that belong to no model of ours, such as a decoder's.
    tells: `arrays -> fields` that follow from values in arrays that are no parameters.
    needs: fields that neither arrays nor this format tell, but the config, the file's
      name or the user.
    conclude: `(parameters, fields, facts) -> fields` that only all three together tell.
    grid: `(parameters, fields) -> (h, w)` of the position embeddings, None if unknown.
    resize: `fields -> method` by which the publisher's code resizes position
      embeddings, a key of `adapt.RESIZERS`.
    writer: None: the format is only read.
  """

  name: str
  family: str
  marker: str | tuple[str, ...]
  facts: Reader
  rules: Table | Callable[[Arrays, Facts], Table]
  infer: Callable[[Arrays], Fields]
  when: Callable[[dict, str], bool] = lambda config, name: True
  within: str = ''
  ignored: str = ''
  tells: Callable[[Arrays], Fields] = lambda arrays: {}
  needs: tuple[str, ...] = ()
  conclude: Callable[[Arrays, Fields, Facts], Fields] = lambda flat, fields, facts: {}
  grid: Callable[[Arrays, Fields], tuple[int, int] | None] = lambda flat, fields: None
  resize: Callable[[Fields], str] = lambda fields: 'bilinear'
  writer: Writer | None = None

  @property
  def to(self) -> str:
    """The name of the format that is written, one of `export.TO`."""
    return 'google' if self.name in ('bit', 'big_vision') else self.name

  def complete_facts(
    self, arrays: Arrays, facts: Facts, usual: Fields, given: Fields
  ) -> Facts:
    """Returns the facts with the fields in `needs`, and those that arrays tell.

    Args:
      usual: fields that the model's name tells; all else wins over them.
      given: fields that the user passed; they win over all else.

    Raises:
      ValueError: if nothing tells a field in `needs`.
    """
    fields = {key: usual[key] for key in self.needs if key in usual}
    fields |= self.tells(arrays) | facts.fields
    fields |= {key: given[key] for key in self.needs if key in given}
    if missing := [key for key in self.needs if key not in fields]:
      sized = "variant='B/16' or " if missing == ['num_heads'] else ''
      raise ValueError(
        f"neither arrays nor the file's name tell {' and '.join(missing)}: pass {sized}"
        f'{", ".join(f"{key}=..." for key in missing)}, or keep the published name'
      )
    return facts._replace(fields=fields)

  def parse(self, arrays: Arrays, facts: Facts) -> _Parsed:
    """Returns the model of arrays by their names and shapes; reads none of them."""
    # Zeros without memory, which transforms reshape as they would the array itself.
    zeros = {
      n: np.broadcast_to(np.zeros((), x.dtype), x.shape) for n, x in arrays.items()
    }
    table = self.rules(zeros, facts) if callable(self.rules) else self.rules
    blanks = rename_arrays(zeros, table)
    fields = _merge_fields(facts.fields, self.infer(blanks))
    fields |= self.conclude(blanks, fields, facts)
    body = fields.get('backbone') or fields
    depth = body.get('depth') or sum(body.get('blocks') or body.get('depths') or ())
    if depth > adapt.MOST_LAYERS:
      raise ValueError(f'it has {depth:,} layers, up to {adapt.MOST_LAYERS:,} are read')
    return _Parsed(fields=fields, table=table, blanks=blanks)

  def write(
    self, flat: Arrays, fields: Fields, image_size: tuple[int, int], class_names
  ) -> tuple[Arrays, dict]:
    """Returns ({their name: array}, config), given all fields of the model.

    The file is read again, and its fields are compared with those of the model.

    Raises:
      ValueError: for a field that the format cannot express.
    """
    assert self.writer is not None, self.name
    config = self.writer.config(fields, image_size, class_names)
    rules = self.rules
    if self.writer.rules:
      rules = self.writer.rules(flat, fields)
    elif callable(rules):
      rules = rules(flat, Facts(fields))
    arrays = rename.to_theirs(flat, rules) | self.writer.buffers(flat, fields)
    format, parameters, _ = detect(arrays, config)
    facts = format.facts(readers.drop_nulls(config), '')
    facts = facts._replace(fields=format.tells(parameters) | facts.fields)
    again = format.parse(parameters, facts).fields
    self._check_equal(fields, models.build(self.family, **again).fields())
    return arrays, config

  def _check_equal(self, fields: Fields, again: Fields) -> None:
    for key, value in fields.items():
      if isinstance(value, dict) and isinstance(again.get(key), dict):
        self._check_equal(value, again[key])
      elif key not in {*TRAINING, *self.writer.alike} and value != again.get(key):
        raise ValueError(
          f'{self.to} cannot express {key}={value!r}, but {again.get(key)!r}'
        )


def rename_arrays(arrays: Arrays, table: Table) -> Arrays:
  """Returns a file's arrays under our names.

  Raises:
    ValueError: for an array that the table does not have, or one of integers.
  """
  flat, unknown = rename.to_ours(arrays, table)
  if unknown:
    raise ValueError(
      f'{len(unknown)} of its {len(arrays)} arrays are not part of that architecture: '
      f'{unknown[:4]}'
    )
  if odd := [name for name, x in flat.items() if x.dtype.kind in 'biuc']:
    raise ValueError(f'{odd[0]} is {flat[odd[0]].dtype}, parameters are floats')
  return flat


def _merge_fields(stated: Fields, inferred: Fields) -> Fields:
  """Returns fields, those of the config before inferred ones, also within a backbone."""
  fields = inferred | stated
  if isinstance(inferred.get('backbone'), dict):
    fields['backbone'] = _merge_fields(
      stated.get('backbone') or {}, inferred['backbone']
    )
  return fields


def all_formats() -> list[Format]:
  """Returns all formats, in the order in which they are tried."""
  return [format for name in FORMATS for format in FORMATS[name]]


def find_writer(family: str, to: str) -> Format:
  """Returns the format of a family by the name `to`; ValueError if there is none."""
  named = {f.to: f for f in all_formats() if f.family == family and f.writer}
  if to not in named:
    raise ValueError(f'{to} has no {family!r}; it can be written as {list(named)}')
  return named[to]


def detect(
  arrays: Arrays, config: dict, source: str = ''
) -> tuple[Format, Arrays, list[str]]:
  """Returns (format, parameters under their plain names, names left out).

  The parameters of scanned blocks, as in files by big_vision, are no longer stacked.
  """
  skipped, file = [], Path(source).name
  for prefix in _PREFIXES:
    inside = {
      n.removeprefix(prefix): x for n, x in arrays.items() if n.startswith(prefix)
    }
    if inside:
      skipped += [n for n in arrays if not n.startswith(prefix)]
      arrays = inside
  skipped += [n for n in arrays if _NOT_PARAMETERS.fullmatch(n)]
  arrays = {n: x for n, x in arrays.items() if not _NOT_PARAMETERS.fullmatch(n)}
  for name in arrays:
    if any(int(n) > _LARGEST_NUMBER for n in re.findall(r'\d{1,9}', name)):
      raise ValueError(f'array {name[:80]!r} is numbered beyond {_LARGEST_NUMBER}')
  has = lambda regex: any(re.fullmatch(regex, name) for name in arrays)
  for format in all_formats():
    markers = (format.marker,) if isinstance(format.marker, str) else format.marker
    if all(map(has, markers)) and format.when(config, file):
      inside, more = _select_model(arrays, format)
      inside = adapt.unstack(inside, models.family(format.family))
      return format, inside, [*skipped, *more]
  formats = sorted({f'{f.name} ({f.family})' for f in all_formats()})
  kind = {k: config[k] for k in ('model_type', 'architecture') if k in config}
  raise ValueError(
    f'its arrays are of no known format: {kind or ""} their names begin with '
    f'{list(arrays)[:4]}. Known formats: {", ".join(formats)}'
  )


def _select_model(arrays: Arrays, format: Format) -> tuple[Arrays, list[str]]:
  """Returns (the arrays of a format's model under its names, names of the others)."""
  cut = lambda name: re.sub(f'^(?:{format.within})', '', name)
  whole = not any(cut(name) != name for name in arrays)
  inside = {n: cut(n) for n in arrays if whole or cut(n) != n}
  inside = {n: s for n, s in inside.items() if not re.fullmatch(format.ignored, s)}
  return {s: arrays[n] for n, s in inside.items()}, [
    n for n in arrays if n not in inside
  ]
