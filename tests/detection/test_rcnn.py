"""Two-stage detectors against detectron2, torchvision and mmdetection: random tiny ones.

Tolerances are those of the references, absolute, relative to the largest value above 1:
other convolution algorithms and numbers of threads change them by up to 6e-5.
"""

import functools
import json
import pickle
import re
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import vit_jax
from tests.support import naming, two_stage
from vit_jax import models, trees, weights
from vit_jax.detection.models import roi_heads
from vit_jax.detection.regions.origins import ORIGINS
from vit_jax.detection.tasks import rcnn
from vit_jax.errors import UserError
from vit_jax.train import flops
from vit_jax.weights import formats, rename, zoo

MVIT_D2 = 'mask_rcnn_mvitv2_d2'
GOLDENS = (
  'faster_rcnn_fpn_d2',
  'faster_rcnn_fpn_giou_d2',
  'faster_rcnn_dc5_d2',
  'mask_rcnn_fpn_d2',
  'mask_rcnn_vitdet_d2',
  'cascade_mask_rcnn_vitdet_d2',
  'cascade_mask_rcnn_swin_d2',
  MVIT_D2,
  'mask_rcnn_torchvision',
  'mask_rcnn_v2_torchvision',
  'cascade_mask_rcnn_swin_mmdet',
)
LOSSES = {
  'faster_rcnn_fpn_giou_d2': dict(
    box_loss='giou', box_weight=20.0, proposal_loss='giou'
  ),
  'cascade_mask_rcnn_swin_mmdet': dict(box_loss='giou', box_weight=10.0),
}
MAPS, VALUES, SCORES, PIXELS = 2e-5, 2e-4, 5e-4, 2e-2


def close(ours, theirs, tolerance, message='', rows=None):
  """Compares as many rows [B, R] as the reference has; they are relative to its largest."""
  ours = np.asarray(ours)[:, : theirs.shape[1]].reshape(theirs.shape)
  if rows is not None:
    shown = np.arange(theirs.shape[1]) < np.asarray(rows)[:, None]
    ours, theirs = ours[shown], theirs[shown]
  scale = max(1, np.abs(theirs).max(initial=0))
  np.testing.assert_allclose(
    ours, theirs, rtol=0, atol=tolerance * scale, err_msg=message
  )


def pixels(*args):
  close(*args[:2], PIXELS / max(1, np.abs(args[1]).max(initial=0)), *args[2:])


def head(x: dict, name: str, key: str) -> np.ndarray:
  """Returns a reference's logits or deltas; torchvision's background comes first."""
  if 'torchvision' not in name:
    return x[key]
  return np.roll(x[key], -1, -1) if 'logits' in key else x[key][..., 4:]


@pytest.mark.parametrize('name', GOLDENS)
def test_results_are_those_of_the_reference(name):
  """In one program, as compiling takes the time: both passes share maps and proposals."""
  loaded, x = vit_jax.load(two_stage.FOLDER / name), two_stage.expected(name)
  model, fixed = loaded.model, {**loaded.variables}
  params, targets = fixed.pop('params'), two_stage.training_of(name, model)
  options = dict(origin=ORIGINS[model.origin], nominal=model.anchor_sample)

  def train(params, images, mask, targets):
    (outputs, _), _ = model.apply(
      {**fixed, 'params': params},
      *(images, mask, targets),
      train=True,
      features=False,
      rngs={'dropout': jax.random.key(0)},
      mutable=['batch_stats'],
    )
    losses = rcnn.losses(outputs, targets, **options, **LOSSES.get(name, {}))
    goals = [rcnn.mask_targets(targets, x, options['origin']) for x in outputs['masks']]
    return losses['loss'], outputs | {'goals': goals}

  @jax.jit
  def compute(params, images, mask, targets):
    detections = model.apply({**fixed, 'params': params}, images, mask)
    step = jax.value_and_grad(train, has_aux=True)
    return detections, step(params, images, mask, targets)

  detections, training = compute(params, *two_stage.images_of(name), targets)
  same_detections(name, model, *detections, x)
  (loss, outputs), gradients = training
  same_training(name, model, outputs, x)
  # SCORES: losses have the tolerance of scores.
  np.testing.assert_allclose(loss, x['loss_total'], rtol=SCORES)
  same_lengths(name, gradients, x)


