"""DETR in the formats of transformers and of its authors (facebookresearch/detr)."""

import re

import numpy as np

from vit_jax import trees
from vit_jax.detection.weights import detr_config
from vit_jax.weights import layers
from vit_jax.weights import transforms as t
from vit_jax.weights.families import resnet
from vit_jax.weights.formats import Format
from vit_jax.weights.rename import Rule

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
  return detr_config.timm_name(_resnet(flat)) is not None


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


FORMATS = (
  Format(
    'hf',
    'detr',
    r'model\.query_position_embeddings\.weight',
    lambda arrays, config: _hf_rules(published=True),
    _infer,
    detr_config.read,
    flat_heads=True,
    to='hf',
    write_config=detr_config.write,
    write_rules=lambda flat: _hf_rules(_published(flat)),
  ),
  Format(
    'authors',
    'detr',
    r'transformer\.decoder\.layers\.0\.multihead_attn\.in_proj_weight',
    lambda arrays, config: _AUTHORS,
    _infer,
    detr_config.read,
    flat_heads=True,
  ),
)
