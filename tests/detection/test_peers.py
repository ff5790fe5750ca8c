"""Detectors and ViTDet beside transformers; two stages beside torchvision."""

import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.support.goldens import path_of
from tests.support.peers import MARKS, images, randomise, save_timm
from vit_jax import models, trees, weights
from vit_jax.detection import inference
from vit_jax.detection.regions import suppression
from vit_jax.detection.regions.origins import ORIGINS
from vit_jax.detection.regions.roi_align import roi_align
from vit_jax.detection.tasks import rcnn
from vit_jax.weights import pipelines, zoo

pytestmark = MARKS

TOLERANCE = 1e-4  # the reference's own float32 is off its float64 by 2e-5


def trained(torch, model):
  """Makes parameters random, and statistics those of a trained network."""
  torch.manual_seed(0)
  for parameter in model.parameters():
    parameter.add_(0.02 * torch.randn_like(parameter))
  for name, statistic in model.named_buffers():
    if name.endswith('running_mean'):
      statistic.add_(0.1 * torch.randn_like(statistic))
    if name.endswith('running_var'):
      statistic.mul_(0.5 + torch.rand_like(statistic))
  return model.eval()


def padded():
  """Returns (images [2, 96, 128, 3], mask) whose first image is 70 x 100 pixels."""
  batch = np.random.default_rng(0).normal(size=(2, 96, 128, 3)).astype(np.float32)
  mask = np.ones((2, 96, 128), np.int64)
  mask[0, 70:] = mask[0, :, 100:] = 0
  return batch * mask[..., None].astype(np.float32), mask


def nchw(torch, x):
  return torch.from_numpy(np.ascontiguousarray(np.moveaxis(np.asarray(x), -1, 1)))


def theirs(torch, model, pixels, mask):
  out = model(pixel_values=nchw(torch, pixels), pixel_mask=torch.from_numpy(mask))
  return {'logits': out.logits.numpy(), 'boxes': out.pred_boxes.numpy()}


def agree(folder, expected, pixels, mask):
  loaded = vit_jax.load(folder)
  outputs, _ = jax.jit(loaded.model.apply)(loaded.variables, pixels, mask)
  for key, x in expected.items():
    np.testing.assert_allclose(outputs[key], x, rtol=0, atol=TOLERANCE, err_msg=key)


SMALL = dict(
  d_model=32,
  encoder_layers=2,
  decoder_layers=2,
  encoder_attention_heads=4,
  decoder_attention_heads=4,
  encoder_ffn_dim=64,
  decoder_ffn_dim=64,
  num_queries=10,
  num_labels=7,
)
RESNET = dict(embedding_size=16, hidden_sizes=[32, 64], depths=[1, 2])
BACKBONES = {
  'of transformers': dict(use_timm_backbone=False),
  'of timm': dict(use_timm_backbone=True, backbone='resnet50'),
  'of timm, DC5': dict(use_timm_backbone=True, backbone='resnet50', dilation=True),
}


@pytest.mark.parametrize('backbone', BACKBONES)
def test_files_both_ways(torch, timm, transformers, tmp_path, backbone):
  options = BACKBONES[backbone]
  if not options['use_timm_backbone']:
    inside = transformers.ResNetConfig(**RESNET, out_features=['stage2'])
    options = dict(options, backbone_config=inside)
  config = transformers.DetrConfig(**SMALL, **options)
  model = trained(torch, transformers.DetrForObjectDetection(config))
  model.save_pretrained(tmp_path / 'theirs')
  inputs = padded()
  expected = theirs(torch, model, *inputs)
  agree(tmp_path / 'theirs', expected, *inputs)

  weights.write(weights.read(tmp_path / 'theirs'), tmp_path / 'ours', 'hf')
  again, info = transformers.DetrForObjectDetection.from_pretrained(
    tmp_path / 'ours', output_loading_info=True
  )
  assert not any(info[k] for k in ('missing_keys', 'unexpected_keys'))
  for key, x in theirs(torch, again.eval(), *inputs).items():
    np.testing.assert_array_equal(x, expected[key], err_msg=key)


