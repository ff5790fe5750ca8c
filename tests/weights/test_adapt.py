"""Resizing and stacking, against closed forms and other people's code."""

import jax
import numpy as np
import pytest
import scipy.ndimage

from tests.support import naming
from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.weights import adapt


@pytest.fixture
def table():
  return np.random.default_rng(0).normal(size=(1, 1 + 14 * 10, 5)).astype(np.float32)


@pytest.mark.parametrize('new', [(24, 24), (7, 5), (14, 20), (1, 1)])
def test_bilinear_is_scipys_zoom_of_order_one(table, new):
  grid = table[0, 1:].reshape(14, 10, 5).astype(np.float64)
  factors = (new[0] / 14, new[1] / 10, 1)
  expected = scipy.ndimage.zoom(grid, factors, order=1)
  result = adapt.resize_positions(table, (14, 10), new)
  assert result.shape == (1, 1 + new[0] * new[1], 5)
  np.testing.assert_array_equal(result[0, 0], table[0, 0])
  # Both in float64; the result is float32 of numbers up to 3.
  np.testing.assert_allclose(result[0, 1:].reshape(expected.shape), expected, atol=3e-7)


@pytest.mark.parametrize('new', [(24, 24), (7, 5), (14, 20)])
def test_bicubic_is_jax_image(table, new):
  grid = table[0, 1:].reshape(14, 10, 5)
  expected = jax.image.resize(grid, (*new, 5), 'bicubic', antialias=True)
  result = adapt.resize_positions(table, (14, 10), new, 'bicubic')
  # jax.image computes its kernel in float32, at positions up to 24.
  np.testing.assert_allclose(result[0, 1:].reshape(expected.shape), expected, atol=2e-5)


def test_the_same_grid_is_the_same_table(table):
  assert adapt.resize_positions(table, (14, 10), (14, 10)) is table


def test_bad_arguments_of_positions(table):
  with pytest.raises(UserError, match=naming("'cubic'", 'bicubic')):
    adapt.resize_positions(table, (14, 10), (7, 5), 'cubic')
  with pytest.raises(ValueError, match=naming((1, 141, 5), '12x12')):
    adapt.resize_positions(table, (12, 12), (7, 5))


@pytest.mark.parametrize('new', [(16, 16), (12, 24)])
def test_enlarged_patches_have_their_old_embedding(new):
  rng = np.random.default_rng(0)
  kernel = rng.normal(size=(8, 8, 3, 4))
  patch = rng.normal(size=(8, 8, 3))
  larger = np.asarray(jax.image.resize(patch, (*new, 3), 'linear', antialias=False))
  ours = np.einsum('hwc,hwcd->d', larger, adapt.resize_patches(kernel, new))
  # jax.image works in float32, 192 terms.
  np.testing.assert_allclose(ours, np.einsum('hwc,hwcd->d', patch, kernel), atol=1e-4)


def test_smaller_patches_are_the_least_squares_answer():
  kernel = np.random.default_rng(0).normal(size=(8, 8, 1, 1))
  small = adapt.resize_patches(kernel, (4, 4))
  # The matrix that halves a patch, from the images of its basis.
  basis = np.eye(64).reshape(64, 8, 8)
  halves = jax.vmap(lambda p: jax.image.resize(p, (4, 4), 'linear', antialias=False))
  matrix = np.asarray(halves(basis)).reshape(64, 16)  # patch -> small patch, transposed
  expected = np.linalg.lstsq(matrix, kernel.ravel(), rcond=None)[0]
  np.testing.assert_allclose(small.ravel(), expected, atol=1e-5)


def test_stack_and_unstack_are_inverse():
  vit, block = models.family('vit'), 'Transformer/encoderblock'
  flat = {f'{block}_{i}/k': np.full(2, i) for i in range(11)} | {'cls': np.ones(1)}
  stacked = adapt.stack(flat, vit)
  np.testing.assert_array_equal(stacked[f'{block}/k'][:, 0], np.arange(11))
  again = adapt.unstack(stacked, vit)
  assert again.keys() == flat.keys()
  assert all(np.array_equal(again[n], flat[n]) for n in flat)
