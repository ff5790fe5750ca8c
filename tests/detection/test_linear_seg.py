"""Linear segmentation: the head, folders of masks, a run on a frozen backbone."""

import json

import jax
import numpy as np
import pytest
from PIL import Image
from sklearn import metrics

from tests.support import GOLDEN, commands, naming, runs, tiny_models
from vit_jax import config, models, sharding, trees, weights
from vit_jax.data import pipeline, sources
from vit_jax.detection.evaluators import segmentation
from vit_jax.errors import UserError
from vit_jax.tools import predict
from vit_jax.train import run as train
from vit_jax.train.trainer import Trainer

# -- the head -----------------------------------------------------------------------------


def enlarged(x, size):
  """Bilinear, half-pixel centres, the border repeated: [B, h, w, K] to (H, W)."""
  for axis, n in zip((1, 2), size, strict=True):
    old = x.shape[axis]
    at = (np.arange(n) + 0.5) * old / n - 0.5
    along = lambda row, at=at, old=old: np.interp(at, np.arange(old), row)
    x = np.apply_along_axis(along, axis, x)
  return x


@pytest.mark.parametrize('layers', [1, 2])
def test_the_head_is_a_linear_layer_on_normalised_patches(layers):
  backbone = tiny_models.TINY['linear_seg 0']['backbone'] | {'depth': 3}
  model = tiny_models.build('linear_seg 0', layers=layers, backbone=backbone)
  variables, images = tiny_models.random(model), tiny_models.images()
  logits, out = jax.jit(model.apply)(variables, images)
  (B, H, W, _), params = images.shape, variables['params']
  if layers == 1:
    x = out['encoded']
  else:
    x = np.stack([out['block01'], out['block02']], 2).astype(np.float64)
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
  x = np.reshape(x[:, 1:], (B, 4, 4, -1))  # the class token is in front
  stats, norm = variables['batch_stats']['norm'], params['norm']
  x = (x - stats['mean']) / np.sqrt(stats['var'] + 1e-5) * norm['scale'] + norm['bias']
  np.testing.assert_allclose(out['joined'], x, atol=1e-5 * np.abs(x).max())
  expected = enlarged(x @ params['head']['kernel'] + params['head']['bias'], (H, W))
  atol = 1e-5 * np.abs(expected).max()
  np.testing.assert_allclose(logits, expected, rtol=0, atol=atol)


def test_other_backbones_give_their_last_stages():
  swin = models.family('fpn').tiny[0]['backbone']
  model = models.build('linear_seg', backbone=swin, layers=2, num_classes=3)
  images = jax.ShapeDtypeStruct((1, 64, 64, 3), np.float32)
  (logits, out), _ = jax.eval_shape(model.init_with_output, jax.random.key(0), images)
  assert logits.shape == (1, 64, 64, 3)
  assert out['joined'].shape == (1, 16, 16, 16 + 32)  # both at the scale of the first
  with pytest.raises(UserError, match=naming('layers=3', 'stage2')):
    model.change(layers=3).shapes((64, 64, 3))
  vit = tiny_models.build('linear_seg 0')
  with pytest.raises(UserError, match=naming('(36, 36)', '(8, 8)')):
    vit.shapes((36, 36, 3))


# -- a plain ViT below pyramids -----------------------------------------------------------

PREFIX = dict(name='vit', patch_size=(8, 8), width=16, depth=2, mlp_dim=32, num_heads=2)
PREFIX |= dict(classifier='token', registers=4, layer_scale=1e-5)
PREFIX |= dict(rope='dinov3', posemb='none')


@pytest.mark.parametrize('name', ['linear_seg', 'semantic_fpn'])
def test_training_starts_on_a_vit_with_registers(name, tmp_path, monkeypatch):
  c = config.load(f'{runs.ROOT}/configs/linear_seg.py:debug')
  sfp = dict(name='sfp', backbone=PREFIX, channels=32, extra_level=False)
  c['model'] = {'name': name, 'backbone': PREFIX if name == 'linear_seg' else sfp}
  runs.on_one_device(monkeypatch)
  runs.until_the_first_step(monkeypatch, c, tmp_path)


ANY = 'dinov2_reg4_swiglu_hf dinov3_hf clip_hf siglip_hf beit_hf deit_distilled_hf'


@pytest.mark.parametrize('source', [*ANY.split(), 'mae_hf', 'mixer_google.npz'])
def test_weights_of_any_family_are_below_both_kinds_of_heads(source):
  source = weights.read(GOLDEN / source)
  for name in ('linear_seg', 'sfp'):
    model = models.build(**weights.complete({'name': name}, source))
    _, merge = weights.fit(source, model, source.image_size)
    assert not any('backbone' in x for x in merge.reinitialized)
    assert model.backbone.family_name == source.family


