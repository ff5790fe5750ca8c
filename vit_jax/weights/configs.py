"""The config beside arrays, of timm, of transformers or our own, read and written.

Values are checked where they are read. Keys that are not read are left alone.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax import imagenet, models
from vit_jax.models.timm import NO_MATTER
from vit_jax.models.vit import has_cls
from vit_jax.weights import pipelines

# Arguments of timm's models that need not be read: the shapes of the arrays show them, or
# they concern training or images of another size.
_NEEDLESS = re.compile(
  rf'{NO_MATTER}|patch_size|embed_dim|depths?|dims|num_blocks|num_heads|mlp_ratio|layers'
  r'|channels|stem_chs|stem_width|width_factor|class_token|pos_embed|fc_norm|init_values'
  r'|ls_init_value|expand_attn|use_cls_token|zero_init_last|nlhb'
)

# Names of activations -> ours.
_ACTS = dict.fromkeys(('gelu', 'gelu_erf'), 'gelu_erf')
_ACTS |= dict.fromkeys(('gelu_tanh', 'gelu_new', 'gelu_pytorch_tanh'), 'gelu_tanh')
_ACTS |= {name: name for name in ('quick_gelu', 'silu', 'relu')}


class Facts(NamedTuple):
  """The facts in a config about the model that its arrays belong to."""

  fields: dict[str, Any]
  image_size: tuple[int, int] | None = None  # (H, W), pixels
  class_names: list[str] | None = None
  pp: str | None = None  # the evaluation pipeline, in our ops
  architecture: str | None = None  # timm's name of the model
  config: dict | None = None
  # The images in evaluation as `pipelines.of_timm` reads them, where `pp` is None.
  images: dict | None = None


# (config, source as the user wrote it) -> Facts; ValueError for a model that is not read.
Reader = Callable[[dict, str], Facts]


def ours(config: dict, defaults: dict) -> Facts:
  """Returns the facts of our own config, over the fields of files without one."""
  own = section(config, 'vit_jax')
  fields, names = section(own, 'fields'), own.get('class_names')
  fields = {key: _tuples(x) for key, x in fields.items()}
  names = imagenet.class_names(names) if isinstance(names, str) else names
  size = pair(own.get('image_size'))
  return Facts(defaults | fields, size, texts(names), own.get('pp'), config=config)


def _tuples(value):
  """Returns a JSON value with tuples for lists."""
  if isinstance(value, dict):
    return {key: _tuples(x) for key, x in value.items()}
  return tuple(map(_tuples, value)) if isinstance(value, list) else value


def google(**defaults) -> Reader:
  """Reads our own config over fields that Google's files, which have none, share."""

  def read(config, source):
    fields = section(section(config, 'vit_jax'), 'fields')
    plain = str | bool | float | list | tuple
    if odd := [k for k, v in fields.items() if not isinstance(v, plain)]:
      raise ValueError(f'field {odd[0]}={fields[odd[0]]!r} follows from the arrays')
    return ours(config, defaults)

  return read


def timm(fields: Callable[[dict, str], dict] = lambda args, name: {}, **only) -> Reader:
  """Reads timm's config, and raises ValueError for arguments that are not read.

  Args:
    fields: (timm's arguments of the model, architecture or file name) -> the model's
      fields. It takes the arguments that it reads out of the dict.
    **only: arguments that have this value only.
  """

  def read(config, source):
    cfg = section(config, 'pretrained_cfg')
    args = {k: x[k] for x in (cfg, config) for k in ('global_pool',) if k in x}
    args |= section(config, 'model_args')
    architecture = config.get('architecture')
    if not isinstance(architecture, str | None):
      raise ValueError(f'architecture is {architecture!r}, expected a text')
    size = cfg.get('input_size', config.get('input_size'))
    size = pair(args.get('img_size') or (size and size[1:]))
    names = texts(config.get('label_names') or cfg.get('label_names'))
    pp = section(config, 'vit_jax').get('pp') or pipelines.of_timm(cfg, size)
    own = fields(args, architecture or Path(source).name)
    require(args, only, 'a model of timm')
    for key in args.keys() - only.keys():
      if not _NEEDLESS.fullmatch(key):
        raise ValueError(f'model_args.{key} is not read: it may compute something else')
    return Facts(own, size, names, pp, architecture, config)

  return read


