"""Attention maps of models: whose row is read, classes, options, errors."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vit_jax
from tests.support import GOLDEN, naming
from vit_jax import explain, models, trees, tune
from vit_jax.errors import UserError
from vit_jax.explain import attention as pure
from vit_jax.explain import kinds, weights
from vit_jax.explain.saliency import gradient_times_input
from vit_jax.weights import Loaded

PIXELS = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8)


def test_maps_are_the_references_class_token(golden):
  loaded = vit_jax.load(GOLDEN / 'vit_hf')
  x = golden('vit_hf.expected')['image']
  run = jax.jit(lambda v, x: kinds.rollout(loaded.model, v, x, None))
  result = run(loaded.variables, x)
  result /= result.max((1, 2), keepdims=True)
  # As the attention maps themselves agree: 5e-6.
  np.testing.assert_allclose(result, golden('attention')['map_cls'], rtol=0, atol=2e-5)


def drawn(model):
  """Returns parameters of a model, drawn so that its rows of attention differ."""
  rng, x = np.random.default_rng(1), jax.ShapeDtypeStruct((1, 32, 32, 3), 'float32')
  shapes = jax.eval_shape(model.init, jax.random.key(0), x)['params']
  draw = lambda s: rng.normal(scale=0.3, size=s.shape).astype(np.float32)
  flat = {n: draw(s) + n.endswith('scale') for n, s in trees.flatten(shapes).items()}
  return trees.unflatten(flat)


def tiny(scan=False, **fields):
  model = models.build('vit', 'mu/8', depth=2, num_classes=3, scan=scan, **fields)
  pp = 'decode|value_range(-1, 1)'
  variables = {'params': drawn(model)}
  return Loaded(
    model=model,
    variables=variables,
    image_size=(32, 32),
    channels=3,
    pp=pp,
    class_names=None,
    source='x',
    format='x',
    report='',
  )


def prompted(classifier='token', **options):
  loaded = tiny(classifier=classifier)
  section = dict(method='vpt', number=2, **options)
  tuned, _ = tune.attach(loaded.model, models.family('vit'), (32, 32, 3), **section)
  return dataclasses.replace(loaded, model=tuned, variables={'params': drawn(tuned)})


@pytest.mark.parametrize(
  ('make', 'fields'),
  [
    (tiny, dict(scan=True)),  # with a class token
    (tiny, dict(classifier='gap')),
    (tiny, dict(classifier='map')),
    (prompted, dict(classifier='map')),
  ],
)
def test_maps_are_read_as_the_head_reads_the_tokens(make, fields):
  loaded = make(**fields)
  x, classes = loaded.preprocess(PIXELS), np.array([0, 1, 2])
  model = loaded.model

  @jax.jit
  def run(variables):
    attended, gradients, grid = once = weights.attention_and_gradients(
      model, variables, x, classes
    )
    functions = dict(
      attention=lambda *_: (attended, grid), attention_and_gradients=lambda *_: once
    )
    with mock.patch.multiple(weights, **functions):  # computed once for all maps
      each = {kind: kinds.KINDS[kind](model, variables, x, classes) for kind in rows}
    return each, attended, gradients

  rows = {'rollout': None, 'attention': None, 'class_rollout': None}
  results, attended, gradients = run(loaded.variables)
  layers, pooling = attended
  rows['rollout'] = pure.rollout(layers)
  rows['attention'] = layers[-1].mean(1)
  rows['class_rollout'] = pure.class_rollout(layers, gradients.layers)
  for kind, row in rows.items():
    if pooling is not None:
      how = pooling.mean(1)  # [B, 1, N], without prompts
      if kind == 'class_rollout':
        how = np.maximum(pooling * gradients.pooling, 0).mean(1)
      expected = (how @ row[:, -16:])[:, 0]
    elif fields.get('classifier') == 'gap':
      own = np.eye(16) if kind == 'class_rollout' else 0
      expected = (row - own).mean(1)
    else:
      expected = row[:, 0]
    expected = expected[:, -16:].reshape(3, 4, 4)
    np.testing.assert_allclose(results[kind], expected, rtol=1e-4, atol=1e-6)


def test_class_rollout_of_a_mean_shows_the_patch_that_differs():
  loaded = tiny(classifier='gap', posemb='none')
  image = np.full((32, 32, 3), 200, np.uint8)
  image[8:16, 16:24] = PIXELS[0, :8, :8]
  (result,) = vit_jax.attention_maps(loaded, [image], 'class_rollout', classes=0)
  others = np.delete(result.ravel(), 1 * 4 + 2)
  np.testing.assert_allclose(others, others[0], rtol=1e-3)  # without positions
  assert result[1, 2] > 2 * others[0]


def test_what_cannot_be_mapped():
  loaded = tiny()
  with pytest.raises(UserError, match=naming("'rolout'", 'rollout')):
    vit_jax.attention_maps(loaded, PIXELS, 'rolout')
  with pytest.raises(UserError, match=naming('Swin', 'stages', 'gradient')):
    vit_jax.attention_maps(GOLDEN / 'swin_hf_pad', PIXELS)
  for kind, options, named in (
    ('rollout', dict(layer=1), ("'layer'", 'fusion')),
    ('rollout', dict(classes=1), ('classes=1', 'class_rollout')),
    ('attention', dict(layer=2), ('layer=2', 0, 1)),
    ('attention', dict(layer='pooling'), ('pooling', 'map')),
    ('attention', dict(head=2), ('head=2', 1)),
    ('gradient', dict(classes=3), ('classes=3', 2)),
    ('gradient', dict(classes=[0, 1]), (2, 3)),
  ):
    with pytest.raises(UserError, match=naming(*named)):
      vit_jax.attention_maps(loaded, PIXELS, kind, **options)
  with pytest.raises(UserError, match=naming('logits')):
    vit_jax.attention_maps(tiny(classifier='none'), PIXELS, 'gradient')
  for options in (dict(deep=True), dict(deep=False, pool='both')):
    with pytest.raises(UserError, match=naming('prompts', 'gradient')):
      vit_jax.attention_maps(prompted(**options), PIXELS)


@pytest.mark.parametrize('fields', [dict(scan=True), dict(classifier='map')])
def test_gradients_by_attention_are_differences_of_the_logit(fields):
  loaded = tiny(**fields)
  x = loaded.preprocess(PIXELS[:1])
  run = lambda v, x: weights.attention_and_gradients(loaded.model, v, x, jnp.array([1]))
  result, gradients, _ = jax.jit(run)(loaded.variables, x)
  run = lambda v, x: loaded.model.apply(v, x, mutable=['intermediates'])
  _, sown = jax.eval_shape(run, loaded.variables, x)
  zeros = jax.tree.map(
    lambda t: np.zeros(t[0].shape, np.float32),
    sown['intermediates'],
    is_leaf=lambda t: isinstance(t, tuple),
  )
  logit = jax.jit(
    lambda p: loaded.model.apply({**loaded.variables, 'perturbations': p}, x)[0][0, 1]
  )
  strongest = np.abs(gradients.layers).argmax()
  at, eps = np.unravel_index(strongest, gradients.layers.shape), 0.01
  changed = []
  for sign in (1, -1):
    moved = jax.tree.map(np.copy, zeros)
    blocks = moved['Transformer']
    block = (
      blocks['encoderblock'] if 'scan' in fields else blocks[f'encoderblock_{at[0]}']
    )
    table = block['MultiHeadDotProductAttention_0']['attention_weights']
    table[at if 'scan' in fields else at[1:]] = sign * eps
    changed.append(logit(moved))
  slope = (changed[0] - changed[1]) / (2 * eps)
  assert abs(slope) > 1e-2
  # Curvature of norm and GELU, and rounding of the logits.
  np.testing.assert_allclose(gradients.layers[at], slope, rtol=2e-2)
  assert (result.pooling is None) == (gradients.pooling is None)


def test_pixels_of_any_model_and_its_likeliest_class():
  loaded = vit_jax.load(GOLDEN / 'mixer_google.npz')
  size = (3, *loaded.image_size, 3)
  images = np.random.default_rng(0).integers(0, 256, size, np.uint8)
  result = vit_jax.attention_maps(loaded, images, 'gradient', batch_size=2)
  likeliest = lambda x: loaded.model.apply(loaded.variables, x)[0].max(-1)
  run = jax.jit(lambda x: gradient_times_input(likeliest, x))
  np.testing.assert_allclose(
    result, run(loaded.preprocess(images)), rtol=1e-3, atol=1e-6
  )
  assert result.shape == size[:3]
  assert result.dtype == np.float32
  assert np.abs(result).max() > 0


def test_integrated_gradients_add_up_to_a_difference_of_logits():
  loaded = tiny()
  x = loaded.preprocess(PIXELS)
  both = np.concatenate([x, np.full_like(x, -1)])  # the images, and black ones
  logits, black = np.split(explain.predict_logits(loaded, both)[:, 2], 2)
  options = dict(classes=2, steps=64, baseline=-1.0)
  result = vit_jax.attention_maps(loaded, PIXELS, 'integrated', **options)
  np.testing.assert_allclose(result.sum((1, 2)), logits - black, rtol=2e-2)


def test_one_layer_one_head_and_the_pooling():
  loaded = tiny(classifier='map')
  x = loaded.preprocess(PIXELS)

  @jax.jit
  def run(variables):
    maps = [
      kinds.attention(loaded.model, variables, x, None, layer=layer, head=1)
      for layer in ('pooling', 0)
    ]
    return maps, weights.attention(loaded.model, variables, x)[0]

  maps, (layers, pooling) = run(loaded.variables)
  rows = pooling[:, 1], pooling.mean(1) @ layers[0][:, 1]
  for result, row in zip(maps, rows, strict=True):
    np.testing.assert_allclose(result.reshape(3, 16), row[:, 0], rtol=1e-4)
    np.testing.assert_allclose(result.sum((1, 2)), 1, rtol=1e-5)


def test_distances_of_images_are_those_of_their_weights():
  loaded = tiny()
  run = lambda v, x: weights.attention(loaded.model, v, x)[0].layers
  layers = jax.jit(run)(loaded.variables, loaded.preprocess(PIXELS))
  each = explain.attention_distances(loaded, PIXELS, batch_size=2)
  expected = pure.attention_distance(layers, (4, 4), 8).swapaxes(0, 1)
  assert each.shape == (3, 2, layers.shape[2])
  np.testing.assert_allclose(each, expected, rtol=1e-4)
