"""The formats that are read and written, and whose file a file is."""

import functools
import importlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from vit_jax import models
from vit_jax.weights import adapt, rename
from vit_jax.weights.configs import Facts, Reader
from vit_jax.weights.rename import Table

# Modules with FORMATS; the first of two formats that fit a file is taken.
FAMILIES = (
  *(
    f'vit_jax.weights.families.{name}'
    for name in ('bit', 'convnext', 'mixer', 'mvit', 'resnet', 'swin_hf', 'swin_timm')
  ),
  *(f'vit_jax.detection.weights.{name}' for name in ('detr', 'fpn')),
  *(f'vit_jax.weights.families.{name}' for name in ('vit', 'vit_hf', 'vit_timm')),
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
# Far beyond every published model: a larger number in a name, or a deeper model, would
# exhaust time or memory.
_LARGEST_NUMBER = 9_999

Arrays = dict[str, np.ndarray]
Fields = dict[str, Any]


class Format(NamedTuple):
  """How one publisher stores one family. Functions raise ValueError for what does not fit.

  Attributes:
    name: the publisher's: google, big_vision, timm, hf, bit, authors or detectron2.
    family: a key of models.MODELS.
    marker: regex of a name that every such file has, and no file of another format
      unless `lacks` tells them apart.
    rules: the rename table, or a function (arrays, facts) -> table.
    infer: parameters under our names -> fields of the model.
    facts: reads the config beside the arrays.
    lacks: regex of a name that no such file has, where another format has the marker.
    grid: (parameters, fields) -> (h, w) of the positions, or None.
    flat_heads: whether the file does not tell the number of heads, as in PyTorch; then
      `rules` finds it in the facts' fields.
    config: (fields, image size, class names) -> the config to write; None: the format is
      only read.
    to: the name in `export.TO` by which it is written, if that is not `name`.
    write_rules: (parameters, fields) -> rename table, where `rules` is a function.
    buffers: parameters -> arrays beside them that the publisher's code reads.
  """

  name: str
  family: str
  marker: str
  rules: Table | Callable[[Arrays, Facts], Table]
  infer: Callable[[Arrays], Fields]
  facts: Reader
  lacks: str | None = None
  grid: Callable[[Arrays, Fields], tuple[int, int] | None] = lambda flat, fields: None
  flat_heads: bool = False
  config: Callable[[Fields, tuple[int, int], list[str] | None], dict] | None = None
  to: str = ''
  write_rules: Callable[[Arrays, Fields], Table] | None = None
  buffers: Callable[[Arrays], Arrays] = lambda flat: {}

  def read(self, arrays: Arrays, facts: Facts) -> tuple[Fields, Arrays]:
    """Returns (section `model`, parameters under our names, float32, not stacked)."""
    arrays = adapt.unstack(arrays, models.family(self.family))
    rules = self.rules if isinstance(self.rules, tuple) else self.rules(arrays, facts)
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
    body = fields.get('backbone') or fields
    depth = body.get('depth') or sum(body.get('blocks') or body.get('depths') or ())
    if depth > adapt.MOST_LAYERS:
      raise ValueError(f'it has {depth:,} layers, up to {adapt.MOST_LAYERS:,} are read')
    return {'name': self.family, **fields}, flat

  def write(
    self, flat: Arrays, fields: Fields, image_size: tuple[int, int], class_names
  ) -> tuple[Arrays, dict]:
    """Returns ({their name: array}, config) of a model.

    Args:
      flat: parameters under our names, not stacked.
      fields: all fields of the model.
      image_size: (H, W) that the parameters are for.
      class_names: one per class, or None.
    """
    config = self.config(fields, image_size, class_names)
    rules = self.write_rules(flat, fields) if self.write_rules else self.rules
    return rename.to_theirs(flat, rules) | self.buffers(flat), config


def _over(stated: Fields, inferred: Fields) -> Fields:
  """Returns fields, those of the config before inferred ones, also within a backbone."""
  fields = inferred | stated
  if isinstance(inferred.get('backbone'), dict):
    fields['backbone'] = inferred['backbone'] | stated.get('backbone', {})
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
    raise ValueError(
      f'{to} has no model like {family!r}; it can be written as {list(named)}'
    )
  return named[to]


def detect(arrays: Arrays, config: dict) -> tuple[Format, Arrays, list[str]]:
  """Returns (format, parameters under their plain names, names left out).

  Raises:
    ValueError: if the names are of no known format.
  """
  skipped = []
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
    if has(format.marker) and not (format.lacks and has(format.lacks)):
      return format, arrays, skipped
  known = sorted({f'{f.name} ({f.family})' for f in all_formats()})
  kind = {k: config[k] for k in ('model_type', 'architecture') if k in config}
  raise ValueError(
    f'its arrays are of no known format: {kind or ""} their names begin with '
    f'{list(arrays)[:4]}. Known formats: {", ".join(known)}'
  )
