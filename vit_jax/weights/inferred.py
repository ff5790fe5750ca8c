"""What a source of weights does not say about its model: inferred, or refused."""

import os
import re
import typing
from pathlib import Path

from vit_jax import models
from vit_jax.data.ops import registry
from vit_jax.errors import UserError
from vit_jax.weights import opening, zoo
from vit_jax.weights.source import Source

# The size at which published models were trained, where a file does not say it.
_USUAL_SIZE = (224, 224)


def refuse_name_of_a_model(source: str) -> None:
  """Raises UserError for a model's name in place of a source, and lists its weights.

  Args:
    source: as the user wrote it: 'vit_base_patch16_224' names a model, not weights.
  """
  if re.search(r'[/:\\]|\.(npz|safetensors)$', source) or source in zoo.ENTRIES:
    return
  if os.path.exists(source):
    return
  family, size, _ = models.parse_name(_plain(source))
  if family not in models.MODELS or size is None:
    return
  known = [e.name for e in zoo.ENTRIES.values() if e.model == f'{family}:{size}']
  where = [f"the zoo's are {known}"] if known else []
  if source.islower():  # a name of timm
    where.append(f"timm's hf:timm/{source}{'' if '.' in source else '.TAG'}")
  raise UserError(
    f'{source!r} is the name of a model ({family}:{size}), not of weights of it; '
    f'{", ".join(where) or "give a file"}.'
  )


def heads(raw: opening.Weights, family, source: str) -> int:
  """Returns the number of attention heads, by the name of the model.

  Args:
    raw: weights of a format that does not store it.
    family: the model's `models.family.Family`.
    source: as the user wrote it.

  Raises:
    UserError: if no name tells.
  """
  for name in (raw.hints.architecture, Path(source).name):
    try:
      _, fields = models.resolve(_plain(name or ''))
    except UserError:
      continue
    if 'num_heads' in fields:
      return fields['num_heads']
  _, inferred = raw.parameters(family, heads=1)
  raise UserError(
    f'Cannot infer the number of attention heads of {source} (width '
    f'{inferred["width"]}): neither a config.json nor its name tells it. Pass the '
    "model's size, variant='B/16', or num_heads."
  )


def check_fields(raw: opening.Weights, fields: dict) -> None:
  """Raises UserError for a field that is None, as nothing tells it, and may not be."""
  known = models.signature(raw.format.family).parameters
  for name, value in fields.items():
    if value is not None or name not in known:
      continue
    if type(None) not in typing.get_args(known[name].annotation):
      raise UserError(
        f'Cannot infer {name} of {raw.source}: neither the arrays nor a config.json nor '
        f"the file's name tells it. Pass {name}, or the model's size as the variant."
      )


def _plain(architecture: str) -> str:
  """'vit_base_patch16_224.augreg_in21k' without timm's tag."""
  return architecture.removesuffix('.safetensors').split('.')[0]


def check_architecture(raw: opening.Weights, variant, fields) -> None:
  """Raises UserError for a model of timm that is not known here by name.

  It may have a ViT's parameters and compute something else. Naming the `variant`, or
  `act` in `fields`, overrides it.
  """
  name = raw.hints.architecture
  if not name or variant or 'act' in fields:
    return
  try:
    models.resolve(_plain(name))
  except UserError:
    raise UserError(
      f'{raw.source} says that it is {name!r}, which is not known here: it may compute '
      'something else with the same parameters. If it is a plain model, pass its size, '
      "variant='B/16', or its activation, act='gelu_erf'."
    ) from None


def usual_size(found: Source) -> tuple[int, int]:
  """Returns (H, W) of the images, in pixels, for a source that does not say it."""
  family = models.family(found.family, **found.fields)
  if family.position in found.flat:
    raise UserError(
      f'{found.source} has position embeddings of a grid that is not square: pass '
      'image_size=(height, width), the size that they are for.'
    )
  return _USUAL_SIZE


def plain_pp(found: Source, size) -> str:
  """Returns the evaluation pipeline of the Google code: a resize without rounding.

  Of a detector, where the size is square, it keeps the aspect ratio, on a canvas.

  Args:
    found: the source; its `value_range`, if it has a pipeline, is kept.
    size: (H, W) in pixels.
  """
  text = str(size[0]) if size[0] == size[1] else f'({size[0]}, {size[1]})'
  decode = 'decode' if found.channels == 3 else f'decode({found.channels})'
  ops = registry.parse(found.pp or '')
  levels = [op.text for op in ops if op.name == 'value_range'] or ['value_range(-1, 1)']
  resize = f"resize({text}, rounding='none')"
  family = models.family(found.family, **found.fields)
  if family.outputs == 'boxes' and size[0] == size[1]:
    resize = f'detr_resize({text}, {text})|canvas({text})'
  return f'{decode}|{resize}|{levels[0]}'