def same_detections(name, model, outputs, out, x):
  for key in ('p2', 'p3', 'p4', 'p5', 'p6'):
    for theirs in {f'map_{key}', f'map_{int(key[1]) - 2}'} & x.keys():
      close(out[key], x[theirs], MAPS, theirs)
  number = x['num_proposals']
  assert out['proposal_valid'].sum(1).tolist() == number.tolist()
  pixels(out['proposal_boxes'], x['proposal_boxes'], 'proposals', number)
  for s in range(len(model.overlaps)):
    for part in ('logits', 'deltas'):
      if (key := f'box_{part}_{s}') in x:
        close(out[key], head(x, name, key), VALUES, key, number)
  number = x['num_detections']
  assert out['complete'].all()
  assert outputs['valid'].sum(1).tolist() == number.tolist()
  pixels(out['pixel_boxes'], x['boxes'], 'boxes', number)
  close(outputs['scores'], x['scores'], SCORES, 'scores', number)
  first = int('torchvision' in name)
  close(outputs['labels'] + first, x['classes'], 0, 'classes', number)
  if model.masks:
    close(outputs['masks'], x['mask_probs'], SCORES, 'masks')


def same_training(name, model, outputs, x):
  if 'rpn_labels' in x:
    np.testing.assert_array_equal(outputs['rpn']['label'], x['rpn_labels'])
  for s, stage in enumerate(outputs['stages']):
    key = f'_{s}' if s or model.origin == 'mmdetection' else ''
    if f'roi_boxes{key}' not in x:
      continue
    boxes, label = x[f'roi_boxes{key}'], stage['label']
    if model.origin != 'detectron2':
      stage = in_order(stage, boxes)
      label = stage['label']
    if model.origin == 'torchvision':  # whose background is 0
      label = (label + 1) % (model.num_classes + 1)
    number = x.get(f'roi_num{key}', x.get('roi_num_sampled'))
    number = np.full(len(boxes), boxes.shape[1]) if number is None else number
    assert stage['valid'].sum(1).tolist() == number.tolist()
    pixels(stage['boxes'], boxes, f'stage {s}', number)
    if f'roi_classes{key}' in x:
      close(label, x[f'roi_classes{key}'], 0, f'classes {s}', number)
    for part in ('logits', 'deltas'):
      if (key := f'train_box_{part}_{s}') in x:
        close(stage[part], head(x, name, key), VALUES, key, number)
  if 'mask_num' in x:
    (rows,), number = outputs['masks'], x['mask_num']
    assert rows['valid'].sum(1).tolist() == number.tolist()
    pixels(rows['boxes'], x['mask_boxes'], 'boxes of masks', number)
    close(rows['logits'], x['mask_train_logits'], VALUES, 'masks', number)
    close(outputs['goals'][0], x['mask_targets'], 0, 'targets of masks', number)


def in_order(stage: dict, boxes: np.ndarray) -> dict:
  """Returns rows in the order of the reference, which sorts a sample by place."""
  distance = np.abs(np.asarray(stage['boxes'])[:, None] - boxes[:, :, None]).sum(-1)
  order = distance.argmin(2)
  assert (np.sort(order, 1) == np.arange(order.shape[1])).all()
  rows = np.arange(len(order))[:, None]
  return {key: np.asarray(x)[rows, order] for key, x in stage.items()}


def same_lengths(name, gradients, x):
  """Compares lengths of gradients: a missing stop_gradient or factor shows here alone."""
  arrays = load_file(two_stage.FOLDER / name / 'model.safetensors')
  format, arrays, _ = formats.detect(arrays, {})
  facts = format.facts(two_stage.config_of(name), '')
  # Each array is filled with its number, which stands in all of ours that it becomes.
  numbers = {key: np.full(a.shape, i) for i, (key, a) in enumerate(arrays.items())}
  ours, unknown = rename.to_ours(numbers, format.rules(arrays, facts))
  assert not unknown
  squares = dict.fromkeys(range(len(arrays)), 0.0)
  for key, gradient in trees.flatten(gradients).items():
    squares[ours[key].flat[0]] += float(np.square(gradient, dtype=np.float64).sum())
  names = list(arrays)
  lengths = np.sqrt([squares[names.index(key)] for key in x['grad_names']])
  # MViT's tables of positions are resized to the windows when they are loaded.
  resized = [name == MVIT_D2 and '.rel_pos_' in key for key in x['grad_names']]
  lengths, expected = (np.where(resized, 0, v) for v in (lengths, x['grad_norms']))
  np.testing.assert_allclose(lengths, expected, rtol=2e-3, atol=1e-5)


