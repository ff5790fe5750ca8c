"""The formats that can be read and written, and the detection of a file's format."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax import models
from vit_jax.registry import Registry
from vit_jax.weights import adapt, readers, rename
from vit_jax.weights.configs import Facts, Reader
from vit_jax.weights.rename import Arrays, Table

# The formats of each module. If several formats fit a file, the first is taken. The formats of
# rings (see `registry`) come first, because a detector's file also has the arrays of its
# backbone.
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
    # This comes last, because a hybrid of `vit` also has the arrays of its ResNet.
    'bit': 'vit_jax.weights.families.bit:FORMATS',
  },
  rings_first=True,
)

# Prefixes of the parameters in files that also hold other arrays, such as the optimizer's
# state. Arrays without the prefix are left out and reported.
_PREFIXES = ('opt/target/', 'params/', 'target/')
# Arrays of state dicts that are not parameters of the classifier.
_NOT_PARAMETERS = re.compile(
  r'(.*\.)?(num_batches_tracked|position_ids|relative_position_index|attn_mask'
  r'|relative_coords_table)|.*embeddings\.mask_token'
)
# Largest number in the name of an array, far beyond that of every published model.
_LARGEST_NUMBER = 9_999

# Fields that matter only in training, or that change only the precision of outputs. Formats
# of other libraries cannot store them. All other fields must be the same after writing and
# reading a file.
TRAINING = {'dropout', 'attention_dropout', 'stochastic_depth', 'head_bias_init'}
TRAINING |= {'posemb_std', 'layer_scale', 'rope_augment', 'zero_init', 'frozen_norm'}
TRAINING |= {'remat', 'scan', 'dtype', 'depth_rates'}

Fields = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writer:
  """The functions that write one of our models in a format.

  Attributes:
    config: a function of (fields, image size, class names) that returns the config. It gets
      all fields of the model. It raises ValueError for a value that the format cannot
      express, unless the field is in TRAINING.
    rules: a function of (parameters, fields) that returns the rename table; None: the table
      with which such a file is read.
    buffers: a function of (parameters, fields) that returns further arrays which the
      publisher's code needs.
    own: a function of the parameters that returns further keys of the config, about the
      parameters that `Format.own` names.
    alike: fields that may have another value after writing and reading, without a change
      in what the model computes.
  """

  config: Callable[[Fields, tuple[int, int], list[str] | None], dict]
  rules: Callable[[Arrays, Fields], Table] | None = None
  buffers: Callable[[Arrays, Fields], Arrays] = lambda flat, fields: {}
  own: Callable[[Arrays], dict] = lambda flat: {}
  alike: tuple[str, ...] = ()


class _Parsed(NamedTuple):
  """The facts about a model that follow from the names and shapes of a file's arrays."""

  fields: Fields
  table: Table  # renames the arrays
  blanks: Arrays  # zeros that take no memory, with the parameters' shapes and our names
  own: list[str]  # names of the task's own parameters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
  """The format in which one publisher stores the models of one family.

  A file has the first format whose `marker` matches it. `facts` then reads its config,
  `rules` renames its arrays to our names, and `infer` derives from them the fields that the
  config leaves out. All other attributes have a default that suits most formats.

  Attributes:
    name: the name of the publisher: google, big_vision, timm, hf, bit, authors, open_clip...
    family: a key of `models.MODELS`.
    marker: regex of an array's name, or several, that every such file has and few others
      have.
    facts: a function of (config, source) that returns the `Facts` in the config and the
      file's name.
    rules: the rename table, or a function of (arrays, facts) that returns it.
    infer: a function of the parameters that returns fields of the model. Facts win over
      these fields.

    when: a function of (config, file name) that returns whether a file has this format. It
      tells apart formats that have the same arrays.
    within: regex of a prefix of the model's arrays in files that hold several models.
    ignored: regex of arrays that are not part of our models, such as a decoder's.
    tells: a function of the arrays that returns fields. It reads values of arrays that are
      not parameters.
    needs: fields that do not follow from the arrays or from this format. The config, the
      file's name or the user must give them.
    conclude: a function of (parameters, fields, facts) that returns fields which follow from
      all three together.
    grid: a function of (parameters, all fields) that returns the grid (h, w) of the position
      embeddings, or None if it is unknown.
    class_names: {number of classes: their names}, for files without names.
    resize: a function of the fields that returns a key of `adapt.RESIZERS`, the method by
      which the publisher's code resizes position embeddings.
    own: the key of a task's own parameters that the file also has, such as those of a
      decoder; '': it has none.
    writer: the functions that write this format; None: it can only be read.
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
  class_names: Mapping[int, list[str]] = dataclasses.field(default_factory=dict)
  resize: Callable[[Fields], str] = lambda fields: 'bilinear'
  own: str = ''
  writer: Writer | None = None

  @property
  def to(self) -> str:
    """The name of the format that is written, one of `export.TO`."""
    return 'google' if self.name in ('bit', 'big_vision') else self.name

  def parse(
    self, arrays: Arrays, facts: Facts, usual: Fields, given: Fields
  ) -> _Parsed:
    """Infers the model from the names and shapes of arrays, without reading the arrays.

    Args:
      usual: fields that follow from the model's name. All other fields win over them.
      given: fields that the user passed. They win over all other fields.

    Raises:
      ValueError: if a field in `needs` remains unknown.
    """
    known = {key: usual[key] for key in self.needs if key in usual}
    known |= self.tells(arrays) | facts.fields
    known |= {key: given[key] for key in self.needs if key in given}
    if missing := [key for key in self.needs if key not in known]:
      name = 'ViT-B-32-quickgelu' if 'act' in missing else 'B/16'
      sized = f'variant={name!r} or ' if {*missing} <= {'num_heads', 'act'} else ''
      raise ValueError(
        f"neither arrays nor the file's name give {' and '.join(missing)}: pass {sized}"
        f'{", ".join(f"{key}=..." for key in missing)}, or keep the published name'
      )
    facts = facts._replace(fields=known)
    # Zeros that take no memory. Transforms reshape them like the arrays themselves.
    zeros = {
      n: np.broadcast_to(np.zeros((), x.dtype), x.shape) for n, x in arrays.items()
    }
    table = self.rules(zeros, facts) if callable(self.rules) else self.rules
    blanks = rename_arrays(zeros, table)
    own = [name for name in blanks if name.partition('/')[0] == self.own]
    blanks = {name: x for name, x in blanks.items() if name not in own}
    fields = merge_fields(facts.fields, self.infer(blanks))
    fields |= self.conclude(blanks, fields, facts)
    body = fields.get('backbone') or fields
    depth = body.get('depth') or sum(body.get('blocks') or body.get('depths') or ())
    if depth > adapt.MOST_LAYERS:
      raise ValueError(
        f'it has {depth:,} layers, but at most {adapt.MOST_LAYERS:,} are supported'
      )
    return _Parsed(fields=fields, table=table, blanks=blanks, own=own)

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
    config |= self.writer.own(flat)
    rules = self.rules
    if self.writer.rules:
      rules = self.writer.rules(flat, fields)
    elif callable(rules):
      rules = rules(flat, Facts(fields))
    arrays = rename.to_theirs(flat, rules) | self.writer.buffers(flat, fields)
    format, parameters, _ = detect(arrays, config)
    facts = format.facts(readers.drop_nulls(config), '')
    again = format.parse(parameters, facts, usual={}, given={}).fields
    self._check_equal(fields, models.build(self.family, **again).fields())
    return arrays, config

  def _check_equal(self, fields: Fields, again: Fields) -> None:
    for key, value in fields.items():
      if isinstance(value, dict) and isinstance(again.get(key), dict):
        self._check_equal(value, again[key])
      elif key not in {*TRAINING, *self.writer.alike} and value != again.get(key):
        raise ValueError(
          f'{self.to} cannot express {key}={value!r}, only {again.get(key)!r}'
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
    raise ValueError(f'{odd[0]} is {flat[odd[0]].dtype}, but parameters must be floats')
  return flat


def merge_fields(own: Fields, inferred: Fields) -> Fields:
  """Adds inferred fields to a model's own, which win. Does the same for its backbone."""
  fields = inferred | own
  if isinstance(inferred.get('backbone'), dict):
    fields['backbone'] = merge_fields(own.get('backbone') or {}, inferred['backbone'])
  return fields


