"""Whose file is it: the formats that are read, told apart by names that only one has."""

import functools
import importlib
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights.hints import Reader
from vit_jax.weights.rename import Rule

# Modules with FORMATS; of two formats that fit a file the first is taken.
FAMILIES = (
  *(f'vit_jax.weights.families.{name}' for name in ('bit', 'convnext')),
  *(f'vit_jax.detection.weights.{name}' for name in ('detr', 'fpn')),
  *(
    f'vit_jax.weights.families.{name}'
    for name in ('mixer', 'mvit', 'resnet', 'resnet_gn', 'swin', 'swin_hf', 'swin_timm')
  ),
  *(f'vit_jax.weights.families.{name}' for name in ('vit', 'vit_hf', 'vit_timm')),
  'vit_jax.detection.weights.vitdet',
)

# Around the parameters in files that hold more, or that wrap them. What is beside a
# prefix that is found (the optimizer's state) is left out, and reported.
_PREFIXES = ('opt/target/', 'params/', 'target/')
# Beside the parameters in state dicts: not parameters of the classifier.
_NOT_PARAMETERS = (
  r'(.*\.)?(num_batches_tracked|position_ids|relative_position_index|attn_mask'
  r'|relative_coords_table)|.*embeddings\.mask_token'
)

Arrays = dict[str, np.ndarray]


class Format(NamedTuple):
  """How one publisher stores one family.

  Attributes:
    name: of the publisher: google, big_vision, timm, hf, bit, or another.
    family: a key of models.MODELS.
    marker: regex of a name that every such file has, and no file of another format
      unless `lacks` tells them apart.
    rules: (arrays, config) -> rename table.
    infer: parameters under our names -> fields of the model.
    hints: reads the config beside the arrays.
    lacks: regex of a name that no such file has, where another format has the marker.
    grid: (parameters, fields) -> (h, w) of the positions, or None.
    flat_heads: whether attention's kernels hide the number of heads, as in PyTorch.
    to: the name by which `tools.convert --to` writes it, one of `export.TO`; None: it
      is only read.
    write_config: (fields, image size, class names) -> config; UserError for what the
      format cannot express. Needed with `to`.
    write_rules: parameters -> rename table, where `rules` depends on the arrays.
    buffers: parameters -> arrays beside them that the publisher's code reads.
  """

  name: str
  family: str
  marker: str
  rules: Callable[[Arrays, dict], tuple[Rule, ...]]
  infer: Callable[[Arrays], dict]
  hints: Reader
  lacks: str | None = None
  grid: Callable[[Arrays, dict], tuple[int, int] | None] = lambda flat, fields: None
  flat_heads: bool = False
  to: str | None = None
  write_config: Callable[[dict, tuple[int, int], list[str] | None], dict] | None = None
  write_rules: Callable[[Arrays], tuple[Rule, ...]] | None = None
  buffers: Callable[[Arrays], Arrays] = lambda flat: {}


@functools.cache
def all_formats() -> tuple[Format, ...]:
  """Returns the formats of every module in FAMILIES."""
  modules = map(importlib.import_module, FAMILIES)
  return tuple(found for module in modules for found in module.FORMATS)


def detect(arrays: Arrays, where: str) -> tuple[Format, Arrays, list[str]]:
  """Returns (format, the parameters under their plain names, names left out).

  Raises:
    UserError: if the names are of no known format.
  """
  skipped = []
  for prefix in _PREFIXES:
    inside = {
      n.removeprefix(prefix): x for n, x in arrays.items() if n.startswith(prefix)
    }
    if inside:
      skipped += [n for n in arrays if not n.startswith(prefix)]
      arrays = inside
  for name in [n for n in arrays if re.fullmatch(_NOT_PARAMETERS, n)]:
    arrays = {n: x for n, x in arrays.items() if n != name}
    skipped.append(name)
  has = lambda regex: any(re.fullmatch(regex, name) for name in arrays)
  for known in all_formats():
    if has(known.marker) and not (known.lacks and has(known.lacks)):
      return known, arrays, skipped
  formats = sorted({f'{f.name} ({f.family})' for f in all_formats()})
  raise UserError(
    f'{where} does not hold weights of a known format: its names begin with '
    f'{list(arrays)[:4]}. Known formats: {", ".join(formats)}.'
  )