def hf(model_type: str) -> Reader:
  """Reads transformers' config of a model of that type."""

  def read(config, source):
    if not config:
      return Facts({'act': 'gelu_erf'})
    if (other := config.get('model_type', model_type)) != model_type:
      raise ValueError(f'model_type is {other!r}, expected {model_type!r}')
    eps = epsilon(config.get('layer_norm_eps', 1e-12))
    fields = {'act': activation(config.get('hidden_act', 'gelu')), 'norm_eps': eps}
    if 'num_attention_heads' in config:
      fields['num_heads'] = config['num_attention_heads']
    return hf_facts(config, fields, pair(config.get('image_size')))

  return read


def hf_facts(config: dict, fields: dict, size, processor: dict | None = None) -> Facts:
  """Returns the facts that all of transformers' configs state alike.

  Args:
    processor: the preprocessor_config.json of a folder that has none.
  """
  labels = section(config, 'id2label')
  names = texts([labels[key] for key in sorted(labels, key=int)])
  if all(name == f'LABEL_{i}' for i, name in enumerate(names)):
    names = None  # transformers' placeholders
  pp = section(config, 'vit_jax').get('pp')
  pp = pp or pipelines.of_hf(section(config, 'preprocessor') or processor or {}, size)
  return Facts(fields, size, names, pp, config=config)


def epsilon(value) -> float:
  """Returns the epsilon of norms in a config."""
  if not 0 <= value < 1:
    raise ValueError(f'layer_norm_eps is {value}, expected a number in [0, 1)')
  return value


def without_nulls(value):
  """Returns a JSON value without keys that are null: they stand for the default."""
  if not isinstance(value, dict):
    return value
  return {k: without_nulls(v) for k, v in value.items() if v is not None}


def section(config: dict, key: str) -> dict:
  """Returns an object within a config, {} if it is not there."""
  value = config.get(key, {})
  if not isinstance(value, dict):
    raise ValueError(f'{key} is {str(value)[:60]!r}, expected an object')
  return value


def require(config: dict, expected: dict, what: str) -> None:
  """Raises ValueError where `what` has other values than the only ones that are read."""
  for key, value in expected.items():
    if config.get(key, value) != value:
      raise ValueError(f'{what} has {key}={config[key]!r}, expected {value!r}')


def activation(name: str) -> str:
  """Returns our name of an activation."""
  if name not in _ACTS:
    raise ValueError(f'activation {name!r} is not read: one of {sorted(_ACTS)} is')
  return _ACTS[name]


def open_clip_act(model: dict, tower: dict) -> str:
  """Returns our name of the activation in a tower's part of a `model_cfg`."""
  tanh = section(tower, 'act_kwargs').get('approximate') == 'tanh'
  return (
    'quick_gelu' if model.get('quick_gelu') else 'gelu_tanh' if tanh else 'gelu_erf'
  )


def timm_act(args: dict, name: str) -> dict:
  """Returns the field `act` of a timm model."""
  return {'act': activation(args.pop('act_layer', 'gelu'))}


def pair(size, key: str = 'image_size') -> tuple[int, int] | None:
  """Returns (height, width) of one number or two at the key of a config, or None."""
  if size is None:
    return None
  size = tuple(size) if isinstance(size, list | tuple) else (size, size)
  if len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
    raise ValueError(f'{key} is {size}, expected a height and a width')
  return size


def side(size, key: str) -> int:
  """Returns the side of a square, as `pair` reads it."""
  height, width = pair(size, key)
  if height != width:
    raise ValueError(f'{key}={size} is not square')
  return height