def _fpn(name, variant, **fields):
  pyramid = {k: fields.pop(k) for k in ('norm',) if k in fields}
  return dict(
    name='fpn', backbone=dict(name=name, variant=variant, **fields), **pyramid
  )


AUTHORS = dict(overlaps=(0.5, 0.6, 0.7), origin='mmdetection')
AUTHORS |= dict(head='4conv1fc', head_norm='batch')
MVIT, SWIN = 'MViTv2/', 'Cascade Mask R-CNN Swin-'
# A name under which a model is published, or (backbone, fields).
COUNTS = {
  'Faster R-CNN R50-FPN': 'faster_rcnn_R_50_FPN_3x',
  'Mask R-CNN R50-FPN': 'mask_rcnn_R_50_FPN_1x',
  'Faster R-CNN R101-FPN': 'faster_rcnn_R_101_FPN_3x',
  'Mask R-CNN R101-FPN': 'mask_rcnn_R_101_FPN_3x',
  'Faster R-CNN R50-DC5': 'faster_rcnn_R_50_DC5_3x',
  'Faster R-CNN R101-DC5': 'faster_rcnn_R_101_DC5_3x',
  'Cascade Mask R-CNN R50-FPN': 'cascade_mask_rcnn_R_50_FPN_3x',
  'ViTDet/mask_rcnn_vitdet_b_100ep': 'mask_rcnn_vitdet_b',
  'ViTDet/mask_rcnn_vitdet_l_100ep': 'mask_rcnn_vitdet_l',
  'ViTDet/mask_rcnn_vitdet_h_75ep': 'mask_rcnn_vitdet_h',
  'ViTDet/cascade_mask_rcnn_vitdet_b_100ep': 'cascade_mask_rcnn_vitdet_b_100ep',
  'ViTDet/cascade_mask_rcnn_vitdet_l_100ep': 'cascade_mask_rcnn_vitdet_l',
  'ViTDet/cascade_mask_rcnn_vitdet_h_75ep': 'cascade_mask_rcnn_vitdet_h_75ep',
  'ViTDet/cascade_mask_rcnn_swin_b_in21k_50ep': 'cascade_mask_rcnn_swin_b_in21k',
  'ViTDet/cascade_mask_rcnn_swin_l_in21k_50ep': 'cascade_mask_rcnn_swin_l_in21k',
  'ViTDet/cascade_mask_rcnn_mvitv2_b_in21k_100ep': 'cascade_mask_rcnn_mvitv2_b_in21k',
  'ViTDet/cascade_mask_rcnn_mvitv2_l_in21k_50ep': 'cascade_mask_rcnn_mvitv2_l_in21k',
  'ViTDet/cascade_mask_rcnn_mvitv2_h_in21k_36ep': 'cascade_mask_rcnn_mvitv2_h_in21k',
  'torchvision/fasterrcnn_resnet50_fpn': 'fasterrcnn_resnet50_fpn',
  'torchvision/maskrcnn_resnet50_fpn': 'maskrcnn_resnet50_fpn',
  'torchvision/fasterrcnn_resnet50_fpn_v2': 'fasterrcnn_resnet50_fpn_v2',
  'torchvision/maskrcnn_resnet50_fpn_v2': 'maskrcnn_resnet50_fpn_v2',
  f'{MVIT}mask_rcnn_mvitv2_t_3x': (_fpn('mvit', 'T', map_norms=True), {}),
  f'{SWIN}T (mmdetection)': (_fpn('swin', 'T', map_norms=True), AUTHORS),
  f'{SWIN}S (mmdetection)': (_fpn('swin', 'S', map_norms=True), AUTHORS),
  f'{SWIN}B (mmdetection)': (_fpn('swin', 'B', map_norms=True), AUTHORS),
  'Mask R-CNN Swin-T (mmdetection)': (
    _fpn('swin', 'T', map_norms=True),
    dict(origin='mmdetection'),
  ),
}


