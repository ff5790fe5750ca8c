"""Segmentation: the head, its loss, its metric, and the classes of segments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import naming, runs
from vit_jax import models, optim, sharding, tasks
from vit_jax.data import pipeline, sources
from vit_jax.detection.evaluators import segmentation
from vit_jax.detection.tasks import segment
from vit_jax.evaluators.class_match import Classes
from vit_jax.tools.inspect import recipe
from vit_jax.train import run
from vit_jax.train.state import init_state
from vit_jax.train.step import make_step

TINY = models.family('semantic_fpn').tiny[0]
K = 3
SPEC = {
  'image': jax.ShapeDtypeStruct((8, 32, 32, 3), jnp.float32),
  'segments': jax.ShapeDtypeStruct((8, 32, 32), jnp.uint8),
  'mask': jax.ShapeDtypeStruct((8,), jnp.float32),
}


def model(**fields):
  return models.build('semantic_fpn', **{'num_classes': K, **TINY, **fields})


def squares(number: int, seed: int = 0) -> dict:
  """Returns images with a dark and a bright square, and the class of every pixel."""
  rng = np.random.default_rng(seed)
  images = rng.normal(0, 0.05, (number, 32, 32, 3)).astype(np.float32)
  segments = np.zeros((number, 32, 32), np.uint8)
  for image, labels in zip(images, segments, strict=True):
    for label, value in ((1, -1.0), (2, 1.0)):
      y, x = rng.integers(0, 3, 2) * 8
      image[y : y + 12, x : x + 12] = value
      labels[y : y + 12, x : x + 12] = label
  return {'image': images, 'segments': segments, 'mask': np.ones(number, np.float32)}


# -- the head ---------------------------------------------------------------------------


def test_levels_are_summed_at_the_finest_and_enlarged_to_the_image():
  built = model(levels=('p2', 'p4'))
  images = jnp.zeros((1, 40, 64, 3))
  init = jax.eval_shape(built.init_with_output, jax.random.key(0), images)
  (logits, out), variables = init
  assert logits.shape == (1, 40, 64, K)
  # Patches of 8 px: levels 1 to 4, of which two are read. Each doubles twice from 4 to 2.
  assert out['merged'].shape == (1, 10, 16, 32)
  params = variables['params']
  assert set(params['level2']) == {'conv0', 'norm0'}
  assert set(params['level4']) == {'conv0', 'norm0', 'conv1', 'norm1'}


# -- the loss ---------------------------------------------------------------------------


class Fixed:
  """A model whose logits are its parameters."""

  num_classes = K

  def apply(self, variables, images, **_):
    return (variables['params'], {}), {}


def loss_of(logits, batch, **options):
  task = segment.Segment(
    Fixed(), {k: jnp.asarray(x) for k, x in batch.items()}, **options
  )
  weight = batch['mask'] / max(batch['mask'].sum(), 1)
  prepared = task.prepare({**batch, 'weight': jnp.asarray(weight)}, None)
  return task.loss({'params': logits}, prepared, None)


def test_the_loss_is_a_mean_over_labelled_pixels_of_the_whole_batch():
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(3, 4, 5, K)).astype(np.float32)
  segments = rng.integers(0, K, (3, 4, 5)).astype(np.uint8)
  segments[0, :3] = 255  # few labels, in the first image alone
  batch = {
    'image': logits,
    'segments': segments,
    'mask': np.array([1, 1, 0], np.float32),
  }
  loss, (metrics, _) = loss_of(logits, batch)
  p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  real = [(b, y, x) for b, y, x in np.ndindex(2, 4, 5) if segments[b, y, x] != 255]
  each = [-np.log(p[*at, segments[at]]) for at in real]
  np.testing.assert_allclose(loss, np.mean(each), rtol=1e-5)
  right = [logits[at].argmax() == segments[at] for at in real]
  np.testing.assert_allclose(metrics['accuracy'], np.mean(right), rtol=1e-6)


def test_a_label_that_is_no_class_is_not_learned_in_silence():
  logits = np.zeros((1, 2, 2, K), np.float32)
  batch = {'image': logits, 'mask': np.ones(1, np.float32)}
  bad = np.full((1, 2, 2), K, np.uint8)
  assert np.isnan(loss_of(logits, {**batch, 'segments': bad})[0])
  assert loss_of(logits, {**batch, 'segments': bad}, ignore=K)[0] == 0


@pytest.mark.parametrize(
  ('segments', 'facts'),
  [
    (None, ("'segments'", 'digits_canvas')),
    (jax.ShapeDtypeStruct((8, 16, 16), jnp.uint8), ("'segments'", 'uint8[8, 16, 16]')),
    (jax.ShapeDtypeStruct((8, 32, 32), jnp.float32), ('float32[8, 32, 32]',)),
  ],
)
def test_batches_without_a_class_for_every_pixel_are_refused(segments, facts):
  spec = {k: x for k, x in {**SPEC, 'segments': segments}.items() if x is not None}
  with pytest.raises(ValueError, match=naming(*facts)):
    tasks.build('segment', model(), spec)


@pytest.mark.parametrize(
  ('task', 'name', 'facts'),
  [
    ('segment', 'vitdet', ('segment', 'pixel', 'ViTDet', 'image')),
    ('classify', 'sfp', ('classify', 'SFP', 'maps')),
  ],
)
def test_tasks_refuse_models_of_other_outputs(task, name, facts):
  built = models.build(name, **models.family(name).tiny[0])
  with pytest.raises(ValueError, match=naming(*facts)):
    tasks.build(task, built, {**SPEC, 'label': SPEC['mask']})


def start(steps: int):
  """Returns (initial state, jitted and without arguments; step) of training."""
  task = tasks.build('segment', model(levels=('p2', 'p3')), SPEC)
  optimizer = optim.build('adamw', 3e-2, steps)
  key = jax.random.key(0)
  init = lambda: init_state(task, optimizer, SPEC, key, {}, [('.*', True)])
  return jax.jit(init), make_step(task, optimizer, lambda batch: batch, key)


def trained(devices: int, steps: int):
  """Returns (loss of each step, metrics) of training on eight images."""
  init, step = start(steps)
  mesh = sharding.make_mesh(devices, devices=jax.devices()[:devices])
  with jax.set_mesh(mesh):
    state = init()
    places = sharding.state_shardings(state, mesh, 'fsdp')
    state = jax.device_put(state, places)
    step = jax.jit(step, out_shardings=(places, sharding.replicated(mesh)))
    losses = []
    for _ in range(steps):
      state, metrics = step(state, sharding.global_batch(squares(8), mesh))
      losses.append(float(metrics['loss']))
  return losses, metrics


@pytest.mark.slow
def test_a_segmenter_learns_squares():
  losses, metrics = trained(1, 36)
  np.testing.assert_allclose(losses[0], np.log(K), rtol=1e-5)
  assert losses[-1] < 0.2
  assert metrics['accuracy'] > 0.9, metrics
  split, _ = trained(8, 2)
  np.testing.assert_allclose(split, losses[:2], rtol=1e-4)


# -- the evaluator ----------------------------------------------------------------------


def test_mean_iou_of_counts():
  # By hand: class 0 has 5 right, 1 missed, 2 added; class 1 has 3, 2, 1; 2 never occurs.
  metrics = segmentation.mean_iou(np.array([[5, 1, 0], [2, 3, 0], [0, 0, 0]]))
  assert metrics == {
    'mean_iou': pytest.approx((5 / 8 + 3 / 6) / 2),
    'pixel_accuracy': pytest.approx(8 / 11),
    'iou_0': pytest.approx(5 / 8),
    'iou_1': pytest.approx(3 / 6),
  }
  with pytest.raises(ValueError, match='label'):
    segmentation.mean_iou(np.zeros((3, 3), int))


# -- classes ----------------------------------------------------------------------------

NAMES = ['background', *map(str, range(10))]

CANVASES = dict(
  source='digits_canvas',
  split='train[:10]',
  source_options={'segments': True},
  pp='value_range(-1, 1)|pad_to(boxes=4, label=4)',
)


def test_a_model_has_the_classes_of_the_segments():
  data = pipeline.train(**CANVASES, batch_size=8)
  sections = dict(task={'name': 'segment'}, data=CANVASES, steps=1, evals={})
  sections |= dict(checkpoint={}, log={})
  resolved = lambda model: run._resolve({**sections, 'model': model}, data)
  config = resolved({})
  assert config['model']['num_classes'] == 11  # not the 10 of the boxes
  assert config['resolved']['class_names'] == NAMES
  facts = ('segments', '11 classes', 'num_classes=10')
  with pytest.raises(ValueError, match=naming(*facts)):
    resolved({'num_classes': 10})


@pytest.fixture(scope='module')
def evaluator():
  """Ten canvases in batches of 8, the second padded."""
  mesh = sharding.make_mesh(8)
  data = {**CANVASES, 'batch_size': 8}
  return lambda *model, **options: segmentation.Segmentation(
    mesh, lambda: None, *model, data=data, **options
  )


def test_the_evaluator_counts_every_pixel_once(evaluator):
  def predict(params, batch):  # all of class 2 is predicted as class 0
    labels = jnp.where(batch['segments'] == 2, 0, batch['segments'])
    return {'logits': jax.nn.one_hot(labels, 11)}

  metrics = evaluator().run(predict, {})
  source = sources.build('digits_canvas', 'train[:10]', segments=True)
  labels = np.stack([x['segments'] for x in source.read(np.arange(10))])
  share = np.bincount(labels.reshape(-1), minlength=11)
  assert share[2] > 0
  assert metrics['examples'] == 10
  assert metrics['iou_2'] == 0
  assert metrics['iou_0'] == pytest.approx(share[0] / (share[0] + share[2]))
  assert {metrics[f'iou_{k}'] for k in range(3, 11) if share[k]} == {1}
  iou = [x for name, x in metrics.items() if name.startswith('iou')]
  assert metrics['mean_iou'] == pytest.approx(np.mean(iou))
  assert metrics['pixel_accuracy'] == pytest.approx(1 - share[2] / labels.size)


def test_labels_that_the_model_does_not_have(evaluator):
  logits = lambda params, batch: {'logits': jnp.zeros((*batch['segments'].shape, 10))}
  with pytest.raises(
    ValueError, match=naming('digits_canvas', 'class 10', '10 classes')
  ):
    evaluator().run(logits, {})
  # Where the classes are known, before the evaluation begins.
  evaluator(Classes(NAMES, 11))
  evaluator(Classes([*NAMES, ''], 12))
  evaluator(Classes(None, 10), ignore=10)
  with pytest.raises(
    ValueError, match=naming('digits_canvas', 'class 10', '10 classes')
  ):
    evaluator(Classes(None, 10))
  with pytest.raises(ValueError, match=naming('Class 0', "'background'", "'0'")):
    evaluator(Classes(NAMES[1:], 11))


def test_inspect_counts_a_head_for_the_classes_of_segments():
  checked = recipe.load(f'{runs.ROOT}/configs/vitdet_digits.py:debug,head=segment', [])
  assert recipe.describe(checked)['classes'] == 11
