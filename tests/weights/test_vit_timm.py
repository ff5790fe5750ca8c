"""timm's ViTs of today: golden outputs, other sizes, options that contradict the arrays."""

import json
import shutil

import jax
import numpy as np
import pytest

import vit_jax
from tests.support import GOLDEN, naming
from vit_jax.errors import UserError

OTHERS = ('bit', 'convnext', 'mixer', 'mvit', 'resnet', 'swin')
FILES = sorted(
  path.name.removesuffix('.expected.npz')
  for path in GOLDEN.glob('*_timm*.expected.npz')
  if not path.name.startswith((*OTHERS, 'vit_timm'))
)


@pytest.mark.parametrize('file', FILES)
def test_outputs_are_those_of_timm(file):
  """Float32 rounding in timm itself is up to 1.2e-5, of logits 2.6e-6."""
  name, _, size = file.partition('.')
  size = tuple(map(int, size.split('x'))) if size else None
  loaded = vit_jax.load(GOLDEN / name, image_size=size)
  expected = dict(np.load(GOLDEN / f'{file}.expected.npz'))
  with jax.default_matmul_precision('highest'):
    logits, out = jax.jit(loaded.model.apply)(loaded.variables, expected.pop('image'))
  depth = loaded.model.depth
  computed = {
    'embed': out['tokens'],
    'block_1': out['block00'],
    f'block_{depth}': out[f'block{depth - 1:02d}'],
    'tokens': out['encoded'],
    'pre_logits': out['pre_logits'],
    'logits': logits,
  }
  assert ('logits' in expected) == bool(loaded.model.num_classes)
  for key, value in expected.items():
    tolerance = 1e-5 if key == 'logits' else 2e-5
    np.testing.assert_allclose(
      computed[key], value, rtol=0, atol=tolerance, err_msg=key
    )


@pytest.mark.parametrize(
  ('name', 'change', 'words'),
  [
    ('dinov3_timm', dict(num_reg_tokens=2), ('registers', '4')),
    ('dinov3_timm', dict(rope_temperature=50), ('50.0',)),
    ('rope_timm', dict(rope_grid_offset=0.5), ('0.5',)),
    ('dinov3_timm', dict(rope_type='spiral'), ('rope_type', 'spiral', 'dinov3')),
    ('dinov2_timm', dict(init_values=0.0), ('gamma',)),
    ('clip_timm', dict(pre_norm=False), ('pre_norm',)),
    ('eva02_timm', dict(attn_type='cross'), ('attn_type', 'cross', 'rope')),
    ('reg4_gap_timm', dict(global_pool='prr'), ('global_pool', 'prr', 'avg')),
    ('sapiens2_timm', dict(num_kv_heads=[4, 4, 4]), ('key',)),
    ('beit_timm', dict(use_rel_pos_bias=False), ('relpos',)),
    ('siglip_timm', dict(attn_pool_style='new'), ('attn_pool_style',)),
    ('xp_parallel_timm', dict(block_fn='Weird'), ('block_fn', 'Weird')),
    ('dinov3_timm', dict(depth=3), ('depth', '3', '2')),
    ('dinov3_timm', dict(embed_dim=48), ('embed_dim', '48', '32')),
    ('dinov3_timm', dict(patch_size=16), ('patch_size', '16', '8')),
  ],
)
def test_options_that_contradict_the_arrays_or_are_unknown(
  tmp_path, name, change, words
):
  folder = shutil.copytree(GOLDEN / name, tmp_path / 'folder')
  config = json.loads((folder / 'config.json').read_text(encoding='utf-8'))
  config['model_args'] |= change
  (folder / 'config.json').write_text(json.dumps(config), encoding='utf-8')
  with pytest.raises(UserError, match=naming(*words)):
    vit_jax.load(folder)


@pytest.mark.parametrize(
  ('name', 'heads', 'word'),
  [
    ('beit_timm', 2, 'relpos'),  # the pooling
    ('clip_timm', 2, 'patch_bias'),  # the activation and the epsilon
    ('dinov3_timm', 2, 'registers'),  # rotary positions
    ('respost_timm', 4, 'qkv_bias'),  # the place of norms
  ],
)
def test_arrays_of_later_models_without_a_name_are_refused(name, heads, word, tmp_path):
  path = shutil.copy(GOLDEN / name / 'model.safetensors', tmp_path)
  with pytest.raises(UserError, match=naming(word, 'name')):
    vit_jax.load(path, num_heads=heads)


@pytest.mark.parametrize(
  ('key', 'value', 'word'),
  [('architecture', None, 'config.json'), ('num_classes', 7, 'num_classes')],
)
def test_configs_without_the_architecture_or_of_another_head(
  tmp_path, key, value, word
):
  folder = shutil.copytree(GOLDEN / 'dinov3_timm', tmp_path / 'folder')
  config = json.loads((folder / 'config.json').read_text(encoding='utf-8'))
  config[key] = value
  (folder / 'config.json').write_text(json.dumps(config), encoding='utf-8')
  with pytest.raises(UserError, match=naming(word)):
    vit_jax.load(folder)


def test_an_architecture_decides_about_what_arrays_do_not_tell(tmp_path):
  # The same arrays by another name: other activation, pooling, norm or positions.
  folder = shutil.copytree(GOLDEN / 'clip_timm', tmp_path / 'folder')
  config = json.loads((folder / 'config.json').read_text(encoding='utf-8'))
  config['architecture'] = 'vit_base_patch16_clip_224'
  (folder / 'config.json').write_text(json.dumps(config), encoding='utf-8')
  assert vit_jax.load(GOLDEN / 'clip_timm').model.act == 'quick_gelu'
  assert vit_jax.load(folder).model.act == 'gelu_erf'
  config['architecture'] = 'vit_relpos_base_patch16_224'
  (folder / 'config.json').write_text(json.dumps(config), encoding='utf-8')
  with pytest.raises(UserError, match=naming('vit_relpos_base_patch16_224', 'known')):
    vit_jax.load(folder)
