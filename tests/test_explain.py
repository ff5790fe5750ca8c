"""Attention rollout and distance, against another implementation and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN, naming

import vit_jax
from vit_jax import explain, models, pretrained, viz
from vit_jax.errors import UserError

PIXELS = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8)


def weights(seed=0, shape=(3, 2, 4, 6, 6)):
  logits = np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 2
  return np.asarray(jax.nn.softmax(logits, -1))


@pytest.mark.parametrize('fusion', ['mean', 'max', 'min'])
@pytest.mark.parametrize('residual', [True, False])
def test_rollout_is_the_reference(golden, fusion, residual):
  attention = golden('vit_hf.expected')['attentions']  # of transformers' ViT
  name = f'rollout_{fusion}_{"residual" if residual else "plain"}'
  found = viz.rollout(attention, fusion, residual)
  # Three products of rows that sum to 1, in float32 in another order.
  np.testing.assert_allclose(found, golden('attention')[name], rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-6)


def test_rollout_in_closed_form():
  L, N = 3, 5
  uniform = np.full((L, 2, 4, N, N), 1 / N, np.float32)
  expected = 0.5**L * np.eye(N) + (1 - 0.5**L) / N
  np.testing.assert_allclose(viz.rollout(uniform)[1], expected, rtol=1e-6)
  identity = np.broadcast_to(np.eye(N, dtype=np.float32), uniform.shape)
  np.testing.assert_array_equal(viz.rollout(identity, residual=False)[0], np.eye(N))
  # The later layer multiplies from the left.
  one, two = np.roll(np.eye(N), 1, 0), np.eye(N)
  two[0] = 1 / N
  stacked = np.stack([one, two])[:, None, None]
  np.testing.assert_allclose(
    viz.rollout(stacked, residual=False)[0], two @ one, rtol=1e-6
  )
  a = weights()
  np.testing.assert_allclose(viz.rollout(a), viz.rollout(a[:, :, ::-1]), rtol=1e-6)


def test_discard_leaves_the_largest_weights_of_each_row():
  a = weights(shape=(1, 1, 1, 6, 6))
  found = np.asarray(viz.rollout(a, residual=False, discard=0.5))[0]
  order = np.argsort(a[0, 0, 0], -1)
  assert (np.take_along_axis(found, order[:, :3], -1) == 0).all()
  kept = np.take_along_axis(a[0, 0, 0], order[:, 3:], -1)
  kept /= kept.sum(-1, keepdims=True)
  np.testing.assert_allclose(np.take_along_axis(found, order[:, 3:], -1), kept, 1e-6)


def test_distance_is_the_reference_and_that_of_known_patterns(golden):
  attention, expected = golden('vit_hf.expected')['attentions'], golden('attention')
  for renormalize, name in ((True, 'renormalized'), (False, 'plain')):
    found = viz.attention_distance(attention, (4, 4), (8, 8), renormalize)
    np.testing.assert_allclose(found, expected[f'distance_{name}'], rtol=1e-5)
  eye = np.eye(16, dtype=np.float32)[None, None, None]
  assert viz.attention_distance(eye, (4, 4), (8, 8)) == 0
  even = np.full((1, 1, 1, 64, 64), 1 / 64, np.float32)
  np.testing.assert_allclose(
    viz.attention_distance(even, (8, 8), (4, 4)), 16.5459, rtol=1e-5
  )


def test_maps_are_the_references_class_token(golden):
  loaded = vit_jax.load(GOLDEN / 'vit_hf')
  x = golden('vit_hf.expected')['image']
  run = jax.jit(lambda v, x: explain._maps(loaded.model, v, x, 'rollout'))
  found = run(loaded.variables, x)
  found /= found.max((1, 2), keepdims=True)
  # As the attention maps themselves agree: 5e-6.
  np.testing.assert_allclose(found, golden('attention')['map_cls'], rtol=0, atol=2e-5)


def tiny(scan=False, **fields):
  model = models.build('vit', 'mu/8', depth=2, num_classes=3, scan=scan, **fields)
  x = jnp.zeros((1, 32, 32, 3))
  params = jax.jit(model.init)(jax.random.key(0), x)['params']
  # Far enough from their start that rows of attention differ.
  params = jax.tree.map(lambda p: np.asarray(p) * 1.5, params)
  pp = 'decode|value_range(-1, 1)'
  return pretrained.Loaded(
    model, {'params': params}, (32, 32), 3, pp, None, 'x', 'x', ''
  )


@pytest.mark.parametrize(
  'fields', [dict(classifier='gap'), dict(classifier='map'), dict(scan=True)]
)
def test_other_classifiers_and_scanned_blocks(fields):
  loaded = tiny(**fields)
  _, state = loaded.model.apply(
    loaded.variables, loaded.preprocess(PIXELS), mutable=['intermediates']
  )
  blocks = state['intermediates']['Transformer']
  of = lambda block: block['MultiHeadDotProductAttention_0']['attention_weights'][0]
  if 'scan' in fields:
    layers = of(blocks['encoderblock'])
  else:
    layers = np.stack([of(blocks[f'encoderblock_{i}']) for i in range(2)])
  rows = {'rollout': viz.rollout(layers), 'last': layers[-1].mean(1)}
  for kind in explain.KINDS:
    found = vit_jax.attention_maps(loaded, PIXELS, kind, batch_size=2)
    if loaded.model.classifier == 'token':
      expected = rows[kind][:, 0, 1:]
    elif loaded.model.classifier == 'gap':
      expected = rows[kind].mean(1)
    else:
      probe = of(state['intermediates']['MAPHead_0']).mean(1)  # [B, 1, N]
      expected = (probe @ rows[kind])[:, 0]
    np.testing.assert_allclose(found, expected.reshape(3, 4, 4), rtol=1e-4, atol=1e-6)
    assert found.dtype == np.float32


def test_what_cannot_be_mapped():
  loaded = tiny()
  with pytest.raises(UserError, match=naming("'rolout'", 'rollout')):
    vit_jax.attention_maps(loaded, PIXELS, 'rolout')
  with pytest.raises(UserError, match=naming('Mixer', 'attention')):
    vit_jax.attention_maps(GOLDEN / 'mixer_google.npz', PIXELS)
  with pytest.raises(UserError, match=naming((3, 2, 6, 6))):
    viz.rollout(weights()[:, :, 0])
  with pytest.raises(UserError, match=naming('discard=1.0')):
    viz.rollout(weights(), discard=1.0)
  with pytest.raises(UserError, match=naming('4x4', 6)):
    viz.attention_distance(weights(), (4, 4), (8, 8))