def test_maps_leave_out_the_tokens_in_front_of_the_patches():
  model = models.build(**PREFIX, num_classes=None)
  images = np.zeros((2, 32, 48, 3), np.float32)
  _, out = jax.jit(lambda: model.init_with_output(jax.random.key(0), images)[0])()
  maps = model.maps(out)
  assert set(maps) == {'stem', 'tokens', 'block00', 'block01', 'encoded'}
  assert {x.shape for x in maps.values()} == {(2, 4, 6, 16)}
  token = out['encoded'][1, 5 + 2 * 6 + 3]
  np.testing.assert_array_equal(maps['encoded'][1, 2, 3], token)


# -- masks --------------------------------------------------------------------------------

SIZES = [(24, 40), (32, 32), (40, 24), (16, 16)]
NAMES = ['sky', 'sea', 'sand']


def write_masks(root, number=4, names=NAMES):
  """Writes images whose gray level tells the class of the mask, of the number given."""
  rng = np.random.default_rng(0)
  for split, count in (('train', number), ('val', 3)):
    for folder in ('images/a', 'masks/a'):
      (root / split / folder).mkdir(parents=True)
    for i in range(count):
      mask = rng.integers(0, 3, (4, 4)).astype(np.uint8)
      mask = np.asarray(Image.fromarray(mask).resize(SIZES[i % 4][::-1], 0))
      gray = np.repeat(80 * mask[..., None], 3, -1)
      Image.fromarray(gray).save(root / split / 'images/a' / f'{i}.png')
      image = Image.fromarray(np.where(mask == 2, 255, mask) if i == 1 else mask)
      if i == 2:
        image.putpalette(bytes([9, 200, 100, 0, 0, 255, 1, 2, 3]))
      image.save(root / split / 'masks/a' / f'{i}.png')
  if names:
    (root / 'classes.txt').write_text('\n'.join(names) + '\n')
  return root


