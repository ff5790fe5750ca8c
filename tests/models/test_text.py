"""The masks and poolings of text towers, and pairs of towers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import models
from vit_jax.models.text import TextTransformer, TwoTowers

SMALL = dict(vocab=20, length=6, width=16, depth=2, mlp_dim=24, num_heads=2, outputs=5)
IDS = jnp.array([[18, 3, 4, 19, 0, 0], [18, 7, 19, 2, 19, 1]])


def run(ids, **fields):
  model = TextTransformer(**SMALL | fields)
  return model.apply(model.init(jax.random.key(0), IDS), ids)


def test_a_causal_token_does_not_see_those_behind_it():
  changed = IDS.at[:, 3:].set(5)
  for mask, rows in (('causal', slice(0, 3)), ('none', slice(0, 0))):
    (_, one), (_, other) = (run(ids, mask=mask) for ids in (IDS, changed))
    differ = np.abs(one['encoded'] - other['encoded']).max((0, 2)) > 1e-6
    assert not differ[rows].any()
    assert differ[rows.stop :].all()


@pytest.mark.parametrize(
  ('fields', 'places'),
  [
    (dict(), (3, 2)),  # the first of the largest ids
    (dict(eos=0), (4, 0)),  # the first position, if a text has none
    (dict(eos=2), (0, 3)),
    (dict(pooling='last'), (5, 5)),
  ],
)
def test_pooling_takes_one_token(fields, places):
  z, out = run(IDS, outputs=None, **fields)
  np.testing.assert_array_equal(z, out['encoded'][np.arange(2), np.array(places)])
  np.testing.assert_array_equal(z, out['pre_logits'])


def test_towers_are_compared_by_their_angle():
  image = models.build('vit', 'mu/8', depth=1, num_classes=5, dtype=jnp.float32)
  for bias in (False, True):
    towers = TwoTowers(image, TextTransformer(**SMALL), bias)
    images = jax.random.uniform(jax.random.key(1), (3, 16, 16, 3))
    variables = towers.init(jax.random.key(0), images, IDS)
    params = variables['params'] | {'logit_scale': jnp.log(3.0)}
    params['image']['head']['kernel'] = jax.random.normal(jax.random.key(2), (32, 5))
    logits, out = towers.apply({'params': params}, images, IDS)
    x, y = image.apply({'params': params['image']}, images)[0], out['text']
    cosines = x @ y.T / np.linalg.norm(x, axis=1)[:, None]  # y has unit length
    np.testing.assert_allclose(np.linalg.norm(y, axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(logits, 3 * cosines - 10 * bias, rtol=1e-5, atol=1e-5)
    assert set(params) == {'image', 'text', 'logit_scale', *['logit_bias'] * bias}
