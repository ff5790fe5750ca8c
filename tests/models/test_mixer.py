"""MLP-Mixer: its stochastic depth and variants."""

import jax
import numpy as np
import pytest

import vit_jax
from tests.support import naming, tuning
from vit_jax import trees
from vit_jax.errors import UserError


def test_stochastic_depth_grows_with_the_block():
  # A block that is dropped whole leaves its input: rates 0, 0.3, 0.6.
  model = vit_jax.create_model(
    'mixer',
    num_classes=None,
    stochastic_depth=0.6,
    **dict(patch_size=(4, 4), width=8, depth=3, tokens_mlp_dim=4, channels_mlp_dim=4),
  )
  images = np.random.default_rng(0).uniform(-1, 1, (4000, 8, 8, 3)).astype(np.float32)
  params = tuning.random(model.shapes((8, 8, 3))['params'])
  variables = {'params': trees.unflatten(params)}
  rngs = {'dropout': jax.random.key(1)}
  _, out = jax.jit(lambda v: model.apply(v, images, train=True, rngs=rngs))(variables)
  blocks = [out['tokens'], *(out[f'block{i:02d}'] for i in range(3))]
  for before, after, rate in zip(blocks, blocks[1:], (0, 0.3, 0.6), strict=False):
    unchanged = np.mean(np.all(before == after, axis=(1, 2)))
    # Both branches; five deviations of sqrt(p (1 - p) / 4000) are 0.04.
    assert abs(unchanged - rate**2) < 0.04


def test_unknown_variants_are_refused():
  for name in ('X/16', 'B', 'B/0', 'b/16'):
    with pytest.raises(UserError, match=naming(f"'{name}'", "'B/16'", "'L'")):
      vit_jax.create_model('mixer', name)
  with pytest.raises(UserError, match=naming('tokens_mlp_dim=0')):
    vit_jax.create_model('mixer', 'B/16', tokens_mlp_dim=0)
