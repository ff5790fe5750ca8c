"""Our parameters to the formats of others, with the config that they need."""

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.errors import UserError, choose
from vit_jax.weights import bit, mixer, vit
from vit_jax.weights import rename as names

FORMATS = ('google', 'timm', 'hf')

# (family, format) -> rename table; timm's ViT depends on the parameters.
_RULES = {
  ('vit', 'google'): lambda flat: vit.GOOGLE,
  ('mixer', 'google'): lambda flat: mixer.GOOGLE,
  ('resnet_gn', 'google'): lambda flat: bit.POST_ACTIVATION,
  ('bit', 'google'): lambda flat: bit.TF,
  ('vit', 'timm'): lambda flat: vit.timm(has_stages=bool(vit.resnet_blocks(flat))),
  ('mixer', 'timm'): lambda flat: mixer.TIMM,
  ('bit', 'timm'): lambda flat: bit.TIMM,
  ('vit', 'hf'): lambda flat: vit.hf(),
}

# What the arrays of a Google file mean where it does not say otherwise.
_GOOGLE_FIELDS = {'act': 'gelu_tanh', 'norm_eps': 1e-6, 'posemb': 'learn'}
_GOOGLE_FIELDS |= {'head_bias_init': 0.0}

# timm's hybrids and BiTs are functions, one per ResNet.
_TIMM_HYBRIDS = {
  (): 'vit_tiny_r_s16_p8_224',
  (2, 2, 2, 2): 'vit_small_r26_s32_224',
  (3, 4, 9): 'vit_base_r50_s16_224',
  (3, 4, 6, 3): 'vit_large_r50_s32_224',
}
_TIMM_MIXERS = {
  (512, 8, 0.5, 4.0): 's',
  (768, 12, 0.5, 4.0): 'b',
  (1024, 24, 0.5, 4.0): 'l',
}
_TIMM_MIXER_NAMES = [f'mixer_{size}{patch}_224' for size in 'sbl' for patch in (16, 32)]
_TIMM_BITS = {
  ((3, 4, 6, 3), 64): 'resnetv2_50x1_bit',
  ((3, 4, 6, 3), 192): 'resnetv2_50x3_bit',
  ((3, 4, 23, 3), 64): 'resnetv2_101x1_bit',
  ((3, 4, 23, 3), 192): 'resnetv2_101x3_bit',
  ((3, 8, 36, 3), 128): 'resnetv2_152x2_bit',
  ((3, 8, 36, 3), 256): 'resnetv2_152x4_bit',
}


def export(
  flat: dict[str, np.ndarray],
  family: str,
  fields: dict[str, Any],
  to: str,
  *,
  image_size: tuple[int, int],
  pp: str | None = None,
  class_names: list[str] | None = None,
) -> tuple[dict[str, np.ndarray], dict]:
  """Returns ({their name: array}, config) of a model in a format.

  Args:
    flat: parameters under our names, blocks not stacked.
    family: a key of `models.MODELS`.
    fields: all fields of the model.
    to: one of FORMATS.
    image_size: (H, W) that the parameters are for.
    pp: evaluation pipeline, kept with the weights.
    class_names: one per class.

  Raises:
    UserError: for what the format cannot express; a file that computes something else
      is never written.
  """
  choose('format', to, FORMATS)
  rules = _RULES.get((family, to))
  if rules is None:
    able = [f for f in FORMATS if (family, f) in _RULES]
    raise UserError(f'{to} has no model like {family!r}; it can be written as {able}.')
  config = {'google': _google, 'timm': _timm, 'hf': _hf}[to](
    family, fields, image_size, class_names
  )
  arrays = names.to_theirs(flat, rules(flat), fields.get('num_heads'), to)
  if pp and (to != 'google' or config or class_names):
    config.setdefault('vit_jax', {})['pp'] = pp
  return arrays, config


