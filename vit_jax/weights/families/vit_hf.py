"""ViT in transformers' format."""

from vit_jax.weights import config_writers, configs, layers
from vit_jax.weights.families.vit import ATTENTION, BLOCK, MLP, POSITIONS, grid, infer
from vit_jax.weights.formats import Format
from vit_jax.weights.rename import Rule, Table, respelled, table


def hf(heads: int, prefix: str = 'vit.') -> Table:
  """transformers' ViTForImageClassification; prefix '' for a bare ViTModel."""
  embeddings, layer = f'{prefix}embeddings', f'{prefix}encoder.layer.{{i}}'
  attention = f'{layer}.attention'
  rules = table(
    Rule(f'{embeddings}.cls_token', 'cls'),
    Rule(f'{embeddings}.position_embeddings', POSITIONS),
    layers.conv(f'{embeddings}.patch_embeddings.projection', 'embedding'),
    layers.norm(f'{layer}.layernorm_before', f'{BLOCK}/LayerNorm_0'),
    layers.norm(f'{layer}.layernorm_after', f'{BLOCK}/LayerNorm_1'),
    [
      layers.into_heads(f'{attention}.attention.{x}', f'{ATTENTION}/{x}', heads)
      for x in layers.QKV
    ],
    layers.out_of_heads(f'{attention}.output.dense', f'{ATTENTION}/out', heads),
    layers.dense(f'{layer}.intermediate.dense', f'{MLP}/Dense_0'),
    layers.dense(f'{layer}.output.dense', f'{MLP}/Dense_1'),
    layers.norm(f'{prefix}layernorm', 'Transformer/encoder_norm'),
    layers.dense(f'{prefix}pooler.dense', 'pre_logits'),
    layers.dense('classifier', 'head'),
  )
  return table(
    rules, respelled(rules, (r'encoder\.layer\.', 'layers.'), *layers.TRANSFORMERS_5)
  )


def _config(fields, image_size, class_names) -> dict:
  one = dict(classifier=('token',), posemb=('learn',), posemb_where=('stem',))
  one |= dict(attention=('full',), representation_size=(None,), stem_blocks=(None,))
  config_writers.need(fields, 'transformers', **one)
  args = {
    'hidden_size': fields['width'],
    'num_hidden_layers': fields['depth'],
    'num_attention_heads': fields['num_heads'],
    'intermediate_size': fields['mlp_dim'],
    'patch_size': config_writers.one(fields['patch_size']),
    'layer_norm_eps': fields['norm_eps'],
    'qkv_bias': True,
  }
  return config_writers.hf('ViT', 'vit', args, fields, image_size, class_names)


FORMATS = (
  Format(
    'hf',
    'vit',
    r'(vit\.)?(encoder\.layer|layers)\.0\.layernorm_before\..+',
    lambda arrays, facts: hf(facts.fields['num_heads'], configs.prefix(arrays, 'vit.')),
    infer,
    configs.hf('vit'),
    grid=grid,
    flat_heads=True,
    config=_config,
    write_rules=lambda flat, fields: hf(fields['num_heads']),
  ),
)
