"""Text towers in files that also hold an image tower: CLIP, SigLIP and AIMv2.

There are four formats: transformers, big_vision, Apple's AIMv2, and the names that OpenAI,
open_clip and the Perception Encoder share. Runs on pairs have our own names.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data.ops import registry
from vit_jax.errors import choose
from vit_jax.text.tokenizer import CLEAN, Rules
from vit_jax.weights import configs, rename
from vit_jax.weights.configs import section
from vit_jax.weights.families.vit_originals import look_up
from vit_jax.weights.rename import Arrays, Rule, Table, table

BLOCK = 'encoderblock_{i}'
ATTENTION = f'{BLOCK}/MultiHeadDotProductAttention_0'
MLP = f'{BLOCK}/MlpBlock_0'

# Regexes of an array by which a format is recognised. open_clip may put its text tower under
# 'text.', and big_vision may put all arrays under 'params/'.
_MARKERS = {
  'hf': r'text_model\.embeddings\.token_embedding\.weight',
  'open_clip': r'(text\.)?token_embedding\.weight',
  'big_vision': r'(params/)?txt/Embed_0/embedding',
  'aimv2': r'text_encoder\.preprocessor\.text_embedding\.weight',
}
# Regexes of all arrays that do not belong to the image tower.
_NAMES = {
  'hf': r'text_model\..*|text_projection\.weight|logit_(scale|bias)',
  'open_clip': r'logit_(scale|bias)|text\..*|(token_embedding|ln_final)\..*'
  r'|positional_embedding|transformer\.resblocks\..*|text_projection',
  'big_vision': r'(params/)?(txt/.*|[tb])',
  'aimv2': r'text_encoder\..*|text_projector\.weight|log_logit_scale',
}


class TextArrays(NamedTuple):
  """The arrays of a file's text tower, under the file's names."""

  format: str  # a key of _READERS
  arrays: Arrays
  config: dict
  folder: Path | str  # contains the vocabulary, or is `tokenizer.BYTES`
  name: str  # name of the file that holds the arrays, or of its folder


class Text(NamedTuple):
  """A text tower: the fields of a TextTransformer, and its parameters under our names."""

  fields: dict[str, Any]
  flat: Arrays
  scalars: Arrays  # logit_scale, and perhaps logit_bias
  rules: Rules


def split(arrays: Arrays, config: dict, path: Path) -> tuple[TextArrays | None, Arrays]:
  """Splits the arrays of a file: (text tower or None, all other arrays)."""
  for format, marker in _MARKERS.items():
    if any(re.fullmatch(marker, name) for name in arrays):
      mine = {n: x for n, x in arrays.items() if re.fullmatch(_NAMES[format], n)}
      folder = path if path.is_dir() else path.parent
      others = {n: x for n, x in arrays.items() if n not in mine}
      return TextArrays(format, mine, config, folder, path.name), others
  return None, arrays


def read(tower: TextArrays, image: dict[str, Any]) -> Text:
  """Reads a text tower, or raises ValueError if vit_jax cannot compute it.

  Args:
    image: fields of the image tower. In OpenAI's files, the text tower has the same activation.
      A ResNet has none, but the file's name may tell.
  """
  image = look_up(tower.name)[0] | image
  cut = lambda name: re.sub(r'^(params/)?(txt/|text\.|text_encoder\.)?', '', name)
  arrays = {cut(name): np.asarray(x) for name, x in tower.arrays.items()}
  return _READERS[tower.format](arrays, tower.config, image)


# -- transformers -----------------------------------------------------------------------


def _hf_rules(
  heads: int,
  attention: str = 'self_attn',
  norms: tuple[str, str] = ('layer_norm', 'final_layer_norm'),
  mlp: tuple[str, str] = ('mlp.fc1', 'mlp.fc2'),
) -> Table:
  """Makes the rules of a text tower, given those names of layers that differ in AIMv2."""
  model, layer = 'text_model', 'text_model.encoder.layers.{i}'
  return table(
    Rule(f'{model}.embeddings.token_embedding.weight', 'embedding/embedding'),
    Rule(f'{model}.embeddings.position_embedding.weight', 'pos_embedding'),
    rename.norm(f'{layer}.{norms[0]}1', f'{BLOCK}/LayerNorm_0'),
    rename.norm(f'{layer}.{norms[0]}2', f'{BLOCK}/LayerNorm_1'),
    [
      rename.split_heads(f'{layer}.{attention}.{x[0]}_proj', f'{ATTENTION}/{x}', heads)
      for x in rename.QKV
    ],
    rename.merge_heads(f'{layer}.{attention}.out_proj', f'{ATTENTION}/out', heads),
    rename.dense(f'{layer}.{mlp[0]}', f'{MLP}/Dense_0'),
    rename.dense(f'{layer}.{mlp[1]}', f'{MLP}/Dense_1'),
    rename.norm(f'{model}.{norms[1]}', 'encoder_norm'),
    rename.dense(f'{model}.head', 'head'),
    rename.dense('text_projection', 'head'),
  )


def _hf(arrays: Arrays, config: dict, image: dict) -> Text:
  kind, own = config.get('model_type'), section(config, 'text_config')
  if kind == 'aimv2':
    return _aimv2(arrays, config, image)
  own = own | section(config, 'text_config_dict')
  fields, vocab = {}, arrays['text_model.embeddings.token_embedding.weight'].shape[0]
  if kind == 'clip':
    act, eps, heads = 'quick_gelu', 1e-5, 8
    # In old configs, 2 means that the end token is the one with the largest id.
    if (eos := own.get('eos_token_id', 49407)) != 2:
      fields = {'eos': eos}
    tokens = {'clean': 'none', 'pad': None}
  elif kind in ('siglip', 'siglip2'):
    act, eps, heads = 'gelu_pytorch_tanh', 1e-6, 12
    fields = {'mask': 'none', 'pooling': 'last'}
    tokens = _siglip_tokens(vocab, 'siglip')
  else:
    raise ValueError(f'model_type={kind!r} has an unknown text tower')
  fields |= {
    'act': configs.activation(own.get('hidden_act', act)),
    'norm_eps': own.get('layer_norm_eps', eps),
    'num_heads': own.get('num_attention_heads', heads),
  }
  return _text(arrays, _hf_rules(fields['num_heads']), fields, tokens)


# AIMv2's names in transformers -> Apple's.
_APPLE = (
  (r'^text_model\.embeddings\.token_embedding', 'preprocessor.text_embedding'),
  (r'^text_model\.embeddings.*', 'preprocessor.positional_embedding'),
  (r'^text_model\.encoder\.layers', 'trunk.blocks'),
  (r'^text_model\.rms_norm', 'trunk.post_trunk_norm'),
  (r'\.rms_norm(\d)', r'.norm_\1'),
  (r'\.attention\.(out_)?', '.attn.'),
  (r'\.ffn\.gate_proj', '.mlp.fc1'),
  (r'\.ffn\.up_proj', '.mlp.fc3'),
  (r'\.ffn\.down_proj', '.mlp.fc2'),
  (r'^text_projection', 'text_projector'),
)


def _aimv2(arrays: Arrays, config: dict, image: dict) -> Text:
  own = section(config, 'text_config')
  configs.require(own, {'qkv_bias': False, 'mlp_bias': False}, 'AIMv2')
  heads, layer = own.get('num_attention_heads', 6), 'text_model.encoder.layers.{i}'
  norms, mlp = ('rms_norm', 'rms_norm'), ('ffn.up_proj', 'ffn.down_proj')
  rules = table(
    _hf_rules(heads, 'attention', norms, mlp),
    rename.fuse_heads(f'{layer}.attention.qkv', ATTENTION, heads),
    rename.dense(f'{layer}.ffn.gate_proj', f'{MLP}/gate'),
  )
  fields = {
    'norm': 'rms',
    'norm_eps': own.get('rms_norm_eps', 1e-5),
    'mlp': 'swiglu',
    'act': configs.activation(own.get('hidden_act', 'silu')),
    'num_heads': heads,
    'eos': own.get('eos_token_id', 49407),
  }
  arrays = {re.sub('^log_logit', 'logit', name): x for name, x in arrays.items()}
  # Both libraries compute with a scale within these limits.
  most = np.log(config.get('max_logit_scale', 100.0))
  arrays['logit_scale'] = np.clip(arrays['logit_scale'], 0, most)
  tokens = {'clean': 'none', 'pad': None}
  return _text(arrays, table(rules, rename.respell(rules, *_APPLE)), fields, tokens)


def _siglip_tokens(vocab: int, clean: str) -> dict:
  """Returns the tokenizer's options. SigLIP 2 uses Gemma's vocabulary of 256,000."""
  gemma = vocab == 256_000
  return {'clean': 'siglip2', 'pad': 0} if gemma else {'clean': clean, 'pad': None}


# -- OpenAI, open_clip, Perception Encoder ----------------------------------------------


def _open_clip_rules(heads: int) -> Table:
  return table(
    Rule('token_embedding.weight', 'embedding/embedding'),
    Rule('positional_embedding', 'pos_embedding'),
    rename.openai_block('transformer.resblocks.{i}', BLOCK, heads),
    rename.norm('ln_final', 'encoder_norm'),
    # OpenAI computes x @ text_projection, so the array is not transposed.
    Rule('text_projection', 'head/kernel'),
    rename.dense('text_projection', 'head'),
  )


# Keys of open_clip's text_cfg that are read here, or that change no output.
_TEXT_CFG = {'context_length', 'vocab_size', 'width', 'heads', 'layers', 'mlp_ratio'}
_TEXT_CFG |= {'no_causal_mask', 'pool_type', 'eos_id', 'proj_bias', 'norm_kwargs'}
_TEXT_CFG |= {'act_kwargs', 'hf_tokenizer_name', 'tokenizer_kwargs'}
_TEXT_CFG |= {'output_tokens', 'output_dim'}


def _open_clip(arrays: Arrays, config: dict, image: dict) -> Text:
  model = section(section(config, 'open_clip'), 'model_cfg')
  own = section(model, 'text_cfg') or section(config, 'text')
  if odd := sorted(own.keys() - _TEXT_CFG):
    raise ValueError(f'text_cfg.{odd[0]} is unknown: it may change the outputs')
  if 'positional_embedding' not in arrays:
    raise ValueError(
      'its text tower has no positional_embedding, so another package must have written it'
    )
  pool = own.get('pool_type', 'argmax')
  if pool not in ('argmax', 'eos', 'last'):
    raise ValueError(f"pool_type={pool!r}, expected 'argmax', 'eos' or 'last'")
  if not (model or 'act' in image):
    raise ValueError(
      'neither arrays nor name give the activation of its text tower: keep the published '
      "name, such as 'RN50.pt', or open_clip_config.json beside it"
    )
  model = model or {'quick_gelu': image['act'] == 'quick_gelu'}
  heads = own.get('heads', arrays['positional_embedding'].shape[1] // 64)
  fields = {
    'mask': 'none' if own.get('no_causal_mask') else 'causal',
    'pooling': 'last' if pool == 'last' else 'eot',
    'eos': own.get('eos_id', 2) if pool == 'eos' else None,
    'act': configs.open_clip_act(model, own),
    'norm_eps': section(own, 'norm_kwargs').get('eps', 1e-5),
    'num_heads': heads,
  }
  clean = 'whitespace' if 'hf_tokenizer_name' in own else 'lower'
  clean = section(own, 'tokenizer_kwargs').get('clean', clean)
  vocab = arrays['token_embedding.weight'].shape[0]
  pad = 0 if fields['pooling'] == 'eot' else _siglip_tokens(vocab, clean)['pad']
  return _text(arrays, _open_clip_rules(heads), fields, {'clean': clean, 'pad': pad})


def open_clip(text: Text) -> tuple[Arrays, dict]:
  """Returns (arrays, text_cfg) of a text tower in the format of open_clip."""
  fields = {'mask': 'causal', 'pooling': 'eot', 'norm': 'layer'} | text.fields
  allowed = {
    'mask': ('causal',),
    'pooling': ('eot',),
    'head_bias': (False,),
    'norm_eps': (1e-5,),
    'norm': ('layer',),
  }
  configs.need(fields, 'open_clip', **allowed)
  arrays = rename.to_theirs(text.flat, _open_clip_rules(fields['num_heads']))
  arrays |= {name: np.array(x, np.float32) for name, x in text.scalars.items()}
  config = {
    'context_length': fields['length'],
    'vocab_size': fields['vocab'],
    'width': fields['width'],
    'heads': fields['num_heads'],
    'layers': fields['depth'],
    'mlp_ratio': configs.timm_ratio(fields['mlp_dim'], fields['width']),
  }
  if (eos := fields.get('eos')) is not None:
    config |= {'pool_type': 'eos', 'eos_id': eos}
  return arrays, config


# -- big_vision -------------------------------------------------------------------------

# [1, N, D] -> [N, D].
_FIRST = rename.Transform(lambda x: (x[0],), lambda xs: xs[0][None])
_BIG_VISION = table(
  Rule('Embed_0/embedding', 'embedding/embedding'),
  Rule('pos_embedding', 'pos_embedding', _FIRST),
  Rule(f'Encoder_0/{BLOCK}/{{rest}}', f'{BLOCK}/{{rest}}'),
  Rule('Encoder_0/encoder_norm/{rest}', 'encoder_norm/{rest}'),
  Rule('head/{rest}', 'head/{rest}'),
)


def _big_vision(arrays: Arrays, config: dict, image: dict) -> Text:
  scalars = {'t': 'logit_scale', 'b': 'logit_bias'}
  arrays = {scalars.get(n, n): x for n, x in arrays.items()}
  stacked = 'Encoder_0/encoderblock/'
  for name in [n for n in arrays if n.startswith(stacked)]:
    for i, x in enumerate(arrays.pop(name)):
      arrays[f'Encoder_0/encoderblock_{i}/{name.removeprefix(stacked)}'] = x
  query = 'Encoder_0/encoderblock_0/MultiHeadDotProductAttention_0/query/bias'
  fields = {'mask': 'none', 'pooling': 'last', 'act': 'gelu_tanh', 'norm_eps': 1e-6}
  fields['num_heads'] = arrays[query].shape[0]
  tokens = _siglip_tokens(len(arrays['Embed_0/embedding']), 'big_vision')
  return _text(arrays, _BIG_VISION, fields, tokens)


# -- a run ------------------------------------------------------------------------------


def split_run(own: Arrays, config: dict, name: str) -> TextArrays | None:
  """Returns the text tower of a run, given the task's own parameters and the run's config."""
  if 'text' not in config.get('task', {}):
    return None
  arrays = {n.partition('/')[2]: x for n, x in own.items()}
  return TextArrays('run', arrays, config, _tokenize(config)['vocab'], name)


def _tokenize(config: dict) -> dict:
  """Returns the arguments of the op `tokenize` of a run."""
  (op,) = (x for x in registry.parse(config['data']['pp']) if x.name == 'tokenize')
  return op.arguments


def _run(arrays: Arrays, config: dict, image: dict) -> Text:
  tokens = {key: _tokenize(config)[key] for key in ('clean', 'pad')}
  fields = {'norm_eps': 1e-5, **config['task']['text']}
  return _text(arrays, table(Rule('text/{rest}', '{rest}')), fields, tokens)


# -- all formats ------------------------------------------------------------------------


def _text(arrays: Arrays, rules: Table, fields: dict, tokens: dict) -> Text:
  scalars = ('logit_scale', 'logit_bias')
  numbers = {n: np.float32(arrays[n].reshape(())) for n in scalars if n in arrays}
  buffers = ('position_ids', 'attn_mask')
  arrays = {n: x for n, x in arrays.items() if not n.endswith((*scalars, *buffers))}
  flat, unknown = rename.to_ours(arrays, rules)
  if unknown:
    raise ValueError(f'its text tower has unknown arrays: {unknown[:4]}')
  flat = {name: np.asarray(x, np.float32) for name, x in flat.items()}
  vocab, width = flat['embedding/embedding'].shape
  length = len(flat['pos_embedding'])
  configs.epsilon(fields['norm_eps'])
  choose('cleaning of texts', tokens['clean'], CLEAN)
  fields = fields | {
    'vocab': vocab,
    'length': length,
    'width': width,
    'depth': sum(name.endswith('/LayerNorm_0/scale') for name in flat),
    'mlp_dim': flat[f'{MLP}/Dense_0/kernel'.format(i=0)].shape[1],
    'bias': any(re.fullmatch(r'encoderblock_\d+/M.*/bias', name) for name in flat),
    'outputs': flat['head/kernel'].shape[1] if 'head/kernel' in flat else None,
    'head_bias': 'head/bias' in flat,
  }
  return Text(fields, flat, numbers, Rules(length, **tokens))


_READERS = dict(hf=_hf, open_clip=_open_clip, big_vision=_big_vision, aimv2=_aimv2)
_READERS['run'] = _run
