"""Tiny published files in tests/golden, and the outputs of their own library."""

import functools
import re

import jax
import numpy as np
from safetensors.numpy import load_file

import vit_jax
from tests.support import GOLDEN
from vit_jax import trees

# golden -> (dialect, family, tolerance): rounding in float32; a hybrid's convolutions
# sum over thousands of terms, after a division by a standard deviation, which timm guards
# within the root (of resnet_gn: that is 3e-5 of its logits); the reference's own float32
# is off its float64 by 7e-6 of ConvNeXt, ResNet and Swin, and by 6e-5 of Swin V2, whose scores
# are up to 100.
GOLDENS = {
  'vit_google_token': ('google', 'vit', 5e-6),
  'vit_google_prelogits': ('google', 'vit', 5e-6),
  'hybrid_google': ('google', 'vit', 1e-4),
  'mixer_google': ('google', 'mixer', 5e-6),
  'vit_bigvision_map': ('big_vision', 'vit', 5e-6),
  'vit_bigvision_scan_tok': ('big_vision', 'vit', 5e-6),
  'vit_timm': ('timm', 'vit', 5e-6),
  'vit_timm_rect': ('timm', 'vit', 5e-6),  # 3 x 5 patches and a class token: 4 x 4 rows
  'flexivit_timm': ('timm', 'vit', 5e-6),
  'mixer_timm': ('timm', 'mixer', 5e-6),
  'vit_hf': ('hf', 'vit', 5e-6),
  'resnet_gn_timm': ('big_vision', 'resnet_gn', 1e-4),
  'bit_timm': ('bit', 'bit', 5e-6),
  'convnext_timm': ('timm', 'convnext', 1e-5),
  'swin_timm': ('timm', 'swin', 1e-5),
  'swin_timm_pad': ('timm', 'swin', 1e-5),
  'swin_timm_rect': ('timm', 'swin', 1e-5),
  'swin_hf': ('hf', 'swin', 1e-5),
  'swin_hf_pad': ('hf', 'swin', 1e-5),
  'swinv2_timm_pre': ('timm', 'swin', 2e-4),
  'swinv2_hf': ('hf', 'swin', 2e-4),
  'vitdet_hf': ('hf', 'vitdet', 2e-5),
  'sam_hf': ('hf', 'vitdet', 2e-5),
  'samvit_timm': ('timm', 'vitdet', 2e-5),
  'samvit_norm_timm': ('timm', 'vitdet', 2e-5),
  'sfp_d2': ('detectron2', 'sfp', 2e-5),
  'fpn_d2': ('detectron2', 'fpn', 2e-5),
  'fpn_ln_d2': ('detectron2', 'fpn', 1e-5),
  'resnet_timm': ('timm', 'resnet', 1e-5),
  'mvit_timm': ('timm', 'mvit', 2e-5),
  'mvit_timm_cls': ('timm', 'mvit', 2e-5),
  'mvit_timm_mlp_expand': ('timm', 'mvit', 2e-5),
  'detr_hf': ('hf', 'detr', 1e-4),
  'detr_dc5_original': ('authors', 'detr', 1e-4),
}
# Families whose tolerance is absolute, however large a value is.
ABSOLUTE = ('vitdet', 'sfp', 'fpn', 'detr')
# Logits that agree more closely than the features before them.
LOGITS = {'swinv2_timm_pre': 1e-5, 'swinv2_hf': 1e-5}


TWO = {'num_heads': 2}
# Golden of a ViT -> what its small file needs to be told; published ones tell it by their
# names.
TOLD = {
  'clip_openai': dict(num_heads=1, act='quick_gelu'),
  'dinov2_original': TWO,
  'dinov2_reg4_swiglu_original': TWO,
  'eva02_clip_original': TWO,
  'mae_original': TWO,
  'pe_core_original': TWO | dict(map_heads=4),
  'siglip_open_clip': TWO,
  'siglip2_naflex_hf': dict(image_size=40),
}

# Outputs that ours are not compared with: those of MAE's masking and decoder, and those of
# DeiT's two heads, whose mean is `logits`.
OTHERS = {
  *('noise', 'mask', 'ids_restore', 'latent', 'pred', 'target', 'loss'),
  *('loss_without_norm_pix', 'cls_logits', 'distillation_logits'),
}

# Goldens with a text tower.
PAIRS = (
  *('clip_hf', 'clip_old_eos_hf', 'siglip_hf', 'siglip2_naflex_hf', 'siglip_bigvision'),
  *('clip_open_clip', 'siglip_open_clip', 'clip_openai', 'pe_core_original'),
  'aimv2_lit_hf',
  *('clip_resnet_open_clip', 'clip_convnext_open_clip'),
)

# Golden of a ViT of transformers -> the model_type that it is written as.
TRANSFORMERS = {
  'dinov2_hf': 'dinov2',
  'dinov2_reg4_swiglu_hf': 'dinov2_with_registers',
  'dinov3_hf': 'dinov3_vit',
  'clip_vision_hf': 'clip_vision_model',
  'siglip_classifier_hf': 'ijepa',  # whose classifier takes the same mean
  'deit_distilled_hf': 'deit',
  'beit_hf': 'beit',
  'beit_shared_abs_hf': 'beit',
  'data2vec_hf': 'beit',
  'ijepa_hf': 'ijepa',
  'vit_msn_hf': 'vit',
  'mae_hf': 'vit_mae',
  'aimv2_hf': 'aimv2_vision_model',
  'aimv2_native_hf': 'aimv2_vision_model',
}