@pytest.mark.parametrize('shape', [(70, 100), (150, 75)])
def test_boxes_in_pixels_of_a_file(torch, transformers, tmp_path, shape):
  shutil.copytree(path_of('detr_hf'), tmp_path, dirs_exist_ok=True)
  model = transformers.DetrForObjectDetection.from_pretrained(tmp_path).eval()
  size = {'shortest_edge': 96, 'longest_edge': 128}
  processor = transformers.DetrImageProcessor(size=size)
  processor.save_pretrained(tmp_path)
  coarse = np.random.default_rng(0).integers(0, 256, (5, 5, 3), np.uint8)
  image = Image.fromarray(coarse).resize(shape[::-1], Image.Resampling.BICUBIC)
  image.save(tmp_path / 'a.png')

  # On the canvas of `inputs`; alone in a batch theirs would not be padded.
  canvas = {'height': 128, 'width': 128}
  inputs = processor(image, return_tensors='pt', do_pad=True, pad_size=canvas)
  loaded = vit_jax.load(tmp_path)
  ours = {
    key: np.asarray(x)
    for key, x in inference.inputs(loaded, [tmp_path / 'a.png']).items()
  }
  np.testing.assert_array_equal(ours['mask'], inputs['pixel_mask'].numpy())
  pixels = inputs['pixel_values'].numpy().transpose(0, 2, 3, 1)
  # A level of 255 where rounding differs.
  np.testing.assert_allclose(ours['images'], pixels, rtol=0, atol=2e-2)

  # Prediction cuts off padding in steps of 32 pixels.
  shown = ours['mask'][0]
  height, width = (-(-int(shown.any(k).sum()) // 32) * 32 for k in (1, 0))
  images = ours['images'][:, :height, :width]
  inputs['pixel_values'] = nchw(torch, images)
  inputs['pixel_mask'] = inputs['pixel_mask'][:, :height, :width]
  (boxes,) = processor.post_process_object_detection(
    model(**inputs), threshold=0.0, target_sizes=[shape]
  )
  ours = inference.detect_images(loaded, [tmp_path / 'a.png'])
  assert ours.sizes.tolist() == [[*shape]]
  assert np.ptp(boxes['boxes'].numpy(), 0).min() > 5  # the queries differ
  np.testing.assert_array_equal(ours.labels[0], boxes['labels'])
  np.testing.assert_allclose(ours.scores[0], boxes['scores'], rtol=0, atol=TOLERANCE)
  np.testing.assert_allclose(ours.boxes[0], boxes['boxes'], rtol=0, atol=1e-2)


# -- ViTDet -------------------------------------------------------------------------------


def map_of(torch, model, x):
  with torch.no_grad():
    (map_,) = model.eval()(nchw(torch, x)).feature_maps
  return np.moveaxis(map_.numpy(), 1, -1)


def last_map(source, x, **options):
  loaded = vit_jax.load(source, **options)
  _, out = jax.jit(loaded.model.apply)(loaded.variables, x)
  return out[f'block{loaded.model.depth - 1:02d}']


@pytest.mark.parametrize('window', [0, 3])
def test_transformers_vitdet_both_ways(torch, transformers, tmp_path, window):
  config = transformers.VitDetConfig(
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=2,
    image_size=64,
    pretrain_image_size=48,
    patch_size=16,
    window_size=window,
    window_block_indices=[0, 1] if window else [],
    use_relative_position_embeddings=bool(window),
    out_features=['stage3'],
  )
  model = randomise(torch, transformers.VitDetBackbone(config))
  model.save_pretrained(tmp_path / 'hf')
  x = images(64)
  expected = map_of(torch, model, x)
  close = lambda ours: np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-5)
  close(last_map(tmp_path / 'hf', x))
  back = tmp_path / 'back'
  weights.write(weights.read(tmp_path / 'hf'), back, 'hf')
  loaded, info = transformers.VitDetBackbone.from_pretrained(
    back, output_loading_info=True
  )
  assert not info['missing_keys']
  assert not info['unexpected_keys']
  close(map_of(torch, loaded, x))


# The goldens of SAM are models like these.
SAM = dict(num_heads=2, window_size=3, patch_size=4)
TIMM_SAMS = {
  'samvit_base_patch16': dict(neck_chans=8, num_classes=0),
  'samvit_large_patch16': dict(neck_chans=8, num_classes=5, norm_layer=''),
  'samvit_base_patch16_224': dict(num_classes=5),
}


@pytest.mark.parametrize('name', TIMM_SAMS)
def test_timm_sam_both_ways(torch, timm, tmp_path, name):
  args = SAM | dict(img_size=32, embed_dim=16, depth=3, mlp_ratio=2.0)
  args |= dict(global_attn_indexes=[1])
  args |= TIMM_SAMS[name]
  model = randomise(torch, timm.create_model(name, **args))
  folder, classes = save_timm(tmp_path / 'timm', model), args.pop('num_classes')
  config = json.loads((folder / 'config.json').read_text())
  config |= {'num_classes': classes, 'model_args': args}
  (folder / 'config.json').write_text(json.dumps(config))
  weights.write(weights.read(folder), tmp_path / 'back', 'timm')
  again = timm.create_model(f'local-dir:{tmp_path / "back"}', pretrained=True).eval()
  for size in (32, (20, 48)):
    x = images(size)
    expected = model(nchw(torch, x)).numpy()
    loaded = vit_jax.load(folder)
    logits, out = jax.jit(loaded.model.apply)(loaded.variables, x)
    agree_with = logits if model.num_classes else out['pre_logits']
    np.testing.assert_allclose(agree_with, expected, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(again(nchw(torch, x)).numpy(), expected)


def test_transformers_sam_both_ways(torch, transformers, tmp_path):
  config = transformers.SamVisionConfig(
    hidden_size=16,
    output_channels=8,
    num_hidden_layers=3,
    num_attention_heads=2,
    image_size=32,
    patch_size=4,
    window_size=3,
    global_attn_indexes=[1],
    mlp_dim=32,
  )
  model = randomise(torch, transformers.SamVisionModel(config))
  model.save_pretrained(tmp_path / 'hf')
  x = images(32)
  expected = model(nchw(torch, x)).last_hidden_state.numpy()
  loaded = vit_jax.load(tmp_path / 'hf')
  _, out = jax.jit(loaded.model.apply)(loaded.variables, x)
  np.testing.assert_allclose(
    np.moveaxis(out['neck'], -1, 1), expected, rtol=0, atol=2e-5
  )
  weights.write(weights.read(tmp_path / 'hf'), tmp_path / 'back', 'hf')
  again, info = transformers.SamVisionModel.from_pretrained(
    tmp_path / 'back', output_loading_info=True
  )
  assert not any(info[key] for key in ('missing_keys', 'unexpected_keys'))
  ours = again.eval()(nchw(torch, x)).last_hidden_state.numpy()
  np.testing.assert_array_equal(ours, expected)


# -- RoIAlign -----------------------------------------------------------------------------


@pytest.mark.parametrize('aligned', [True, False])
@pytest.mark.parametrize('samples', [0, 2])
def test_roi_align_of_torchvision(torch, transformers, samples, aligned):
  from torchvision.ops import roi_align as compiled

  rng = np.random.default_rng(0)
  x = rng.normal(size=(1, 23, 31, 3)).astype(np.float32)
  centres = rng.uniform(-40, [160, 130], (60, 2))
  sides = np.exp(rng.uniform(-5, 6, (60, 2)))
  sides[:10, 0], sides[10:15] = 1e-3, 0  # thin, and empty
  sides[15:20] *= -1  # corners that cross
  boxes = np.concatenate([centres - sides / 2, centres + sides / 2], -1)
  boxes[20:40] = 28 * np.round(boxes[20:40] / 28)  # whole bins of whole cells
  boxes = boxes.astype(np.float32)
  cotangent = rng.normal(size=(60, 7, 7, 3)).astype(np.float32)

  with torch.enable_grad():
    theirs = nchw(torch, x).requires_grad_()
    rois = [torch.from_numpy(boxes)]
    pooled = compiled(theirs, rois, 7, 0.25, samples, aligned)
    pooled.backward(nchw(torch, cotangent))
  run = lambda x: roi_align([x], boxes[None], [4], 7, samples, aligned)[0]
  ours, vjp = jax.vjp(jax.jit(run), x)
  back = lambda tensor: np.moveaxis(tensor.detach().numpy(), 1, -1)
  np.testing.assert_allclose(ours, back(pooled), rtol=0, atol=2e-5)
  expected = back(theirs.grad)  # sums over all boxes
  close = 2e-6 * np.abs(expected).max()
  np.testing.assert_allclose(*vjp(cotangent), expected, rtol=0, atol=close)


# -- Suppression --------------------------------------------------------------------------


# IoU at the threshold: torchvision compares a float32 quotient with a float64, and 3 / 10
# in float32 exceeds 0.3. At 0.5 and 0.7, which detectors use, equality is equality.
@pytest.mark.parametrize('threshold', [0.5, 0.7])
@pytest.mark.parametrize('whole', [True, False])
def test_suppression_beside_torchvision(torch, threshold, whole):
  ops = pytest.importorskip('torchvision.ops', reason='torchvision is not installed')
  rng = np.random.default_rng(int(10 * threshold))
  cases, n = 200, 40
  corner, sides = rng.integers(0, 12, (cases, n, 2)), rng.integers(0, 11, (cases, n, 2))
  boxes = np.concatenate([corner, corner + sides], -1).astype(np.float32)
  if not whole:
    boxes += rng.uniform(0, 0.4, boxes.shape).astype(np.float32)
    boxes[..., 2:] = np.maximum(boxes[..., :2], boxes[..., 2:])
  # Half of the boxes are copies of others; scores differ, as theirs is no stable sort.
  boxes[:, n // 2 :] = boxes[:, rng.integers(0, n, n // 2)]
  scores = rng.permuted(np.tile(np.arange(n, dtype=np.float32), (cases, 1)), axis=1) / n
  classes, number = rng.integers(0, 3, (cases, n)), rng.integers(0, n + 1, cases)
  number[0] = 0
  valid = np.arange(n) < number[:, None]

  def keep(boxes, scores, *arrays):
    order = jnp.argsort(-scores)
    arrays = (x[order] for x in arrays)
    survivors = suppression.keep(boxes[order], threshold, *arrays)
    return survivors[jnp.argsort(order)]

  alone = np.array(jax.jit(jax.vmap(keep))(boxes, scores, valid))
  within = np.array(jax.jit(jax.vmap(keep))(boxes, scores, valid, classes))
  for i, m in enumerate(number):
    b, s, c = (torch.from_numpy(x[i, :m]) for x in (boxes, scores, classes))
    expected = np.zeros((2, n), bool)
    expected[0, ops.nms(b, s, threshold).numpy()] = True
    # Without its offsets between classes, which round: they are no whole pixels.
    each = [ops.nms(b[c == k], s[c == k], threshold) for k in range(3)]
    rows = [torch.where(c == k)[0][kept] for k, kept in enumerate(each)]
    expected[1, torch.cat(rows).numpy()] = True
    np.testing.assert_array_equal([alone[i], within[i]], expected)
    if whole:
      (batched,) = np.nonzero(within[i])
      theirs_ = ops.batched_nms(b, s, c, threshold).numpy()
      np.testing.assert_array_equal(batched, np.sort(theirs_))


# -- Two-stage detectors -----------------------------------------------------------------


@pytest.mark.parametrize('kind', ['faster', 'mask'])
@pytest.mark.parametrize('version', ['', '_v2'])
def test_names_of_torchvision(torch, transformers, tmp_path, kind, version):
  from torchvision.models import detection

  name = f'{kind}rcnn_resnet50_fpn{version}'
  model = getattr(detection, name)(weights=None, weights_backbone=None)
  file = tmp_path / zoo.ENTRIES[name].url.rpartition('/')[2]
  torch.save(model.state_dict(), file)
  header, named = weights.read_header(file), models.build(name)
  assert models.build('rcnn', **header.fields).fields() == named.fields()
  # Ours have no boxes and masks of the background, which torchvision ignores.
  background = 4 * 1025 + 257 * named.masks
  theirs = sum(x.numel() for x in model.parameters()) - background
  shapes = {k: x for k, x in header.shapes.items() if not trees.is_statistic(k)}
  assert sum(map(math.prod, shapes.values())) == theirs


# -- Training of a two-stage detector -----------------------------------------------------


def test_losses_of_torchvision(torch, transformers, tmp_path):
  """All candidates are sampled, so that nothing is random; norms have no epsilon."""
  from torchvision.models import detection, resnet
  from torchvision.models.detection import _utils, backbone_utils
  from torchvision.ops.misc import FrozenBatchNorm2d

  torch.manual_seed(0)
  one = [1, 1, 1, 1]
  body = resnet.ResNet(resnet.Bottleneck, one, norm_layer=FrozenBatchNorm2d)
  for name, norm in body.named_modules():
    # With small variances, epsilon counts.
    if isinstance(norm, FrozenBatchNorm2d):
      norm.running_var.uniform_(1e-4, 1e-3)
      norm.weight.copy_(norm.running_var.sqrt() * (0.2 if 'bn3' in name else 1))
  backbone = backbone_utils._resnet_fpn_extractor(body, 3)
  options = dict(rpn_batch_size_per_image=8000, box_batch_size_per_image=400)
  options |= dict(rpn_post_nms_top_n_train=60, _skip_resize=True)
  model = detection.MaskRCNN(backbone, num_classes=6, **options).train()
  _utils.overwrite_eps(model, 0.0)
  file = tmp_path / 'maskrcnn_resnet50_fpn_coco-00000000.pth'
  torch.save(model.state_dict(), file)

  rng, (h, w), N = np.random.default_rng(0), (96, 128), 3
  pixels = rng.random((2, h, w, 3), np.float32)
  low = rng.uniform(0, 60, (2, N, 2))
  boxes = np.concatenate([low, low + rng.uniform(20, 36, (2, N, 2))], -1)
  boxes, label = boxes.astype(np.float32), rng.integers(0, 5, (2, N))
  masks = rng.integers(0, 2, (2, N, h, w))
  rows = [
    dict(boxes=b, labels=k + 1, masks=m.to(torch.uint8))
    for b, k, m in zip(*map(torch.from_numpy, (boxes, label, masks)), strict=True)
  ]
  expected = model(list(nchw(torch, pixels)), rows)

  fields = dict(after=(60, 60), anchor_sample=8000, box_sample=400)
  loaded = vit_jax.load(file, image_size=(h, w), **fields)
  images = (pixels - pipelines.MEAN) / pipelines.STD
  targets = dict(boxes=boxes, label=label, valid=np.ones((2, N), bool))
  targets |= dict(masks=masks, extents=np.tile(np.float32([0, 0, w, h]), (2, N, 1)))
  targets |= dict(size=np.float32([[h, w]] * 2), weight=np.full(2, 0.5))
  targets['key'] = np.zeros((2, 2), np.uint32)

  @jax.jit
  def losses(variables, images, targets):
    outputs, _ = loaded.model.apply(variables, images, None, targets)
    return rcnn.losses(outputs, targets, origin=ORIGINS['torchvision'], nominal=8000)

  ours = losses(loaded.variables, images.astype(np.float32), targets)
  names = dict(loss_object='loss_objectness', loss_proposal='loss_rpn_box_reg')
  names |= dict(loss_class='loss_classifier', loss_box='loss_box_reg')
  for name in (*names, 'loss_mask'):
    other = float(expected[names.get(name, name)])
    # Sums in another order.
    np.testing.assert_allclose(ours[name], other, rtol=1e-4, err_msg=name)
