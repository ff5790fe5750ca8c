"""Tiny published files in tests/golden, and the outputs of their own library."""

import functools

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
