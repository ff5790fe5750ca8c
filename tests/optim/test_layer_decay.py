"""Rates that differ by layer, and by rules."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.abstract import abstract_params
from vit_jax import models, trees
from vit_jax.optim import multipliers

VIT = models.family('vit')


def vit_params(**fields):
  """Returns the parameters of a ViT of three blocks, by shape."""
  model = models.build('vit', 'Ti/16', depth=3, num_heads=4, num_classes=5, **fields)
  return abstract_params(model, 32)


def test_layer_decay_is_that_of_beit():
  params = vit_params()
  factors = multipliers.layer_factors(VIT, params, 0.5)
  factor = factors.__getitem__
  names = list(trees.flatten(params))
  for name in names:
    if 'encoderblock_' in name:
      layer = int(name.split('encoderblock_')[1][0])
      assert factor(name) == 0.5 ** (3 - layer), name
    elif name.startswith(('embedding', 'cls', 'Transformer/posembed_input')):
      assert factor(name) == 0.5**4, name
    else:
      assert name.split('/')[0] == 'head' or 'encoder_norm' in name, name
      assert factor(name) == 1.0, name


def test_layers_are_decayed_alike_when_stacked():
  ones = lambda tree: jax.tree.map(lambda s: jnp.ones(s.shape), tree)
  loose, stacked = ones(vit_params()), ones(vit_params(scan=True))
  rules = [('.*/bias', 0.25), ('.*', 1.0)]
  tx = multipliers.scaled_by_rate(rules, 0.5, VIT)
  update = lambda params: tx.update(params, tx.init(params), params, rate=1.0)[0]
  one, other = (trees.flatten(update(params)) for params in (loose, stacked))
  for name, value in other.items():
    expected = one.get(name)
    if VIT.is_stacked(name):
      layers = [name.replace('encoderblock', f'encoderblock_{i}') for i in range(3)]
      expected = np.stack([one[layer] for layer in layers])
    np.testing.assert_allclose(value, expected, rtol=1e-6, err_msg=name)
  norm = {name: one[f'Transformer/encoder_norm/{name}'] for name in ('bias', 'scale')}
  np.testing.assert_allclose(norm['bias'], 0.25 * norm['scale'], rtol=1e-6)
