"""Segmentation: the head, its loss, its metric, and the classes of segments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import naming, runs
from tests.support.figures import decoded
from vit_jax import models, sharding, tasks
from vit_jax.data import pipeline, sources
from vit_jax.detection.evaluators import segmentation
from vit_jax.detection.tasks import segment
from vit_jax.detection.tools import report_objects
from vit_jax.evaluators.class_match import Classes
from vit_jax.tools.inspect import recipe
from vit_jax.tools.report.folder import Run
from vit_jax.train import run
from vit_jax.train.step import gradients

TINY = models.family('semantic_fpn').tiny[0]
K = 3
SPEC = {
  'image': jax.ShapeDtypeStruct((8, 32, 32, 3), jnp.float32),
  'segments': jax.ShapeDtypeStruct((8, 32, 32), jnp.uint8),
  'mask': jax.ShapeDtypeStruct((8,), jnp.float32),
}


def model(**fields):
  return models.build('semantic_fpn', **{'num_classes': K, **TINY, **fields})


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


def doubled(x):
  """Bilinear, half-pixel centres: three quarters of a pixel, one of its neighbour."""
  for axis in (1, 2):
    ends = np.pad(x, [(int(i == axis),) * 2 for i in range(4)], 'edge')
    before, after = (np.take(ends, range(k, k + x.shape[axis]), axis) for k in (0, 2))
    pairs = np.stack([0.75 * x + 0.25 * before, 0.75 * x + 0.25 * after], axis + 1)
    x = pairs.reshape([n * (1 + (i == axis)) for i, n in enumerate(x.shape)])
  return x


def test_the_head_sums_levels_that_are_convolved_and_doubled():
  built = model(channels=64)
  rng = np.random.default_rng(0)
  draw = lambda shape: rng.normal(0.1, 0.2, shape).astype(np.float32)
  images = draw((1, 32, 32, 3))
  shapes = jax.eval_shape(built.init, jax.random.key(0), images)
  variables = jax.tree.map(lambda x: draw(x.shape), shapes)
  logits, out = jax.jit(built.apply)(variables, images)
  params, merged = variables['params'], 0
  for steps, name in enumerate(('p1', 'p2', 'p3', 'p4')):
    y, level = out[name], params[f'level{name[1:]}']
    for i in range(max(steps, 1)):
      y = jax.lax.conv_general_dilated(
        y,
        level[f'conv{i}']['kernel'],
        (1, 1),
        'SAME',
        dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
      )
      groups = np.asarray(y).reshape(1, -1, 32, 2)
      mean, var = groups.mean((1, 3), keepdims=True), groups.var((1, 3), keepdims=True)
      y = ((groups - mean) / np.sqrt(var + 1e-5)).reshape(y.shape)
      y = np.maximum(y * level[f'norm{i}']['scale'] + level[f'norm{i}']['bias'], 0)
      y = doubled(y) if steps else y
    merged = merged + y
  head = params['head']
  expected = doubled(merged @ head['kernel'][0, 0] + head['bias'])
  np.testing.assert_allclose(
    logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max()
  )


# -- the loss ---------------------------------------------------------------------------


class PerPixel:
  """A model whose parameters [C, K] multiply every pixel."""

  num_classes = K

  def apply(self, variables, images, **_):
    return (images @ variables['params'], {}), {}


def measure(params, batch, accum=1):
  """Returns ({metric: value}, gradients) of a batch in `accum` micro-batches."""
  task = segment.Segment(PerPixel(), batch)
  batch = task.prepare(batch, None, None)
  loss = lambda params, stats, *args: task.loss({'params': params}, *args)
  return gradients(loss, params, {}, batch, jax.random.key(0), accum)[:2]


def test_the_loss_is_a_mean_over_labelled_pixels_of_the_whole_batch():
  rng = np.random.default_rng(0)
  params = rng.normal(size=(3, K)).astype(np.float32)
  images = rng.normal(size=(8, 4, 5, 3)).astype(np.float32)
  segments = rng.integers(0, K, (8, 4, 5)).astype(np.uint8)
  segments[0, :3] = 255  # few labels, in the first image alone
  weight = np.array([1] * 7 + [0], np.float32) / 7
  batch = {'image': images, 'segments': segments, 'weight': weight}
  metrics, grads = jax.jit(measure)(params, batch)
  logits = images @ params
  p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  real = [at for at in np.ndindex(7, 4, 5) if segments[at] != 255]
  each = [-np.log(p[*at, segments[at]]) for at in real]
  np.testing.assert_allclose(metrics['loss'], np.mean(each), rtol=1e-5)
  right = [logits[at].argmax() == segments[at] for at in real]
  np.testing.assert_allclose(metrics['accuracy'], np.mean(right), rtol=1e-6)
  # On eight devices, and in micro-batches.
  mesh = sharding.make_mesh(4, 2)
  with jax.set_mesh(mesh):
    split, split_grads = jax.jit(measure)(params, sharding.global_batch(batch, mesh))
  _, accumulated = jax.jit(measure, static_argnums=2)(params, batch, 4)
  np.testing.assert_allclose(split['loss'], metrics['loss'], rtol=1e-6)
  for other in (split_grads, accumulated):
    np.testing.assert_allclose(other, grads, rtol=1e-5, atol=1e-7)


def test_a_label_that_is_no_class_is_not_learned_in_silence():
  batch = {'image': np.zeros((1, 2, 2, K), np.float32), 'weight': np.ones(1)}
  batch['segments'] = np.full((1, 2, 2), K, np.uint8)
  assert np.isnan(jax.jit(measure)(np.eye(K), batch)[0]['loss'])


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
  data = pipeline.TrainBatches(**CANVASES, batch_size=8)
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
  return lambda *model: segmentation.Segmentation(mesh, lambda: None, *model, data=data)


def test_the_evaluator_counts_every_pixel_once(evaluator):
  def predict(params, batch):  # all of class 2 is predicted as class 0
    labels = jnp.where(batch['segments'] == 2, 0, batch['segments'])
    return {'logits': jax.nn.one_hot(labels, 11)}

  measured = evaluator()
  metrics = measured.run(predict, {})
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

  # The page of a run: classes over the image, the background as it is.
  answers = measured.predictions
  config = {'evals': {'test': {'data': CANVASES}}, 'data': CANVASES}
  config['resolved'] = {'class_names': NAMES}
  folder = Run(None, '', config, *[{}] * 4, {'test': answers}, [])
  part = report_objects.masks(folder, 'test')
  assert len(part['pictures']) == segmentation.SHOWN == len(answers['index'])
  assert ('1', f'{share[2] / labels.size:.2%}', '0.0%') in part['rows']
  for i, (_, truth, answer) in zip(answers['index'], part['pictures'], strict=True):
    for picture, mask in (
      (truth, labels[i] > 0),
      (answer, labels[i] * (labels[i] != 2) > 0),
    ):
      colour = np.ptp(decoded(picture).astype(int), -1) > 60
      assert (colour & mask).sum() >= 0.7 * (colour | mask).sum()


def test_labels_that_the_model_does_not_have(evaluator):
  logits = lambda params, batch: {'logits': jnp.zeros((*batch['segments'].shape, 10))}
  with pytest.raises(
    ValueError, match=naming('digits_canvas', 'class 10', '10 classes')
  ):
    evaluator().run(logits, {})
  # Where both declare their classes, before the evaluation begins.
  evaluator(Classes(NAMES, 11))
  evaluator(Classes([*NAMES, ''], 12))
  with pytest.raises(
    ValueError, match=naming('digits_canvas', 'class 10', '10 classes')
  ):
    evaluator(Classes(None, 10))
  with pytest.raises(ValueError, match=naming('Class 0', "'background'", "'0'")):
    evaluator(Classes(NAMES[1:], 11))


def test_inspect_counts_a_head_for_the_classes_of_segments():
  checked = recipe.load(f'{runs.ROOT}/configs/vitdet_digits.py:debug,head=segment', [])
  assert recipe.describe(checked)['classes'] == 11
