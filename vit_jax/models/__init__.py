"""The table of models, and functions that build a model by name."""

import dataclasses
import functools
import inspect
import json
import operator
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp

from vit_jax.check import Size, bind
from vit_jax.errors import UserError, choose, did_you_mean
from vit_jax.registry import Registry

MODELS = Registry(
  'model',
  {
    'vit': 'vit_jax.models.vit_later:FAMILY',
    'mixer': 'vit_jax.models.mixer:FAMILY',
    'resnet_gn': 'vit_jax.models.resnet_gn:FAMILY',
    'bit': 'vit_jax.models.bit:FAMILY',
    'convnext': 'vit_jax.models.convnext:FAMILY',
    'swin': 'vit_jax.models.swin:FAMILY',
    'resnet': 'vit_jax.models.resnet:FAMILY',
    'mvit': 'vit_jax.models.mvit:FAMILY',
  },
)
# Published families that are not built, see docs/guides/models.md.
_NOT_BUILT = re.compile(
  r'resnet(\d+(ts|q|_gn|_mlp)|aa|blur|rs|v2_(?!\d+x)).*|convnext_.*_(ols|rms|hnf).*'
  r'|(resmlp|gmlp|gmixer|swin_s3|swinv2_cr|naflexvit|hiera|xcit|cait|vitamin)_.*'
  r'|(qwen3|deepseek|gemma4)_vit_.*|(tf_)?(efficient|mobile|reg|dense)net.*|resnext.*'
  r'|(max|mobile|fast|efficient|rep)vit\w*|(levit|volo|pvt|twins|coat|coatnet)_.*'
  r'|vit_.*_(mci|resnet\d+d)_.*|vit_d(little|p?wee)_.*|(retinanet|fcos|ssd)\w*\d.*'
  r'|keypoint_?rcnn_.*|\w*rcnn_.*(C4|32x8d|gn|dconv|mobilenet|regnet).*'
  r'|deformable[_-]detr.*|panoptic_fpn_.*'
)
DTYPES = ('float32', 'bfloat16', 'float16')


def family(name: str, variant: str | None = None, **fields):
  """Returns the `Family` of the model that `build` returns for these arguments."""
  name, fields = resolve(name, variant, **fields)
  facts, inside = _facts(name), fields.get('backbone')
  return facts.around(family(**inside)) if inside else facts


def _facts(name: str):
  """Returns the `Family` of a model, by any name that `parse_name` accepts."""
  key, *_ = parse_name(name)
  if key not in MODELS:
    hubs = (other.removeprefix('hf:') for other in names(on_hub=True))
    near = did_you_mean(name, [*names(), *hubs])
    if _NOT_BUILT.fullmatch(key):
      raise UserError(
        f'Unknown model {name!r}: its family is published, but not built here; '
        f'docs/guides/models.md lists such families.{near}'
      )
    raise UserError(
      f'Unknown model {name!r}: expected one of {list(MODELS)}, or a published name such as '
      f"'vit_base_patch16_224' or 'R50+ViT-B_16'.{near}"
    )
  return MODELS[key]


def names(on_hub: bool = False) -> list[str]:
  """Returns names of models, or the names of weights on the hub: 'hf:OWNER/NAME'."""
  from vit_jax.models import timm

  text = Path(__file__).with_name('names.json').read_text(encoding='utf-8')
  every = [*MODELS, *dict.fromkeys([*json.loads(text), *timm.architectures()])]
  return [name for name in every if name.startswith('hf:') == on_hub]


def parse_name(name: str, variant: str | None = None) -> tuple[str, str | None, dict]:
  """Returns (family, variant, fields) for 'vit' + 'B/16', 'vit:B/16' or a published name.

  Published names are those of `Family.published`: names of timm ('vit_base_patch16_224',
  'mixer_b16_224', with or without a tag such as '.augreg_in1k') and of Google ('ViT-B_16',
  'R50+ViT-B_16', 'BiT-R50x1'). For ViTs they include the names of transformers, of the
  authors and of open_clip in `hub` ('facebook/dinov2-small', 'dinov2_vits14_reg'). A name
  of timm has the classes of the weights with its tag, or with timm's default tag.
  """
  from vit_jax.models import timm

  name = name.removeprefix('hf:').removeprefix('timm/')
  if variant is None and name not in MODELS:
    head, colon, rest = name.partition(':')
    if head in MODELS:
      return head, rest, {}
    for key in MODELS:
      for regex, described in MODELS[key].published:
        match = re.fullmatch(regex, name.partition('.')[0])
        if match and (described_as := described(*match.groups())):
          variant, fields = described_as
          return key, variant, fields | timm.classes_of(name)
    from vit_jax.models import hub

    if described := hub.published(name):
      return 'vit', *described
    name, variant = head if colon else name, rest or None
  return name, variant, {}