class Evil:
  def __reduce__(self):
    return (open, ('evil', 'w'))


def test_pickles_of_detectron2(tmp_path, monkeypatch):
  """As published: arrays of NumPy by name, below 'model', and the author's name."""
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'cache'))
  folder = two_stage.FOLDER / 'faster_rcnn_fpn_d2'
  arrays = load_file(folder / 'model.safetensors')
  file = tmp_path / 'model_final.pkl'
  saved = {'model': arrays, '__author__': 'somebody', 'matching_heuristics': False}
  file.write_bytes(pickle.dumps(saved, protocol=2))
  shutil.copy(folder / 'config.json', tmp_path)
  ours, expected = weights.read(file), weights.read(folder)
  assert ours.fields == expected.fields
  jax.tree.map(np.testing.assert_array_equal, ours.flat, expected.flat)
  # Without a config it is one of the model zoo: BGR, strides in the first convolution.
  (tmp_path / 'config.json').unlink()
  ours = weights.read(file)
  assert ours.fields['backbone']['backbone']['stride_first']
  assert ours.pp.startswith('decode|detr_resize(800, 1333)|canvas(1344)|')
  assert 'anchor_sizes' not in ours.fields
  # The name of a model stands for its file.
  name = 'faster_rcnn_R_50_FPN_3x'
  place = tmp_path / 'cache' / zoo.ENTRIES[name].url.removeprefix('https://')
  place.parent.mkdir(parents=True)
  shutil.copy(file, place)
  named = weights.read(name)
  assert (named.fields, named.pp) == (ours.fields, ours.pp)
  assert zoo.find_licence(name).name == 'cc-by-sa-3.0'
  # Code in a pickle does not run.
  monkeypatch.chdir(tmp_path)
  file.write_bytes(pickle.dumps({'model': {**arrays, 'evil': Evil()}}))
  jax.tree.map(np.testing.assert_array_equal, weights.read(file).flat, ours.flat)
  assert not (tmp_path / 'evil').exists()


def test_norms_of_the_first_files_of_torchvision_have_no_epsilon(tmp_path):
  arrays = two_stage.FOLDER / 'mask_rcnn_torchvision' / 'model.safetensors'
  file = tmp_path / 'maskrcnn_resnet50_fpn_coco-bf2d0c1e.safetensors'
  shutil.copy(arrays, file)

  def epsilon(file):
    model = models.build('rcnn', **weights.read_header(file).fields)
    return model.backbone.backbone.norm_eps

  assert epsilon(file) == 0
  file = file.rename(tmp_path / 'model.safetensors')
  assert epsilon(file) == 1e-5
  fields = {'backbone': {'backbone': {'norm_eps': 0.0}}}
  (tmp_path / 'config.json').write_text(json.dumps({'vit_jax': {'fields': fields}}))
  assert epsilon(file) == 0


@pytest.mark.parametrize(
  'name',
  [
    'mask_rcnn_R_50_FPN_3x',
    'faster_rcnn_R_50_DC5_1x',
    'mask_rcnn_R_50_FPN_3x_syncbn',
    'cascade_mask_rcnn_vitdet_b',
    'cascade_mask_rcnn_swin_b_in21k',
    'cascade_mask_rcnn_mvitv2_b_in21k',
  ],
)
def test_a_name_is_the_model_that_its_file_gives(name):
  narrow = dict(conv_width=8, fc_width=8, num_classes=2)
  model = models.build(name, **narrow)
  size = zoo.ENTRIES[name].resolution
  spec = jax.ShapeDtypeStruct((1, size, size, 3), np.float32)
  flat = trees.flatten_variables(jax.eval_shape(model.init, jax.random.key(0), spec))
  flat = {key: np.zeros(x.shape, np.float16) for key, x in flat.items()}
  writer = formats.find_writer('rcnn', 'detectron2').writer
  arrays = rename.to_theirs(flat, writer.rules(flat, model.fields()))
  format, arrays, _ = formats.detect(arrays, {})
  facts = format.facts({}, name)
  fields = format.parse(arrays, facts, {}, {}).fields
  again = models.build('rcnn', **fields | {'conv_width': 8})
  assert again.fields() == model.fields()
  assert facts.image_size == (size, size)


