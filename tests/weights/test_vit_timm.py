"""timm's ViTs of today: options that contradict the arrays; outputs are in test_goldens.py."""

import json
import shutil
from pathlib import Path

import pytest

import vit_jax
from tests.support import GOLDEN, naming
from vit_jax.errors import UserError


def folder_of(tmp_path, name, change) -> Path:
  """Returns a copy of a golden whose config was changed."""
  folder = shutil.copytree(GOLDEN / name, tmp_path / 'folder', dirs_exist_ok=True)
  config = json.loads((folder / 'config.json').read_text(encoding='utf-8'))
  change(config)
  (folder / 'config.json').write_text(json.dumps(config), encoding='utf-8')
  return folder


# golden -> (options of timm, words of the error)
CONTRADICTIONS = [
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
  ('relpos_timm', dict(rel_pos_type='mlp_swin'), ('rel_pos_type', 'mlp_swin', 'bias')),
  ('relpos_timm', dict(rel_pos_dim=9), ('mlp/Dense_0', '12', '9')),
  ('srelpos_timm', dict(rel_pos_type='bias'), ('relpos/mlp',)),
  ('siglip_timm', dict(attn_pool_style='new'), ('attn_pool_style',)),
  ('xp_parallel_timm', dict(block_fn='Weird'), ('block_fn', 'Weird')),
  ('dinov3_timm', dict(depth=3), ('depth', '3', '2')),
  ('dinov3_timm', dict(embed_dim=48), ('embed_dim', '48', '32')),
  ('dinov3_timm', dict(patch_size=16), ('patch_size', '16', '8')),
]
CONFIGS = [
  *((name, {'model_args': args}, words) for name, args, words in CONTRADICTIONS),
  ('dinov3_timm', {'architecture': None}, ('config.json',)),
  ('dinov3_timm', {'num_classes': 7}, ('num_classes',)),
]


def test_options_that_contradict_the_arrays_or_are_unknown(tmp_path):
  for name, changes, words in CONFIGS:

    def change(config, changes=changes):
      args = config['model_args'] | changes.get('model_args', {})
      config |= changes | {'model_args': args}

    with pytest.raises(UserError, match=naming(*words)):
      vit_jax.load(folder_of(tmp_path, name, change))


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


def test_an_architecture_decides_about_what_arrays_do_not_tell(tmp_path):
  # The same arrays by another name: other activation, pooling, norm or positions.
  called = lambda name: folder_of(
    tmp_path, 'clip_timm', lambda config: config.update(architecture=name)
  )
  assert vit_jax.load(GOLDEN / 'clip_timm').model.act == 'quick_gelu'
  assert vit_jax.load(called('vit_base_patch16_clip_224')).model.act == 'gelu_erf'
  with pytest.raises(UserError, match=naming('vit_relpos_base_patch99_224', 'unknown')):
    vit_jax.load(called('vit_relpos_base_patch99_224'))
