"""config.json and preprocessor_config.json of DETR, transformers', read and written."""

import os

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights import export, hints

# What evaluation resizes images to where no file says it, as in the paper: the shorter side,
# and the longer one at most.
_SHORTER, _LONGEST = 800, 1333
_HEADS = 8  # of every published model; the arrays do not show it
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's

# What each key of transformers' config must be.
_ONLY = {'activation_function': 'relu', 'position_embedding_type': 'sine'}


def read(config: dict, where: str) -> hints.Hints:
  """Returns what the files tell; UserError for a model that is not this one."""
  for key, value in _ONLY.items():
    if config.get(key, value) != value:
      raise UserError(
        f'{where}: a DETR with {key}={config[key]!r} is not read; expected {value!r}.'
      )
  heads = config.get('encoder_attention_heads', _HEADS)
  if heads != (other := config.get('decoder_attention_heads', heads)):
    raise UserError(
      f'{where}: encoder_attention_heads is {heads}, decoder_attention_heads {other}: '
      'expected the same.'
    )
  # The authors' files have no config: the name tells, detr-r50-dc5-f0fb7ef5.
  dilated = config.get(
    'dilation', not config and 'dc5' in os.path.basename(where.rstrip('/')).lower()
  )
  fields = {
    'num_heads': heads,
    'backbone': {'output_stride': 16 if dilated else 32},
  }
  given = {'image_mean': _MEAN, 'image_std': _STD, **config.get('preprocessor', {})}
  shorter, longest, size = _sides(config, given)
  whole = {'height': size[0], 'width': size[1]}
  found = hints.hf('detr')(
    {**config, 'image_size': list(size), 'preprocessor': {**given, 'size': whole}},
    where,
  )
  if shorter:
    for key, value in (('resample', 2), ('do_resize', True)):
      if given.get(key, value) != value:
        raise UserError(
          f'{where}: preprocessor_config.json has {key}={given[key]}; with a shorter side '
          f'only {value} is read.'
        )
    # Images of a batch are padded to the largest there; canvases are of one size.
    resized = f'decode|detr_resize({shorter}, {longest})|canvas({longest})'
    found = found._replace(pp='|'.join([resized, found.pp.rpartition('|')[2]]))
  return found._replace(fields=fields)


def _sides(config: dict, given: dict) -> tuple[int | None, int | None, tuple[int, int]]:
  """Returns (shorter side, most of the longer, size of the model's images) in evaluation.

  Where a height and a width are given, images are resized to those, whatever their aspect
  ratio; the first two are then None, as they are where the config has our pipeline.

  Args:
    given: transformers' preprocessor_config.json.
  """
  size = given.get('size', _SHORTER)
  own = 'size' not in given or 'pp' in config.get('vit_jax', {})
  fixed = hints.pair(config.get('image_size')) if own else None
  if not fixed and isinstance(size, list):
    fixed = size
  elif not fixed and isinstance(size, dict) and 'height' in size:
    fixed = size['height'], size['width']
  if fixed:
    return None, None, tuple(fixed)
  longest = given.get('max_size', _LONGEST)  # of files from before 2023
  if isinstance(size, dict):
    size, longest = size['shortest_edge'], size.get('longest_edge', longest)
  return size, longest, (longest, longest)


def write(fields, image_size, class_names) -> dict:
  """Returns config.json; UserError for what transformers' DETR cannot express."""
  inside = fields['backbone']
  if inside.get('name') != 'resnet':
    raise UserError(
      f'transformers has DETR on a resnet, not on a {inside.get("name")} of ours.'
    )
  export.need(inside, 'frozen_norm', (True,), 'transformers', 'its norms are frozen')
  export.need(fields, 'feature', (None,), 'transformers', 'it takes the last map')
  dilated = inside['output_stride'] != 32
  name = timm_name(inside)
  if name:
    export.need(inside, 'output_stride', (16, 32), 'transformers', 'DC5 has 16')
    backbone = {'use_timm_backbone': True, 'backbone': name}
  else:
    export.need(
      inside, 'output_stride', (32,), 'transformers', 'its own ResNet has no other'
    )
    backbone = {
      'use_timm_backbone': False,
      'backbone': None,
      'backbone_config': {
        'model_type': 'resnet',
        'num_channels': 3,
        'embedding_size': inside['stem_width'],
        'hidden_sizes': list(inside['widths']),
        'depths': list(inside['depths']),
        'layer_type': 'bottleneck',
        'hidden_act': 'relu',
        'downsample_in_first_stage': False,
        'out_features': [f'stage{len(inside["depths"])}'],
      },
    }
  labels = class_names or [f'LABEL_{i}' for i in range(fields['num_classes'])]
  return {
    'architectures': ['DetrForObjectDetection'],
    'model_type': 'detr',
    'use_pretrained_backbone': False,
    **backbone,
    'dilation': dilated,
    'd_model': fields['width'],
    'encoder_layers': fields['encoder_depth'],
    'decoder_layers': fields['decoder_depth'],
    'encoder_attention_heads': fields['num_heads'],
    'decoder_attention_heads': fields['num_heads'],
    'encoder_ffn_dim': fields['mlp_dim'],
    'decoder_ffn_dim': fields['mlp_dim'],
    'num_queries': fields['num_queries'],
    **_ONLY,
    'dropout': fields['dropout'],
    'attention_dropout': fields['attention_dropout'],
    'auxiliary_loss': False,
    'image_size': list(image_size),
    'id2label': {str(i): name for i, name in enumerate(labels)},
    'label2id': {name: i for i, name in enumerate(labels)},
  }


def timm_name(fields: dict) -> str | None:
  """Returns timm's name of a ResNet of these blocks and widths, if it has one."""
  shape = {'widths': (256, 512, 1024, 2048), 'stem_width': 64}
  names = {(3, 4, 6, 3): 'resnet50', (3, 4, 23, 3): 'resnet101'}
  if any(tuple(np.ravel(fields[k])) != tuple(np.ravel(v)) for k, v in shape.items()):
    return None
  return names.get(tuple(fields['depths']))
