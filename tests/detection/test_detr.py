"""DETR: counts, masks, files; what it computes is compared in test_goldens.py."""

import functools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import vit_jax
from tests.support import naming, tiny_models
from tests.support.goldens import arrays_of, path_of
from vit_jax import models, trees, weights
from vit_jax.detection import inference
from vit_jax.errors import UserError
from vit_jax.tools.inspect import flops
from vit_jax.weights import formats

# Parameters, those that the recipe trains, frozen statistics; 1e9 multiply-adds at 800 x
# 1066, of the backbone and of the rest: of transformers and of the authors' code.
SIZES = {
  'R50': (41_524_768, 41_302_368, 106_240, 69.98 + 11.19),
  'R50-DC5': (41_524_768, 41_302_368, 106_240, 106.02 + 67.15),
  'R101': (60_464_672, 60_242_272, 210_688, 133.43 + 11.19),
  'R101-DC5': (60_464_672, 60_242_272, 210_688, 169.47 + 67.15),
}
FROZEN = r'backbone/(stem|stage1_.*)/.*'


@pytest.mark.slow
@pytest.mark.parametrize(
  'variant',
  [pytest.param(v, marks=[] if v == 'R50-DC5' else pytest.mark.slow) for v in SIZES],
)
def test_parameters_and_operations(variant):
  model, shapes = models.build('detr', variant), {}

  def forward(images):  # traced once, for both
    outputs, variables = model.init_with_output(jax.random.key(0), images)
    shapes.update(variables)
    return outputs

  found = flops.count(forward, jax.ShapeDtypeStruct((1, 800, 1066, 3), jnp.float32))
  named = {key: trees.flatten(tree) for key, tree in shapes.items()}
  count = lambda tree: sum(x.size for x in tree.values())
  trained = {k: x for k, x in named['params'].items() if not re.fullmatch(FROZEN, k)}
  *counts, gmacs = SIZES[variant]
  assert [*map(count, (named['params'], trained, named['batch_stats']))] == counts
  assert found / 2e9 == pytest.approx(gmacs, rel=5e-3)


def tiny(**fields):
  return models.build('detr', **models.family('detr').tiny[0] | fields)


