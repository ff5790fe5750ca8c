"""The formats that are read and written, and whose file a file is."""

import functools
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax import models
from vit_jax.weights import adapt, configs, rename
from vit_jax.weights.configs import Facts, Reader
from vit_jax.weights.rename import Arrays, Table

# Modules with FORMATS; the first of two formats that fit a file is taken.
FAMILIES = (
  'vit_jax.weights.families.vit_hf',
  *(
    f'vit_jax.weights.families.{name}'
    for name in ('convnext', 'mixer', 'mvit', 'resnet', 'swin', 'vit_originals')
  ),
  *(f'vit_jax.detection.weights.{name}' for name in ('rcnn', 'detr', 'fpn')),
  'vit_jax.weights.families.vit',
  'vit_jax.weights.families.bit',  # a hybrid of `vit` has the arrays of its ResNet, too
  'vit_jax.detection.weights.vitdet',
)

# Prefixes of the parameters in files that hold more. Arrays without the prefix, such as
# the optimizer's state, are left out and reported.
_PREFIXES = ('opt/target/', 'params/', 'target/')
# Arrays of state dicts that are not parameters of the classifier.
_NOT_PARAMETERS = re.compile(
  r'(.*\.)?(num_batches_tracked|position_ids|relative_position_index|attn_mask'
  r'|relative_coords_table)|.*embeddings\.mask_token'
)
_LARGEST_NUMBER = 9_999  # in a name: far beyond every published model

# Fields that no output in evaluation depends on, or its precision alone: no format of
# others has a place for them. Any other field must survive a file.
TRAINING = {'dropout', 'attention_dropout', 'stochastic_depth', 'head_bias_init'}
TRAINING |= {'posemb_std', 'layer_scale', 'rope_augment', 'zero_init', 'frozen_norm'}
TRAINING |= {'remat', 'scan', 'dtype'}

Fields = dict[str, Any]


class _Stated(dict):
  """The fields that a writer is given, and in `read` those that it looked at."""

  read = frozenset()

  def __getitem__(self, key):
    self.read |= {key}
    return super().__getitem__(key)

  def get(self, key, default=None):
    self.read |= {key}
    return super().get(key, default)


