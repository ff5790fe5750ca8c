"""MLP-Mixer against published counts, and its stochastic depth."""

import jax
import numpy as np
import pytest

import vit_jax
from tests.support import naming
from tests.support.abstract import abstract_params
from vit_jax.errors import UserError


@pytest.mark.parametrize(
  ('variant', 'count'),
  # Of google-research/vision_transformer, big_vision (H) and timm (S/32, B/32, L/32).
  [
    ('S/32', 19_104_624),
    ('S/16', 18_528_264),
    ('B/32', 60_293_428),
    ('B/16', 59_880_472),
    ('L/32', 206_939_264),
    ('L/16', 208_196_168),
    ('H/16', 430_121_832),
    ('H/14', 432_350_952),  # by hand: N 256 and not 196, 14 px patches
  ],
)
def test_parameter_counts_are_the_published_ones(variant, count):
  params = abstract_params(vit_jax.create_model('mixer', variant, scan=True))
  assert sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(params)) == count


def test_stochastic_depth_grows_with_the_block():
  # A block that is dropped whole leaves its input: rates 0, 0.3, 0.6.
  model = vit_jax.create_model(
    'mixer',
    num_classes=None,
    stochastic_depth=0.6,
    **dict(patch_size=(4, 4), width=8, depth=3, tokens_mlp_dim=4, channels_mlp_dim=4),
  )
  images = np.random.default_rng(0).uniform(-1, 1, (4000, 8, 8, 3)).astype(np.float32)
  variables = jax.jit(model.init)(jax.random.key(0), images)
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
