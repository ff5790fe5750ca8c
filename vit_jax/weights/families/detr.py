"""DETR in the formats of transformers and of its authors (facebookresearch/detr)."""

import os
import re

import numpy as np

from vit_jax import trees
from vit_jax.errors import UserError
from vit_jax.weights import export, hints, layers
from vit_jax.weights import transforms as t
from vit_jax.weights.families import resnet
from vit_jax.weights.formats import Format
from vit_jax.weights.rename import Rule

# What images are resized to where the file does not say: the paper's shorter side at 4:3, the shape
# of most of COCO. Boxes are fractions of the image, and any size may be asked for.
_SIZE = (800, 1066)
_HEADS = 8  # of every published model; the arrays do not show it
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
_STYLES = ('hf', 'hf5', 'authors')  # hf5: the names of modules since transformers 5


def _below(rules: tuple[Rule, ...], prefix: str) -> tuple[Rule, ...]:
  """Returns the rules of a backbone's own file for one within a DETR's."""

  def ours(name):
    stats = f'{trees.STATS}/'
    below = f'backbone/{name.removeprefix(stats)}'
    return stats + below if trees.is_statistic(name) else below

  return tuple(
    r._replace(theirs=prefix + r.theirs, ours=tuple(map(ours, r.targets)))
    for r in rules
  )


def _attention(theirs: str, ours: str, style: str) -> tuple[Rule, ...]:
  out = layers.pair(f'{theirs}.out_proj', f'{ours}/out', t.out_kernel)
  if style == 'authors':
    names = ('query', 'key', 'value')
    fused = zip(
      ('weight', 'bias'),
      layers.fused(theirs, ours, names),
      strict=True,
    )
    return *out, *(r._replace(theirs=f'{theirs}.in_proj_{p}') for p, r in fused)
  if style == 'hf5':
    out = layers.pair(f'{theirs}.o_proj', f'{ours}/out', t.out_kernel)
  each = (
    layers.pair(f'{theirs}.{n[0]}_proj', f'{ours}/{n}', t.heads_kernel, t.heads_bias)
    for n in ('query', 'key', 'value')
  )
  return *out, *(rule for pair in each for rule in pair)


def _stack(theirs: str, ours: str, style: str, cross: bool) -> tuple[Rule, ...]:
  """The layers of the encoder, or with `cross` of the decoder."""
  theirs, ours = f'{theirs}.layers.{{i}}', f'{ours}/layer_{{i}}'
  if style == 'authors':
    attentions = ('self_attn', 'multihead_attn')[: 1 + cross]
    norms, mlp = [f'norm{k + 1}' for k in range(2 + cross)], ('linear1', 'linear2')
  else:
    attentions = ('self_attn', 'encoder_attn')[: 1 + cross]
    norms = [*(f'{name}_layer_norm' for name in attentions), 'final_layer_norm']
    mlp = ('fc1', 'fc2') if style == 'hf' else ('mlp.fc1', 'mlp.fc2')
  return (
    *(
      rule
      for k, name in enumerate(attentions)
      for rule in _attention(
        f'{theirs}.{name}', f'{ours}/MultiHeadDotProductAttention_{k}', style
      )
    ),
    *(
      rule
      for k, name in enumerate(norms)
      for rule in layers.norm(f'{theirs}.{name}', f'{ours}/LayerNorm_{k}')
    ),
    *(
      rule
      for k, name in enumerate(mlp)
      for rule in layers.pair(f'{theirs}.{name}', f'{ours}/MlpBlock_0/Dense_{k}')
    ),
  )


def _rules(style: str) -> tuple[Rule, ...]:
  """All but the backbone."""
  if style == 'authors':
    encoder, decoder = 'transformer.encoder', 'transformer.decoder'
    names = ('transformer.decoder.norm', 'input_proj', 'query_embed')
    heads = ('class_embed', 'bbox_embed')
  else:
    encoder, decoder = 'model.encoder', 'model.decoder'
    names = ('layernorm', 'input_projection', 'query_position_embeddings')
    names = (f'{decoder}.layernorm', *(f'model.{name}' for name in names[1:]))
    heads = ('class_labels_classifier', 'bbox_predictor')
  norm, projection, query = names
  return (
    *_stack(encoder, 'encoder', style, cross=False),
    *_stack(decoder, 'decoder', style, cross=True),
    *layers.norm(norm, 'decoder/norm'),
    *layers.pair(projection, 'input_projection', t.conv),
    Rule(f'{query}.weight', 'query_embedding'),
    *layers.pair(heads[0], 'head'),
    *layers.pair(f'{heads[1]}.layers.{{i}}', 'box_head/Dense_{i}'),
  )


