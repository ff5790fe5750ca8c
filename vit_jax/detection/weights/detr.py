"""DETR in the formats of transformers and its authors (facebookresearch/detr)."""

import os
import re

import numpy as np

from vit_jax.detection.coco import names
from vit_jax.detection.weights.fpn import backbone_of
from vit_jax.weights import configs, pipelines, rename
from vit_jax.weights.families import resnet
from vit_jax.weights.formats import Format, Writer
from vit_jax.weights.rename import Rule, Table, nest_rules, respell, table

# -- rename tables --------------------------------------------------------------------


def _stack(theirs: str, heads: int, attentions, norms, mlp) -> Table:
  """Makes the rules of an encoder's or decoder's layers.

  Args:
    theirs: the file's name of the encoder or decoder.
    attentions, norms, mlp: the file's names of these modules in a layer, in our order.
  """
  part = theirs.rpartition('.')[2]
  theirs, ours = f'{theirs}.layers.{{i}}', f'{part}/layer_{{i}}'
  return table(
    [
      _attention(f'{theirs}.{x}', f'{ours}/MultiHeadDotProductAttention_{k}', heads)
      for k, x in enumerate(attentions)
    ],
    [
      rename.norm(f'{theirs}.{x}', f'{ours}/LayerNorm_{k}') for k, x in enumerate(norms)
    ],
    [
      rename.dense(f'{theirs}.{x}', f'{ours}/MlpBlock_0/Dense_{k}')
      for k, x in enumerate(mlp)
    ],
  )


def _attention(theirs: str, ours: str, heads: int) -> Table:
  out = rename.merge_heads(f'{theirs}.out_proj', f'{ours}/out', heads)
  if theirs.startswith('transformer.'):
    # The authors' file has one projection for queries, keys and values.
    return table(out, rename.fuse_heads(f'{theirs}.in_proj', ours, heads, dot='_'))
  into = lambda x: rename.split_heads(f'{theirs}.{x[0]}_proj', f'{ours}/{x}', heads)
  return table(out, map(into, rename.QKV))


def _hf(arrays, facts: configs.Facts) -> Table:
  """Makes the rules of transformers, for its older names and those of version 5.

  A backbone that timm has is written under timm's names, as in the published files.
  """
  heads = facts.fields['num_heads']
  published = _timm_name(facts.fields['backbone']) is not None
  attentions, mlp = ('self_attn', 'encoder_attn'), ('fc1', 'fc2')
  norms = [f'{name}_layer_norm' for name in attentions]
  rules = table(
    _stack(
      'model.encoder', heads, attentions[:1], (*norms[:1], 'final_layer_norm'), mlp
    ),
    _stack('model.decoder', heads, attentions, (*norms, 'final_layer_norm'), mlp),
    rename.norm('model.decoder.layernorm', 'decoder/norm'),
    rename.conv('model.input_projection', 'input_projection'),
    Rule('model.query_position_embeddings.weight', 'query_embedding'),
    rename.dense('class_labels_classifier', 'head'),
    rename.dense('bbox_predictor.layers.{i}', 'box_head/Dense_{i}'),
  )
  newer = respell(rules, (r'out_proj', 'o_proj'), (r'\.(fc\d)', r'.mlp.\1'))
  kinds = (resnet.TIMM, resnet.HF_BARE)
  places = ('model.backbone.conv_encoder.model.', 'model.backbone.model.')
  backbones = [
    nest_rules(kind, place, 'backbone/')
    for place in places
    for kind in (kinds if published else kinds[::-1])
  ]
  return table(rules, newer, backbones)


def _authors(heads: int) -> Table:
  attentions, mlp = ('self_attn', 'multihead_attn'), ('linear1', 'linear2')
  return table(
    _stack('transformer.encoder', heads, attentions[:1], ('norm1', 'norm2'), mlp),
    _stack('transformer.decoder', heads, attentions, ('norm1', 'norm2', 'norm3'), mlp),
    rename.norm('transformer.decoder.norm', 'decoder/norm'),
    rename.conv('input_proj', 'input_projection'),
    Rule('query_embed.weight', 'query_embedding'),
    rename.dense('class_embed', 'head'),
    rename.dense('bbox_embed.layers.{i}', 'box_head/Dense_{i}'),
    nest_rules(resnet.TIMM, 'backbone.0.body.', 'backbone/'),
  )


def _infer(flat: dict[str, np.ndarray]) -> dict:
  depth = lambda part: len(
    {n.split('/')[1] for n in flat if re.match(rf'{part}/layer_\d+/', n)}
  )
  query = flat['encoder/layer_0/MultiHeadDotProductAttention_0/query/kernel']
  queries, width = flat['query_embedding'].shape
  inside = resnet.infer(backbone_of(flat))
  return dict(
    backbone={'name': 'resnet', **inside, 'frozen_norm': True},
    num_classes=flat['head/kernel'].shape[1] - 1,
    num_queries=queries,
    width=width,
    num_heads=query.shape[1],
    mlp_dim=flat['encoder/layer_0/MlpBlock_0/Dense_0/kernel'].shape[1],
    encoder_depth=depth('encoder'),
    decoder_depth=depth('decoder'),
  )