@pytest.mark.slow
def test_a_mask_without_padding_changes_nothing():
  model, images = tiny_models.build('detr 0'), tiny_models.images()
  params = tiny_models.init(model)
  expected, _ = tiny_models.apply(model, params)
  given = tiny_models.variables(model, params), images, np.ones(images.shape[:3])
  found, _ = jax.jit(functools.partial(model.apply, features=False))(*given)
  for key, x in expected.items():
    np.testing.assert_allclose(found[key], x, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_on_another_backbone_and_another_of_its_maps():
  vit = dict(models.family('vitdet').tiny[0], name='vitdet')
  image = jnp.zeros((1, 32, 32, 3))

  def projected(**fields):
    call = lambda: tiny(**fields).init_with_output(jax.random.key(0), image)[0]
    return jax.eval_shape(call)[1]['projected'].shape

  assert projected(backbone=vit) == (1, 8, 8, 16)
  sfp = dict(name='sfp', backbone=vit, channels=8)
  assert projected(backbone=sfp, feature='p3') == (1, 4, 4, 16)


@pytest.mark.parametrize(
  ('fields', 'mask', 'facts'),
  [
    (dict(variant='R5'), None, ("'R5'", 'R50', 'R101-DC5')),
    (dict(), None, ('backbone', 'detr:R50')),
    (dict(variant='R50', feature='stage5'), None, ("'stage5'", 'stage4')),
    (dict(variant='R50', width=42), None, ('42', '4')),
    (dict(variant='R50'), (1, 1, 1), ('(1, 1, 1)', '(1, 32, 32)')),
  ],
)
def test_what_does_not_fit_is_refused(fields, mask, facts):
  image = jnp.zeros((1, 32, 32, 3))
  mask = None if mask is None else jnp.ones(mask)
  init = lambda key: models.build('detr', **fields).init(key, image, mask)
  with pytest.raises(UserError, match=naming(*facts)):
    jax.eval_shape(init, jax.random.key(0))


# -- files --------------------------------------------------------------------------------


@pytest.mark.slow
def test_files_come_back_bit_for_bit(tmp_path):
  source = weights.read(path_of('detr_hf'))
  weights.write(source, tmp_path / 'out', 'hf')
  arrays = load_file(tmp_path / 'out' / 'model.safetensors')
  expected = arrays_of('detr_hf')
  assert arrays.keys() == expected.keys()
  for key, x in expected.items():
    np.testing.assert_array_equal(arrays[key], x, err_msg=key)
  again = weights.read(tmp_path / 'out')
  assert (again.fields, again.image_size) == (source.fields, source.image_size)
  assert again.pp == source.pp
  theirs, ours = (
    json.loads((folder / 'config.json').read_text())
    for folder in (path_of('detr_hf'), tmp_path / 'out')
  )
  changed = {'dropout', 'class_cost', 'bbox_cost', 'giou_cost', 'eos_coefficient'}
  changed |= {'bbox_loss_coefficient', 'giou_loss_coefficient'}  # of training
  assert {k: ours[k] for k in theirs if k not in changed} == {
    k: x for k, x in theirs.items() if k not in changed
  }


MEAN = 'value_range((-2.1179039, -2.0357143, -1.8044444), (2.2489083, 2.4285714, 2.64))'


@pytest.mark.parametrize(
  ('beside', 'size', 'pp'),
  [
    pytest.param(
      *(None, (1333, 1333), 'detr_resize(800, 1333)|canvas(1333)'),
      marks=pytest.mark.slow,
    ),
    ({'size': 480, 'max_size': 640}, (640, 640), 'detr_resize(480, 640)|canvas(640)'),
    (
      {'size': {'shortest_edge': 480, 'longest_edge': 640}},
      (640, 640),
      'detr_resize(480, 640)|canvas(640)',
    ),
    (  # the longer side decides
      {'size': {'shortest_edge': 800, 'longest_edge': 600}},
      (600, 600),
      'detr_resize(800, 600)|canvas(600)',
    ),
    (
      {'size': {'height': 64, 'width': 96}},
      (64, 96),
      "resize((64, 96), method='bilinear', antialias=True, rounding='nearest')",
    ),
  ],
)
def test_images_are_prepared_as_their_processor_says(tmp_path, beside, size, pp):
  shutil.copytree(path_of('detr_hf'), tmp_path, dirs_exist_ok=True)
  if beside:
    (tmp_path / 'preprocessor_config.json').write_text(json.dumps(beside))
  source = weights.read(tmp_path)
  assert (source.image_size, source.pp) == (size, f'decode|{pp}|{MEAN}')
  # What convert writes for transformers says the same.
  weights.write(source, tmp_path / 'out', 'hf')
  again = json.loads((tmp_path / 'out' / 'preprocessor_config.json').read_text())
  wanted = (beside or {'size': {'shortest_edge': 800, 'longest_edge': 1333}})['size']
  if isinstance(wanted, int):
    wanted = {'shortest_edge': 480, 'longest_edge': 640}
  assert again['size'] == wanted
  assert again['image_mean'] == [0.485, 0.456, 0.406]


def test_another_resampling_is_refused(tmp_path):
  shutil.copytree(path_of('detr_hf'), tmp_path, dirs_exist_ok=True)
  (tmp_path / 'preprocessor_config.json').write_text('{"resample": 3}')
  with pytest.raises(UserError, match=naming(tmp_path, 'resample=3', 2)):
    vit_jax.load(tmp_path)


def test_padded_images_come_with_their_mask():
  loaded = vit_jax.load(path_of('detr_hf'), image_size=64)
  assert loaded.pp == f'decode|detr_resize(64, 64)|canvas(64)|{MEAN}'
  image = np.full((30, 60, 3), 255, np.uint8)
  given = inference.inputs(loaded, [image])
  images, mask = (np.asarray(given[key]) for key in ('images', 'mask'))
  assert mask[0, :32].all()
  assert not mask[0, 32:].any()
  white = np.array([2.2489083, 2.4285714, 2.64])
  np.testing.assert_allclose(images[0, :32], np.tile(white, (32, 64, 1)), atol=1e-5)
  assert not images[0, 32:].any()  # as the published model saw it
  with pytest.raises(UserError, match=naming('canvas', 'inputs')):
    loaded.preprocess([image])


# transformers' names of a backbone's layers, and timm's.
TIMM = (
  (r'embedder\.embedder\.convolution', lambda m: 'conv1'),
  (r'embedder\.embedder\.normalization', lambda m: 'bn1'),
  (r'encoder\.stages\.(\d)\.layers\.(\d)', lambda m: f'layer{int(m[1]) + 1}.{m[2]}'),
  (r'shortcut\.convolution', lambda m: 'downsample.0'),
  (r'shortcut\.normalization', lambda m: 'downsample.1'),
  (r'layer\.(\d)\.convolution', lambda m: f'conv{int(m[1]) + 1}'),
  (r'layer\.(\d)\.normalization', lambda m: f'bn{int(m[1]) + 1}'),
)


def test_names_of_timm_in_the_backbone(tmp_path):
  def renamed(name):
    for theirs, timm in TIMM if 'conv_encoder' in name else ():
      name = re.sub(theirs, timm, name)
    return name

  arrays = {renamed(n): x for n, x in arrays_of('detr_hf').items()}
  assert 'model.backbone.conv_encoder.model.layer2.0.conv1.weight' in arrays
  save_file(arrays, tmp_path / 'model.safetensors')
  config = json.loads((path_of('detr_hf') / 'config.json').read_text())
  for key in ('backbone_config', 'use_timm_backbone'):
    del config[key]
  (tmp_path / 'config.json').write_text(json.dumps(config))
  same(tmp_path, 'detr_hf')


def test_names_of_modules_since_transformers_5(tmp_path):
  def renamed(name):
    name = name.replace('backbone.conv_encoder', 'backbone')
    if 'backbone' not in name:
      name = re.sub(r'layers\.(\d+)\.fc', r'layers.\1.mlp.fc', name)
      name = name.replace('out_proj', 'o_proj')
    return name

  arrays = {renamed(n): x for n, x in arrays_of('detr_hf').items()}
  assert 'model.decoder.layers.0.mlp.fc1.weight' in arrays
  save_file(arrays, tmp_path / 'model.safetensors')
  shutil.copy(path_of('detr_hf') / 'config.json', tmp_path)
  same(tmp_path, 'detr_hf')


def same(folder, name):
  found, expected = (vit_jax.load(path) for path in (folder, path_of(name)))
  assert found.model == expected.model
  jax.tree.map(np.testing.assert_array_equal, found.variables, expected.variables)


@pytest.mark.slow
def test_the_name_of_an_original_file_tells_of_dc5(tmp_path):
  source = path_of('detr_dc5_original') / 'model.safetensors'
  for name, stride in (('detr-r50-dc5-f0fb7ef5', 16), ('detr-r50-e632da11', 32)):
    shutil.copy(source, tmp_path / f'{name}.safetensors')
    model = vit_jax.load(tmp_path / f'{name}.safetensors').model
    assert (model.backbone.output_stride, model.num_heads) == (stride, 8)


@pytest.mark.slow
def test_a_head_for_other_classes_is_new():
  loaded = vit_jax.load(path_of('detr_hf'), num_classes=3)
  assert loaded.params['head']['kernel'].shape == (32, 4)
  assert 'initialised afresh: head/bias, head/kernel' in loaded.report


@pytest.mark.parametrize(
  ('change', 'facts'),
  [
    ({'position_embedding_type': 'learned'}, ('learned', 'sine')),
    ({'activation_function': 'gelu'}, ('gelu', 'relu')),
    ({'decoder_attention_heads': 8}, ('decoder_attention_heads', 4, 8)),
    ({'model_type': 'yolos'}, ("'yolos'", "'detr'")),
    ({'dilation': 'yes'}, ('dilation', "'yes'")),
  ],
)
def test_what_is_not_read_is_refused(tmp_path, change, facts):
  folder = tmp_path / 'a'
  shutil.copytree(path_of('detr_hf'), folder)
  config = json.loads((folder / 'config.json').read_text()) | change
  (folder / 'config.json').write_text(json.dumps(config))
  with pytest.raises(UserError, match=naming(folder, *facts)):
    vit_jax.load(folder)


@pytest.mark.parametrize(
  ('backbone', 'fields', 'facts'),
  [
    ({'output_stride': 16}, {}, ('output_stride=16', 'ResNet')),
    ({'frozen_norm': False}, {}, ('frozen_norm=False',)),
    ({'name': 'swin'}, {}, ('resnet', 'swin')),
    ({}, {'feature': 'stage3'}, ("feature='stage3'", 'last')),
  ],
)
def test_what_transformers_cannot_express_is_refused(backbone, fields, facts):
  source = weights.read(path_of('detr_hf'))
  fields = {**models.fields_of(models.build('detr', **source.fields)), **fields}
  fields['backbone'] = fields['backbone'] | backbone
  with pytest.raises(ValueError, match=naming(*facts)):
    formats.writer('detr', 'hf').config(fields, (128, 160), None)


def test_what_names_classes_refuses_it():
  model = tiny_models.build('detr 0')
  with pytest.raises(UserError, match=naming('RUN', 'boxes', 'classes')):
    models.check_outputs(model, 'classes', 'RUN')
  models.check_outputs(tiny_models.build('vit 0'), 'classes', 'RUN')
