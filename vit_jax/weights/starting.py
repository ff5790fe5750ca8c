"""Weights of one model as the start of another one: its backbone, or a ViTDet of a ViT.

Everything else in that model starts from its initial values.
"""

import dataclasses
import re

import numpy as np

from vit_jax import models, trees
from vit_jax.models.family import Family
from vit_jax.nn.positions import sincos2d
from vit_jax.weights import adapt
from vit_jax.weights.source import Source

_HEADS = r'(head|pre_logits)/.*'
# Parameters of a ViT that its blocks do not read, or that follow them.
_NOT_IN_VITDET = rf'cls|Transformer/encoder_norm/.*|MAPHead_0/.*|{_HEADS}'


def started(source: Source, model, resize: str) -> tuple[Source, list[str], list[str]]:
  """Returns a source as one of a model.

  Args:
    source: of the model's family, of that of its backbone (or of the backbone of this), or
      a ViT for a ViTDet.
    resize: of position embeddings, see `adapt.resize_positions`.

  Returns:
    (parameters under the names of that model, regexes of the model's parameters that are
    not among them, notes of what was changed on the way).

  Raises:
    ValueError: for a ViT that no ViTDet can start from.
  """
  name, inside = models.name_of(model), models.backbone_of(model)
  if source.family != name and inside is not None:
    body, new, notes = started(source, inside, resize)
    body = _without(body, _HEADS)
    flat = {_below(n): x for n, x in body.flat.items()}
    new = [rf'(?!({trees.STATS}/)?backbone/).*', *(f'backbone/(?:{r})' for r in new)]
    return dataclasses.replace(body, family=name, flat=flat), new, notes
  if (source.family, name) == ('vit', 'vitdet'):
    return _vitdet_of_vit(source, model, resize)
  return source, [], []  # the same model, or one that will not fit


def _below(name: str) -> str:
  """Returns the name that a variable of a backbone has in the model around it."""
  if trees.is_statistic(name):
    return f'{trees.STATS}/backbone/{name.removeprefix(f"{trees.STATS}/")}'
  return f'backbone/{name}'


def _without(source: Source, regex: str) -> Source:
  """Returns a source in which some parameters are unused."""
  unused = [n for n in source.flat if re.fullmatch(regex, n)]
  flat = {n: x for n, x in source.flat.items() if n not in unused}
  return dataclasses.replace(source, flat=flat, unused=[*unused, *source.unused])


def _vitdet_of_vit(source: Source, model, resize: str):
  fields = models.fields_of(models.build('vit', **source.fields))
  for field, values in (
    ('posemb', ('learn', 'sincos2d')),
    ('posemb_where', ('stem',)),
    ('attention', ('full',)),
    ('stem_blocks', (None,)),
  ):
    if fields[field] not in values:
      raise ValueError(
        f'it is a ViT of {field}={fields[field]!r}: a vitdet starts from one with '
        f'{" or ".join(map(repr, values))}'
      )
  if source.image_size is None:
    raise ValueError(
      'it does not give its image size, so the grid of its positions is unknown: '
      'convert it to a format that does, vit_jax convert ... --to hf'
    )
  family, size = models.family('vit'), source.image_size
  flat, _ = learned_positions(source.flat, fields, family, size)
  source = _without(dataclasses.replace(source, flat=flat), _NOT_IN_VITDET)
  old = tuple(n // s for n, s in zip(size, family.stride(fields), strict=True))
  notes, table = [], source.flat.pop(family.position)
  if model.absolute:
    new = tuple(
      n // p for n, p in zip(model.pretrained_size, model.patch_size, strict=True)
    )
    table = _positions(table, old, new, model.class_row, resize)
    source.flat[family.position] = table
    if old != new:
      notes.append(f'position embeddings resized from {old} to {new}, {resize}')
  for field in ('act', 'norm_eps'):
    if (theirs := fields[field]) != (ours := getattr(model, field)):
      notes.append(
        f'the weights are of {field}={theirs!r}, the model has {ours!r}: set it to theirs'
      )
  return (
    dataclasses.replace(source, family='vitdet'),
    [r'.*/relative_positions/.*'],
    notes,
  )


def _positions(table, old, new, class_row: bool, resize: str) -> np.ndarray:
  """Returns [1, R + h w, D] for the grid `new`, with or without a class token's row."""
  table = adapt.resize_positions(table, old, new, resize)
  patches = table[:, table.shape[1] - new[0] * new[1] :]
  if not class_row:
    return patches
  if patches.shape == table.shape:  # the source has no class token
    return np.pad(table, ((0, 0), (1, 0), (0, 0)))
  return table


def learned_positions(
  flat: dict[str, np.ndarray], fields: dict, family: Family, image_size: tuple[int, int]
) -> tuple[dict[str, np.ndarray], dict]:
  """Returns (parameters, fields) of a model of equal outputs with a learned table.

  Sine-cosine positions become a table of their numbers, for images of this size: for
  another size a library would resize the table, where the sines and cosines were
  computed anew. Models with other positions, or that add them before every block, come
  back as they are.

  Args:
    flat: parameters under our names, blocks not stacked.
    fields: all fields of the model.
  """
  if (fields.get('posemb'), fields.get('posemb_where')) != ('sincos2d', 'stem'):
    return flat, fields
  (H, W), (down, across) = image_size, family.stride(fields)
  table = sincos2d(H // down, W // across, fields['width'])
  if fields['classifier'] == 'token':  # the class token has no position
    table = np.pad(table, ((0, 0), (1, 0), (0, 0)))
  return {**flat, family.position: table}, {**fields, 'posemb': 'learn'}