def resolve(name: str, variant: str | None = None, **fields) -> tuple[str, dict]:
  """Returns (key of MODELS, fields). The given fields override the variant's."""
  name, variant, named_fields = parse_name(name, variant)
  facts = _facts(name)
  fields = {**(facts.variant(variant) if variant else {}), **named_fields, **fields}
  if isinstance(inside := fields.get('backbone'), dict) and 'name' in inside:
    inner, its_fields = resolve(**inside)
    if 'num_classes' not in inside:  # A backbone has no head, whatever its name says.
      its_fields.pop('num_classes', None)
    fields['backbone'] = {'name': inner, **its_fields}
  return name, fields


def complete(name: str, variant: str | None = None, **fields) -> dict:
  """Returns all fields of a model and of its backbone, with defaults for those not given."""
  name, fields = resolve(name, variant, **fields)
  if inside := fields.get('backbone'):
    fields['backbone'] = {'name': inside['name'], **complete(**inside)}
  defaults = {key: p.default for key, p in signature(name).parameters.items()}
  return defaults | fields


def build(name: str, variant: str | None = None, **fields):
  """Returns a Linen module, such as `build('vit', 'B/16', num_classes=10, scan=True)`.

  Args:
    name: a key of MODELS, 'name:variant', or a name that `parse_name` accepts.
    variant: the model's size; None: the defaults of the fields.
    **fields: fields of the model's class, which override the variant's. A model within a
      model (a `backbone`) is a dict of the same arguments: {'name': 'vit', ...}.

  Raises:
    UserError: for an unknown name, variant, field or dtype, a value out of range, or a
      family that shares its class with another one.
  """
  name, fields = resolve(name, variant, **fields)
  bind(f'model {name}', fields, signature(name))
  for field, value in fields.items():
    if isinstance(value, dict) and 'name' in value:
      # By default, a backbone has no head, and it has the dtype of the model around it.
      shared = {'num_classes': None, 'dtype': fields.get('dtype', jnp.float32)}
      shared = {
        k: v for k, v in shared.items() if k in signature(value['name']).parameters
      }
      fields[field] = build(**{**shared, **value})
    else:
      fields[field] = _hashable(value)
  if 'dtype' in fields:
    fields['dtype'] = jnp.dtype(fields['dtype'])
  model = _facts(name).make(**fields)
  # A model knows its family by its class.
  if (other := model.family_name) != name:
    raise UserError(
      f'models {other!r} and {name!r} have the same class, {type(model).__name__}: register '
      f'{name!r} with a subclass of it.'
    )
  return model


def _hashable(value):
  """Turns lists into tuples, because JSON has no tuples, and modules need hashable fields."""
  return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def signature(name: str, variant: str | None = None) -> inspect.Signature:
  """Returns the keyword parameters that `build` takes for this model."""
  name, _, _ = parse_name(name, variant)
  key = inspect.Parameter.KEYWORD_ONLY
  fields = [
    inspect.Parameter(f.name, key, default=f.default, annotation=_sized(f.type))
    for f in dataclasses.fields(_facts(name).model)
    if f.name not in ('parent', 'name')
  ]
  return inspect.Signature(fields)


def _check_dtype(where: str, value, _) -> None:
  choose(where, getattr(value, '__name__', None) or str(value), DTYPES)


_Dtype = typing.Annotated[typing.Any, _check_dtype]


def _sized(kind):
  """Returns the annotation that is checked: `Size` for `int`, one of DTYPES for a dtype."""
  args = typing.get_args(kind)
  if isinstance(kind, types.UnionType):
    return functools.reduce(operator.or_, map(_sized, args))
  if args and typing.get_origin(kind) in (tuple, Sequence):
    return typing.get_origin(kind)[tuple(map(_sized, args))]
  return {int: Size, jnp.dtype: _Dtype}.get(kind, kind)
