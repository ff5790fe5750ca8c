"""Axial attention: section D.6 of the ViT paper."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vit_jax
from tests.support import naming
from tests.support.abstract import abstract_params, count
from vit_jax import explain
from vit_jax.errors import UserError
from vit_jax.models import vit
from vit_jax.nn.layers import LayerNorm, MlpBlock, MultiHeadDotProductAttention

GRID = 3, 4
HEADS = dict(num_heads=2, dtype=jnp.float32)


def make_block(axis=None, **options):
  """Returns a block whose tokens attend along an axis; None: to all."""
  attention = functools.partial(MultiHeadDotProductAttention, **HEADS)
  if axis is not None:
    attention = functools.partial(vit.AxialAttention, **HEADS, grid=GRID, axis=axis)
  return vit.EncoderBlock(
    attention=attention,
    mlp=functools.partial(MlpBlock, 16),
    norm=LayerNorm,
    dropout=0.0,
    grid=GRID,
    **options,
  )


def tokens():
  return np.random.default_rng(0).standard_normal((2, 12, 8), np.float32)


def random(block):
  """Returns random variables, from shapes alone: nothing is compiled."""
  rng = np.random.default_rng(1)
  shapes = jax.eval_shape(block.init, jax.random.key(0), tokens())
  return jax.tree.map(lambda x: rng.normal(0, 0.5, x.shape).astype(x.dtype), shapes)


@pytest.mark.parametrize('axis', ['rows', 'columns'])
def test_tokens_attend_along_one_axis(axis, monkeypatch):
  block, params = make_block(axis), random(make_block(axis))
  y, x = np.divmod(np.arange(12), 4)
  line = y if axis == 'rows' else x
  together = line[:, None] == line
  apply = jax.jit(block.apply)
  slopes = jax.jit(jax.jacobian(lambda t: apply(params, t).sum(-1)))(tokens())
  touched = np.abs(slopes).sum((0, 2, 4)) > 0  # [N, N]
  np.testing.assert_array_equal(touched, together)
  # The same numbers as full attention under a mask.
  full = vit.MultiHeadDotProductAttention.__call__
  monkeypatch.setattr(
    vit.MultiHeadDotProductAttention,
    '__call__',
    lambda self, q, kv=None, *, positions=None: full(self, q, kv, mask=together),
  )
  expected = jax.jit(make_block().apply)(params, tokens())
  monkeypatch.undo()
  np.testing.assert_allclose(apply(params, tokens()), expected, atol=1e-5)


def test_a_block_is_one_along_rows_then_one_along_columns():
  rows, columns = (functools.partial(make_block, axis) for axis in ('rows', 'columns'))
  block, x = vit.AxialBlock(rows, columns), tokens()
  params = random(block)
  for axis in ('rows', 'columns'):
    one = {'params': params['params'][axis]}
    x = jax.jit(make_block(axis).apply)(one, x)
  result = jax.jit(block.apply)(params, tokens())
  np.testing.assert_allclose(result, x, atol=1e-6)


def test_parameters():
  full, axial = (
    vit_jax.create_model('vit', 'B/16', classifier='gap', attention=kind)
    for kind in ('full', 'axial')
  )
  assert count(axial) - count(full) == 12 * 7_087_872  # twelve blocks more


def test_dropped_paths_are_of_whole_images():
  block = make_block('rows')
  x = jnp.broadcast_to(tokens()[:1], (64, 12, 8))
  params = random(block)
  rngs = {'dropout': jax.random.key(2)}
  apply = functools.partial(block.apply, train=True)
  out = np.asarray(jax.jit(apply)(params, x, 0.5, rngs=rngs))
  kinds = {image.tobytes() for image in out.round(4)}
  assert len(kinds) == 4  # either branch, both or none


def test_its_weights_are_not_those_of_a_rollout():
  model = vit_jax.create_model('vit', 'mu/8', classifier='gap', attention='axial')
  variables, images = {'params': abstract_params(model, 16)}, jnp.zeros((1, 16, 16, 3))
  attention = functools.partial(explain.weights.attention, model)
  with pytest.raises(UserError, match=naming('axial', 'gradient')):
    jax.eval_shape(attention, variables, images)
