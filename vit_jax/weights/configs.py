"""Reads and writes the config that belongs to a file's arrays.

There are three kinds: timm's, transformers' and our own. A value is checked when it is read.
A key that nothing here reads is ignored.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax import imagenet, models
from vit_jax.models.timm import NO_MATTER
from vit_jax.models.vit_later import has_cls
from vit_jax.weights import pipelines

# Arguments of timm's models that are ignored. They follow from the shapes of the arrays, or
# they matter only in training or for images of another size.
_NEEDLESS = re.compile(
  rf'{NO_MATTER}|patch_size|embed_dim|depths?|dims|num_blocks|num_heads|mlp_ratio|layers'
  r'|channels|stem_chs|stem_width|width_factor|class_token|pos_embed|fc_norm|init_values'
  r'|ls_init_value|expand_attn|use_cls_token|zero_init_last|nlhb'
)

# Activations: timm's and transformers' names -> ours.
_ACTS = dict.fromkeys(('gelu', 'gelu_erf'), 'gelu_erf')
_ACTS |= dict.fromkeys(('gelu_tanh', 'gelu_new', 'gelu_pytorch_tanh'), 'gelu_tanh')
_ACTS |= {name: name for name in ('quick_gelu', 'silu', 'relu')}


class Facts(NamedTuple):
  """Facts about a model, read from its config."""

  fields: dict[str, Any]  # fields of the model
  image_size: tuple[int, int] | None = None  # (H, W), pixels
  class_names: list[str] | None = None
  pp: str | None = None  # the evaluation pipeline, in our ops
  architecture: str | None = None  # timm's name of the model
  config: dict | None = None
  # Preprocessing in the keys of `pipelines.read_timm`; used where `pp` is None.
  images: dict | None = None


# A function of (config, the user's text of the source) that returns Facts. It raises
# ValueError for a model that vit_jax cannot compute.
Reader = Callable[[dict, str], Facts]


def ours(config: dict, defaults: dict) -> Facts:
  """Reads our own config; `defaults` are the fields of a file without one."""
  own = section(config, 'vit_jax')
  names = own.get('class_names')
  names = imagenet.class_names(names) if isinstance(names, str) else names
  return Facts(
    fields=defaults | _to_tuples(section(own, 'fields')),
    image_size=pair(own.get('image_size')),
    class_names=texts(names),
    pp=own.get('pp'),
    config=config,
  )


def _to_tuples(value):
  """Replaces the lists in a JSON value by tuples."""
  if isinstance(value, dict):
    return {key: _to_tuples(x) for key, x in value.items()}
  return tuple(map(_to_tuples, value)) if isinstance(value, list) else value


def google(**defaults) -> Reader:
  """Makes the Reader of Google's files.

  These files have no config. `defaults` are the fields that all of them share. Files that
  vit_jax wrote have our own config, which wins.
  """

  def read(config, source):
    fields = section(section(config, 'vit_jax'), 'fields')
    plain = str | bool | float | list | tuple
    if odd := [k for k, v in fields.items() if not isinstance(v, plain)]:
      raise ValueError(
        f'its config sets {odd[0]}={fields[odd[0]]!r}: remove it, because it follows from '
        'the arrays'
      )
    return ours(config, defaults)

  return read


def timm(fields: Callable[[dict, str], dict] = lambda args, name: {}, **only) -> Reader:
  """Makes the Reader of timm's config.json.

  It raises ValueError for an argument that it does not know, because the model may then
  compute something else.

  Args:
    fields: a function of (timm's arguments of the model, the architecture or file name) that
      returns the model's fields. It deletes from the dict every argument that it uses.
    **only: arguments for which only one value is supported, with that value.
  """

  def read(config, source):
    cfg = section(config, 'pretrained_cfg')
    args = {k: x[k] for x in (cfg, config) for k in ('global_pool',) if k in x}
    args |= section(config, 'model_args')
    architecture = config.get('architecture')
    if not isinstance(architecture, str | None):
      raise ValueError(f'architecture is {architecture!r}, expected a string')
    size = cfg.get('input_size', config.get('input_size'))
    size = pair(args.get('img_size') or (size and size[1:]))
    names = texts(config.get('label_names') or cfg.get('label_names'))
    pp = section(config, 'vit_jax').get('pp') or pipelines.read_timm(cfg, size)
    own = fields(args, architecture or Path(source).name)
    require(args, only, 'a model of timm')
    for key in args.keys() - only.keys():
      if not _NEEDLESS.fullmatch(key):
        raise ValueError(f'model_args.{key} is unknown: it may change the outputs')
    return Facts(
      fields=own,
      image_size=size,
      class_names=names,
      pp=pp,
      architecture=architecture,
      config=config,
    )

  return read


def hf(model_type: str) -> Reader:
  """Makes the Reader of transformers' config.json for one `model_type`."""

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
  """Reads the keys that all configs of transformers share.

  Args:
    processor: used instead of preprocessor_config.json if the folder has no such file.
  """
  labels = section(config, 'id2label')
  names = texts([labels[key] for key in sorted(labels, key=int)])
  if all(name == f'LABEL_{i}' for i, name in enumerate(names)):
    names = None  # They are placeholders, not names.
  pp = section(config, 'vit_jax').get('pp')
  pp = pp or pipelines.read_hf(section(config, 'preprocessor') or processor or {}, size)
  return Facts(fields=fields, image_size=size, class_names=names, pp=pp, config=config)


def epsilon(value) -> float:
  """Checks the epsilon of a config's norms, and returns it."""
  if not 0 <= value < 1:
    raise ValueError(f'layer_norm_eps is {value}, expected a number in [0, 1)')
  return value


def section(config: dict, key: str) -> dict:
  """Returns the object at a key of a config, or {} if the key is absent."""
  value = config.get(key, {})
  if not isinstance(value, dict):
    raise ValueError(f'{key} is {str(value)[:60]!r}, expected an object')
  return value


def require(config: dict, expected: dict, what: str) -> None:
  """Raises ValueError if a key is present with another value than the expected one."""
  for key, value in expected.items():
    if config.get(key, value) != value:
      raise ValueError(f'{what} has {key}={config[key]!r}, expected {value!r}')


def activation(name: str) -> str:
  """Returns our name of an activation."""
  if name not in _ACTS:
    raise ValueError(f'activation {name!r} is unknown, expected one of {sorted(_ACTS)}')
  return _ACTS[name]


def open_clip_act(model: dict, tower: dict) -> str:
  """Returns our name of a tower's activation, given open_clip's `model_cfg`."""
  if model.get('quick_gelu'):
    return 'quick_gelu'
  tanh = section(tower, 'act_kwargs').get('approximate') == 'tanh'
  return 'gelu_tanh' if tanh else 'gelu_erf'


def open_clip(
  read_tower: Callable[[dict, dict], Facts], known: Iterable[str]
) -> Reader:
  """Makes the Reader of open_clip_config.json, and of OpenAI's files, which have no config.

  Args:
    read_tower: a function of (`model_cfg`, `vision_cfg`) that returns fields of the image
      tower.
    known: keys of `vision_cfg` that are read, follow from the arrays or change no output.
  """

  def read(config, source):
    whole = section(config, 'open_clip')
    model = section(whole, 'model_cfg')
    vision = section(model, 'vision_cfg')
    if odd := vision.keys() - {'image_size', *known}:
      raise ValueError(f'vision_cfg.{min(odd)} is unknown: it may change the outputs')
    cfg = section(whole, 'preprocess_cfg')
    mode = cfg.get('resize_mode', 'shortest')
    if mode not in ('shortest', 'squash'):
      raise ValueError(f"resize_mode={mode!r}, expected 'shortest' or 'squash'")
    mean, std = pipelines.CLIP
    usual = dict(mean=mean, std=std, interpolation='bicubic')
    images = {key: cfg.get(key, value) for key, value in usual.items()}
    images |= {'crop_pct': 1.0, 'crop_mode': 'center' if mode == 'shortest' else mode}
    return read_tower(model, vision)._replace(
      image_size=pair(vision.get('image_size', 224 if whole else None)),
      pp=section(config, 'vit_jax').get('pp'),
      config=config,
      images=images,
    )

  return read


# Keys of the `vision_cfg` of a model of timm. Its projection follows from the arrays.
_TRUNK = ('timm_model_name', 'timm_model_pretrained', 'timm_pool', 'timm_proj')
_TRUNK += ('timm_proj_bias', 'timm_drop', 'timm_drop_path')


def open_clip_trunk(read_timm: Reader) -> Reader:
  """Makes the Reader of an open_clip_config.json whose image tower `read_timm` reads."""

  def read_tower(model, vision):
    pool = vision.get('timm_pool', 'avg')
    args = {'global_pool': pool} if pool else {}
    if not (name := vision.get('timm_model_name')):
      raise ValueError(
        'its image tower is a model of timm: keep open_clip_config.json beside it, whose '
        'vision_cfg.timm_model_name names that model'
      )
    return read_timm({'architecture': name, 'model_args': args}, '')

  return open_clip(read_tower, _TRUNK)


def timm_act(args: dict, name: str) -> dict:
  """Reads the field `act` from timm's arguments, and deletes `act_layer` from them."""
  return {'act': activation(args.pop('act_layer', 'gelu'))}


def pair(size, key: str = 'image_size') -> tuple[int, int] | None:
  """Reads (height, width) from a config's value: None, one number or two."""
  if size is None:
    return None
  size = tuple(size) if isinstance(size, list | tuple) else (size, size)
  if len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
    raise ValueError(f'{key} is {size}, expected a height and a width')
  return size


def side(size, key: str) -> int:
  """Reads a value like `pair`, and returns the side of the square."""
  height, width = pair(size, key)
  if height != width:
    raise ValueError(f'{key}={size} is not square')
  return height


def texts(names) -> list[str] | None:
  """Checks a list of class names, or None, and returns it."""
  if names is not None and not (
    isinstance(names, list) and all(isinstance(name, str) for name in names)
  ):
    raise ValueError(f'class names are {str(names)[:60]}, expected a list of strings')
  return names


# -- writing ----------------------------------------------------------------------------


def need(fields: dict, format: str, **allowed: tuple) -> None:
  """Raises ValueError if a field has a value that is not allowed."""
  for key, values in allowed.items():
    if (value := fields.get(key)) not in values:
      raise ValueError(f'{format} cannot express {key}={value!r}, only {list(values)}')


def need_defaults(fields: dict, format: str, family: str, known: Iterable[str]) -> None:
  """Raises ValueError if a field outside of `known` differs from its default."""
  usual = models.signature(family).parameters
  other = {k: (usual[k].default,) for k in fields if k in usual and k not in known}
  need(fields, format, **other)


def unify(fields: dict) -> dict:
  """Normalises those fields of a ViT in which different values can mean the same.

  `map_heads=None`, for example, means the same as `map_heads=num_heads`.
  """
  return {
    'cls_token': has_cls(fields),
    'layer_scale': fields['layer_scale'] is not None,
    'map_heads': fields['map_heads'] or fields['num_heads'],
    'map_mlp_dim': fields['map_mlp_dim'] or fields['mlp_dim'],
  }


def google_config(**published):
  """Returns a function that writes our config, to be stored beside arrays in Google's format.

  Args:
    **published: the fields of a model whose file has no config. Only fields with another value
      are written.
  """

  def config(fields, image_size, class_names) -> dict:
    differ = {k: fields[k] for k, v in published.items() if fields[k] != v}
    ours = {'fields': differ} if differ else {}
    # A list of names that vit_jax ships is written as the name of the list.
    if class_names:
      ours['class_names'] = imagenet.list_of(class_names) or class_names
    if ours or image_size[0] != image_size[1]:
      ours['image_size'] = list(image_size)
    return {'vit_jax': ours} if ours else {}

  return config


def timm_config(architecture, pool, args, fields, image_size, class_names) -> dict:
  """Returns a config.json from which timm builds the model `architecture`."""
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
  """Returns timm's arguments for the sizes of the image and patches, and the width."""
  size, patch = list(image_size), list(fields['patch_size'])
  if len(set(size)) == len(set(patch)) == 1:
    size, patch = size[0], patch[0]
  return {'img_size': size, 'patch_size': patch, 'embed_dim': fields['width']}


def timm_ratio(part: int, width: int) -> float:
  """Returns a ratio r for which timm's int(width * r) is `part`."""
  ratio = part / width
  return ratio if int(width * ratio) == part else float(np.nextafter(ratio, np.inf))


def hf_config(name, model_type, args, fields, image_size, class_names) -> dict:
  """Returns transformers' config.json; `name` is the prefix of its classes, such as 'ViT'."""
  classes, act = fields['num_classes'], fields.get('act')
  return {
    'architectures': [f'{name}{"ForImageClassification" if classes else "Model"}'],
    'model_type': model_type,
    'image_size': int_or_pair(image_size),
    'num_channels': 3,
    **({'hidden_act': HF_ACTS[act]} if act in HF_ACTS else {}),
    **args,
    **labels(class_names, classes),
  }


# Activations: our names -> those of transformers, where the two differ.
HF_ACTS = {'gelu_erf': 'gelu', 'gelu_tanh': 'gelu_pytorch_tanh'}


def labels(class_names: list[str] | None, classes: int | None) -> dict:
  """Returns transformers' maps from class numbers to names and back."""
  names = class_names or [f'LABEL_{i}' for i in range(classes or 0)]
  return {
    'id2label': {str(i): name for i, name in enumerate(names)},
    'label2id': {name: i for i, name in enumerate(names)},
  }


def int_or_pair(pair) -> int | list[int]:
  """Returns an int if both numbers are equal, else a list of both."""
  return pair[0] if pair[0] == pair[1] else list(pair)
