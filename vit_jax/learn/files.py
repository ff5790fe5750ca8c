"""Reads files with a task's own parameters: MAE with its decoder, DINO with its heads.

The model alone is read by the formats of the core, which these extend. MAE is also written,
under the names of its authors and of transformers.
"""

import dataclasses

from vit_jax.learn.dino import DINO
from vit_jax.learn.mae import MAE
from vit_jax.weights import configs, rename
from vit_jax.weights.configs import Facts
from vit_jax.weights.families import vit_hf, vit_originals
from vit_jax.weights.formats import TRAINING, Writer
from vit_jax.weights.rename import Arrays, Rule, Table, table

# -- DINO -----------------------------------------------------------------------------

_LENGTHS = rename.Transform(lambda x: (x.ravel(),), lambda xs: xs[0][:, None])
_MASK = rename.Transform(lambda x: (x[0],), lambda xs: xs[0][None])


def _head(theirs: str, ours: str) -> Table:
  return table(
    [
      rename.dense(f'{theirs}.mlp.{2 * i}', f'{DINO.OWN}/{ours}/Dense_{i}')
      for i in range(3)
    ],
    Rule(
      f'{theirs}.last_layer.weight_v',
      f'{DINO.OWN}/{ours}/prototypes',
      rename.dense_kernel,
    ),
    Rule(f'{theirs}.last_layer.weight_g', f'{DINO.OWN}/{ours}/lengths', _LENGTHS),
  )


def dino(num_heads: int) -> Table:
  """Returns the rules of a teacher or student of DINO or DINOv2, with its heads."""
  return table(
    Rule('backbone.mask_token', f'{DINO.OWN}/mask', _MASK),
    rename.nest_rules(vit_originals.dino(num_heads, False), theirs='backbone.'),
    _head('head', 'head'),
    _head('dino_head', 'head'),
    _head('ibot_head', 'patch_head'),
  )


_DINO = dataclasses.replace(
  vit_originals.DINOV2,
  within='',
  ignored='(?!)',
  own=DINO.OWN,
  rules=lambda arrays, facts: dino(facts.fields['num_heads']),
  writer=None,
)

# -- MAE ------------------------------------------------------------------------------

_BLOCK = f'{MAE.OWN}/encoderblock_0'
_KIND = vit_hf.KINDS['vit_mae']
# The key of a config for the number of heads of the decoder.
_HEADS = 'decoder_num_attention_heads'


def _nest(rules: Table, theirs: str, decoder: str) -> Table:
  """Returns the rules of a decoder's blocks, made from those of an encoder's blocks.

  Args:
    rules: the rules of a whole encoder; those that do not start with `theirs` are left out.
    theirs: start of the names of the encoder's blocks in a file.
    decoder: start of the names of the decoder's blocks in a file.
  """
  own = lambda name: f'{MAE.OWN}/{name.removeprefix("Transformer/")}'
  return tuple(
    rule._replace(
      theirs=decoder + rule.theirs.removeprefix(theirs),
      ours=tuple(own(name) for name in rule.targets),
    )
    for rule in rules
    if rule.theirs.startswith(theirs)
  )


def _ends(prefix: str) -> Table:
  """Returns the rules of a decoder's arrays outside of its blocks."""
  return table(
    Rule(f'{prefix}decoder_pos_embed', f'{MAE.OWN}/positions'),
    Rule(f'{prefix}mask_token', f'{MAE.OWN}/mask'),
    rename.dense(f'{prefix}decoder_embed', f'{MAE.OWN}/embed'),
    rename.norm(f'{prefix}decoder_norm', f'{MAE.OWN}/encoder_norm'),
    rename.dense(f'{prefix}decoder_pred', f'{MAE.OWN}/pred'),
  )


def _authors(fields: dict, decoder_heads: int) -> Table:
  decoder = _nest(vit_originals.plain(decoder_heads), 'blocks.', 'decoder_blocks.')
  return table(_ends(''), decoder, vit_originals.plain(fields['num_heads']))


