"""The config that a format needs beside the arrays: for the families' `Format.config`."""

import numpy as np

from vit_jax import imagenet


def need(fields: dict, format: str, **allowed: tuple) -> None:
  """Raises ValueError unless each field has one of the values that the format knows."""
  for key, values in allowed.items():
    if (value := fields.get(key)) not in values:
      raise ValueError(f'{format} cannot express {key}={value!r}, but {list(values)}')


def google(**published):
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


def timm(architecture, pool, args, fields, image_size, class_names) -> dict:
  """Returns the config.json of a timm model.

  Args:
    architecture: the function of timm that builds it, with `pool` and `args`.
  """
  classes = fields['num_classes'] or 0
  config = {
    'architecture': architecture,
    'num_classes': classes,
    'global_pool': pool,
    'model_args': args,
    'pretrained_cfg': {
      'num_classes': classes,
      'input_size': [3, *image_size],
      'interpolation': 'bilinear',
      'crop_pct': 1.0,
      **dict.fromkeys(('mean', 'std'), [0.5] * 3),
    },
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


def hf(name, model_type, args, fields, image_size, class_names) -> dict:
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
