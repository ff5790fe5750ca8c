"""The table of models, and how one is built by name."""

import dataclasses
import importlib
import inspect
import re

import jax.numpy as jnp

from vit_jax.errors import UserError, did_you_mean

# name -> module with `Model` (a Linen module that keeps the contract of the README)
# and `variant(name) -> fields`; imported when asked for.
MODELS = {
  'vit': 'vit_jax.models.vit',
}

_TIMM_SIZES = {
  'tiny': 'Ti',
  'small': 'S',
  'medium': 'M',
  'base': 'B',
  'large': 'L',
  'so400m': 'So400m',
  'huge': 'H',
  'giant': 'g',
  'gigantic': 'G',
}
_TIMM = re.compile(
  rf'vit_({"|".join(_TIMM_SIZES)})_patch(\d+)(?P<gap>_gap)?(?:_(?P<res>\d+))?'
)
DTYPES = ('float32', 'bfloat16', 'float16')


def parse_name(name: str, variant: str | None = None) -> tuple[str, str | None, dict]:
  """Returns (model, variant, fields) for 'vit' + 'B/16', 'vit:B/16' or a timm name.

  timm's names ('vit_base_patch16_224') are those of the same shapes; the number at
  the end, its input size, is not a property of the model here: any size that the
  patches tile is taken.
  """
  match = _TIMM.fullmatch(name)
  if match and variant is None:
    fields = {'classifier': 'gap'} if match['gap'] else {}
    return 'vit', f'{_TIMM_SIZES[match[1]]}/{match[2]}', fields
  if ':' in name and variant is None:
    name, variant = name.split(':', 1)
  return name, variant, {}


def build(name: str, variant: str | None = None, **fields):
  """Returns a Linen module: `build('vit', 'B/16', num_classes=10, dtype='bfloat16')`.

  Args:
    name: a key of MODELS, 'name:variant', or a timm name.
    variant: the model's size; without one the fields' defaults hold.
    **fields: fields of the model's class, over those of the variant.

  Raises:
    UserError: for an unknown name, variant, field or dtype.
  """
  name, variant, named_fields = parse_name(name, variant)
  module = _module(name)
  fields = {**(module.variant(variant) if variant else {}), **named_fields, **fields}
  known = list(signature(name).parameters)
  for field in fields:
    if field not in known:
      raise UserError(
        f'Model {name!r} has no field {field!r}: it has {known}.'
        f'{did_you_mean(field, known)}'
      )
  if 'dtype' in fields:
    name = getattr(fields['dtype'], '__name__', None) or str(fields['dtype'])
    if name not in DTYPES:
      raise UserError(
        f'Unknown dtype {name!r}: one of {DTYPES}.{did_you_mean(name, DTYPES)}'
      )
    fields['dtype'] = jnp.dtype(name)
  _check_ranges(fields)
  for field, value in fields.items():
    if isinstance(value, list):  # JSON knows no tuples; modules must be hashable
      fields[field] = tuple(value)
  return module.Model(**fields)


_COUNTS = ('width', 'depth', 'mlp_dim', 'num_heads', 'representation_size')
_COUNTS += ('num_classes',)
_RATES = ('dropout', 'attention_dropout', 'stochastic_depth')


def _check_ranges(fields: dict) -> None:
  for field in _COUNTS:
    if (value := fields.get(field)) is not None and value < 1:
      raise UserError(f'Model field {field}={value!r}: expected 1 or more.')
  for field in _RATES:
    if not 0 <= fields.get(field, 0) < 1:
      raise UserError(f'Model field {field}={fields[field]!r}: not in [0, 1).')


def signature(name: str, variant: str | None = None) -> inspect.Signature:
  """Returns the keyword parameters that `build` takes for this model."""
  name, _, _ = parse_name(name, variant)
  fields = [
    inspect.Parameter(
      f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type
    )
    for f in dataclasses.fields(_module(name).Model)
    if f.name not in ('parent', 'name')
  ]
  return inspect.Signature(fields)


def _module(name: str):
  if name not in MODELS:
    raise UserError(
      f'Unknown model {name!r}: one of {list(MODELS)}, or a timm name such as '
      f"'vit_base_patch16_224'.{did_you_mean(name, MODELS)}"
    )
  return importlib.import_module(MODELS[name])