# -- configs --------------------------------------------------------------------------

# The shorter side of images in the paper's evaluation, and the limit of the longer side. Used
# for files without a preprocessor_config.json.
_SHORTER, _LONGEST = 800, 1333
# Attention heads of all published models. The arrays do not show them.
_HEADS = 8

# Keys of transformers' config for which only one value is supported.
_ONLY = {'activation_function': 'relu', 'position_embedding_type': 'sine'}


def _facts(config: dict, source: str) -> configs.Facts:
  configs.require(config, _ONLY, 'a DETR')
  heads = config.get('encoder_attention_heads', _HEADS)
  configs.require(config, {'decoder_attention_heads': heads}, 'a DETR')
  # The authors' files have no config, so their name decides, such as detr-r50-dc5-f0fb7ef5.
  by_name = not config and 'dc5' in os.path.basename(source.rstrip('/')).lower()
  if not isinstance(dilated := config.get('dilation', by_name), bool):
    raise ValueError(f'dilation is {dilated!r}, expected true or false')
  processor = {'image_mean': pipelines.MEAN, 'image_std': pipelines.STD}
  processor |= configs.section(config, 'preprocessor')
  shorter, longest, size = _sides(config, processor)
  processor = {**processor, 'size': {'height': size[0], 'width': size[1]}}
  read = {**config, 'image_size': size, 'preprocessor': processor}
  facts = configs.hf('detr')(read, source)
  if shorter:
    expected = {'resample': 2, 'do_resize': True}
    configs.require(processor, expected, 'preprocessor_config.json of a shorter side')
    # transformers pads a batch to its largest image. Our canvases have one size.
    resized = f'decode|detr_resize({shorter}, {longest})|canvas({longest})'
    facts = facts._replace(pp='|'.join([resized, facts.pp.rpartition('|')[2]]))
  fields = {'num_heads': heads, 'backbone': {'output_stride': 16 if dilated else 32}}
  return facts._replace(fields=fields)


def _sides(config: dict, processor: dict):
  """Reads (shorter side, limit of the longer side, size of images) for evaluation.

  The first two are None if the config has our pipeline, or a height and width to which all
  images are squashed.
  """
  size = processor.get('size', _SHORTER)
  own = 'size' not in processor or 'pp' in configs.section(config, 'vit_jax')
  fixed = config.get('image_size') if own else None
  if not fixed and isinstance(size, list):
    fixed = size
  elif not fixed and isinstance(size, dict) and 'height' in size:
    fixed = size['height'], size['width']
  if fixed:
    return None, None, configs.pair(fixed)
  # Files from before 2023 have 'max_size'.
  longest = processor.get('max_size', _LONGEST)
  if isinstance(size, dict):
    size, longest = size['shortest_edge'], size.get('longest_edge', longest)
  return configs.pair(size)[0], longest, configs.pair(longest)


def _config(fields, image_size, class_names) -> dict:
  inside, need = fields['backbone'], configs.need
  need(inside, 'transformers', name=('resnet',), frozen_norm=(True,))
  name = _timm_name(inside)
  if name:
    need(inside, 'transformers', output_stride=(16, 32))
    backbone = {'use_timm_backbone': True, 'backbone': name}
  else:
    need(inside, 'transformers', output_stride=(32,))
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
  return {
    'architectures': ['DetrForObjectDetection'],
    'model_type': 'detr',
    'use_pretrained_backbone': False,
    **backbone,
    'dilation': inside['output_stride'] != 32,
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
    **configs.labels(class_names, fields['num_classes']),
  }


def _timm_name(fields: dict) -> str | None:
  """Returns timm's name of a ResNet with these depths and widths, or None."""
  names = {(3, 4, 6, 3): 'resnet50', (3, 4, 23, 3): 'resnet101'}
  widths = *fields.get('widths', ()), fields.get('stem_width')
  usual = widths == (256, 512, 1024, 2048, 64)
  return names.get(tuple(fields['depths'])) if usual else None


FORMATS = (
  Format(
    name='hf',
    family='detr',
    marker=r'model\.query_position_embeddings\.weight',
    facts=_facts,
    rules=_hf,
    infer=_infer,
    needs=('num_heads',),
    writer=Writer(config=_config),
  ),
  Format(
    name='authors',
    family='detr',
    marker=r'transformer\.decoder\.layers\.0\.multihead_attn\.in_proj_weight',
    facts=_facts,
    rules=lambda arrays, facts: _authors(facts.fields['num_heads']),
    infer=_infer,
    class_names=names.FROM_0,
    needs=('num_heads',),
  ),
)
