"""The table of models, and how one is built by name."""

import dataclasses
import importlib
import inspect
import re
import types
import typing

import jax.numpy as jnp

from vit_jax import other_families
from vit_jax.errors import UserError, choose, did_you_mean
from vit_jax.models.family import Family

# name -> module with a `FAMILY`; imported when asked for.
MODELS = {
  'vit': 'vit_jax.models.vit',
  'mixer': 'vit_jax.models.mixer',
  'resnet_gn': 'vit_jax.models.resnet_gn',
  'bit': 'vit_jax.models.bit',
  'convnext': 'vit_jax.models.convnext',
  'swin': 'vit_jax.models.swin',
  'resnet': 'vit_jax.models.resnet',
  'mvit': 'vit_jax.models.mvit',
}
DTYPES = ('float32', 'bfloat16', 'float16')


def family(name: str) -> Family:
  """Returns the facts of the family that a name is of; UserError for an unknown one.

  Args:
    name: a key of MODELS, or any name that `parse_name` knows.
  """
  if name not in MODELS:
    name, *_ = parse_name(asked := name)
  if name not in MODELS:
    if other := other_families.describe(asked):
      raise UserError(
        f'{asked!r} is a model of another family, which is not here: {other}. Models here: '
        f'{list(MODELS)}.'
      )
    renamed = ' The published BiT is named bit now.' if name == 'bit_paper' else ''
    raise UserError(
      f'Unknown model {asked!r}: one of {list(MODELS)}, or a published name such as '
      f"'vit_base_patch16_224' or 'R50+ViT-B_16'.{renamed or did_you_mean(name, MODELS)}"
    )
  return importlib.import_module(MODELS[name]).FAMILY


def family_of(model) -> Family:
  """Returns the `Family` of a model: `FAMILY` of the module that defines its class."""
  return _module(core(model)).FAMILY


def core(model):
  """Returns the model of a family that one stands for, as `tune.tuned.Tuned` does."""
  return model if hasattr(_module(model), 'FAMILY') else core(model.backbone)


def changed(model, **fields):
  """Returns a model with other values of those of the fields that it has."""
  if model is not (inside := core(model)):
    return model.clone(backbone=changed(inside, **fields))
  return model.clone(**{k: v for k, v in fields.items() if hasattr(model, k)})


def _module(model) -> types.ModuleType:
  return importlib.import_module(type(model).__module__)


def parse_name(name: str, variant: str | None = None) -> tuple[str, str | None, dict]:
  """Returns (family, variant, fields) for 'vit' + 'B/16', 'vit:B/16' or another's name.

  timm's names ('vit_base_patch16_224', 'deit_base_patch16_224', 'mixer_b16_224') and
  Google's ('ViT-B_16', 'R50+ViT-B_16', 'BiT-R50x1') are those of the same shapes, see
  `Family.published`. The number at the end of timm's, the input size, is not a property
  of the model here: it takes any size that its patches tile.
  """
  if variant is None and name not in MODELS:
    head, colon, rest = name.partition(':')
    if head in MODELS:
      return head, rest, {}
    for key in MODELS:
      for regex, described in family(key).published:
        if match := re.fullmatch(regex, name):
          return key, *described(*match.groups())
    name, variant = head if colon else name, rest or None
  return name, variant, {}


def build(name: str, variant: str | None = None, **fields):
  """Returns a Linen module: `build('vit', 'B/16', num_classes=10, dtype='bfloat16')`.

  Args:
    name: a key of MODELS, 'name:variant', or a name that `parse_name` knows.
    variant: the model's size; without one the fields' defaults hold.
    **fields: fields of the model's class, over those of the variant. A model within a
      model (a `backbone`) is a dict of the same arguments: {'name': 'vit', ...}.

  Raises:
    UserError: for an unknown name, variant, field or dtype, or a value out of range.
  """
  name, fields = resolve(name, variant, **fields)
  known = signature(name).parameters
  for field, value in fields.items():
    choose('field', field, list(known), f', the fields of {name}')
    if isinstance(value, dict) and 'name' in value:
      fields[field] = build(**value)
    elif isinstance(value, list):  # JSON knows no tuples; modules must be hashable
      fields[field] = tuple(value)
    _check_range(field, fields[field], known[field].annotation)
  if 'dtype' in fields:
    dtype = getattr(fields['dtype'], '__name__', None) or str(fields['dtype'])
    fields['dtype'] = jnp.dtype(choose('dtype', dtype, DTYPES))
  return family(name).model(**fields)


def resolve(name: str, variant: str | None = None, **fields) -> tuple[str, dict]:
  """Returns (key of MODELS, fields): those of the variant, under the ones given."""
  name, variant, named_fields = parse_name(name, variant)
  found = family(name)
  return name, {**(found.variant(variant) if variant else {}), **named_fields, **fields}


# Fields of any model that are shares.
_RATES = ('dropout', 'attention_dropout', 'stochastic_depth')


def _check_range(field: str, value, kind) -> None:
  """Refuses a rate outside [0, 1), and by the annotation counts below 1 and odd words."""
  if typing.get_origin(kind) is typing.Literal:
    choose(f'value of the model field {field}:', value, typing.get_args(kind))
  if field in _RATES and not 0 <= value < 1:
    raise UserError(f'Model field {field}={value!r}: expected a number in [0, 1).')
  kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
  if value is None and type(None) in kinds:
    return
  counts = None
  if int in kinds:
    counts, expected = [value], 'a whole number of 1 or more'
  elif any(typing.get_origin(k) is tuple for k in kinds):
    counts = value if isinstance(value, tuple) else [None]
    expected = 'whole numbers of 1 or more, such as (3, 4)'
  if counts is not None and not all(type(n) is int and n >= 1 for n in counts):
    raise UserError(f'Model field {field}={value!r}: expected {expected}.')


def signature(name: str, variant: str | None = None) -> inspect.Signature:
  """Returns the keyword parameters that `build` takes for this model."""
  name, _, _ = parse_name(name, variant)
  fields = [
    inspect.Parameter(
      f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type
    )
    for f in dataclasses.fields(family(name).model)
    if f.name not in ('parent', 'name')
  ]
  return inspect.Signature(fields)