def all_formats() -> list[Format]:
  """Returns all formats, in the order in which they are tried."""
  return [format for name in FORMATS for format in FORMATS[name]]


def find_writer(family: str, to: str, own: str = '') -> Format:
  """Returns the format `to` of a family; raises ValueError if it cannot be written.

  Args:
    own: the key of a task's own parameters. A format that holds them wins.
  """
  able = [f for f in all_formats() if f.family == family and f.writer]
  writers = {f.to: f for key in ('', own) for f in able if f.own == key}
  if to not in writers:
    raise ValueError(f'{to} cannot store {family!r}; formats that can: {list(writers)}')
  return writers[to]


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
  others = [n for n in arrays if _NOT_PARAMETERS.fullmatch(n)]
  # Each of PyTorch's batch norms counts its batches, so that is not reported.
  skipped += [n for n in others if not n.endswith('num_batches_tracked')]
  arrays = {n: x for n, x in arrays.items() if n not in others}
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
    f'its arrays have no known format (config: {kind or "none"}; first names: '
    f'{list(arrays)[:4]}). Known formats: {", ".join(formats)}'
  )


def _select_model(arrays: Arrays, format: Format) -> tuple[Arrays, list[str]]:
  """Returns ({name without prefix: array} of the format's model, names of other arrays)."""
  cut = lambda name: re.sub(f'^(?:{format.within})', '', name)
  whole = not any(cut(name) != name for name in arrays)
  inside = {n: cut(n) for n in arrays if whole or cut(n) != n}
  inside = {n: s for n, s in inside.items() if not re.fullmatch(format.ignored, s)}
  return {s: arrays[n] for n, s in inside.items()}, [
    n for n in arrays if n not in inside
  ]
