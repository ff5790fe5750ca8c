"""ViT in transformers' format."""

from vit_jax.weights import export, hints, layers
from vit_jax.weights import transforms as t
from vit_jax.weights.families.vit import ATTENTION, BLOCK, MLP, POSITIONS, grid, infer
from vit_jax.weights.formats import Format
from vit_jax.weights.rename import Rule


def _hf(layer: str, names: dict[str, str], prefix: str) -> tuple[Rule, ...]:
  embeddings = f'{prefix}embeddings'
  layer = f'{prefix}{layer}.{{i}}'
  return (
    Rule(f'{embeddings}.cls_token', 'cls'),
    Rule(f'{embeddings}.position_embeddings', POSITIONS),
    *layers.pair(f'{embeddings}.patch_embeddings.projection', 'embedding', t.conv),
    *layers.norm(f'{layer}.layernorm_before', f'{BLOCK}/LayerNorm_0'),
    *layers.norm(f'{layer}.layernorm_after', f'{BLOCK}/LayerNorm_1'),
    *(
      rule
      for part in ('query', 'key', 'value')
      for rule in layers.pair(
        f'{layer}.{names[part]}', f'{ATTENTION}/{part}', t.heads_kernel, t.heads_bias
      )
    ),
    *layers.pair(f'{layer}.{names["out"]}', f'{ATTENTION}/out', t.out_kernel),
    *layers.pair(f'{layer}.{names["fc1"]}', f'{MLP}/Dense_0'),
    *layers.pair(f'{layer}.{names["fc2"]}', f'{MLP}/Dense_1'),
    *layers.norm(f'{prefix}layernorm', 'Transformer/encoder_norm'),
    *layers.pair(f'{prefix}pooler.dense', 'pre_logits'),
    *layers.pair('classifier', 'head'),
  )


# transformers 5 renamed the layers; files on the hub carry the older names, which all
# its versions read.
_OLD = {
  'query': 'attention.attention.query',
  'key': 'attention.attention.key',
  'value': 'attention.attention.value',
  'out': 'attention.output.dense',
  'fc1': 'intermediate.dense',
  'fc2': 'output.dense',
}
_NEW = {
  'query': 'attention.q_proj',
  'key': 'attention.k_proj',
  'value': 'attention.v_proj',
  'out': 'attention.o_proj',
  'fc1': 'mlp.fc1',
  'fc2': 'mlp.fc2',
}


def hf(prefix: str = 'vit.') -> tuple[Rule, ...]:
  """transformers' ViTForImageClassification; prefix '' for a bare ViTModel."""
  new = (rule._replace(only_load=True) for rule in _hf('layers', _NEW, prefix))
  return (*_hf('encoder.layer', _OLD, prefix), *new)


def _config(fields, image_size, class_names) -> dict:
  for key, allowed, why in (
    ('classifier', ('token',), 'its ViT always classifies the class token'),
    ('posemb', ('learn',), 'its ViT always adds a table of positions'),
    ('posemb_where', ('stem',), 'its ViT adds positions once'),
    ('attention', ('full',), 'in its ViT every token attends to all'),
    ('representation_size', (None,), 'its classifier is one linear layer'),
    ('stem_blocks', (None,), 'its ViT cuts patches from the image itself'),
  ):
    export.need(fields, key, allowed, 'transformers', why)
  patch = tuple(fields['patch_size'])
  args = {
    'hidden_size': fields['width'],
    'num_hidden_layers': fields['depth'],
    'num_attention_heads': fields['num_heads'],
    'intermediate_size': fields['mlp_dim'],
    'patch_size': patch[0] if len(set(patch)) == 1 else list(patch),
    'layer_norm_eps': fields['norm_eps'],
    'qkv_bias': True,
  }
  return export.hf_config('ViT', 'vit', args, fields, image_size, class_names)


def _rules(arrays, config) -> tuple[Rule, ...]:
  return hf('vit.' if any(name.startswith('vit.') for name in arrays) else '')


FORMATS = (
  Format(
    'hf',
    'vit',
    r'(vit\.)?(encoder\.layer|layers)\.0\.layernorm_before\..+',
    _rules,
    infer,
    hints.hf('vit'),
    grid=grid,
    flat_heads=True,
    to='hf',
    write_config=_config,
    write_rules=lambda flat: hf(),
  ),
)
