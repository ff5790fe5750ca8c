"""The pure functions of explain, against another implementation and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import naming
from vit_jax.explain import filters
from vit_jax.explain.attention import attention_distance, class_rollout, rollout
from vit_jax.explain.filters import filters_pca
from vit_jax.explain.positions import posemb_similarity
from vit_jax.explain.saliency import gradient_times_input, integrated_gradients
from vit_jax.nn.positions import sincos2d


def weights(seed=0, shape=(3, 2, 4, 6, 6)):
  logits = np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 2
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
  L, N = 3, 5
  uniform = np.full((L, 2, 4, N, N), 1 / N, np.float32)
  expected = 0.5**L * np.eye(N) + (1 - 0.5**L) / N
  np.testing.assert_allclose(rollout(uniform)[1], expected, rtol=1e-6)
  identity = np.broadcast_to(np.eye(N, dtype=np.float32), uniform.shape)
  np.testing.assert_array_equal(rollout(identity, residual=False)[0], np.eye(N))
  # The later layer multiplies from the left.
  one, two = np.roll(np.eye(N), 1, 0), np.eye(N)
  two[0] = 1 / N
  stacked = np.stack([one, two])[:, None, None]
  np.testing.assert_allclose(rollout(stacked, residual=False)[0], two @ one, rtol=1e-6)
  a = weights()
  np.testing.assert_allclose(rollout(a), rollout(a[:, :, ::-1]), rtol=1e-6)
  one = (a[0].mean(1) + np.eye(6)) / 2  # a single layer's
  np.testing.assert_allclose(rollout(a[:1]), one, rtol=1e-6)


def test_distance_is_the_reference_and_that_of_known_patterns(golden):
  attention, expected = golden('vit_hf.expected')['attentions'], golden('attention')
  for renormalize, name in ((True, 'renormalized'), (False, 'plain')):
    result = attention_distance(attention, (4, 4), (8, 8), renormalize)
    np.testing.assert_allclose(result, expected[f'distance_{name}'], rtol=1e-6)
  eye = np.eye(16, dtype=np.float32)[None, None, None]
  assert attention_distance(eye, (4, 4), (8, 8)) == 0


@pytest.mark.parametrize(
  ('grid', 'patch', 'pixels'),
  [(14, 16, 116.4922), (7, 32, 115.5029), (8, 4, 16.5459)],
)
def test_distance_of_uniform_attention_in_pixels(grid, patch, pixels):
  N = grid * grid
  even = np.full((1, 1, 1, N, N), 1 / N, np.float32)
  result = attention_distance(even, (grid, grid), patch)
  np.testing.assert_allclose(result, pixels, rtol=5e-7, atol=5e-5)  # as it is printed
  # A class token in front changes nothing once weights are brought back to 1.
  token = np.full((1, 1, 1, N + 1, N + 1), 1 / (N + 1), np.float32)
  again = attention_distance(token, (grid, grid), (patch, patch))
  np.testing.assert_allclose(again, result, rtol=1e-5)
  less = attention_distance(token, (grid, grid), patch, renormalize=False)
  np.testing.assert_allclose(less, result * N / (N + 1), rtol=1e-5)


def test_distance_of_attention_to_the_neighbour_and_per_image():
  g, P = 14, 16
  # Each patch attends to the one on its right, the last column to itself.
  shift = np.zeros((g * g, g * g), np.float32)
  for i in range(g * g):
    shift[i, i if i % g == g - 1 else i + 1] = 1
  both = np.stack([shift, np.eye(g * g, dtype=np.float32)])[None, :, None]
  each = attention_distance(both, (g, g), P, per_image=True)
  np.testing.assert_allclose(each, [[[P * (g - 1) / g], [0]]], rtol=1e-6)
  np.testing.assert_allclose(attention_distance(both, (g, g), P), each.mean(1))
  # Each head on its own, and none further than a corner from the one opposite.
  a = weights(shape=(2, 1, 3, g * g, g * g))
  result = attention_distance(a, (g, g), P)
  swapped = attention_distance(a[:, :, ::-1], (g, g), P)
  np.testing.assert_allclose(result, swapped[:, ::-1], rtol=1e-6)
  corners = np.zeros((1, 1, 1, g * g, g * g), np.float32)
  corners[..., range(g * g), [(0 if i else -1) for i in range(g * g)]] = 1
  furthest = np.sqrt(2) * (g - 1) * P
  assert furthest == pytest.approx(294.16, abs=0.005)
  assert 0 < attention_distance(corners, (g, g), P) < furthest
  # Other patches than squares, and grids: one step down is the patch's height.
  down = np.zeros((1, 1, 1, 6, 6), np.float32)
  down[..., range(6), [3, 4, 5, 3, 4, 5]] = 1
  np.testing.assert_allclose(attention_distance(down, (2, 3), (8, 2)), 4)


def test_class_rollout_in_closed_form():
  a = weights(shape=(2, 1, 3, 4, 4))
  g = np.random.default_rng(1).normal(size=a.shape)
  one, two = np.maximum(a * g, 0).mean(2)[:, 0]
  expected = (np.eye(4) + two) @ (np.eye(4) + one)
  np.testing.assert_allclose(class_rollout(a, g)[0], expected, rtol=1e-6)
  np.testing.assert_array_equal(class_rollout(a, -np.abs(g))[0], np.eye(4))


def test_similarity_of_positions():
  table = np.random.default_rng(0).normal(size=(1, 1 + 12, 8)).astype(np.float32)
  tiles = np.asarray(posemb_similarity(table, (3, 4)))
  assert tiles.shape == (3, 4, 3, 4)
  flat = tiles.reshape(12, 12)
  rows = table[0, 1:] / np.linalg.norm(table[0, 1:], axis=-1, keepdims=True)
  np.testing.assert_allclose(flat, rows @ rows.T, atol=1e-6)
  np.testing.assert_allclose(np.diag(flat), 1, rtol=1e-6)
  np.testing.assert_array_equal(flat, flat.T)
  np.testing.assert_allclose(posemb_similarity(table[0, 1:] * 7), flat, atol=1e-6)
  blank = posemb_similarity(np.zeros((2, 4), np.float32))
  np.testing.assert_array_equal(blank, 0)


def test_sine_cosine_positions_are_alike_where_they_are_near():
  g = 8
  tiles = np.asarray(posemb_similarity(sincos2d(g, g, 64), (g, g)))
  y, x = np.mgrid[:g, :g]
  for i, j in np.ndindex(g, g):
    assert np.unravel_index(tiles[i, j].argmax(), (g, g)) == (i, j)
    distance = np.hypot(y - i, x - j).ravel()
    ranks = [np.argsort(np.argsort(v)) for v in (distance, tiles[i, j].ravel())]
    assert np.corrcoef(*ranks)[0, 1] < -0.5  # measured: -0.72 to -0.94


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
  shown = filters.to_show(result.filters)
  assert (shown.min((1, 2, 3)) == 0).all()
  assert (shown.max((1, 2, 3)) == 1).all()
  np.testing.assert_array_equal(filters.to_show(np.ones((1, 2, 2, 1))), 0)


def test_saliency_of_functions_with_known_gradients():
  rng = np.random.default_rng(0)
  x, w = rng.normal(size=(2, 2, 3, 4, 3)).astype(np.float32)
  linear = lambda x: (w * x).sum((1, 2, 3))
  expected = (w * x).sum(-1)
  np.testing.assert_allclose(gradient_times_input(linear, x), expected, atol=1e-5)
  from_one = integrated_gradients(linear, x, 1.0, steps=1)
  np.testing.assert_allclose(from_one, (w * (x - 1)).sum(-1), atol=1e-5)
  # The midpoint rule is exact where the gradient is linear along the way.
  square = lambda x: (w * x * x).sum((1, 2, 3))
  result = integrated_gradients(square, x, steps=2)
  np.testing.assert_allclose(result, (w * x * x).sum(-1), atol=1e-5)
  np.testing.assert_allclose(result.sum((1, 2)), square(x), rtol=1e-5, atol=1e-4)


def test_arguments_out_of_range():
  with pytest.raises(ValueError, match=naming(13, 12)):
    filters_pca(np.zeros((2, 2, 3, 40)), 13)
  with pytest.raises(ValueError, match=naming('steps=0')):
    integrated_gradients(lambda x: x.sum((1, 2, 3)), jnp.zeros((1, 2, 2, 3)), steps=0)