def narrow_masks(key: str, x: np.ndarray) -> np.ndarray:
  """Cuts an array of a mask head: three channels instead of eight, one mask for all."""
  if 'mask_head' not in key:
    return x
  x = x[: 1 if 'predictor' in key or 'logits' in key else 3]
  first = 'mask_fcn1' in key or 'convs.0' in key
  return x[:, :3] if x.ndim > 1 and not first else x


@pytest.mark.parametrize(
  ('name', 'fields'),
  [
    ('mask_rcnn_fpn_d2', dict(head='1fc', conv_width=3, mask_width=None)),
    (
      'cascade_mask_rcnn_swin_mmdet',
      dict(head='4conv2fc', conv_width=8, mask_width=3),
    ),
  ],
)
def test_heads_of_other_sizes(name, fields, tmp_path):
  shutil.copytree(two_stage.FOLDER / name, tmp_path, dirs_exist_ok=True)
  arrays = load_file(tmp_path / 'model.safetensors')
  gone = re.compile(r'.*(mask_fcn[34]|mask_head\.\d\.convs\.[23]|box_head\.fc2)\..*')
  arrays = {k: narrow_masks(k, x) for k, x in arrays.items() if not gone.match(k)}
  for key in [k for k in arrays if 'shared_fcs.0' in k]:
    more = np.zeros((24, 24)[: arrays[key].ndim], np.float32)
    arrays[key.replace('fcs.0', 'fcs.1')] = more
  arrays = {key: np.ascontiguousarray(x) for key, x in arrays.items()}
  save_file(arrays, tmp_path / 'model.safetensors')
  model = vit_jax.load(tmp_path).model
  fields |= dict(mask_convs=2, class_agnostic_masks=True)
  assert model.fields().items() >= fields.items()
  if 'd2' in name:
    weights.write(weights.read(tmp_path), tmp_path / 'out', 'detectron2')
    again = load_file(tmp_path / 'out' / 'model.safetensors')
    jax.tree.map(np.testing.assert_array_equal, again, arrays)
  with pytest.raises(UserError, match=naming('head', '4conv1fc', '2fcs')):
    models.build('rcnn:R50-FPN', head='2fcs')


def test_the_head_of_mmdetections_mask_rcnn_has_no_number(tmp_path):
  folder = two_stage.FOLDER / 'cascade_mask_rcnn_swin_mmdet'
  shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
  head = re.compile(r'(roi_head\.\w+_head)\.(\d)')
  arrays = load_file(tmp_path / 'model.safetensors').items()
  first = {
    head.sub(r'\1', k): x for k, x in arrays if not re.match(r'.*_head\.[12]', k)
  }
  save_file(first, tmp_path / 'model.safetensors')
  loaded, cascade = vit_jax.load(str(tmp_path)), vit_jax.load(str(folder))
  assert (loaded.model.overlaps, cascade.model.overlaps) == ((0.5,), (0.5, 0.6, 0.7))
  params, every = trees.flatten(loaded.params), trees.flatten(cascade.params)
  assert params.keys() == {name for name in every if not re.search('head[12]', name)}
  for name, x in params.items():
    np.testing.assert_array_equal(x, every[name], err_msg=name)


def test_a_mask_that_all_classes_share():
  head = roi_heads.MaskHead(1, 'none', 4, 1, np.float32)
  x, label = np.ones((1, 2, 2, 2, 4), np.float32), np.array([[0, 3]])
  logits, _ = head.init_with_output(jax.random.key(0), x, label, train=False)
  np.testing.assert_array_equal(logits[0, 0], logits[0, 1])


# The golden of MViT, like published MViTs, has position tables of another window size than its
# model. Reading resizes the tables, so writing cannot give the file's own back.
COME_BACK = [name for name in GOLDENS if name.endswith('d2') and name != MVIT_D2]