def test_a_folder_of_masks(tmp_path):
  source = sources.build(f'masks:{write_masks(tmp_path)}', 'train')
  assert (source.num_classes, source.class_names) == (3, NAMES)
  for i, example in enumerate(source.read(np.arange(4))):
    number = int(source.name_of(i)[-5])
    gray = np.asarray(Image.open(source.name_of(i)))[..., 0]
    assert example['segments'].shape == SIZES[number]
    expected = np.where(gray == 160, 255, gray // 80) if number == 1 else gray // 80
    np.testing.assert_array_equal(example['segments'], expected)
  # Without splits, and without names.
  (tmp_path / 'classes.txt').unlink()
  alone = sources.build(f'masks:{tmp_path / "train"}', 'train[:50%]')
  assert (len(alone), alone.num_classes) == (2, None)
  facts = ('validation', 'train[90%:]', 'linear_seg:data=masks:ROOT')
  with pytest.raises(UserError, match=naming(*facts)):
    sources.build(f'masks:{tmp_path / "train"}', 'val')


def test_masks_that_do_not_fit(tmp_path):
  root = write_masks(tmp_path, names=NAMES[:2])
  with pytest.raises(UserError, match=naming('class 2', 'classes.txt', '2')):
    sources.build(f'masks:{root}', 'val').read(np.arange(3))
  write = lambda x, i: Image.fromarray(x).save(root / f'train/masks/a/{i}.png')
  write(np.zeros((24, 40, 3), np.uint8), 0)
  write(np.zeros((40, 24), np.uint8), 1)
  (root / 'train/masks/a/2.png').write_bytes(b'no')
  (root / 'classes.txt').unlink()
  examples = sources.build(f'masks:{root}', 'train').read(np.arange(4))
  assert 'its mask is not an image of a known type' in [
    x.get('error') for x in examples
  ]
  options = dict(batch_size=4, num_classes=3, max_bad_fraction=1.0)
  pp = 'decode|resize(8)|value_range'
  data = pipeline.EvalBatches(f'masks:{root}', 'train', pp, **options)
  (batch,) = data.iterate()
  assert batch['mask'].sum() == data.num_examples - data.bad_images == 1
  (root / 'train/masks/a/3.png').unlink()
  with pytest.raises(UserError, match=naming('1 of 4', 'train/masks/a/3.png')):
    sources.build(f'masks:{root}', 'train')
  (root / 'classes.txt').write_bytes('lac glacé'.encode('latin-1'))
  with pytest.raises(UserError, match=naming(root / 'classes.txt', 'utf')):
    sources.build(f'masks:{root}', 'val')


@pytest.mark.parametrize(
  'ops',
  [
    'inception_crop(12, 30, method="nearest")|flip_lr',
    'resize((10, 14), method="nearest")',
    'resize_small(16, method="nearest", antialias=False)|central_crop((15, 13))',
  ],
)
def test_segments_stay_with_their_pixels(tmp_path, ops):
  root = write_masks(tmp_path, number=12)
  pp = f'decode|{ops}|value_range(0, 255)'
  data = pipeline.TrainBatches(f'masks:{root}', 'train', pp, 12)
  batches = data.iterate()
  batch = next(batches)
  batches.close()
  gray, segments = batch['image'][..., 0], batch['segments']
  assert segments.dtype == np.uint8
  assert batch['mask'].sum() == 12
  assert (segments == gray // 80)[segments != 255].all()
  assert (gray[segments == 255] == 160).all()
  assert {*np.unique(segments)} == {0, 1, 2, 255}
  with pytest.raises(ValueError, match=naming('trim(2)', 'segments')):
    pipeline.TrainBatches(f'masks:{root}', 'train', f'decode|trim(2){pp[6:]}', 12)


# -- the metric ---------------------------------------------------------------------------


def test_the_metric_is_that_of_scikit_learn_on_any_number_of_devices(tmp_path):
  root = write_masks(tmp_path, number=11)
  section = dict(source=f'masks:{root}', split='train', batch_size=8)
  section['pp'] = "decode|resize(16, method='nearest')|value_range"

  def predict(params, batch):  # class 0 at some of the pixels
    del params
    right = np.random.default_rng(0).random((16, 16)) < 0.7
    answer = right * batch['segments'].clip(0, 2)
    return {'logits': jax.nn.one_hot(answer, 3)}

  measured = []
  for devices in (jax.devices()[:1], jax.devices()[:8]):
    mesh = sharding.make_mesh(devices=devices)
    evaluator = segmentation.Segmentation(mesh, lambda: None, data=section)
    measured.append(evaluator.run(predict, {}))
  assert measured[0] == measured[1]
  assert measured[0]['examples'] == 11  # the second batch is padded

  batches = list(pipeline.EvalBatches(**section).iterate())
  truth = np.concatenate([b['segments'][b['mask'] > 0] for b in batches])
  answer = np.concatenate(
    [predict({}, b)['logits'].argmax(-1)[b['mask'] > 0] for b in batches]
  )
  real = truth != 255
  iou = metrics.jaccard_score(truth[real], answer[real], average=None)
  assert [measured[0][f'iou_{k}'] for k in range(3)] == pytest.approx(iou.tolist())
  assert measured[0]['mean_iou'] == pytest.approx(iou.mean())
  assert measured[0]['pixel_accuracy'] == pytest.approx((truth == answer)[real].mean())
  confusion = metrics.confusion_matrix(truth[real], answer[real])
  np.testing.assert_array_equal(evaluator.predictions['counts'], confusion)


# -- a run --------------------------------------------------------------------------------


def test_a_run_on_a_frozen_backbone(tmp_path, monkeypatch, capsys):
  runs.on_one_device(monkeypatch)
  root, workdir = write_masks(tmp_path / 'data', number=8), tmp_path / 'run'
  source = GOLDEN / 'vit_google_token.npz'
  spec = f'linear_seg:weights={source},data=masks:{root},res=32,steps=2,warmup=1'
  c = config.load(f'{spec},batch=4,eval_every=1')
  status, rows = train.train(c, workdir)
  runs.assert_finished(status, rows, c['evals'])
  assert 0 <= rows[-1]['val/mean_iou'] <= 1

  # The backbone is that of the weights, to the bit, and not in the state of the optimizer.
  written = config.read(workdir)
  assert written['resolved']['inferred'] == ['backbone']
  assert written['model']['backbone']['name'] == 'vit'
  assert written['resolved']['class_names'] == NAMES
  loaded, origin = weights.load(str(workdir)), weights.load(str(source))
  ours = loaded.params['backbone']
  for name in ('embedding', 'Transformer'):
    jax.tree.map(np.testing.assert_array_equal, ours[name], origin.params[name])
  assert np.abs(loaded.params['head']['kernel']).max() > 0
  images = {'image': jax.ShapeDtypeStruct((4, 32, 32, 3), np.float32)}
  images['segments'] = jax.ShapeDtypeStruct((4, 32, 32), np.uint8)
  state = Trainer(written, images, sharding.make_mesh()).abstract_state
  trained = trees.flatten(state.params)
  assert {*trained} == {'head/bias', 'head/kernel', 'norm/bias', 'norm/scale'}
  moments = [x.size for x in jax.tree.leaves(state.opt_state) if x.ndim]
  assert sum(moments) == 2 * sum(x.size for x in trained.values())

  # It goes on from its checkpoints, with the same config.
  c['steps'] = 3
  c['resume_allow'] = 'steps'
  status, _ = train.train(c, workdir)
  assert status['step'] == 3

  photo = str(root / 'val/images/a/0.png')
  capsys.readouterr()
  argv = workdir, photo, '--draw', tmp_path / 'out', '--json'
  code, out, _ = commands.run(predict.main, capsys, *argv)
  (image,) = json.loads(out)['images']
  assert code == 0
  assert sum(x['share'] for x in image['segments']) == pytest.approx(1)
  assert {x['name'] for x in image['segments']} <= {*NAMES}
  mask = Image.open(image['mask'])
  assert (mask.mode, mask.size) == ('P', (image['width'], image['height']))
  assert {*np.unique(mask)} == {x['class'] for x in image['segments']}
