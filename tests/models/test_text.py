"""The masks and poolings of text towers; whole models: tests/weights/test_text.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models.text import TextTransformer

SMALL = dict(vocab=20, length=6, width=16, depth=2, mlp_dim=24, num_heads=2, outputs=5)
IDS = jnp.array([[18, 3, 4, 19, 0, 0], [18, 7, 19, 2, 19, 1]])


@functools.cache
def prepared(model):
  """Returns (compiled function, variables), which are random: nothing is initialised."""
  shapes, rng = (
    jax.eval_shape(model.init, jax.random.key(0), IDS),
    np.random.default_rng(0),
  )
  draw = lambda x: rng.normal(0, 0.3, x.shape).astype(x.dtype)
  return jax.jit(model.apply), jax.tree.map(draw, shapes)


def run(ids, **fields):
  apply, variables = prepared(TextTransformer(**SMALL | fields))
  return apply(variables, ids)


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