@pytest.mark.parametrize('name', COME_BACK)
def test_files_of_detectron2_come_back(name, tmp_path):
  source = weights.read(two_stage.FOLDER / name)
  weights.write(source, tmp_path / 'out', 'detectron2')
  arrays = load_file(tmp_path / 'out' / 'model.safetensors')
  expected = load_file(two_stage.FOLDER / name / 'model.safetensors')
  expected = {k: x for k, x in expected.items() if 'relative_position_index' not in k}
  assert arrays.keys() == expected.keys()
  for key, x in expected.items():
    np.testing.assert_array_equal(arrays[key], x, err_msg=key)
  again = weights.read(tmp_path / 'out')
  model = lambda source: models.build('rcnn', **source.fields).fields()
  assert model(again) == model(source)
  assert (again.pp, again.image_size) == (source.pp, source.image_size)


# Of `counts.json`, and of the Swin paper's table at 800 x 1280 as measured on the authors'
# config, where attention's products count, too: 1e9 multiply-adds.
COSTS = {
  'Faster R-CNN R50-FPN': ((800, 1088), dict(backbone=116.19, rpn=43.02, box=14.3)),
  'Faster R-CNN R50-DC5': ((800, 1088), dict(backbone=104.99, rpn=128.87, box=104.22)),
  'ViTDet/cascade_mask_rcnn_vitdet_l_100ep': (
    (1024, 1024),
    dict(backbone=1574.24, rpn=103.31, box=385.61, mask=52.99),
  ),
  f'{SWIN}T (mmdetection)': (
    (800, 1280),
    dict(backbone=148.65, rpn=50.62, box=386.58, mask=158.96),
  ),
}


@pytest.mark.parametrize('system', COUNTS)
def test_published_systems_have_as_many_parameters_and_cost_as_much(system):
  """Parts of a detector; multiply-adds of 1,000 proposals and 100 masks."""
  if isinstance(named := COUNTS[system], str):
    model = models.build(named)
  else:
    model = models.build('rcnn', backbone=named[0], **named[1])
  # Tables of positions have the size that the publishers gave them.
  usual = (1024, 1024) if 'vitdet' in system else (224, 224)
  size, expected = COSTS.get(system, (usual, {}))
  spec = lambda *shape, dtype=np.float32: jax.ShapeDtypeStruct((1, *shape), dtype)
  images, parameters, costs = spec(*size, 3), 0, {}

  def add(name, times, part, *args, **options):
    nonlocal parameters
    init = functools.partial(part.init_with_output, **options)
    outputs, variables = jax.eval_shape(init, jax.random.key(0), *args)
    leaves = jax.tree.leaves(variables['params'])
    parameters += times * sum(x.size for x in leaves)
    if name in expected:
      apply = functools.partial(part.apply, **options)
      costs[name] = times * flops.count(apply, variables, *args) / 2e9
    return outputs

  outputs, out = add('backbone', 1, model.backbone, images)
  maps = [*outputs.values()] if isinstance(outputs, dict) else [out['stage4']]
  anchors = len(model.ratios) * len(model.anchor_sizes[0])
  add('rpn', 1, roi_heads.RPN(model.rpn_convs, anchors, np.float32), maps)
  stages, K, C = len(model.overlaps), model.num_classes, maps[-1].shape[-1]
  widths = model.head_norm, model.conv_width, model.fc_width, K, model.class_agnostic
  box = roi_heads.BoxHead(model.head, *widths, np.float32)
  add('box', stages, box, spec(1000, 7, 7, C), train=False)
  if model.masks:
    heads = stages if model.origin == 'mmdetection' else 1
    mask = roi_heads.MaskHead(4, model.mask_norm, model.conv_width, K, np.float32)
    args = spec(100, 14, 14, C), spec(100, dtype=np.int32)
    add('mask', heads, mask, *args, train=False)
    if 'mask' in expected:  # theirs computes all K masks of a box
      costs['mask'] += heads * 100 * 28 * 28 * model.conv_width * (K - 1) / 1e9
  counts = json.loads((two_stage.FOLDER / 'counts.json').read_text())
  expected_number = counts[system]['parameters']
  if 'torchvision' in system:
    # torchvision predicts a box, and a mask, for the background; its frozen norms count.
    expected_number -= 4 * 1025 + 257 * model.masks
    expected_number -= 53_120 * ('v2' not in system)
  assert parameters == expected_number
  assert costs == pytest.approx(expected, rel=1e-3)