def _google(family, fields, image_size, class_names) -> dict:
  """What a reader of the arrays alone would get wrong; {} for published models."""
  differ = {k: v for k, v in _GOOGLE_FIELDS.items() if k in fields and fields[k] != v}
  differ = {k: fields[k] for k in differ if k != 'head_bias_init'}
  ours = {'fields': differ} if differ else {}
  if class_names:
    ours['class_names'] = class_names
  if ours or image_size[0] != image_size[1]:
    ours['image_size'] = list(image_size)
  return {'vit_jax': ours} if ours else {}


def _timm(family, fields, image_size, class_names) -> dict:
  size = list(image_size)
  args: dict[str, Any] = {}
  if family == 'vit':
    _need(fields, 'norm_eps', (1e-6,), 'timm')
    _need(fields, 'posemb', ('learn', 'none'), 'timm')
    _need(fields, 'representation_size', (None,), 'timm')
    _need(fields, 'classifier', ('token', 'gap', 'map'), 'timm')
    pool = {'token': 'token', 'gap': 'avg', 'map': 'map'}[fields['classifier']]
    args = _timm_transformer(fields, size)
    args |= {
      'num_heads': fields['num_heads'],
      'mlp_ratio': _ratio(fields['mlp_dim'], fields['width']),
      'class_token': fields['classifier'] == 'token',
      'global_pool': pool,
      'fc_norm': False,  # norm first, then the mean
      'act_layer': fields['act'].replace('_erf', ''),
      'depth': fields['depth'],
    }
    if fields['posemb'] == 'none':
      args['pos_embed'] = 'none'
    architecture = 'vit_base_patch16_224'
    if fields.get('stem_blocks') is not None:
      architecture = _TIMM_HYBRIDS.get(tuple(fields['stem_blocks']))
      if architecture is None or fields['stem_width'] != 64:
        raise UserError(
          f'timm has no hybrid with stem_blocks={tuple(fields["stem_blocks"])} and '
          f'stem_width={fields["stem_width"]}; it has {list(_TIMM_HYBRIDS)} of width 64.'
        )
  elif family == 'mixer':
    _need(fields, 'act', ('gelu_erf',), 'timm')
    pool, args = 'avg', _timm_transformer(fields, size)
    args['num_blocks'] = fields['depth']
    args['mlp_ratio'] = [
      _ratio(fields[k], fields['width']) for k in ('tokens_mlp_dim', 'channels_mlp_dim')
    ]
    shape = (args['embed_dim'], fields['depth'], *args['mlp_ratio'])
    architecture = f'mixer_{_TIMM_MIXERS.get(shape)}{args["patch_size"]}_224'
    if architecture in _TIMM_MIXER_NAMES:
      # These functions fix the shape, and fail where it is given again.
      args = {'img_size': args['img_size']}
    else:  # only timm.models.MlpMixer(**model_args) builds it
      architecture = 'mixer_s16_224'
  else:
    pool = 'avg'
    architecture = _TIMM_BITS.get((tuple(fields['blocks']), fields['width']))
    if architecture is None:
      raise UserError(
        f'timm has no BiT with blocks={tuple(fields["blocks"])} and '
        f'width={fields["width"]}; it has {list(_TIMM_BITS.values())}.'
      )
  classes = fields['num_classes'] or 0
  config = {
    'architecture': architecture,
    'num_classes': classes,
    'global_pool': pool,
    'model_args': args,
    'pretrained_cfg': {
      'num_classes': classes,
      'input_size': [3, *size],
      'interpolation': 'bilinear',
      'crop_pct': 1.0,
      'mean': [0.5, 0.5, 0.5],
      'std': [0.5, 0.5, 0.5],
    },
  }
  return config | ({'label_names': class_names} if class_names else {})


def _timm_transformer(fields, size) -> dict:
  if size[0] != size[1] or len(set(fields['patch_size'])) > 1:
    patch, size = list(fields['patch_size']), list(size)
  else:
    patch, size = fields['patch_size'][0], size[0]
  return {'img_size': size, 'patch_size': patch, 'embed_dim': fields['width']}


