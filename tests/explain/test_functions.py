"""The pure functions of explain, against another implementation and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import naming
from vit_jax.explain import attention
from vit_jax.explain.parameters import filters_pca, posemb_similarity, rescale
from vit_jax.explain.saliency import gradient_times_input, integrated_gradients

rollout = jax.jit(attention.rollout, static_argnums=(1, 2))
distance = jax.jit(attention.attention_distance, static_argnums=(1, 2))


def weights(*shape):
  logits = np.random.default_rng(0).normal(size=shape).astype(np.float32) * 2
  return np.asarray(jax.nn.softmax(logits, -1))


@pytest.mark.parametrize('fusion', ['mean', 'max', 'min'])
@pytest.mark.parametrize('residual', [True, False])
def test_rollout_is_the_reference(golden, fusion, residual):
  attention = golden('vit_hf.expected')['attentions']  # from transformers' ViT
  name = f'rollout_{fusion}_{"residual" if residual else "plain"}'
  result = rollout(attention, fusion, residual)
  np.testing.assert_allclose(result, golden('attention')[name], rtol=1e-6)
  np.testing.assert_allclose(result.sum(-1), 1, rtol=1e-6)


def test_rollout_in_closed_form():
  L, N = 2, 6
  uniform = np.full((L, 1, 4, N, N), 1 / N, np.float32)
  expected = 0.5**L * np.eye(N) + (1 - 0.5**L) / N
  np.testing.assert_allclose(rollout(uniform)[0], expected, rtol=1e-6)
  # The later layer multiplies from the left.
  one, two = np.roll(np.eye(N), 1, 0), np.eye(N)
  two[0] = 1 / N
  stacked = np.broadcast_to(np.stack([one, two])[:, None, None], uniform.shape)
  result = rollout(stacked.astype(np.float32), residual=False)[0]
  np.testing.assert_allclose(result, two @ one, rtol=1e-6)
  a = weights(*uniform.shape)
  np.testing.assert_allclose(rollout(a), rollout(a[:, :, ::-1]), rtol=1e-6)


def test_distance_is_the_reference(golden):
  result = distance(golden('vit_hf.expected')['attentions'], (4, 4), (8, 8))
  expected = golden('attention')['distance_renormalized']
  np.testing.assert_allclose(result.mean(1), expected, rtol=1e-6)


@pytest.mark.parametrize(
  ('grid', 'patch', 'pixels'),
  [(14, 16, 116.4922), (7, 32, 115.5029), (8, 4, 16.5459)],
)
def test_distance_of_uniform_attention_in_pixels(grid, patch, pixels):
  # A class token in front changes nothing: weights are brought back to a sum of 1.
  N = grid * grid + 1
  even = np.full((1, 1, 1, N, N), 1 / N, np.float32)
  result = distance(even, (grid, grid), patch)
  np.testing.assert_allclose(result, pixels, rtol=2e-6)  # as it is printed


def test_distance_of_known_patterns():
  g, P = 14, 16
  # Each patch attends to the one on its right, the last column to itself.
  shift = np.zeros((g * g, g * g), np.float32)
  for i in range(g * g):
    shift[i, i if i % g == g - 1 else i + 1] = 1
  corners = np.zeros((g * g, g * g), np.float32)
  corners[range(g * g), [(0 if i else -1) for i in range(g * g)]] = 1
  heads = np.stack([shift, np.eye(g * g, dtype=np.float32), corners])
  result = distance(heads[None, None], (g, g), P)[0, 0]
  np.testing.assert_allclose(result[:2], [P * (g - 1) / g, 0], rtol=1e-6)
  # No further than a corner from the one opposite.
  assert np.sqrt(2) * (g - 1) * P == pytest.approx(294.16, abs=0.005)
  assert 0 < result[2] < 294.16
  images = np.moveaxis(distance(heads[None, :, None], (g, g), P), 1, 2)
  np.testing.assert_allclose(images[0], result[None])
  # Other patches than squares, and grids: one step down is the patch's height.
  down = np.zeros((1, 1, 1, 6, 6), np.float32)
  down[..., range(6), [3, 4, 5, 3, 4, 5]] = 1
  np.testing.assert_allclose(distance(down, (2, 3), (8, 2)), 4)


def test_class_rollout_in_closed_form():
  a = weights(2, 1, 3, 4, 4)
  g = np.random.default_rng(1).normal(size=a.shape)
  one, two = np.maximum(a * g, 0).mean(2)[:, 0]
  expected = (np.eye(4) + two) @ (np.eye(4) + one)
  np.testing.assert_allclose(attention.class_rollout(a, g)[0], expected, rtol=1e-6)
  np.testing.assert_array_equal(attention.class_rollout(a, -np.abs(g))[0], np.eye(4))


def test_similarity_of_positions():
  table = np.random.default_rng(0).normal(size=(1, 1 + 12, 8)).astype(np.float32)
  tiles = np.asarray(posemb_similarity(table, (3, 4)))
  assert tiles.shape == (3, 4, 3, 4)
  flat = tiles.reshape(12, 12)
  rows = table[0, 1:] / np.linalg.norm(table[0, 1:], axis=-1, keepdims=True)
  np.testing.assert_allclose(flat, rows @ rows.T, atol=1e-6)
  np.testing.assert_allclose(np.diag(flat), 1, rtol=1e-6)
  np.testing.assert_allclose(posemb_similarity(table * 7, (3, 4)), tiles, atol=1e-6)
  blank = posemb_similarity(np.zeros((2, 4), np.float32), (1, 2))
  np.testing.assert_array_equal(blank, 0)


@pytest.mark.parametrize('patch', [(16, 16), (4, 8)])
def test_planted_filters_are_found(patch):
  rng, k, D = np.random.default_rng(0), 3, 48
  size = patch[0] * patch[1] * 3
  planted = np.linalg.qr(rng.normal(size=(size, k)))[0]
  kernel = planted @ (rng.normal(size=(k, D)) * [[9], [3], [1]]) + rng.normal(
    size=(size, 1)
  )
  result = filters_pca(kernel.reshape(*patch, 3, D), k + 2)
  rows = result.filters.reshape(k + 2, size)
  np.testing.assert_allclose(rows @ rows.T, np.eye(k + 2), atol=1e-6)
  cosines = np.linalg.svd(rows[:k] @ planted, compute_uv=False)
  assert np.arccos(cosines.clip(-1, 1)).max() < 1e-3  # float32: cosine 1 - 5e-7
  np.testing.assert_allclose(rows[:k] @ planted @ planted.T, rows[:k], atol=1e-6)
  assert result.explained[:k].sum() == pytest.approx(1)
  assert result.explained[k:].max() < 1e-9
  assert (rows[range(k + 2), np.abs(rows).argmax(1)] > 0).all()


def test_all_components_explain_everything():
  kernel = np.random.default_rng(0).normal(size=(2, 2, 3, 40))
  result = filters_pca(kernel)
  assert result.filters.shape == (12, 2, 2, 3)
  assert result.explained.sum() == pytest.approx(1)
  assert (np.diff(result.explained) <= 0).all()
  shown = rescale(result.filters)
  assert (shown.min((1, 2, 3)) == 0).all()
  assert (shown.max((1, 2, 3)) == 1).all()
  np.testing.assert_array_equal(rescale(np.ones((1, 2, 2, 1))), 0)


def test_saliency_of_functions_with_known_gradients():
  x, w = np.random.default_rng(0).normal(size=(2, 2, 3, 4, 3)).astype(np.float32)
  linear = lambda x: (w * x).sum((1, 2, 3))
  square = lambda x: (w * x * x).sum((1, 2, 3))

  @jax.jit
  def run(x):
    once = gradient_times_input(linear, x), integrated_gradients(linear, x, 1.0, 1)
    # The midpoint rule is exact where the gradient is linear along the way.
    return *once, integrated_gradients(square, x, steps=2)

  expected = (w * x, w * (x - 1), w * x * x)
  for result, contributions in zip(run(x), expected, strict=True):
    np.testing.assert_allclose(result, contributions.sum(-1), atol=1e-5)


def test_arguments_out_of_range():
  with pytest.raises(ValueError, match=naming(13, 12)):
    filters_pca(np.zeros((2, 2, 3, 40)), 13)
  with pytest.raises(ValueError, match=naming('steps=0')):
    integrated_gradients(lambda x: x.sum((1, 2, 3)), jnp.zeros((1, 2, 2, 3)), steps=0)