def _hf_rules(published: bool) -> tuple[Rule, ...]:
  """transformers' names: of files, which it writes, and of its modules.

  Args:
    published: whether the backbone is written under timm's names, as in the published
      files, rather than transformers'.
  """
  own, timm = resnet.hf(''), resnet.TIMM
  kinds = (timm, own) if published else (own, timm)
  places = ('model.backbone.conv_encoder.model.', 'model.backbone.model.')
  rules = [rule for place in places for kind in kinds for rule in _below(kind, place)]
  modules = (rule._replace(only_load=True) for rule in _rules('hf5'))
  return *_rules('hf'), *modules, *rules


_AUTHORS = (*_rules('authors'), *_below(resnet.TIMM, 'backbone.0.body.'))


def _published(flat: dict[str, np.ndarray]) -> bool:
  """Whether timm has a ResNet of these blocks and widths by name."""
  return _timm_name(_resnet(flat)) is not None


def _timm_name(fields: dict) -> str | None:
  shape = {'widths': (256, 512, 1024, 2048), 'stem_width': 64}
  names = {(3, 4, 6, 3): 'resnet50', (3, 4, 23, 3): 'resnet101'}
  if any(tuple(np.ravel(fields[k])) != tuple(np.ravel(v)) for k, v in shape.items()):
    return None
  return names.get(tuple(fields['depths']))


def _resnet(flat: dict[str, np.ndarray]) -> dict:
  prefix = 'backbone/'
  inside = {n.removeprefix(prefix): x for n, x in flat.items() if n.startswith(prefix)}
  return resnet.infer(inside)


def _infer(flat: dict[str, np.ndarray]) -> dict:
  """Returns the model's fields that follow from its parameters."""
  depth = lambda part: len(
    {n.split('/')[1] for n in flat if re.match(rf'{part}/layer_\d+/', n)}
  )
  query = flat['encoder/layer_0/MultiHeadDotProductAttention_0/query/kernel']
  queries, width = flat['query_embedding'].shape
  return dict(
    backbone={'name': 'resnet', **_resnet(flat), 'frozen_norm': True},
    num_classes=flat['head/kernel'].shape[1] - 1,
    num_queries=queries,
    width=width,
    num_heads=query.shape[1],
    mlp_dim=flat['encoder/layer_0/MlpBlock_0/Dense_0/kernel'].shape[1],
    encoder_depth=depth('encoder'),
    decoder_depth=depth('decoder'),
  )


# -- configs ----------------------------------------------------------------------------

# What each key of transformers' config must be.
_ONLY = {'activation_function': 'relu', 'position_embedding_type': 'sine'}


def _hints(config: dict, where: str) -> hints.Hints:
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
  size = hints.pair(config.get('image_size')) or _SIZE
  pixels = {
    'image_mean': _MEAN,
    'image_std': _STD,
    **config.get('preprocessor', {}),
    # Theirs bounds the sides, and images of a batch are padded to one size.
    'size': {'height': size[0], 'width': size[1]},
  }
  found = hints.hf('detr')(
    {**config, 'image_size': list(size), 'preprocessor': pixels}, where
  )
  return found._replace(fields=fields)


def _config(fields, image_size, class_names) -> dict:
  inside = fields['backbone']
  if inside.get('name') != 'resnet':
    raise UserError(
      f'transformers has DETR on a resnet, not on a {inside.get("name")} of ours.'
    )
  export.need(inside, 'frozen_norm', (True,), 'transformers', 'its norms are frozen')
  export.need(fields, 'feature', (None,), 'transformers', 'it takes the last map')
  dilated = inside['output_stride'] != 32
  name = _timm_name(inside)
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


FORMATS = (
  Format(
    'hf',
    'detr',
    r'model\.query_position_embeddings\.weight',
    lambda arrays, config: _hf_rules(published=True),
    _infer,
    _hints,
    flat_heads=True,
    to='hf',
    write_config=_config,
    write_rules=lambda flat: _hf_rules(_published(flat)),
  ),
  Format(
    'authors',
    'detr',
    r'transformer\.decoder\.layers\.0\.multihead_attn\.in_proj_weight',
    lambda arrays, config: _AUTHORS,
    _infer,
    _hints,
    flat_heads=True,
  ),
)