def _ratio(part: int, width: int) -> float:
  """Returns r with int(width * r) == part, which is how timm computes it."""
  ratio = part / width
  return ratio if int(width * ratio) == part else float(np.nextafter(ratio, np.inf))


def _hf(family, fields, image_size, class_names) -> dict:
  _need(fields, 'classifier', ('token',), 'transformers')
  _need(fields, 'posemb', ('learn',), 'transformers')
  _need(fields, 'representation_size', (None,), 'transformers')
  _need(fields, 'stem_blocks', (None,), 'transformers')
  one = lambda pair: pair[0] if pair[0] == pair[1] else list(pair)
  classes = fields['num_classes']
  labels = class_names or [f'LABEL_{i}' for i in range(classes or 0)]
  act = {'gelu_erf': 'gelu', 'gelu_tanh': 'gelu_pytorch_tanh'}[fields['act']]
  return {
    'architectures': ['ViTForImageClassification' if classes else 'ViTModel'],
    'model_type': 'vit',
    'hidden_size': fields['width'],
    'num_hidden_layers': fields['depth'],
    'num_attention_heads': fields['num_heads'],
    'intermediate_size': fields['mlp_dim'],
    'image_size': one(tuple(image_size)),
    'patch_size': one(tuple(fields['patch_size'])),
    'num_channels': 3,
    'hidden_act': act,
    'layer_norm_eps': fields['norm_eps'],
    'qkv_bias': True,
    'id2label': {str(i): name for i, name in enumerate(labels)},
    'label2id': {name: i for i, name in enumerate(labels)},
  }


def _need(fields, key, allowed, format) -> None:
  if fields.get(key) not in allowed:
    hint = ' Loading with another value changes the logits.' if key == 'act' else ''
    raise UserError(
      f'{format} cannot express {key}={fields.get(key)!r}; it knows {list(allowed)}.'
      f'{hint}'
    )


def write(dest: str | Path, arrays: dict[str, np.ndarray], config: dict) -> list[Path]:
  """Writes a file or a hub folder, whole or not at all; returns what was written.

  Args:
    dest: FILE.npz; FILE.safetensors, with config.json beside it; or a folder, for
      model.safetensors and config.json.
    arrays: float arrays by name.
    config: kept in the zip's comment, or in the metadata and config.json.

  Raises:
    UserError: another suffix, files that are there already, a folder that is not.
  """
  dest = Path(dest)
  if dest.suffix == '.npz':
    files = {dest: _npz(arrays, config)}
  else:
    from safetensors.numpy import save

    if dest.suffix not in ('', '.safetensors'):
      raise UserError(
        f'{dest}: write to FILE.npz, FILE.safetensors or a folder (no suffix).'
      )
    file = dest if dest.suffix else dest / 'model.safetensors'
    text = json.dumps(config, indent=1)
    metadata = {'format': 'pt', 'config': json.dumps(config)}
    files = {file: save(arrays, metadata), file.parent / 'config.json': text.encode()}
  for path in files:
    if path.exists():
      raise UserError(f'{path} is there already: choose another place, or remove it.')
    if dest.suffix and not path.parent.is_dir():
      raise UserError(f'{path.parent} is no folder: make it first.')
  for path, data in files.items():
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f'{path.name}.{os.getpid()}.part')
    try:
      partial.write_bytes(data)
      partial.replace(path)
    finally:
      partial.unlink(missing_ok=True)
  return list(files)


def _npz(arrays: dict[str, np.ndarray], config: dict) -> bytes:
  """As np.savez writes it, byte for byte; config in the comment if there is any."""
  out = io.BytesIO()
  np.savez(out, **arrays)
  if config:
    with zipfile.ZipFile(out, 'a') as archive:
      archive.comment = json.dumps(config).encode()
  return out.getvalue()
