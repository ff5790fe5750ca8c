"""Sharding constraints change the placement of activations, not their values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import naming
from vit_jax import models, sharding
from vit_jax.errors import UserError

IMAGES = np.random.default_rng(0).standard_normal((8, 16, 16, 3), np.float32)


def build(name, **fields):
  variants = {'vit': 'mu/8', 'mixer': 'S/8'}
  return models.build(name, variants[name], depth=2, num_classes=5, **fields)


def initial(model, images):
  return jax.jit(model.init)(jax.random.key(0), images)['params']


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'scan'),
  [
    ('vit', False),
    ('mixer', True),
    pytest.param('vit', True, marks=SLOW),
    pytest.param('mixer', False, marks=SLOW),
  ],
)
def test_blocks_are_entered_as_asked(name, scan):
  free = build(name, scan=scan, placement='free')
  params = initial(free, IMAGES)
  rng = np.random.default_rng(1)
  noise = lambda x: x + rng.normal(0, 0.1, x.shape).astype(np.float32)
  params = jax.tree.map(noise, jax.device_get(params))
  mesh = sharding.make_mesh(2, 2, 2)
  with jax.set_mesh(mesh):
    batch = sharding.global_batch({'image': IMAGES}, mesh)['image']

    def run(placement):
      model = build(name, scan=scan, placement=placement)
      fn = jax.jit(lambda p, x: model.apply({'params': p}, x)[0])
      lowered = fn.lower(params, batch)
      return lowered.as_text(), lowered.compile()(params, batch)

    as_free, expected = run('free')

    def text(placement):
      found, logits = run(placement)
      # Sums in another order, of terms as large as the largest logits, about 4: float32
      # rounds these by 2.4e-7 each time, also where the sum is almost 0.
      np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
      return found

    times = 1 if scan else 2  # a scanned block is written once
    assert as_free.count('sharding_constraint') == 0
    assert text('batch').count('sharding_constraint') == times
    width = [
      line for line in text('width').splitlines() if 'sharding_constraint' in line
    ]
    assert len(width) == times
    assert all('"tensor"' in line for line in width)


@pytest.mark.slow
def test_a_batch_that_the_mesh_does_not_divide_is_left_alone():
  model = build('vit', placement='batch')
  shapes = jax.eval_shape(model.init, jax.random.key(0), IMAGES)
  apply = jax.jit(lambda variables, x: model.apply(variables, x)[0])
  with jax.set_mesh(sharding.make_mesh(2, 2, 2)):
    one, eight = (apply.lower(shapes, IMAGES[:n]).as_text() for n in (1, 8))
  assert 'sharding_constraint' not in one
  assert 'sharding_constraint' in eight


@pytest.mark.slow
def test_a_model_by_itself_needs_no_mesh():
  model = build('vit', placement='width')
  params = initial(model, IMAGES)
  logits, _ = jax.jit(model.apply)({'params': params}, jnp.asarray(IMAGES))
  assert logits.shape == (8, 5)


def test_unknown_placements_are_refused():
  with pytest.raises(UserError, match=naming('bach', 'batch')):
    build('vit', placement='bach').init(jax.random.key(0), IMAGES)
