"""DETR: counts, masks, files; its outputs are compared by the goldens."""

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
from vit_jax.tools.inspect import flops
from vit_jax.weights import formats

# Parameters, those that the recipe trains, frozen statistics; 1e9 multiply-adds at 800 x
# 1066, of the backbone and of the rest: of transformers and of the authors' code.
SIZES = {
  'R50-DC5': (41_524_768, 41_302_368, 106_240, 106.02 + 67.15),
  'R101': (60_464_672, 60_242_272, 210_688, 133.43 + 11.19),
}
FROZEN = r'backbone/(stem|stage1_.*)/.*'


@pytest.mark.parametrize('variant', SIZES)
def test_parameters_and_operations(variant):
  model, shapes = models.build('detr', variant), {}

  def forward(images):  # traced once, for both
    outputs, variables = model.init_with_output(jax.random.key(0), images)
    shapes.update(variables)
    return outputs

  images = jax.ShapeDtypeStruct((1, 800, 1066, 3), jnp.float32)
  operations = flops.count(forward, images) / 2e9
  named = {key: trees.flatten(tree) for key, tree in shapes.items()}
  count = lambda tree: sum(x.size for x in tree.values())
  trained = {k: x for k, x in named['params'].items() if not re.fullmatch(FROZEN, k)}
  *counts, gmacs = SIZES[variant]
  assert [*map(count, (named['params'], trained, named['batch_stats']))] == counts
  assert operations == pytest.approx(gmacs, rel=5e-3)


def test_a_mask_without_padding_changes_nothing():
  model, images = tiny_models.build('detr 0'), tiny_models.images()
  variables = tiny_models.random(model)
  run = jax.jit(functools.partial(model.apply, features=False))
  expected, _ = run(variables, images)
  masked, _ = run(variables, images, np.ones(images.shape[:3]))
  for key, x in expected.items():
    np.testing.assert_allclose(masked[key], x, rtol=0, atol=1e-5)


def test_on_another_backbone():
  vit = dict(models.family('vitdet').tiny[0], name='vitdet')
  model = models.build('detr', **models.family('detr').tiny[0] | {'backbone': vit})
  image = jnp.zeros((1, 32, 32, 3))
  _, out = jax.eval_shape(lambda: model.init_with_output(jax.random.key(0), image)[0])
  assert out['projected'].shape == (1, 8, 8, 16)


@pytest.mark.parametrize(
  ('fields', 'facts'),
  [
    (dict(variant='R5'), ("'R5'", 'R50', 'R101-DC5')),
    (dict(), ('backbone', 'detr:R50')),
    (dict(variant='R50', width=42), ('42', '4')),
  ],
)
def test_fields_that_do_not_fit(fields, facts):
  init = lambda key: models.build('detr', **fields).init(key, jnp.zeros((1, 32, 32, 3)))
  with pytest.raises(ValueError, match=naming(*facts)):
    jax.eval_shape(init, jax.random.key(0))


# -- files --------------------------------------------------------------------------------


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
  of_training = {'dropout', 'class_cost', 'bbox_cost', 'giou_cost', 'eos_coefficient'}
  of_training |= {'bbox_loss_coefficient', 'giou_loss_coefficient'}
  for key in theirs.keys() - of_training:
    assert ours[key] == theirs[key], key


MEAN = 'value_range((-2.1179039, -2.0357143, -1.8044444), (2.2489083, 2.4285714, 2.64))'


