"""The losses of two-stage detectors: the references', and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import GOLDEN, naming
from vit_jax import models, sharding, trees
from vit_jax.detection import boxes
from vit_jax.detection.regions.origins import ORIGINS
from vit_jax.detection.tasks import rcnn

LOSSES = np.load(GOLDEN / 'twostage' / 'losses.npz')
D2 = ORIGINS['detectron2']


losses = jax.jit(
  rcnn.losses, static_argnames=('origin', 'nominal', 'box_loss', 'proposal_loss')
)


def close(ours, expected, message=''):
  # The references compute in float32, too.
  np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-6, err_msg=message)


@pytest.mark.parametrize('i', range(3))
def test_smooth_l1(i):
  x = LOSSES['pred'] - LOSSES['target']
  close(rcnn.smooth_l1(x, float(LOSSES['betas'][i])), LOSSES[f'smooth_l1_{i}'])


def test_giou():
  close(1 - boxes.giou(LOSSES['boxes'], LOSSES['target_boxes']), LOSSES['giou'])


def head(rows=slice(None), images=1):
  """Returns the golden rows of a box head as outputs and targets of a batch."""
  part = lambda name: jnp.asarray(LOSSES[f'head_{name}'][rows][None])
  stage = {'boxes': part('boxes'), 'target': part('targets')}
  stage |= {'label': part('classes').astype(int), 'logits': part('logits')}
  stage |= {
    'deltas': part('deltas').reshape(1, -1, 3, 4),
    'valid': jnp.ones(stage['label'].shape, bool),
  }
  anchors = jnp.tile(jnp.array([0.0, 0.0, 8.0, 8.0]), (6, 1))
  rpn = dict(logits=jnp.zeros((1, 6)), label=jnp.array([[1, 0, 0, -1, -1, -1]]))
  rpn['positives'] = dict(
    boxes=anchors[None, :2],
    target=anchors[None, :2] + 2,
    deltas=jnp.zeros((1, 2, 4)),
    valid=jnp.array([[True, False]]),
  )
  return {'rpn': rpn, 'stages': [stage]}, {'weight': jnp.full(images, 1 / images)}


def test_losses_of_a_box_head_are_the_references():
  ours = losses(*head(), origin=D2, nominal=4)
  close(ours['loss_box'], LOSSES['head_loss_smooth_l1'])
  close(ours['loss_class'], LOSSES['head_loss_cls'])
  # One positive and two negatives, of four to sample; each side is off by 2 of 8.
  close(ours['loss_object'], 3 * np.log(2) / 4)
  close(ours['loss_proposal'], 0.5 / 4)
  parts = ('loss_object', 'loss_proposal', 'loss_class', 'loss_box')
  close(ours['loss'], sum(ours[part] for part in parts))
  assert ours['positives'] == (LOSSES['head_classes'] < 3).sum()


def test_weights_and_denominators():
  options = dict(box_weight=3, proposal_weight=2, box_loss='giou', proposal_loss='giou')
  ours = losses(*head(), origin=D2, nominal=4, **options)
  close(ours['loss_box'], 3 * LOSSES['head_loss_giou'])
  # Intersection over union 36 / 92; the box around both is 10 x 10.
  close(ours['loss_proposal'], 2 * (1 - 36 / 92 + 8 / 100) / 4)
  # mmdetection divides by the three that were sampled; smooth L1 of two offsets of 1/4.
  ours = losses(*head(), origin=ORIGINS['mmdetection'], nominal=4)
  close(ours['loss_object'], np.log(2))
  close(ours['loss_proposal'], 2 * (1 / 4 - 1 / 18) / 3)


def batch(images=4, number=3):
  """Returns a batch on canvases of 8 x 12 with images of 8 x 6; the last is unreadable."""
  rng = np.random.default_rng(0)
  low = rng.uniform(0, 0.5, (images, number, 2))
  corners = np.concatenate([low, low + 0.5], -1)
  corners[0, 1, 2] = corners[0, 1, 0]  # without height
  mask = np.zeros((images, 8, 12))
  mask[:-1, :, :6] = 1
  weight = np.append(np.full(images - 1, 1 / (images - 1)), 0)
  parts = dict(image=np.zeros((images, 8, 12, 3)), image_mask=mask, boxes=corners)
  parts |= dict(boxes_mask=np.tile([1, 1, 0], (images, 1)), weight=weight)
  parts |= dict(extents=corners, masks=np.full((images, number, 112, 112), 255))
  label = {'label': np.zeros((images, number), int)}
  return {k: np.asarray(x, np.float32) for k, x in parts.items()} | label


RESNET = dict(name='resnet', depths=(1, 1), widths=(16, 32), stem_width=8)
SMALL = models.MODELS['rcnn'].tiny[0] | dict(
  backbone=dict(name='fpn', channels=8, backbone=RESNET | dict(frozen_norm=True)),
  box_sample=4,
)
MODEL = models.build('rcnn', **SMALL)


def test_targets_are_in_pixels_and_keys_do_not_depend_on_micro_batches():
  whole = batch()
  target = rcnn.RCNN(MODEL, whole).prepare(whole, jax.random.key(0), None)['target']
  pixels = whole['boxes'][..., [1, 0, 3, 2]] * [6, 8, 6, 8]
  np.testing.assert_allclose(target['boxes'][:-1], pixels[:-1], rtol=1e-6)
  np.testing.assert_allclose(target['extents'][:-1], pixels[:-1], rtol=1e-6)
  expected = np.tile([True, True, False], (4, 1)) & (whole['weight'] > 0)[:, None]
  expected[0, 1] = False
  np.testing.assert_array_equal(target['valid'], expected)
  assert len({tuple(key) for key in np.asarray(target['key'])}) == 4
  # Without padding fractions are those of the canvas.
  del whole['image_mask']
  whole_canvas = rcnn.RCNN(MODEL, whole).prepare(whole, jax.random.key(0), None)[
    'target'
  ]
  np.testing.assert_array_equal(whole_canvas['key'], target['key'])
  pixels = whole['boxes'][..., [1, 0, 3, 2]] * [12, 8, 12, 8]
  np.testing.assert_allclose(whole_canvas['boxes'], pixels, rtol=1e-6)
  # The last image, which is unreadable, has no objects though its boxes have an area.
  assert whole_canvas['valid'].any(1).tolist() == [True, True, True, False]


@pytest.mark.parametrize('missing', ['boxes', 'label', 'boxes_mask', 'masks'])
def test_batches_without_objects(missing):
  spec = {name: x for name, x in batch().items() if name != missing}
  with pytest.raises(ValueError, match=naming(missing, 'pad_to', 'masks=True')):
    rcnn.RCNN(MODEL, spec)
  if missing == 'masks':  # Faster R-CNN does without
    del spec['extents']
    rcnn.RCNN(MODEL.clone(masks=False), spec)


def test_masks_are_cut_out_of_boxes():
  """A box half of which is left of its object, whose mask is full, and one around it."""
  rows = {
    'boxes': jnp.array([[[0.0, 4, 8, 12], [4, 4, 8, 12]]]),
    'index': jnp.array([[1, 1]]),
    'logits': jnp.zeros((1, 2, 4, 4)),
    'valid': jnp.array([[True, True]]),
  }
  targets = {
    'masks': jnp.array([[np.zeros((112, 112)), np.full((112, 112), 255)]], jnp.uint8),
    'extents': jnp.array([[[0.0, 0, 9, 9], [4, 4, 8, 12]]]),
    'size': jnp.array([[16.0, 16]]),
    'weight': jnp.ones(1),
  }
  half = np.tile([0, 0, 1, 1], (4, 1))
  ours = jax.jit(rcnn.mask_targets, static_argnums=2)(targets, rows, D2)
  np.testing.assert_array_equal(ours[0], [half, np.ones((4, 4))])
  outputs, weights = head()
  outputs['masks'] = [rows | {'logits': jnp.tile(3.0 * half - 1, (1, 2, 1, 1))}]
  ours = losses(outputs, targets | weights, origin=D2, nominal=4)
  each = np.log1p(np.exp([-1, -2, 1, -2]))  # outside, inside: of the two boxes
  close(ours['loss_mask'], each.mean())


def test_losses_of_micro_batches_add_up():
  """Exactly where samples are full; that of masks by the share of images, not of masks."""
  rng = np.random.default_rng(0)
  B, R, K = 4, 6, 3
  corners = lambda *shape: np.cumsum(rng.uniform(1, 9, (*shape, 2, 2)), -2)
  rows = lambda *shape: corners(*shape).reshape(*shape, 4)
  stage = {'boxes': rows(B, R), 'target': rows(B, R), 'valid': np.ones((B, R), bool)}
  stage |= {'label': rng.integers(0, K + 1, (B, R)), 'deltas': rows(B, R, K)}
  stage['logits'] = rng.normal(size=(B, R, K + 1))
  positives = {key: rows(B, R) for key in ('boxes', 'target', 'deltas')}
  positives['valid'] = rng.random((B, R)) < 0.5
  rpn = {'label': rng.integers(-1, 2, (B, R)), 'positives': positives}
  rpn['logits'] = rng.normal(size=(B, R))
  drawn = {'boxes': rows(B, R), 'valid': rng.random((B, R)) < 0.5}
  drawn |= {'index': np.zeros((B, R), int), 'logits': rng.normal(size=(B, R, 4, 4))}
  targets = {'masks': rng.random((B, 1, 8, 8)), 'extents': rows(B, 1)}
  targets |= {'weight': np.array([1, 1, 1, 0]) / 3, 'size': np.full((B, 2), 32)}
  outputs = {'rpn': rpn, 'stages': [stage], 'masks': [drawn]}

  def of_images(*images, **changed):
    part = jax.tree.map(lambda x: x[[*images]], (outputs, targets | changed))
    return losses(*part, origin=D2, nominal=4)

  whole, a, b = of_images(0, 1, 2, 3), of_images(0, 2), of_images(1, 3)
  for name in whole.keys() - {'loss', 'loss_mask'}:
    # Sums in another order.
    np.testing.assert_allclose(a[name] + b[name], whole[name], rtol=1e-5, err_msg=name)
  # What image 3 holds does not matter, as it has no weight.
  other = of_images(1, 0, weight=targets['weight'] * [0, 1, 1, 1])
  np.testing.assert_array_equal(other['loss_mask'], b['loss_mask'])
  total = a['loss_mask'] + b['loss_mask']
  assert abs(total - whole['loss_mask']) < 0.1 * whole['loss_mask']


def test_the_loss_is_that_of_the_whole_batch():
  """On eight devices, and without the image that could not be read."""
  rng = np.random.default_rng(0)
  B, N = 8, 3
  whole = batch(B, N)
  whole['image'] = rng.normal(size=(B, 32, 32, 3)).astype(np.float32)
  whole['image_mask'] = np.ones((B, 32, 32), np.float32)
  whole['image_mask'][:4, :, 24:] = 0
  whole['image_mask'][-1] = whole['image'][-1] = 0
  whole['masks'] = rng.integers(0, 2, (B, N, 112, 112)).astype(np.uint8) * 255
  task = rcnn.RCNN(MODEL, whole)
  shapes = jax.eval_shape(lambda key: task.init(key, whole), jax.random.key(0))
  variables = jax.tree.map(
    lambda x: (1 + 0.2 * rng.normal(size=x.shape)).astype(x.dtype), shapes
  )

  @jax.jit
  def measure(variables, batch):
    """Returns {name: metric, or gradient of a parameter}."""
    batch = task.prepare(batch, jax.random.key(1), None)
    loss = lambda params: task.loss(
      variables | {'params': params}, batch, jax.random.key(2)
    )
    grads, (metrics, _) = jax.grad(loss, has_aux=True)(variables['params'])
    return metrics | trees.flatten(grads)

  numbers = measure(variables, whole)
  mesh = sharding.make_mesh(4, 2)
  with jax.set_mesh(mesh):
    split = measure(variables, sharding.global_batch(whole, mesh))
  # The last image does not count: keys of the others stay, as it is the last.
  other = whole | {'boxes': whole['boxes'].copy(), 'label': whole['label'].copy()}
  other['boxes'][-1], other['label'][-1] = whole['boxes'][0], 4
  same = measure(variables, other)
  for name, number in numbers.items():
    # Sums in another order.
    np.testing.assert_allclose(split[name], number, rtol=1e-4, atol=1e-5, err_msg=name)
    np.testing.assert_array_equal(same[name], number, err_msg=name)


def test_every_stage_draws_a_sample_of_its_own(monkeypatch):
  draws, fold_in = [], jax.random.fold_in
  spy = lambda key, number: draws.append(number) or fold_in(key, number)
  monkeypatch.setattr(jax.random, 'fold_in', spy)
  fields = dict(origin='mmdetection', overlaps=(0.5, 0.6, 0.7), masks=False)
  model = models.build('rcnn', **SMALL | fields)
  whole = batch()
  task = rcnn.RCNN(model, whole)
  target = task.prepare(whole, jax.random.key(0), None)['target']
  draws.clear()
  train = lambda images, target: model.init(jax.random.key(0), images, None, target)
  jax.eval_shape(train, np.zeros((4, 32, 32, 3), np.float32), target)
  drawn = [number for number in draws if isinstance(number, int)]
  assert sorted(drawn) == [0, 1, 2, 3], 'of anchors, then of each stage'


def test_fewer_candidates_than_the_sample_are_all_drawn():
  """A quarter of the sample may be positive, not of the candidates: ten, not three."""
  model = models.build('rcnn', **SMALL | dict(box_sample=40, masks=False))
  corners = np.float32([[0, 0, 9, 9], [8, 4, 30, 20], [2, 9, 20, 30], [1, 1, 31, 31]])
  target = dict(boxes=corners, label=np.zeros(4, int), valid=np.ones(4, bool))
  target = jax.tree.map(lambda x: x[None], target | dict(key=np.zeros(2, np.uint32)))
  images = np.random.default_rng(0).normal(size=(1, 32, 32, 3)).astype(np.float32)

  @jax.jit
  def sample(images, target):
    (outputs, _), _ = model.init_with_output(jax.random.key(0), images, None, target)
    return outputs['stages'][0]

  stage = sample(images, target)
  assert stage['valid'].sum() == model.after[0] + 4
  assert (stage['label'] < model.num_classes).sum() >= 4  # the targets themselves