def vits() -> list[str]:
  """Returns the goldens of ViTs whose blocks are compared: NAME, or NAME.HEIGHTxWIDTH."""
  stems = {file.name.split('.expected')[0] for file in GOLDEN.glob('*.expected.npz')}
  kinds = re.compile(r'.*_(timm|hf|original|openai|open_clip|bigvision)$')
  named = [(stem.partition('.')[0], stem) for stem in stems - {*GOLDENS, *PAIRS}]
  return sorted(stem for name, stem in named if kinds.match(name))


def path_of(name):
  folder = GOLDEN / name
  return folder if folder.is_dir() else GOLDEN / f'{name}.npz'


def arrays_of(name):
  folder = GOLDEN / name
  if folder.is_dir():
    return load_file(folder / 'model.safetensors')
  with np.load(GOLDEN / f'{name}.npz') as file:
    return dict(file)


def check(source, name, **options):
  """Loads `source`, compares with a golden's reference outputs; returns the `Loaded`."""
  expected = dict(np.load(GOLDEN / f'{name}.expected.npz'))
  loaded = vit_jax.load(source, **options)
  model = loaded.model
  apply = jax.jit(functools.partial(model.apply, mutable=['intermediates']))
  if (inputs := expected.pop('image', None)) is None:  # a pyramid by itself
    inputs = {n: expected.pop(n) for n in list(expected) if n.startswith('res')}
  masks = {'mask': expected.pop('mask')} if 'mask' in expected else {}
  (outputs, out), state = apply(loaded.variables, inputs, **masks)
  computed = {**out, **(outputs if isinstance(outputs, dict) else {'logits': outputs})}
  if 'attentions' in expected:
    weights = trees.flatten(state['intermediates'])
    assert all(key.endswith('attention_weights/0') for key in weights)
    shape = expected['attentions'].shape
    computed['attentions'] = np.stack(list(weights.values())).reshape(shape)
  classifies = getattr(model, 'num_classes', None) is not None
  assert ('logits' in expected) == classifies
  assert classifies or expected
  for key in expected:
    # Maps of ResNets have values up to 30.
    _, family, atol = GOLDENS[name]
    if family not in ABSOLUTE:
      atol *= max(1, np.abs(expected[key]).max())
    if key == 'logits' and name in LOGITS:
      atol = LOGITS[name]
    np.testing.assert_allclose(
      computed[key], expected[key], rtol=0, atol=atol, err_msg=key
    )
  return loaded


def vit_outputs(loaded, images, name: str) -> dict:
  """Returns an image tower's outputs under the names that they have in the goldens."""
  logits, out = jax.jit(loaded.model.apply)(loaded.variables, images)
  if 'tokens' not in out:  # not a ViT
    norm = np.linalg.norm(logits, axis=-1, keepdims=True)
    return {'image_features': logits, 'image_embeds': logits / norm}
  last = out[f'block{loaded.model.depth - 1:02d}']
  is_clip = name.startswith(('clip_hf', 'clip_old', 'clip_openai', 'clip_vision'))
  tokens = last if is_clip else out['encoded']  # CLIP's are before the last norm
  features = logits if loaded.model.num_classes else out['pre_logits']
  unit = features / np.linalg.norm(features, axis=-1, keepdims=True)
  return {
    'embed': out['tokens'],
    'block_1': out['block00'],
    f'block_{loaded.model.depth}': last,
    'tokens': out['encoded'],
    'last_hidden_state': tokens,
    'image_tokens': tokens,
    # DINOv2's pooler takes the class token, its classifier the mean of patches too.
    'pooler_output': out['pre_logits'][:, : loaded.model.width],
    'image_pooled': out['pre_logits'],
    'pre_logits': out['pre_logits'],
    'logits': logits,
    'image_features': features,
    'image_embeds': features if name.startswith('clip_vision') else unit,
  }


def check_vit(stem: str):
  """Loads the file of a golden of `vits()` and compares what its library computes."""
  name, _, size = stem.partition('.')
  size = tuple(map(int, size.split('x'))) if size else None
  expected = dict(np.load(GOLDEN / f'{stem}.expected.npz'))
  loaded = vit_jax.load(path_of(name), image_size=size, **TOLD.get(name, {}))
  computed = vit_outputs(loaded, expected.pop('image'), name)
  expected = {key: x for key, x in expected.items() if key not in OTHERS}
  classes = {'logits', 'image_embeds', 'image_features'} & expected.keys()
  assert bool(classes) == bool(loaded.model.num_classes)
  compare_vit(computed, expected)


def compare_vit(computed: dict, expected: dict):
  """Compares a ViT's outputs with all that are expected."""
  assert expected
  for key, value in expected.items():
    # The libraries' own float32 is up to 1.2e-5 from their float64, in logits 2.6e-6.
    atol = 1e-5 if key in ('logits', 'image_features', 'image_embeds') else 2e-5
    np.testing.assert_allclose(computed[key], value, rtol=0, atol=atol, err_msg=key)
