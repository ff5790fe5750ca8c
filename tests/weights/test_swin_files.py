"""Swin: files of timm and transformers, in and out."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import vit_jax
from tests.support import naming
from tests.support.goldens import GOLDENS, arrays_of, path_of
from vit_jax import weights
from vit_jax.errors import UserError

SWIN = [name for name, (_, family, _) in GOLDENS.items() if family == 'swin']
QUICK = ('swin_hf', 'swinv2_timm_pre')


@pytest.mark.parametrize(
  'name',
  [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in SWIN],
)
def test_files_come_back_bit_for_bit(tmp_path, name):
  source = weights.read(path_of(name))
  weights.write(source, tmp_path / 'out', GOLDENS[name][0])
  arrays = load_file(tmp_path / 'out' / 'model.safetensors')
  expected = arrays_of(name)
  assert arrays.keys() == expected.keys()
  for key, x in expected.items():
    np.testing.assert_array_equal(arrays[key], x, err_msg=key)
  again = weights.read(tmp_path / 'out')
  assert again.fields == source.fields
  theirs, ours = (
    json.loads((folder / 'config.json').read_text())
    for folder in (path_of(name), tmp_path / 'out')
  )
  known = theirs.get('model_args', theirs).keys()
  known -= {'initializer_range', 'pretrained_window_sizes'}  # the latter is a field
  theirs, ours = (c.get('model_args', c) for c in (theirs, ours))
  assert {k: ours[k] for k in known} == {k: theirs[k] for k in known}


@pytest.mark.parametrize(
  ('name', 'to'),
  [
    ('swin_timm', 'hf'),
    ('swin_hf', 'timm'),
    ('swinv2_timm', 'hf'),
    ('swinv2_hf', 'timm'),
  ],
)
def test_files_of_one_library_for_the_other(tmp_path, name, to):
  source = weights.read(path_of(name))
  weights.write(source, tmp_path / 'out', to)
  found = weights.read(tmp_path / 'out')
  assert found.format == to
  assert found.fields | {'borders': source.fields['borders']} == source.fields
  for key, x in source.flat.items():
    np.testing.assert_array_equal(found.flat[key], x, err_msg=key)


@pytest.mark.parametrize(
  ('name', 'to', 'fields', 'facts'),
  [
    ('swin_timm_pad', 'hf', {}, ('shift_pad', '56x56', '14x14')),
    ('swin_hf_pad', 'timm', {}, ('pad_shift', '56x56', '14x14')),
    ('swin_timm_rect', 'hf', {'borders': 'pad_shift'}, ('3x6', '48x96')),
    ('swin_hf', 'timm', {'shift': 0.25}, ('shift=0.25',)),
    ('swin_hf', 'google', {}, ('google', 'swin')),
  ],
)
def test_what_a_format_cannot_express_is_refused(tmp_path, name, to, fields, facts):
  source = weights.read(path_of(name), **fields)
  with pytest.raises(UserError, match=naming(*facts)):
    weights.write(source, tmp_path / 'out', to)


def test_names_of_the_authors_files_that_timm_reads(tmp_path):
  def older(name):
    if name.startswith('layers.') and '.downsample.' in name:
      return name.replace(name[7], str(int(name[7]) - 1), 1)
    return name.replace('head.fc.', 'head.')

  arrays = {older(n): x for n, x in arrays_of('swin_timm').items()}
  arrays['layers.0.blocks.1.attn_mask'] = np.zeros((16, 16, 16), np.float32)
  save_file(arrays, tmp_path / 'model.safetensors')
  shutil.copy(path_of('swin_timm') / 'config.json', tmp_path)
  found, expected = (weights.read(p) for p in (tmp_path, path_of('swin_timm')))
  assert found.flat.keys() == expected.flat.keys()
  for key, x in expected.flat.items():
    np.testing.assert_array_equal(found.flat[key], x, err_msg=key)
  assert found.unused == ['layers.0.blocks.1.attn_mask']


def test_names_of_transformers_5(tmp_path):
  def newer(name):
    for old, new in (
      (
        'self.relative_position_bias_table',
        'relative_position_bias.relative_position_bias_table',
      ),
      ('self.query', 'q_proj'),
      ('self.key', 'k_proj'),
      ('self.value', 'v_proj'),
      ('attention.output.dense', 'attention.o_proj'),
      ('intermediate.dense', 'mlp.fc1'),
      ('output.dense', 'mlp.fc2'),
    ):
      name = name.replace(old, new)
    return name

  arrays = {newer(n): x for n, x in arrays_of('swin_hf').items() if x.dtype.kind == 'f'}
  save_file(arrays, tmp_path / 'model.safetensors')
  shutil.copy(path_of('swin_hf') / 'config.json', tmp_path)
  found, expected = (weights.read(p) for p in (tmp_path, path_of('swin_hf')))
  assert found.fields == expected.fields
  for key, x in expected.flat.items():
    np.testing.assert_array_equal(found.flat[key], x, err_msg=key)


def test_windows_of_v2_come_from_the_name(tmp_path):
  folder = tmp_path / 'a'
  shutil.copytree(path_of('swinv2_timm'), folder)
  config = json.loads((folder / 'config.json').read_text())
  del config['model_args']['window_size']
  config['architecture'] = 'swinv2_base_window12to24_192to384.ms_in22k_ft_in1k'
  (folder / 'config.json').write_text(json.dumps(config))
  found = weights.read(folder).fields
  assert found['windows'] == (24, 24, 24)
  assert found['pretrained_windows'] == (12, 12, 6)
  (folder / 'config.json').unlink()
  (folder / 'model.safetensors').rename(tmp_path / 'model.safetensors')
  file = tmp_path / 'model.safetensors'
  with pytest.raises(UserError, match=naming(file, 'windows', 'variant')):
    vit_jax.load(file)
  assert vit_jax.load(file, windows=(4, 4, 4)).model.windows == (4, 4, 4)


@pytest.mark.parametrize(
  ('name', 'key', 'value', 'facts'),
  [
    ('swin_timm', 'model_args.always_partition', True, ('always_partition', 'True')),
    ('swin_timm', 'global_pool', 'max', ('global_pool', "'max'")),
    ('swin_timm', 'model_args.window_size', 'four', ('window_size', "'four'")),
    ('swin_timm_rect', 'model_args.window_size', 5, ('stage 3', '35', 'window')),
    ('swin_hf', 'layer_norm_eps', 1e-6, ('layer_norm_eps', '1e-06', '1e-05')),
    ('swinv2_hf', 'model_type', 'swinv3', ("'swinv3'", "'swin'")),
    ('swinv2_timm', 'model_args.window_size', [4, 8], ('window_size', 'square')),
  ],
)
def test_what_is_not_read_is_refused(tmp_path, name, key, value, facts):
  shutil.copytree(path_of(name), tmp_path / 'a')
  config = json.loads((tmp_path / 'a' / 'config.json').read_text())
  part, _, last = key.rpartition('.')
  (config[part] if part else config)[last] = value
  (tmp_path / 'a' / 'config.json').write_text(json.dumps(config))
  with pytest.raises(UserError, match=naming(tmp_path / 'a', *facts)):
    vit_jax.load(tmp_path / 'a')