class Format(NamedTuple):
  """How one publisher stores one family. Parameters are those under our names."""

  name: str  # google, big_vision, timm, hf, bit, authors, open_clip, detectron2, ...
  family: str  # a key of models.MODELS
  marker: str | tuple[str, ...]  # regexes of names that every such file has, few others
  rules: Table | Callable[[Arrays, Facts], Table]
  infer: Callable[[Arrays], Fields]  # parameters -> fields of the model
  facts: Reader  # reads the config beside the arrays
  # (config, the file's name) -> whether they are of this format.
  when: Callable[[dict, str], bool] = lambda config, name: True
  # Regex of the prefix of this model in files that hold more, which is cut off.
  within: str = ''
  ignored: str = ''  # regex of arrays beside the model's
  # Fields that neither arrays nor this format tell: the name of the file or the user.
  needs: tuple[str, ...] = ()
  # Their arrays -> fields that those tell which are no parameters.
  tells: Callable[[Arrays], Fields] = lambda arrays: {}
  # (parameters, fields) -> (h, w) of the positions, or None.
  grid: Callable[[Arrays, Fields], tuple[int, int] | None] = lambda flat, fields: None
  # (parameters, fields, facts) -> fields of positions that only all three tell.
  positions: Callable[[Arrays, Fields, Facts], Fields] = lambda flat, fields, facts: {}
  # Whether arrays do not show the number of heads: `rules` finds it in the facts' fields.
  flat_heads: bool = False
  # (fields, image size, class names) -> config; None: the format is only read.
  config: Callable[[Fields, tuple[int, int], list[str] | None], dict] | None = None
  to: str = ''  # the name in `export.TO`, if that is not `name`
  # (parameters, fields) -> table, where that is not `rules(parameters, Facts(fields))`.
  write_rules: Callable[[Arrays, Fields], Table] | None = None
  # (parameters, fields) -> arrays beside them that the publisher's code reads.
  buffers: Callable[[Arrays, Fields], Arrays] = lambda flat, fields: {}
  # Fields -> how the publisher's code resizes positions, see `adapt.RESIZERS`.
  resize: Callable[[Fields], str] = lambda fields: 'bilinear'
  # Fields that may be read with another value: `config` checks that outputs are the same.
  alike: tuple[str, ...] = ()

  def read(self, arrays: Arrays, facts: Facts) -> tuple[Fields, Arrays]:
    """Returns (section `model`, parameters under our names, float32, not stacked)."""
    arrays = adapt.unstack(arrays, models.family(self.family))
    facts = facts._replace(fields=self.tells(arrays) | facts.fields)
    rules = self.rules(arrays, facts) if callable(self.rules) else self.rules
    flat, unknown = rename.to_ours(arrays, rules)
    if unknown:
      raise ValueError(
        f'{len(unknown)} of its {len(arrays)} arrays are not part of that architecture: '
        f'{unknown[:4]}'
      )
    if odd := [name for name, x in flat.items() if x.dtype.kind in 'biuc']:
      raise ValueError(f'{odd[0]} is {flat[odd[0]].dtype}, parameters are floats')
    flat = {name: np.asarray(x, np.float32) for name, x in flat.items()}
    fields = _over(facts.fields, self.infer(flat))
    fields |= self.positions(flat, fields, facts)
    body = fields.get('backbone') or fields
    depth = body.get('depth') or sum(body.get('blocks') or body.get('depths') or ())
    if depth > adapt.MOST_LAYERS:
      raise ValueError(f'it has {depth:,} layers, up to {adapt.MOST_LAYERS:,} are read')
    return {'name': self.family, **fields}, flat

  def write(
    self, flat: Arrays, fields: Fields, image_size: tuple[int, int], class_names
  ) -> tuple[Arrays, dict]:
    """Returns ({their name: array}, config), given all fields of the model.

    Raises:
      ValueError: for a field that the format cannot express: it would be read otherwise.
    """
    stated, usual = _Stated(fields), models.signature(self.family).parameters
    config = self.config(stated, image_size, class_names)
    # Fields are compared when the file is read again. One that an array's absence tells is
    # then equal by itself, whatever another library makes of the file: it must be looked at.
    if config.keys() - {'vit_jax'}:  # ours is read as it was written
      unread = {key: usual[key].default for key in usual.keys() - stated.read}
      self._check_equal({key: fields[key] for key in unread if key in fields}, unread)
    rules = self.rules
    if self.write_rules:
      rules = self.write_rules(flat, fields)
    elif callable(rules):
      rules = rules(flat, Facts(fields))
    arrays = rename.to_theirs(flat, rules) | self.buffers(flat, fields)
    format, parameters, _ = detect(arrays, config)
    section, _ = format.read(
      parameters, format.facts(configs.without_nulls(config), '')
    )
    again = models.build(**section).fields()
    self._check_equal(fields, again)
    return arrays, config

  def _check_equal(self, fields: Fields, again: Fields) -> None:
    for key, value in fields.items():
      if isinstance(value, dict) and isinstance(again.get(key), dict):
        self._check_equal(value, again[key])
      elif key not in {*TRAINING, *self.alike} and value != again.get(key):
        name = self.to or self.name
        raise ValueError(
          f'{name} cannot express {key}={value!r}, but {again.get(key)!r}'
        )


def _over(stated: Fields, inferred: Fields) -> Fields:
  """Returns fields, those of the config before inferred ones, also within a backbone."""
  fields = inferred | stated
  if isinstance(inferred.get('backbone'), dict):
    fields['backbone'] = _over(stated.get('backbone') or {}, inferred['backbone'])
  return fields


@functools.cache
def all_formats() -> tuple[Format, ...]:
  """Returns the formats of every module in FAMILIES."""
  modules = map(importlib.import_module, FAMILIES)
  return tuple(format for module in modules for format in module.FORMATS)


def writer(family: str, to: str) -> Format:
  """Returns the format of a family by the name `to`; ValueError if there is none."""
  named = {f.to or f.name: f for f in all_formats() if f.family == family and f.config}
  if to not in named:
    raise ValueError(f'{to} has no {family!r}; it can be written as {list(named)}')
  return named[to]


def detect(
  arrays: Arrays, config: dict, source: str = ''
) -> tuple[Format, Arrays, list[str]]:
  """Returns (format, parameters under their plain names, names left out)."""
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
      inside, more = _inside(arrays, format)
      return format, inside, [*skipped, *more]
  formats = sorted({f'{f.name} ({f.family})' for f in all_formats()})
  kind = {k: config[k] for k in ('model_type', 'architecture') if k in config}
  raise ValueError(
    f'its arrays are of no known format: {kind or ""} their names begin with '
    f'{list(arrays)[:4]}. Known formats: {", ".join(formats)}'
  )


def _inside(arrays: Arrays, format: Format) -> tuple[Arrays, list[str]]:
  """Returns (the arrays of a format's model under its names, names of the others)."""
  cut = lambda name: re.sub(f'^(?:{format.within})', '', name)
  whole = not any(cut(name) != name for name in arrays)
  inside = {n: cut(n) for n in arrays if whole or cut(n) != n}
  inside = {n: s for n, s in inside.items() if not re.fullmatch(format.ignored, s)}
  return {s: arrays[n] for n, s in inside.items()}, [
    n for n in arrays if n not in inside
  ]
