"""transformers' ViTs: round trips, keys of configs, what is refused."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import vit_jax
from tests.support import GOLDEN, naming
from tests.support.goldens import TRANSFORMERS, vit_outputs
from vit_jax import models, weights
from vit_jax.errors import UserError
from vit_jax.weights import pipelines


@pytest.mark.parametrize('name', TRANSFORMERS)
def test_golden_comes_back(tmp_path, name):
  loaded = vit_jax.load(GOLDEN / name)
  weights.write(weights.read(GOLDEN / name), tmp_path / 'a', 'hf')
  config = json.loads((tmp_path / 'a' / 'config.json').read_text())
  assert config['model_type'] == TRANSFORMERS[name]
  again = vit_jax.load(tmp_path / 'a')
  assert again.model == loaded.model
  jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)
  assert (again.pp, again.image_size) == (loaded.pp, loaded.image_size)
  if name in ('data2vec_hf', 'vit_msn_hf', 'mae_hf', 'siglip_classifier_hf'):
    return
  written, arrays = (
    load_file(folder / 'model.safetensors')
    for folder in (tmp_path / 'a', GOLDEN / name)
  )
  assert written.keys() == arrays.keys() - {'beit.embeddings.mask_token'}
  for key in written:
    if 'mask_token' not in key:
      np.testing.assert_array_equal(written[key], arrays[key], err_msg=key)


@pytest.mark.parametrize('number', range(3))
def test_naflex_at_a_fixed_size(number):
  expected = np.load(GOLDEN / 'siglip2_naflex_hf.expected.npz')
  image = expected[f'image_{number}']
  loaded = vit_jax.load(GOLDEN / 'siglip2_naflex_hf', image_size=image.shape[:2])
  computed = vit_outputs(loaded, image[None], 'siglip2_naflex_hf')
  tokens = computed['last_hidden_state'][0]
  theirs = expected['image_tokens'][number, : len(tokens)]
  np.testing.assert_allclose(tokens, theirs, rtol=0, atol=2e-5)
  for key, atol in (('image_pooled', 2e-5), ('image_embeds', 1e-6)):
    row = expected[key][number]
    np.testing.assert_allclose(computed[key][0], row, rtol=0, atol=atol)


# Keys that decide, whose default is that of the golden's class: files leave them out.
DEFAULTS = {
  'dinov2_hf': ('hidden_act', 'layer_norm_eps', 'mlp_ratio', 'use_swiglu_ffn'),
  'dinov3_hf': ('layer_norm_eps', 'key_bias', 'query_bias', 'rope_theta', 'hidden_act'),
  'clip_vision_hf': ('hidden_act', 'layer_norm_eps'),
  'deit_distilled_hf': ('layer_norm_eps', 'qkv_bias'),
  'beit_hf': ('layer_norm_eps', 'use_mean_pooling', 'layer_scale_init_value'),
  'vit_msn_hf': ('layer_norm_eps',),
  'aimv2_hf': ('rms_norm_eps', 'mlp_bias', 'is_native'),
  'aimv2_native_hf': ('use_head',),
}


def folder_of(tmp_path, name, change=lambda config: None, rename=None):
  folder = shutil.copytree(GOLDEN / name, tmp_path / 'folder')
  config = json.loads((folder / 'config.json').read_text())
  change(config)
  (folder / 'config.json').write_text(json.dumps(config))
  if rename:
    arrays = load_file(folder / 'model.safetensors')
    save_file({rename(n): x for n, x in arrays.items()}, folder / 'model.safetensors')
  return folder


@pytest.mark.parametrize('name', DEFAULTS)
def test_absent_keys_have_the_default_of_their_class(tmp_path, name):
  drop = lambda config: [config.pop(key) for key in DEFAULTS[name]]
  assert weights.read(folder_of(tmp_path, name, drop)).fields == (
    weights.read(GOLDEN / name).fields
  )


# As the library has named its modules since version 5: some files carry these names.
NEWER = (
  (r'\.attention\.attention\.relative_position_bias\.', '.relative_position_bias.'),
  (r'encoder\.relative_position_bias', 'shared_position_bias'),
  (r'attention\.attention\.(\w)(uery|ey|alue)', r'attention.\1_proj'),
  (r'attention\.output\.dense', 'attention.o_proj'),
  (r'intermediate\.dense', 'mlp.fc1'),
  (r'output\.dense', 'mlp.fc2'),
)
LAYERS = (r'encoder\.layer\.', 'layers.')
SPELLINGS = [
  *((name, (*NEWER, LAYERS)) for name in ('beit_hf', 'beit_shared_abs_hf', 'ijepa_hf')),
  ('dinov2_hf', NEWER),
  ('vit_msn_hf', [(r'^encoder', 'vit.encoder')]),  # as on the hub
  ('dinov3_hf', [(r'^layer', 'model.layer')]),
  ('clip_vision_hf', [(r'^vision_model\.', '')]),
]


@pytest.mark.parametrize(('name', 'changes'), SPELLINGS)
def test_both_spellings_of_names(tmp_path, name, changes):
  def rename(key):
    for old, new in changes:
      key = re.sub(old, new, key)
    return key

  source, expected = (
    weights.read(x) for x in (folder_of(tmp_path, name, rename=rename), GOLDEN / name)
  )
  assert source.flat.keys() == expected.flat.keys()
  assert source.fields == expected.fields


# golden -> (key of the config, another value, words of the error)
REFUSED = [
  ('dinov2_hf', 'use_swiglu_ffn', True, ('mlp.fc2',)),
  ('dinov2_hf', 'mlp_ratio', 3, ('mlp_dim=96', '128')),
  ('dinov2_hf', 'patch_size', 7, ('patch_size', '(7, 7)', '(8, 8)')),
  ('dinov2_hf', 'hidden_act', 'mish', ("'mish'", 'gelu')),
  ('dinov2_reg4_swiglu_hf', 'num_register_tokens', 5, ('registers=5', '4')),
  ('dinov3_hf', 'key_bias', True, ("qkv_bias='qkv'", "'qv'")),
  ('dinov3_hf', 'query_bias', False, ('query_bias=False', 'key_bias=False')),
  ('beit_hf', 'use_mean_pooling', False, ("final_norm='tokens'", "'pooled'")),
  (
    'beit_hf',
    'use_shared_relative_position_bias',
    True,
    ('use_shared_relative_position_bias=True',),
  ),
  ('beit_hf', 'layer_scale_init_value', 0, ('layer_scale',)),
  ('aimv2_hf', 'is_native', True, ("posemb='sincos2d_mae'", "'learn'")),
  ('aimv2_hf', 'use_head', True, ('use_head=True', 'False')),
  ('clip_vision_hf', 'num_hidden_layers', 3, ('depth=3', '2')),
]


@pytest.mark.parametrize(('name', 'key', 'value', 'words'), REFUSED)
def test_configs_that_contradict_the_arrays(tmp_path, name, key, value, words):
  folder = folder_of(tmp_path, name, lambda config: config.update({key: value}))
  with pytest.raises(UserError, match=naming(folder, *words)):
    weights.read(folder)


def test_decoders_are_left_out_and_named():
  source = weights.read(GOLDEN / 'mae_hf')
  assert source.unused == [*source.own]
  assert all(name.startswith('mae/') for name in source.own)


@pytest.mark.parametrize(
  ('name', 'field', 'value'),
  [
    ('dinov2_hf', 'rope', 'eva'),
    ('dinov3_hf', 'rope_base', tuple(np.linspace(1, 100, 4).tolist())),
    ('clip_vision_hf', 'norm', 'rms'),
    ('beit_hf', 'block', 'post'),
  ],
)
def test_fields_that_no_class_expresses_are_named(name, field, value):
  source = weights.read(GOLDEN / name)
  fields = models.build('vit', **source.fields | {field: value}).fields()
  format = weights.formats.find_writer('vit', 'hf')
  with pytest.raises(ValueError, match=naming('hf', field)):
    format.write(source.flat, fields, source.image_size, None)


OLD_CLIP = {
  'feature_extractor_type': 'CLIPFeatureExtractor',
  'size': 24,
  'crop_size': 24,
}
OLD_BEIT = {'feature_extractor_type': 'BeitFeatureExtractor', 'size': 24}
OTHER_SIZE = {'size': {'shortest_edge': 256}, 'crop_size': 224, 'do_center_crop': True}


@pytest.mark.parametrize(
  ('name', 'processor', 'pixels'),
  [
    # A folder without preprocessor_config.json, as published: the shorter side, None if
    # the image is squashed, the interpolation, and the mean of red.
    ('dinov2_hf', None, (45, 'bicubic', 0.485)),
    ('dinov3_hf', None, (None, 'bilinear', 0.485)),
    ('clip_vision_hf', None, (32, 'bicubic', 0.481)),
    ('siglip_classifier_hf', None, (None, 'bicubic', 0.5)),
    ('beit_hf', None, (None, 'bilinear', 0.5)),
    ('mae_hf', None, (None, 'bilinear', 0.485)),
    # CLIP's from before 2023: one number is that of the shorter side.
    ('clip_vision_hf', OLD_CLIP, (32, 'bicubic', 0.481)),
    ('beit_hf', OLD_BEIT, (None, 'bicubic', 0.5)),
    # DINOv2's is for images of another size than its positions.
    ('dinov2_hf', OTHER_SIZE, (45, 'bilinear', 0.5)),
  ],
)
def test_images_are_prepared_as_published(tmp_path, name, processor, pixels):
  folder = folder_of(tmp_path, name)
  if processor:
    (folder / 'preprocessor_config.json').write_text(json.dumps(processor))
  loaded = vit_jax.load(folder)
  facts = pipelines.describe(loaded.pp)
  assert facts.size == loaded.image_size
  assert (facts.shorter, facts.method, round(facts.mean[0], 3)) == pixels


@pytest.mark.parametrize('change', [{'do_rescale': False}, {'rescale_factor': 2 / 255}])
def test_pixels_of_another_scale_are_refused(change):
  processor = {'image_processor_type': 'ViTImageProcessor', 'size': 32, **change}
  with pytest.raises(ValueError, match='do_rescale'):
    pipelines.read_hf(processor, (32, 32))
