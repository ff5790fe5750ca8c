"""Files of DETR, ViTDet and pyramids, both ways; outputs are compared by the goldens."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import vit_jax
from tests.support import naming, two_stage
from tests.support.goldens import arrays_of, path_of
from vit_jax import models, weights
from vit_jax.detection import inference
from vit_jax.weights import formats
from vit_jax.weights.loading import read_header

FORMATS = {
  'detr_hf': 'hf',
  'vitdet_hf': 'hf',
  'samvit_timm': 'timm',
  'samvit_norm_timm': 'timm',
  'sfp_d2': 'detectron2',
  'fpn_d2': 'detectron2',
  'fpn_ln_d2': 'detectron2',
}
# Keys of transformers' config that are about training.
TRAINING = {'dropout', 'class_cost', 'bbox_cost', 'giou_cost', 'eos_coefficient'}
TRAINING |= {'bbox_loss_coefficient', 'giou_loss_coefficient'}


def config_of(folder) -> dict:
  return json.loads((folder / 'config.json').read_text())


@pytest.mark.parametrize('name', FORMATS)
def test_files_come_back_bit_for_bit(tmp_path, name):
  source = weights.read(path_of(name))
  weights.write(source, tmp_path / 'out', FORMATS[name])
  arrays = load_file(tmp_path / 'out' / 'model.safetensors')
  expected = arrays_of(name)
  assert arrays.keys() == expected.keys()
  for key, x in expected.items():
    np.testing.assert_array_equal(arrays[key], x, err_msg=key)
  again = weights.read(tmp_path / 'out')
  for field in ('fields', 'image_size', 'pp') if name == 'detr_hf' else ('fields',):
    assert getattr(again, field) == getattr(source, field)
  theirs, ours = map(config_of, (path_of(name), tmp_path / 'out'))
  theirs, ours = (config.get('model_args', config) for config in (theirs, ours))
  theirs = {key: x for key, x in theirs.items() if key not in TRAINING}
  assert {key: ours[key] for key in theirs} == theirs


@pytest.mark.parametrize(
  ('name', 'file', 'change', 'facts'),
  [
    ('detr_hf', 'config', {'position_embedding_type': 'learned'}, ('learned', 'sine')),
    ('detr_hf', 'config', {'decoder_attention_heads': 8}, (4, 8)),
    ('detr_hf', 'config', {'dilation': 'yes'}, ('dilation', "'yes'")),
    ('detr_hf', 'preprocessor_config', {'resample': 3}, ('resample=3', 2)),
    ('sfp_d2', 'config', {'scale_factors': [2.0, 1.0]}, ('[2.0, 1.0]',)),
    ('sfp_d2', 'config', {'top_block': 'LastLevelP6P7'}, ('LastLevelP6P7',)),
    ('vitdet_hf', 'config', {'residual_block_indices': [1]}, ('[1]',)),
    ('vitdet_hf', 'config', {'window_block_indices': [0, -1]}, ('-1',)),
    ('sam_hf', 'config', {'model_type': 'sam_hq'}, ("'sam_hq'", 'sam_vision_model')),
    ('sam_hf', 'config', {'vision_config': {'qkv_bias': False}}, ('qkv_bias=False',)),
    ('sam_hf', 'config', {'vision_config': {}}, ('window=14', 3)),
    ('samvit_timm', 'config', {'window_size': 2}, ('window=2', 3)),
    ('samvit_timm', 'config', {'use_rel_pos': False}, ('use_rel_pos=False',)),
    ('samvit_timm', 'config', {'use_rope': True}, ('use_rope',)),
    ('samvit_timm', 'config', {'norm_layer': 'rms'}, ("norm_layer='rms'",)),
  ],
)
def test_configs_that_are_not_read(tmp_path, name, file, change, facts):
  folder = tmp_path / 'a'
  shutil.copytree(path_of(name), folder)
  path = folder / f'{file}.json'
  config = json.loads(path.read_text()) if path.exists() else {}
  config.get('model_args', config).update(change)
  path.write_text(json.dumps(config))
  with pytest.raises(ValueError, match=naming(folder, *facts)):
    vit_jax.load(folder)


@pytest.mark.parametrize(
  ('name', 'change', 'facts'),
  [
    ('detr_hf', {'output_stride': 16}, ('output_stride=16', 'transformers')),
    ('detr_hf', {'frozen_norm': False}, ('frozen_norm=False',)),
    ('detr_hf', {'name': 'swin'}, ('resnet', 'swin')),
    ('sfp_d2', {'pyramid': 'fpn_last'}, ("pyramid='fpn_last'", 'simple')),
    ('vitdet_hf', {'num_classes': 3}, ('num_classes=3', 'transformers')),
    ('vitdet_hf', {'pretrained_size': (64, 32)}, ('(64, 32)',)),
    ('vitdet_hf', {'mlp_dim': 100}, ('mlp_dim=100', 24)),
    ('samvit_timm', {'neck': None}, ('neck=None', 'timm')),
    ('samvit_timm', {'norm_eps': 1e-3}, ('norm_eps=0.001', 'timm')),
    ('samvit_timm', {'class_row': True}, ('class_row=True',)),
    ('samvit_timm', {}, ('pretrained_size=(32, 32)', '(128, 160)')),
  ],
)
def test_fields_that_a_format_cannot_express(name, change, facts):
  source = weights.read(path_of(name))
  model = models.build(**{'name': source.family, **source.fields})
  fields = model.fields()
  if name == 'detr_hf':
    change = {'backbone': fields['backbone'] | change}
  format = formats.find_writer(source.family, FORMATS[name])
  with pytest.raises(ValueError, match=naming(*facts)):
    format.writer.config(fields | change, (128, 160), None)


# -- DETR ---------------------------------------------------------------------------------

MEAN = 'value_range((-2.1179039, -2.0357143, -1.8044444), (2.2489083, 2.4285714, 2.64))'


@pytest.mark.parametrize(
  ('beside', 'size', 'pp'),
  [
    (None, (1333, 1333), 'decode|detr_resize(800, 1333)|canvas(1333)'),
    (
      {'size': 480, 'max_size': 640},
      (640, 640),
      'decode|detr_resize(480, 640)|canvas(640)',
    ),
    (  # the longer side decides
      {'size': {'shortest_edge': 800, 'longest_edge': 600}},
      (600, 600),
      'decode|detr_resize(800, 600)|canvas(600)',
    ),
    (
      {'size': {'height': 64, 'width': 96}},
      (64, 96),
      'decode(whole=True)'
      "|resize((64, 96), method='bilinear', antialias=True, rounding='nearest')",
    ),
  ],
)
def test_images_are_prepared_as_their_processor_says(tmp_path, beside, size, pp):
  shutil.copytree(path_of('detr_hf'), tmp_path, dirs_exist_ok=True)
  if beside:
    (tmp_path / 'preprocessor_config.json').write_text(json.dumps(beside))
  source = weights.read(tmp_path)
  assert (source.image_size, source.pp) == (size, f'{pp}|{MEAN}')
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
  with pytest.raises(ValueError, match=naming('canvas', 'features')):
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
  config = config_of(path_of('detr_hf'))
  if renamed is timm:
    del config['backbone_config'], config['use_timm_backbone']
  (tmp_path / 'config.json').write_text(json.dumps(config))
  loaded, expected = (vit_jax.load(path) for path in (tmp_path, path_of('detr_hf')))
  assert loaded.model == expected.model
  jax.tree.map(np.testing.assert_array_equal, loaded.variables, expected.variables)
  if renamed is timm:  # DC5
    (tmp_path / 'config.json').write_text(json.dumps(config | {'dilation': True}))
    assert weights.read(tmp_path).fields['backbone']['output_stride'] == 16


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
  assert 'unused' not in loaded.report


# -- ViTDet -------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('name', 'number', 'label', 'expected'),
  [
    ('mask_rcnn_torchvision', 91, 39, 'baseball glove'),
    ('mask_rcnn_fpn_d2', 81, 35, 'baseball glove'),
    ('mask_rcnn_torchvision', 12, None, None),
  ],
)
def test_classes_of_coco_have_their_names(tmp_path, name, number, label, expected):
  last = r'.*(cls_score|bbox_pred|mask_fcn_logits|mask_head\.predictor)\.(weight|bias)'
  arrays = load_file(two_stage.FOLDER / name / 'model.safetensors')
  background = 0 if 'd2' in name else 1
  for key in filter(re.compile(last).fullmatch, arrays):
    boxes, masks = 'bbox_pred' in key, 'mask' in key
    classes = number - (1 - background) * (boxes or masks)
    shape = classes * (4 if boxes else 1), *arrays[key].shape[1:]
    arrays[key] = np.zeros(shape, np.float32)
  save_file(arrays, tmp_path / 'model.safetensors')
  header = read_header(str(tmp_path / 'model.safetensors'))
  assert header.fields['num_classes'] == number - 1
  assert (header.class_names and header.class_names[label]) == expected


def test_arrays_without_their_config(tmp_path):
  # The sizes of tables tell the windows.
  shutil.copy(path_of('vitdet_hf') / 'model.safetensors', tmp_path)
  loaded, expected = (
    vit_jax.load(tmp_path, num_heads=2),
    vit_jax.load(path_of('vitdet_hf')),
  )
  assert (loaded.model, loaded.image_size) == (expected.model, expected.image_size)
  shutil.copy(path_of('sfp_d2') / 'model.safetensors', tmp_path)
  loaded, expected = vit_jax.load(tmp_path), vit_jax.load(path_of('sfp_d2'))
  # The extra level has no parameters that would tell of it.
  assert loaded.model.clone(extra_level=True) == expected.model
  assert loaded.image_size == expected.image_size == (128, 128)


def test_images_of_another_size(golden):
  expected = golden('vitdet_hf_other_size')
  loaded = vit_jax.load(path_of('vitdet_hf'))
  _, out = jax.jit(loaded.model.apply)(loaded.variables, expected['image'])
  for name in expected.keys() - {'image'}:
    np.testing.assert_allclose(out[name], expected[name], rtol=0, atol=2e-5)
  # Tables that loading resizes give the same.
  loaded = vit_jax.load(path_of('vitdet_hf'), image_size=expected['image'].shape[1:3])
  block = loaded.params['Transformer']['encoderblock_3']['relative_positions']
  assert (len(block['rows']), len(block['columns'])) == (2 * 6 - 1, 2 * 10 - 1)
  assert 'resized from 8 to 6, linear' in loaded.report
  _, out = jax.jit(loaded.model.apply)(loaded.variables, expected['image'])
  np.testing.assert_allclose(out['stage2'], expected['block03'], rtol=0, atol=2e-5)


# -- SAM ----------------------------------------------------------------------------------


def test_sam_on_images_of_another_size(golden):
  expected = golden('samvit_timm_other_size')
  size = expected['image'].shape[1:3]
  for options in ({}, {'image_size': size}):
    loaded = vit_jax.load(path_of('samvit_timm'), **options)
    _, out = jax.jit(loaded.model.apply)(loaded.variables, expected['image'])
    for name in expected.keys() - {'image'}:
      np.testing.assert_allclose(out[name], expected[name], rtol=0, atol=2e-5)


# Names of transformers -> names of the authors.
AUTHORS = {
  'vision_encoder.layers': 'image_encoder.blocks',
  'vision_en': 'image_en',
  'layer_norm': 'norm',
  'projection': 'proj',
  'neck.conv1': 'neck.0',
  'neck.norm1': 'neck.1',
  'neck.conv2': 'neck.2',
  'neck.norm2': 'neck.3',
}


def authors(name: str) -> str:
  for old, new in AUTHORS.items():
    name = name.replace(old, new)
  return name


def test_a_sam_of_its_authors_and_of_transformers(tmp_path):
  file = tmp_path / 'sam_vit_b_01ec64.safetensors'
  save_file({authors(n): x for n, x in arrays_of('sam_hf').items()}, file)
  ours, expected = vit_jax.load(file), vit_jax.load(path_of('sam_hf'))
  assert (ours.format, ours.model, ours.pp) == ('authors', expected.model, expected.pp)
  assert 'central_crop(32' in ours.pp
  jax.tree.map(np.testing.assert_array_equal, ours.variables, expected.variables)
  assert all('\n  unused: mask_decoder.' in x.report for x in (ours, expected))
  # Both go to timm and to transformers, with their own epsilon.
  for to in ('timm', 'hf'):
    weights.write(weights.read(file), tmp_path / to, to)
    again = vit_jax.load(tmp_path / to)
    assert (again.model, again.pp) == (expected.model, expected.pp)
    jax.tree.map(np.testing.assert_array_equal, again.variables, expected.variables)
  theirs = {n: x for n, x in arrays_of('sam_hf').items() if n.startswith('vision')}
  assert load_file(tmp_path / 'hf' / 'model.safetensors').keys() == theirs.keys()


@pytest.mark.parametrize('named', [True, False])
def test_a_sam_starts_a_detector(named):
  header = read_header(str(path_of('samvit_timm')))
  section = {'name': 'sfp'}
  if named:
    keys = ('patch_size', 'width', 'depth', 'mlp_dim', 'num_heads')
    inside = {key: header.fields[key] for key in keys}
    inside |= dict(name='vitdet', window=3, global_blocks=(1,))
    section['backbone'] = inside
  model = weights.complete(section, header)
  whole = {'name': 'rcnn', 'variant': 'sfp'}
  whole = {'name': 'rcnn', 'backbone': section} if named else whole
  assert weights.complete(whole, header)['backbone'] == model
  inside = model['backbone']
  own = dict(pretrained_size=(32, 32), class_row=False, norm_eps=1e-5)
  assert inside.items() >= own.items()
  loaded = vit_jax.load(path_of('samvit_timm'), image_size=64, model=section)
  assert loaded.model == models.build(**model)
  params = loaded.params['backbone']
  expected = vit_jax.load(path_of('samvit_timm'), image_size=64).params
  jax.tree.map(np.testing.assert_array_equal, params, {k: expected[k] for k in params})
  assert 'unused: neck_1/conv/kernel' in loaded.report


def test_positions_of_a_sam_are_resized_for_the_table_of_a_vitdet():
  fields = read_header(str(path_of('samvit_timm'))).fields
  fields |= dict(name='vitdet', pretrained_size=(16, 16), class_row=True, neck=None)
  loaded = vit_jax.load(path_of('samvit_timm'), model=fields)
  assert 'position embeddings resized from (8, 8) to (4, 4), bicubic' in loaded.report
  table = loaded.params['Transformer']['posembed_input']['pos_embedding']
  assert table.shape == (1, 1 + 16, 16)
  without = vit_jax.load(path_of('samvit_timm'), model=fields | {'absolute': False})
  assert 'unused: Transformer/posembed_input/pos_embedding' in without.report