@pytest.mark.parametrize(
  ('beside', 'size', 'pp'),
  [
    (None, (1333, 1333), 'detr_resize(800, 1333)|canvas(1333)'),
    ({'size': 480, 'max_size': 640}, (640, 640), 'detr_resize(480, 640)|canvas(640)'),
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
  # The processor that is written for transformers says the same.
  weights.write(source, tmp_path / 'out', 'hf')
  again = json.loads((tmp_path / 'out' / 'preprocessor_config.json').read_text())
  expected = (beside or {'size': {'shortest_edge': 800, 'longest_edge': 1333}})['size']
  if isinstance(expected, int):
    expected = {'shortest_edge': 480, 'longest_edge': 640}
  assert again['size'] == expected
  assert again['image_mean'] == [0.485, 0.456, 0.406]


def test_padded_images_come_with_their_mask():
  loaded = vit_jax.load(path_of('detr_hf'), image_size=64)
  assert loaded.pp == f'decode|detr_resize(64, 64)|canvas(64)|{MEAN}'
  image = np.full((30, 60, 3), 255, np.uint8)
  arguments = inference.inputs(loaded, [image])
  images, mask = (np.asarray(arguments[key]) for key in ('images', 'mask'))
  assert mask[0, :32].all()
  assert not mask[0, 32:].any()
  white = np.array([2.2489083, 2.4285714, 2.64])
  np.testing.assert_allclose(images[0, :32], np.tile(white, (32, 64, 1)), atol=1e-5)
  assert not images[0, 32:].any()  # as the published model saw it
  with pytest.raises(ValueError, match=naming('canvas', 'inputs')):
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


def timm(name):
  for theirs, ours in TIMM if 'conv_encoder' in name else ():
    name = re.sub(theirs, ours, name)
  return name


def transformers_5(name):
  name = name.replace('backbone.conv_encoder', 'backbone')
  if 'backbone' not in name:
    name = re.sub(r'layers\.(\d+)\.fc', r'layers.\1.mlp.fc', name)
    name = name.replace('out_proj', 'o_proj')
  return name


@pytest.mark.parametrize(
  ('renamed', 'example'),
  [
    (timm, 'model.backbone.conv_encoder.model.layer2.0.conv1.weight'),
    (transformers_5, 'model.decoder.layers.0.mlp.fc1.weight'),
  ],
)
def test_other_names(tmp_path, renamed, example):
  arrays = {renamed(n): x for n, x in arrays_of('detr_hf').items()}
  assert example in arrays
  save_file(arrays, tmp_path / 'model.safetensors')
  config = json.loads((path_of('detr_hf') / 'config.json').read_text())
  if renamed is timm:
    del config['backbone_config'], config['use_timm_backbone']
  (tmp_path / 'config.json').write_text(json.dumps(config))
  loaded, expected = (vit_jax.load(path) for path in (tmp_path, path_of('detr_hf')))
  assert loaded.model == expected.model
  jax.tree.map(np.testing.assert_array_equal, loaded.variables, expected.variables)


def test_the_name_of_an_original_file_tells_of_dc5(tmp_path):
  source = path_of('detr_dc5_original') / 'model.safetensors'
  for name, stride in (('detr-r50-dc5-f0fb7ef5', 16), ('detr-r50-e632da11', 32)):
    shutil.copy(source, tmp_path / f'{name}.safetensors')
    fields = weights.read(tmp_path / f'{name}.safetensors').fields
    assert (fields['backbone']['output_stride'], fields['num_heads']) == (stride, 8)


def test_a_head_for_other_classes_is_new():
  loaded = vit_jax.load(path_of('detr_hf'), num_classes=3)
  assert loaded.params['head']['kernel'].shape == (32, 4)
  assert 'initialised afresh: head/bias, head/kernel' in loaded.report


@pytest.mark.parametrize(
  ('file', 'change', 'facts'),
  [
    ('config', {'position_embedding_type': 'learned'}, ('learned', 'sine')),
    ('config', {'decoder_attention_heads': 8}, ('decoder_attention_heads', 4, 8)),
    ('config', {'dilation': 'yes'}, ('dilation', "'yes'")),
    ('preprocessor_config', {'resample': 3}, ('resample=3', 2)),
  ],
)
def test_configs_that_are_not_read(tmp_path, file, change, facts):
  folder = tmp_path / 'a'
  shutil.copytree(path_of('detr_hf'), folder)
  path = folder / f'{file}.json'
  config = json.loads(path.read_text()) if path.exists() else {}
  path.write_text(json.dumps(config | change))
  with pytest.raises(ValueError, match=naming(folder, *facts)):
    vit_jax.load(folder)


@pytest.mark.parametrize(
  ('backbone', 'facts'),
  [
    ({'output_stride': 16}, ('output_stride=16', 'transformers')),
    ({'frozen_norm': False}, ('frozen_norm=False',)),
    ({'name': 'swin'}, ('resnet', 'swin')),
  ],
)
def test_backbones_that_transformers_cannot_express(backbone, facts):
  source = weights.read(path_of('detr_hf'))
  fields = models.fields_of(models.build('detr', **source.fields))
  fields['backbone'] = fields['backbone'] | backbone
  with pytest.raises(ValueError, match=naming(*facts)):
    formats.writer('detr', 'hf').config(fields, (128, 160), None)


def test_a_detector_gives_no_classes():
  with pytest.raises(ValueError, match=naming('RUN', 'boxes', 'classes')):
    models.check_outputs(tiny_models.build('detr 0'), 'classes', 'RUN')