def texts(names) -> list[str] | None:
  """Returns a list of names, or None."""
  if names is not None and not (
    isinstance(names, list) and all(isinstance(name, str) for name in names)
  ):
    raise ValueError(f'class names are {str(names)[:60]}, expected a list of texts')
  return names


# -- written ----------------------------------------------------------------------------


def need(fields: dict, format: str, **allowed: tuple) -> None:
  """Raises ValueError unless each field has one of the values that the format knows."""
  for key, values in allowed.items():
    if (value := fields.get(key)) not in values:
      raise ValueError(f'{format} cannot express {key}={value!r}, but {list(values)}')


def need_defaults(fields: dict, format: str, family: str, told: Iterable[str]) -> None:
  """Raises ValueError unless all fields have their default but those in `told`."""
  usual = models.signature(family).parameters
  other = {k: (usual[k].default,) for k in fields if k in usual and k not in told}
  need(fields, format, **other)


def alike(fields: dict) -> dict:
  """Returns fields of a ViT with one value for models with the same outputs."""
  return {
    'cls_token': has_cls(fields),
    'layer_scale': fields['layer_scale'] is not None,
    'map_heads': fields['map_heads'] or fields['num_heads'],
    'map_mlp_dim': fields['map_mlp_dim'] or fields['mlp_dim'],
  }


def google_config(**published):
  """Returns the writer of fields other than those that a file without config has."""

  def config(fields, image_size, class_names) -> dict:
    differ = {k: fields[k] for k, v in published.items() if fields[k] != v}
    ours = {'fields': differ} if differ else {}
    if class_names:  # a list that this library has goes by its name
      ours['class_names'] = imagenet.list_of(class_names) or class_names
    if ours or image_size[0] != image_size[1]:
      ours['image_size'] = list(image_size)
    return {'vit_jax': ours} if ours else {}

  return config


def timm_config(architecture, pool, args, fields, image_size, class_names) -> dict:
  """Returns the config.json of a model by timm's function `architecture`."""
  classes = fields['num_classes'] or 0
  config = {
    'architecture': architecture,
    'num_classes': classes,
    'global_pool': pool,
    'model_args': args,
    'pretrained_cfg': {'num_classes': classes, 'input_size': [3, *image_size]},
  }
  return config | ({'label_names': class_names} if class_names else {})


def timm_patches(fields, image_size) -> dict:
  """Returns timm's arguments for image, patch and width."""
  size, patch = list(image_size), list(fields['patch_size'])
  if len(set(size)) == len(set(patch)) == 1:
    size, patch = size[0], patch[0]
  return {'img_size': size, 'patch_size': patch, 'embed_dim': fields['width']}


def timm_ratio(part: int, width: int) -> float:
  """Returns r with int(width * r) == part, which is how timm computes it."""
  ratio = part / width
  return ratio if int(width * ratio) == part else float(np.nextafter(ratio, np.inf))


def hf_config(name, model_type, args, fields, image_size, class_names) -> dict:
  """Returns the config.json of transformers' classes `name`, such as 'ViT'."""
  classes, act = fields['num_classes'], fields.get('act')
  return {
    'architectures': [f'{name}{"ForImageClassification" if classes else "Model"}'],
    'model_type': model_type,
    'image_size': one(image_size),
    'num_channels': 3,
    **({'hidden_act': HF_ACTS[act]} if act in HF_ACTS else {}),
    **args,
    **labels(class_names, classes),
  }


# Our names of activations -> transformers', where they differ.
HF_ACTS = {'gelu_erf': 'gelu', 'gelu_tanh': 'gelu_pytorch_tanh'}


def labels(class_names: list[str] | None, classes: int | None) -> dict:
  """Returns transformers' two maps between classes and their names."""
  names = class_names or [f'LABEL_{i}' for i in range(classes or 0)]
  return {
    'id2label': {str(i): name for i, name in enumerate(names)},
    'label2id': {name: i for i, name in enumerate(names)},
  }


def one(pair) -> int | list[int]:
  """Returns the one number of two equal ones, or both."""
  return pair[0] if pair[0] == pair[1] else list(pair)
