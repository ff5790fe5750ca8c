"""Published formats: each loads by its path alone and computes what its library does."""

import re
import zlib

import jax
import numpy as np
import pytest

from tests.support import GOLDEN
from tests.support.goldens import GOLDENS, check, check_vit, path_of, vits
from vit_jax import models, trees


@pytest.mark.parametrize('name', GOLDENS)
def test_golden_loads_by_its_path_and_agrees(name):
  loaded = check(path_of(name), name)
  format, family, _ = GOLDENS[name]
  assert loaded.format == format
  expected = np.load(GOLDEN / f'{name}.expected.npz')
  # The size is in a config beside the arrays, or follows from a table of positions.
  any_size = loaded.model.family.any_size(loaded.model.fields())
  tells = 'image' in expected and (path_of(name).is_dir() or not any_size)
  size = expected['image'].shape[1:3] if tells else (224, 224)
  assert loaded.image_size == {'detr': (1333, 1333)}.get(family, size)


@pytest.mark.parametrize('stem', vits())
def test_golden_vits_agree_block_by_block(stem):
  check_vit(stem)


def test_a_scanned_model_takes_the_same_file():
  check(path_of('vit_google_token'), 'vit_google_token', scan=True)


# Whole published models, filled by a rule: two logits that the reference codes print, as
# files of their weights would be too large. The larger ResNets are not among them: the
# rule makes their kernels of rank two, and then GroupNorm amplifies rounding (an image
# moved by 1e-12 moves the logits of an R50 by 0.4, in float64).
def rule_made(model, shapes, published):
  """Returns params: leaf a/b/c is 0.05 sin(0.37 i + crc32 % 1000), scales 1 more.

  The rule makes the leaves of each block, which are then stacked.
  """

  def one(name, shape):
    name = published(name)
    i = np.arange(np.prod(shape))
    x = 0.05 * np.sin(0.37 * i + zlib.crc32(name.encode()) % 1000)
    return (x + name.endswith('scale')).reshape(shape).astype(np.float32)

  def leaf(name, x):
    if not model.family.is_stacked(name):
      return one(name, x.shape)
    layers = [model.family.unstacked(name, i) for i in range(model.depth)]
    return np.stack([one(layer, x.shape[1:]) for layer in layers])

  return trees.map_named(leaf, shapes)


big_vision = lambda name: re.sub('.*/pos_embedding', 'pos_embedding', name)


@pytest.mark.parametrize(
  ('name', 'size', 'fields', 'published', 'expected'),
  [
    ('vit:Ti/16', 64, {}, str, (-0.068206, -0.047613)),
    ('vit:Ti/16', 64, dict(representation_size=192), str, (-0.032363, -0.016425)),
    ('vit:Ti/16', 64, dict(classifier='gap'), big_vision, (-0.003129, 0.012947)),
    ('vit:Ti/16', 64, dict(classifier='map'), big_vision, (-0.031892, -0.015942)),
    ('vit:S/16', 224, {}, str, (-0.011708, -0.000638)),
    ('vit:R+Ti/16', 64, {}, str, (-0.067467, -0.046870)),
    ('mixer:B/16', 64, {}, str, (-0.032437, -0.017756)),
  ],
)
def test_agrees_with_the_reference_code(name, size, fields, published, expected):
  model = models.build(name, num_classes=10, scan=True, **fields)
  shape = (2, size, size, 3)
  images = np.sin(0.01 * np.arange(np.prod(shape))).reshape(shape).astype(np.float32)
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)['params']
  params = rule_made(model, shapes, published)
  # In float64: in float32 our own rounding is up to 3e-6 more, as the machine has it.
  with jax.enable_x64(True):
    exact = model.clone(dtype=np.dtype('float64'))
    params, images = jax.tree.map(np.float64, (params, images))
    logits = jax.jit(exact.apply)({'params': params}, images)[0][0, :2]
  # Printed to 1e-6, by code whose one-pass variance loses another 2e-6.
  np.testing.assert_allclose(logits, expected, atol=3e-6, rtol=0)
