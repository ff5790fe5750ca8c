"""Attention maps of models: whose row is read, classes, options, errors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vit_jax
from tests.support import GOLDEN, naming
from vit_jax import explain, models, tune
from vit_jax.errors import UserError
from vit_jax.explain import kinds, weights
from vit_jax.explain.attention import attention_distance, rollout
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


@functools.cache
def tiny(scan=False, **fields):
  model = models.build('vit', 'mu/8', depth=2, num_classes=3, scan=scan, **fields)
  x = jnp.zeros((1, 32, 32, 3))
  params = jax.jit(model.init)(jax.random.key(0), x)['params']
  # Far enough from their start that rows of attention differ.
  params = jax.tree.map(lambda p: np.asarray(p) * 1.5, params)
  head = params['head']['kernel']
  params['head']['kernel'] = np.random.default_rng(1).normal(size=head.shape, scale=0.5)
  pp = 'decode|value_range(-1, 1)'
  return Loaded(model, {'params': params}, (32, 32), 3, pp, None, 'x', 'x', '')


def intermediates(loaded):
  """Returns what the model sows, `{'intermediates': ...}`, in one program."""
  run = functools.partial(loaded.model.apply, mutable=['intermediates'])
  return jax.jit(run)(loaded.variables, loaded.preprocess(PIXELS))[1]


@pytest.mark.parametrize(
  'fields',
  [dict(classifier='gap'), dict(classifier='map'), dict(scan=True)],
)
def test_other_classifiers_and_scanned_blocks(fields):
  loaded = tiny(**fields)
  state = intermediates(loaded)
  blocks = state['intermediates']['Transformer']
  of = lambda block: block['MultiHeadDotProductAttention_0']['attention_weights'][0]
  if 'scan' in fields:
    layers = of(blocks['encoderblock'])
  else:
    layers = np.stack([of(blocks[f'encoderblock_{i}']) for i in range(2)])
  rows = {'rollout': rollout(layers), 'attention': layers[-1].mean(1)}
  for kind in rows:
    result = vit_jax.attention_maps(loaded, PIXELS, kind, batch_size=2)
    if loaded.model.classifier == 'token':
      expected = rows[kind][:, 0, 1:]
    elif loaded.model.classifier == 'gap':
      expected = rows[kind].mean(1)
    else:
      probe = of(state['intermediates']['MAPHead_0']).mean(1)  # [B, 1, N]
      expected = (probe @ rows[kind])[:, 0]
    np.testing.assert_allclose(result, expected.reshape(3, 4, 4), rtol=1e-4, atol=1e-6)
    assert result.dtype == np.float32


def prompted(classifier='token', **options):
  loaded = tiny(classifier=classifier)
  section = dict(method='vpt', number=2, **options)
  tuned, _ = tune.attach(loaded.model, models.family('vit'), (32, 32, 3), **section)
  params = jax.jit(tuned.init)(jax.random.key(0), jnp.zeros((1, 32, 32, 3)))['params']
  variables = {'params': {**params, **loaded.params}}
  return dataclasses.replace(loaded, model=tuned, variables=variables)


@pytest.mark.parametrize('classifier', ['token', 'map'])
def test_maps_leave_prompts_out(classifier):
  loaded = prompted(classifier)
  state = intermediates(loaded)
  block = state['intermediates']['Transformer']['encoderblock_1']
  weights = block['MultiHeadDotProductAttention_0']['attention_weights'][0]
  assert weights.shape[-1] == (classifier == 'token') + 2 + 16
  result = vit_jax.attention_maps(loaded, PIXELS, 'attention')
  rows = weights.mean(1)[..., -16:]
  if classifier == 'token':
    expected = rows[:, 0]
  else:
    head = state['intermediates']['MAPHead_0']['MultiHeadDotProductAttention_0']
    probe = head['attention_weights'][0].mean(1)  # [B, 1, N]
    expected = (probe @ rows[:, 2:])[:, 0]
  expected = expected.reshape(3, 4, 4)
  np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-6)


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
  with pytest.raises(UserError, match=naming('logit')):
    vit_jax.attention_maps(tiny(classifier='none'), PIXELS, 'gradient')


@pytest.mark.parametrize(('deep', 'pool'), [(True, None), (False, 'both')])
def test_prompts_in_every_layer_or_pooled_have_gradients_only(deep, pool):
  tuned = prompted(deep=deep, pool=pool)
  assert vit_jax.attention_maps(tuned, PIXELS, 'gradient', classes=1).any()
  with pytest.raises(UserError, match=naming('prompts', 'gradient')):
    vit_jax.attention_maps(tuned, PIXELS)


@pytest.mark.parametrize('fields', [dict(scan=True), dict(classifier='map')])
def test_gradients_by_attention_are_differences_of_the_logit(fields):
  loaded = tiny(**fields)
  x = loaded.preprocess(PIXELS[:1])
  run = lambda v, x: weights.with_gradients(loaded.model, v, x, jnp.array([1]))
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
  stacked = lambda p: weights._sorted(loaded.model, p).layers
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
    assert stacked(moved)[at] == sign * eps
    changed.append(logit(moved))
  slope = (changed[0] - changed[1]) / (2 * eps)
  assert abs(slope) > 1e-2
  # Curvature of norm and GELU, and rounding of the logits.
  np.testing.assert_allclose(gradients.layers[at], slope, rtol=2e-2)
  assert (result.pooling is None) == (gradients.pooling is None)


def apply(loaded, x):
  return np.asarray(jax.jit(loaded.model.apply)(loaded.variables, x)[0])


def attention(loaded, x):
  """The weights, in one program."""
  run = lambda variables: weights.attention(loaded.model, variables, x)[0]
  return jax.jit(run)(loaded.variables)


def test_maps_of_a_class():
  loaded = tiny()
  x = loaded.preprocess(PIXELS)
  logits = apply(loaded, x)
  result = vit_jax.attention_maps(loaded, PIXELS, 'class_rollout', batch_size=2)
  assert result.shape == (3, 4, 4)
  options = dict(classes=[*logits[:2].argmax(-1), logits[2].argmin()])
  one = vit_jax.attention_maps(loaded, PIXELS, 'class_rollout', **options)
  np.testing.assert_allclose(result[:2], one[:2], rtol=1e-4, atol=1e-5)
  assert not np.allclose(result[2], one[2], rtol=1e-2)
  # With enough steps they sum to the image's logit less that of a black image.
  options = dict(classes=2, steps=64, baseline=-1.0)
  result = vit_jax.attention_maps(loaded, PIXELS, 'integrated', **options)
  black = apply(loaded, np.full_like(x, -1))
  np.testing.assert_allclose(result.sum((1, 2)), (logits - black)[:, 2], rtol=2e-2)


def test_pixels_of_any_model():
  loaded = vit_jax.load(GOLDEN / 'mixer_google.npz')
  size = (1, *loaded.image_size, 3)
  images = np.random.default_rng(0).integers(0, 256, size, np.uint8)
  result = vit_jax.attention_maps(loaded, images, 'gradient', classes=1)
  score = lambda x: loaded.model.apply(loaded.variables, x)[0][:, 1]
  expected = gradient_times_input(jax.jit(score), loaded.preprocess(images))
  np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-6)
  assert result.shape == size[:3]
  assert np.abs(result).max() > 0


def test_one_layer_one_head_and_the_pooling():
  loaded = tiny(classifier='map')
  x = loaded.preprocess(PIXELS)
  result = attention(loaded, x)
  maps = vit_jax.attention_maps(loaded, PIXELS, 'attention', layer='pooling', head=1)
  np.testing.assert_allclose(maps.reshape(3, 16), result.pooling[:, 1, 0], rtol=1e-4)
  np.testing.assert_allclose(maps.sum((1, 2)), 1, rtol=1e-5)
  loaded = tiny()
  result = attention(loaded, x)
  maps = vit_jax.attention_maps(loaded, PIXELS, 'attention', layer=0, head=1)
  expected = result.layers[0][:, 1, 0, 1:].reshape(3, 4, 4)
  np.testing.assert_allclose(maps, expected, rtol=1e-4)


def test_distances_of_images_are_those_of_their_weights():
  loaded = tiny()
  x = loaded.preprocess(PIXELS)
  result = attention(loaded, x)
  each = explain.attention_distances(loaded, PIXELS, batch_size=2)
  assert each.shape == (3, *result.layers.shape[:1], result.layers.shape[2])
  expected = attention_distance(result.layers, (4, 4), 8)
  np.testing.assert_allclose(each.mean(0), expected, rtol=1e-4)
