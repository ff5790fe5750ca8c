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
  'mixer': 'vit_jax.models.mixer',
  'resnet_gn': 'vit_jax.models.resnet_gn',
  'bit': 'vit_jax.models.bit',
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
_SIZES = '|'.join(_TIMM_SIZES)
# Names that others publish shapes under -> (model, variant, fields).
_NAMES = (
  (  # timm
    rf'vit_({_SIZES})_patch(\d+)(_gap)?(?:_\d+)?',
    lambda size, patch, gap: ('vit', f'{_TIMM_SIZES[size]}/{patch}', _gap(gap)),
  ),
  (
    rf'vit_({_SIZES})_r(\d+)_s(\d+)(?:_\d+)?',
    lambda size, r, s: ('vit', f'R{r}+{_TIMM_SIZES[size]}/{s}', {}),
  ),
  (
    rf'vit_({_SIZES})_r_s16_p8(?:_\d+)?',
    lambda size: ('vit', f'R+{_TIMM_SIZES[size]}/16', {}),
  ),
  (
    r'mixer_([sblh])(\d+)(?:_\d+)?',
    lambda size, patch: ('mixer', f'{size.upper()}/{patch}', {}),
  ),
  (r'resnetv2_(\d+x\d+)_bit', lambda shape: ('bit', f'R{shape}', {})),
  (  # Google
    r'(R\d*\+)?ViT-([A-Za-z0-9]+)_(\d+)(-gap-norep)?',
    lambda r, size, patch, gap: ('vit', f'{r or ""}{size}/{patch}', _gap(gap)),
  ),
  (r'Mixer-([A-Z])_(\d+)', lambda size, patch: ('mixer', f'{size}/{patch}', {})),
  (r'BiT-(?:[SML]-)?(R\d+x\d+)', lambda shape: ('bit', shape, {})),
)


def _gap(asked) -> dict:
  return {'classifier': 'gap'} if asked else {}


DTYPES = ('float32', 'bfloat16', 'float16')


def parse_name(name: str, variant: str | None = None) -> tuple[str, str | None, dict]:
  """Returns (model, variant, fields) for 'vit' + 'B/16', 'vit:B/16' or a published name.

  timm's names ('vit_base_patch16_224', 'vit_base_r50_s16_384', 'mixer_b16_224',
  'resnetv2_50x1_bit') and Google's ('ViT-B_16', 'R50+ViT-B_16', 'Mixer-B_16',
  'BiT-R50x1') are those of the same shapes; the number at timm's end, its input size,
  is not a property of the model here: any size that the patches tile is taken.
  """
  if variant is None:
    for regex, described in _NAMES:
      if match := re.fullmatch(regex, name):
        return described(*match.groups())
    if ':' in name:
      name, variant = name.split(':', 1)
  return name, variant, {}


def build(name: str, variant: str | None = None, **fields):
  """Returns a Linen module: `build('vit', 'B/16', num_classes=10, dtype='bfloat16')`.

  Args:
    name: a key of MODELS, 'name:variant', or a name that `parse_name` knows.
    variant: the model's size; without one the fields' defaults hold.
    **fields: fields of the model's class, over those of the variant.

  Raises:
    UserError: for an unknown name, variant, field or dtype.
  """
  name, fields = resolve(name, variant, **fields)
  module = _module(name)
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


def resolve(name: str, variant: str | None = None, **fields) -> tuple[str, dict]:
  """Returns (key of MODELS, fields): those of the variant, under the ones given."""
  name, variant, named_fields = parse_name(name, variant)
  module = _module(name)
  return name, {
    **(module.variant(variant) if variant else {}),
    **named_fields,
    **fields,
  }


_COUNTS = ('width', 'depth', 'mlp_dim', 'num_heads', 'representation_size')
_COUNTS += ('num_classes', 'tokens_mlp_dim', 'channels_mlp_dim', 'stem_width')
_RATES = ('dropout', 'attention_dropout', 'stochastic_depth')


def _check_ranges(fields: dict) -> None:
  for field in _COUNTS:
    if (value := fields.get(field)) is not None and value < 1:
      raise UserError(f'Model field {field}={value!r}: expected 1 or more.')
  for field in ('blocks', 'stem_blocks'):
    if min(fields.get(field) or (1,)) < 1:
      raise UserError(
        f'Model field {field}={fields[field]!r}: expected 1 or more units per stage.'
      )
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
      f'Unknown model {name!r}: one of {list(MODELS)}, or a published name such as '
      f"'vit_base_patch16_224' or 'R50+ViT-B_16'.{did_you_mean(name, MODELS)}"
    )
  return importlib.import_module(MODELS[name])
