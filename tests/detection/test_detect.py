"""Boxes, matching, the set loss and post-processing: closed forms and the reference."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from tests.support import GOLDEN, naming
from vit_jax import sharding
from vit_jax.detection import boxes
from vit_jax.detection.tasks import detect
from vit_jax.detection.tasks.matching import match
from vit_jax.train.step import gradients

MATCH = jax.jit(match)
REFERENCES = ('detr_hf', 'detr_dc5_original')

# -- boxes --------------------------------------------------------------------------------


def test_forms_of_boxes():
  centre = np.array([[0.5, 0.4, 0.2, 0.6], [0, 0, 0, 0]], np.float32)
  corners = np.array([[0.4, 0.1, 0.6, 0.7], [0, 0, 0, 0]], np.float32)
  np.testing.assert_allclose(boxes.to_corners(centre), corners, atol=1e-7)
  np.testing.assert_allclose(boxes.to_centres(corners), centre, atol=1e-7)
  swapped = boxes.swap_axes(jnp.array([1.0, 2.0, 3.0, 4.0]))
  np.testing.assert_allclose(swapped, [2, 1, 4, 3])


# Corners of two boxes; their overlap, and the generalised one.
PAIRS = [
  ([0, 0, 2, 2], [0, 0, 2, 2], 1, 1),
  ([0, 0, 2, 2], [1, 0, 3, 2], 2 / 6, 2 / 6),  # fills the box around both
  ([0, 0, 2, 2], [1, 1, 3, 3], 1 / 7, 1 / 7 - 2 / 9),
  ([0, 0, 1, 1], [3, 0, 4, 1], 0, -2 / 4),
  ([0, 0, 1, 1], [1, 1, 2, 2], 0, -2 / 4),  # touch
  ([0, 0, 4, 4], [1, 1, 2, 2], 1 / 16, 1 / 16),  # inside
  ([0, 0, 0, 0], [1, 1, 2, 2], 0, -3 / 4),
  ([1, 1, 1, 1], [1, 1, 1, 1], 0, 0),  # points
]


def test_overlap():
  a, b = (np.array([p[k] for p in PAIRS], np.float32) for k in (0, 1))

  @jax.jit
  def overlaps(a, b):
    total = lambda a: jnp.sum(boxes.giou(a, b) + boxes.iou(a, b))
    every = boxes.giou(a[:, None], b[None])
    return boxes.iou(a, b), boxes.giou(a, b), every, jax.grad(total)(a)

  for one, other in ((a, b), (b, a)):
    iou, giou, every, grads = overlaps(one, other)
    np.testing.assert_allclose(iou, [p[2] for p in PAIRS], atol=1e-6)
    np.testing.assert_allclose(giou, [p[3] for p in PAIRS], atol=1e-6)
    assert every.shape == (len(PAIRS), len(PAIRS))
    np.testing.assert_allclose(np.diagonal(every), giou, atol=1e-6)
    assert np.isfinite(grads).all()


# -- the loss -----------------------------------------------------------------------------


@jax.jit
def losses(outputs, targets, no_object):
  return detect.losses(outputs, targets, no_object=no_object)


def golden(name):
  """Returns (outputs, targets, expected) of a reference, with its auxiliary layer."""
  with np.load(GOLDEN / 'set_losses.npz') as file:
    z = {k.partition('/')[2]: file[k] for k in file.files if k.startswith(f'{name}/')}
  outputs = {
    'logits': z['logits'],
    'boxes': z['pred_boxes'],
    'aux_logits': z['aux_logits'],
    'aux_boxes': z['aux_pred_boxes'],
  }
  targets = {
    'label': np.maximum(z['target_labels'], 0),
    'boxes': z['target_boxes'],
    'valid': z['target_labels'] >= 0,
  }
  return outputs, targets, z


@pytest.mark.parametrize('name', REFERENCES)
def test_losses_matching_and_postprocessing_of_the_reference(name):
  outputs, targets, expected = golden(name)
  every = {
    k: np.concatenate([outputs[f'aux_{k}'], outputs[k][None]])
    for k in ('logits', 'boxes')
  }
  cost = jax.jit(detect.costs)(every, targets)
  valid = np.broadcast_to(targets['valid'], expected['match_query'].shape)
  real = np.broadcast_to(valid[:, :, None], cost.shape)
  np.testing.assert_allclose(cost[real], expected['match_cost'][real], rtol=1e-4)
  np.testing.assert_array_equal(MATCH(cost, valid), expected['match_query'])

  ours = losses(outputs, targets, detect.NO_OBJECT)
  for key in ('loss_ce', 'loss_bbox', 'loss_giou', 'cardinality_error', 'class_error'):
    np.testing.assert_allclose(ours[key], expected[key], rtol=1e-4, err_msg=key)
  np.testing.assert_allclose(ours['loss'], expected['loss_total'], rtol=1e-4)

  answers = boxes.postprocess(outputs)
  pixels = answers['boxes'] * np.tile(expected['post_sizes'][:, None, ::-1], 2)
  np.testing.assert_array_equal(answers['labels'], expected['post_labels'])
  np.testing.assert_allclose(answers['scores'], expected['post_scores'], atol=1e-4)
  np.testing.assert_allclose(pixels, expected['post_boxes'], atol=1e-2)


# Fewer targets than queries, and as many; images without any.
@pytest.mark.parametrize(('queries', 'targets'), [(9, 5), (6, 6)])
@pytest.mark.parametrize('scale', [5, 1e-6])
def test_matching_is_the_best_assignment(queries, targets, scale):
  rng = np.random.default_rng(queries)
  cost = rng.normal(size=(6, queries, targets)).astype(np.float32) * np.float32(scale)
  valid = rng.random((6, targets)) < np.linspace(0, 1, 6)[:, None]
  for c, v, query in zip(cost, valid, np.asarray(MATCH(cost, valid)), strict=True):
    rows, columns = linear_sum_assignment(c[:, v])
    used = query[query >= 0]
    assert len(used) == len(set(used)) == len(rows)
    assert (query[~v] == -1).all()
    at = np.flatnonzero(query >= 0)
    best = c[:, v][rows, columns].sum()
    np.testing.assert_allclose(c[query[at], at].sum(), best, atol=2e-4 * scale)
  with pytest.raises(ValueError, match=naming(targets, targets - 1)):
    match(cost[:, : targets - 1], valid)


def test_matching_ends_whatever_the_costs_are():
  cost = np.full((6, 9, 5), np.nan, np.float32)
  cost[1], cost[2, 0] = np.inf, -np.inf
  query = np.asarray(MATCH(cost, np.ones((6, 5), bool)))
  assert ((query >= -1) & (query < 9)).all()


def test_images_without_objects():
  outputs, targets, _ = golden('detr_hf')
  none = targets | {'valid': targets['valid'] & False}
  empty = losses(outputs, none, detect.NO_OBJECT)
  assert (empty['loss_bbox'] == 0).all()
  assert (empty['loss_giou'] == 0).all()
  # All queries are "no object", of equal weight.
  ce = -jax.nn.log_softmax(outputs['logits'])[..., -1]
  np.testing.assert_allclose(empty['loss_ce'][-1], ce.mean(), rtol=1e-5)
  assert losses(outputs, none, 0.0)['loss'] == 0
  assert empty['class_error'] == pytest.approx(
    100
  )  # 100 - accuracy, which is 0 for none


# -- the task -----------------------------------------------------------------------------


class Tiny(nn.Module):
  """A stand-in for a detector: one dense layer for each of two decoder layers."""

  num_classes: int = 3
  num_queries: int = 6

  @nn.compact
  def __call__(self, images, mask=None, train=False):
    x = images
    if mask is not None:  # NaN for an image that is all padding, as attention gives
      x = jnp.where(mask.any((1, 2))[:, None, None, None], x * mask[..., None], jnp.nan)
    x = x.reshape(len(x), -1)
    size = self.num_queries, self.num_classes + 5
    x = nn.Dense(2 * np.prod(size), name='head')(x).reshape(-1, 2, *size)
    logits, centres = x[..., :-4], nn.sigmoid(x[..., -4:])
    outputs = {'logits': logits[:, 1], 'boxes': centres[:, 1]}
    aux = {'aux_logits': logits[:, 0][None], 'aux_boxes': centres[:, 0][None]}
    return outputs, {'stem': images, **aux}


B, N = 8, 4
SPEC = {
  'image': jax.ShapeDtypeStruct((B, 4, 4, 3), jnp.float32),
  'image_mask': jax.ShapeDtypeStruct((B, 4, 4), jnp.float32),
  'boxes': jax.ShapeDtypeStruct((B, N, 4), jnp.float32),
  'boxes_mask': jax.ShapeDtypeStruct((B, N), jnp.float32),
  'label': jax.ShapeDtypeStruct((B, N), jnp.int32),
}


@pytest.fixture(scope='module')
def setup():
  """A task, its variables, and a batch whose last image cannot be read."""
  task = detect.Detect(Tiny(), SPEC)
  rng = np.random.default_rng(0)
  low = rng.uniform(0, 0.5, (B, N, 2))
  batch = {
    'image': rng.normal(size=(B, 4, 4, 3)),
    'image_mask': rng.random((B, 4, 4)) < 0.8,
    'boxes': np.concatenate([low, low + 0.3], -1),
    'boxes_mask': np.arange(N) < np.arange(B)[:, None] % (N + 1),
    'weight': (np.arange(B) < B - 1) / (B - 1),
  }
  batch = {k: np.asarray(x, np.float32) for k, x in batch.items()}
  batch['image_mask'][-1] = batch['image'][-1] = 0
  batch['label'] = rng.integers(0, 3, (B, N)).astype(np.int32)
  return task, task.init(jax.random.key(0), SPEC), batch


@functools.partial(jax.jit, static_argnums=(0, 3))
def _measure(task, variables, batch, accum=1):
  batch = task.prepare(batch, jax.random.key(1), None)
  loss = lambda params, stats, *args: task.loss({'params': params}, *args)
  return gradients(loss, variables['params'], {}, batch, jax.random.key(2), accum)[:2]


def test_the_loss_is_that_of_the_whole_batch(setup):
  """On eight devices, in micro-batches, and without the image that could not be read."""
  task, variables, batch = setup
  mesh = sharding.make_mesh(4, 2)
  with jax.set_mesh(mesh):
    args = task, variables, sharding.global_batch(batch, mesh)
    program = _measure.lower(*args).compile()
    split = jax.device_get(program(*args[1:]))
  whole, _ = split
  assert {x.shape for x in whole.values()} == {()}
  accumulated = jax.tree.leaves(_measure(task, variables, batch, 4))
  for a, b in zip(accumulated, jax.tree.leaves(split), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  real = slice(0, B - 1)
  targets = {
    'label': batch['label'][real],
    'valid': batch['boxes_mask'][real],
    'boxes': boxes.to_centres(boxes.swap_axes(batch['boxes'][real])),
  }
  outputs, out = task.model.apply(
    variables, batch['image'][real], batch['image_mask'][real] > 0
  )
  aux = {k: out[k] for k in out if k != 'stem'}
  alone = losses(outputs | aux, targets, detect.NO_OBJECT)
  np.testing.assert_allclose(whole['loss'], alone['loss'], rtol=1e-5)
  np.testing.assert_allclose(whole['loss_giou'], alone['loss_giou'][-1], rtol=1e-5)
  # No device waits for another inside the search.
  computations = [x for x in program.as_text().split('\n\n') if 'all-reduce' in x]
  assert computations
  assert all('ENTRY' in x for x in computations)


def test_padding_reaches_the_model_as_zeros_and_mask(setup):
  task, variables, batch = setup
  padding = (batch['image_mask'] == 0) & (batch['weight'] > 0)[:, None, None]
  other = batch | {'image': batch['image'] + padding[..., None] * 9}
  a, b = (task.predict(variables, x) for x in (batch, other))
  assert set(a) == {'logits', 'boxes', 'stem', 'aux_logits', 'aux_boxes'}
  np.testing.assert_array_equal(a['logits'], b['logits'])
  masked = batch['image'] * batch['image_mask'][..., None]
  np.testing.assert_array_equal(a['stem'], masked)
  assert np.isfinite(a['logits']).all()  # also for the image that is all padding
  whole = {k: x for k, x in batch.items() if k != 'image_mask'}
  assert not np.array_equal(task.predict(variables, whole)['logits'], a['logits'])


@pytest.mark.parametrize('missing', ['boxes', 'label', 'boxes_mask', None])
def test_batches_without_boxes_or_with_too_many(missing):
  spec = {k: x for k, x in SPEC.items() if k != missing}
  facts = ('boxes', 'digits_canvas') if missing else ('4 boxes', '3 queries')
  with pytest.raises(ValueError, match=naming(*facts, 'pad_to')):
    detect.Detect(Tiny(num_queries=3), spec)
