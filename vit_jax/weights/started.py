"""Weights of one model as the start of another: of its backbone, or of a ViTDet.

Everything else in that model starts from its initial values.
"""

import dataclasses
import re
from typing import NamedTuple

import numpy as np

from vit_jax import models, trees
from vit_jax.errors import UserError
from vit_jax.weights import adapt, positions
from vit_jax.weights.source import Source

_HEADS = r'(head|pre_logits)/.*'
# Of a ViT, what its blocks do not read, or what follows them.
_NOT_IN_VITDET = rf'cls|Transformer/encoder_norm/.*|MAPHead_0/.*|{_HEADS}'


class Started(NamedTuple):
  """What a source gives to another model.

  Attributes:
    source: its parameters under the names of that model.
    new: regexes of that model's parameters that it does not give.
    notes: what was changed on the way.
  """

  source: Source
  new: list[str]
  notes: list[str]


def started(found: Source, model, resize: str) -> Started:
  """Returns a source's parameters as those of a model.

  Args:
    found: of the model's family, of that of its backbone (or of the backbone of this), or
      a ViT for a ViTDet.
    resize: of position embeddings, see `weights.adapt.resize_positions`.

  Raises:
    UserError: for a ViT that no ViTDet can start from.
  """
  name, inside = models.name_of(model), models.backbone_of(model)
  if found.family == name:
    return Started(found, [], [])
  if inside is not None:
    below = started(found, inside, resize)
    found, unused = _without(below.source, _HEADS)
    found = dataclasses.replace(
      found,
      family=name,
      flat={_below(n): x for n, x in found.flat.items()},
      unused=[*unused, *found.unused],
    )
    new = [rf'(?!({trees.STATS}/)?backbone/).*']
    new += [f'backbone/(?:{regex})' for regex in below.new]
    return Started(found, new, below.notes)
  if (found.family, name) == ('vit', 'vitdet'):
    return _vitdet_of_vit(found, model, resize)
  return Started(found, [], [])  # which will not fit


def _below(name: str) -> str:
  """Returns the name that a variable of a backbone has in the model around it."""
  if trees.is_statistic(name):
    return f'{trees.STATS}/backbone/{name.removeprefix(f"{trees.STATS}/")}'
  return f'backbone/{name}'


def _without(found: Source, regex: str) -> tuple[Source, list[str]]:
  """Returns (a source without some parameters, their names)."""
  left_out = [n for n in found.flat if re.fullmatch(regex, n)]
  flat = {n: x for n, x in found.flat.items() if n not in left_out}
  return dataclasses.replace(found, flat=flat), left_out


def _vitdet_of_vit(found: Source, model, resize: str) -> Started:
  known = models.fields_of(models.build('vit', **found.fields))
  for field, values in (
    ('posemb', ('learn', 'sincos2d')),
    ('posemb_where', ('stem',)),
    ('attention', ('full',)),
    ('stem_blocks', (None,)),
  ):
    if known[field] not in values:
      raise UserError(
        f'{found.source} is a ViT of {field}={known[field]!r}: a vitdet starts from one '
        f'with {" or ".join(map(repr, values))}.'
      )
  if found.image_size is None:
    raise UserError(
      f'{found.source} does not give its image size, so the grid of its positions is '
      'unknown: convert it to a format that does, vit_jax convert ... --to hf.'
    )
  family = models.family('vit')
  flat, _ = positions.learned(found.flat, known, family, found.image_size)
  found, unused = _without(dataclasses.replace(found, flat=flat), _NOT_IN_VITDET)
  found = dataclasses.replace(found, family='vitdet', unused=[*unused, *found.unused])
  old = tuple(
    n // s for n, s in zip(found.image_size, family.stride(known), strict=True)
  )
  notes, table = [], found.flat.pop(family.position)
  if model.absolute:
    new = tuple(
      n // p for n, p in zip(model.pretrained_size, model.patch_size, strict=True)
    )
    found.flat[family.position] = _positions(table, old, new, model.class_row, resize)
    if old != new:
      notes.append(f'position embeddings resized from {old} to {new}, {resize}')
  for field in ('act', 'norm_eps'):
    if (theirs := known[field]) != (ours := getattr(model, field)):
      notes.append(
        f'the weights are of {field}={theirs!r}, the model has {ours!r}: set it to theirs'
      )
  return Started(found, [r'.*/relative_positions/.*'], notes)


def _positions(table, old, new, class_row: bool, resize: str) -> np.ndarray:
  """Returns [1, R + h w, D], of the grid `new`, with a row of a class token or without."""
  table = adapt.resize_positions(table, old, new, resize)
  patches = table[:, table.shape[1] - new[0] * new[1] :]
  if not class_row:
    return patches
  if patches.shape == table.shape:  # the source has no class token
    return np.pad(table, ((0, 0), (1, 0), (0, 0)))
  return table