def _hf(fields: dict, decoder_heads: int) -> Table:
  own = vit_hf.make_rules(_KIND, {**fields, 'num_heads': decoder_heads})
  decoder = _nest(own, 'vit.encoder.layer.', 'decoder.decoder_layers.')
  return table(_ends('decoder.'), decoder, vit_hf.make_rules(_KIND, fields))


def _decoder_of(flat: Arrays) -> dict:
  """Returns the keys of transformers' config that describe a decoder."""
  query = f'{_BLOCK}/MultiHeadDotProductAttention_0/query/kernel'
  width, heads, _ = flat[query].shape
  blocks = {n.split('/')[1] for n in flat if n.startswith(f'{MAE.OWN}/encoderblock_')}
  return {
    'decoder_hidden_size': width,
    'decoder_num_hidden_layers': len(blocks),
    'decoder_intermediate_size': flat[f'{_BLOCK}/MlpBlock_0/Dense_0/kernel'].shape[1],
    _HEADS: heads,
    'norm_pix_loss': True,
  }


def _heads(facts: Facts, usual: int) -> int:
  return (facts.config or {}).get(_HEADS, usual)


def _authors_rules(arrays: Arrays, facts: Facts) -> Table:
  # A file does not say the number of heads of its decoder. Published decoders are 512 wide
  # and have 16 heads. Others are read as one head, to be split by the task.
  usual = 16 if arrays['mask_token'].shape[-1] == 512 else 1
  return _authors(facts.fields, _heads(facts, usual))


def _write_rules(make):
  """Turns a function of (fields, heads of the decoder) into a `Writer.rules`."""
  return lambda flat, fields: make(fields, _decoder_of(flat)[_HEADS])


def _authors_config(fields, image_size, class_names) -> dict:
  ours = {'fields': {'num_heads': fields['num_heads']}, 'image_size': list(image_size)}
  return {'vit_jax': ours}


def _hf_decoder(flat: Arrays) -> dict:
  decoder = _decoder_of(flat)
  if decoder[_HEADS] == 1:
    raise ValueError(
      f'the number of heads of its decoder is unknown: set {_HEADS} in its config.json'
    )
  return decoder


def _hf_config(fields, image_size, class_names) -> dict:
  # Fields that the config or the arrays can express with any value.
  free = {'patch_size', 'width', 'depth', 'mlp_dim', 'num_heads', 'act', 'norm_eps'}
  known = free | {'qkv_bias', 'num_classes'} | TRAINING
  configs.need_defaults(fields, 'transformers', 'vit', known)
  configs.need(fields, 'transformers', num_classes=(None,))
  size = {'image_size': configs.int_or_pair(image_size), 'num_channels': 3}
  kind = {'architectures': ['ViTMAEForPreTraining'], 'model_type': 'vit_mae'}
  return vit_hf.write_fields(_KIND, fields) | size | kind


FORMATS = (
  # Teachers of training runs. The published files have no heads.
  dataclasses.replace(
    _DINO, marker=(r'backbone\.mask_token', r'dino_head\.last_layer\.weight_v')
  ),
  dataclasses.replace(
    _DINO, marker=(r'backbone\.cls_token', r'head\.last_layer\.weight_v')
  ),
  dataclasses.replace(
    vit_originals.MAE,
    own=MAE.OWN,
    ignored='(?!)',
    rules=_authors_rules,
    writer=Writer(
      config=_authors_config,
      rules=_write_rules(_authors),
      own=_decoder_of,
    ),
  ),
  dataclasses.replace(
    vit_hf.FORMAT,
    marker=r'decoder\.decoder_embed\.weight',
    when=lambda config, name: config.get('model_type') == 'vit_mae',
    own=MAE.OWN,
    ignored='(?!)',
    rules=lambda arrays, facts: _hf(facts.fields, _heads(facts, 16)),
    writer=Writer(
      config=_hf_config,
      rules=_write_rules(_hf),
      own=_hf_decoder,
    ),
  ),
)
