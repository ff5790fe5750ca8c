"""Rates that differ by layer, and by rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.abstract import abstract_params
from vit_jax import models, optim, trees
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


@pytest.mark.slow
def test_layers_are_decayed_alike_when_stacked():
  zeros = lambda tree: jax.tree.map(lambda s: jnp.ones(s.shape), tree)
  loose, stacked = zeros(vit_params()), zeros(vit_params(scan=True))
  rates = dict(layer_decay=0.5, lr_rules=[('.*/bias', 0.25), ('.*', 1.0)])
  constant = dict(decay='constant')
  optimizer = optim.build('lamb', 0.01, 10, family=VIT, schedule=constant, **rates)

  @jax.jit
  def updates(params):
    state = optimizer.tx.init(params)
    return optimizer.tx.update(params, state, params, rate=1.0)[0]

  one, other = (trees.flatten(updates(params)) for params in (loose, stacked))
  for name, value in other.items():
    if VIT.is_stacked(name):
      layers = [
        one[name.replace('encoderblock', f'encoderblock_{i}')] for i in range(3)
      ]
      value, wanted = np.asarray(value), np.stack(layers)
    else:
      wanted = one[name]
    np.testing.assert_allclose(value, wanted, rtol=1e-6, err_msg=name)
  norm = {name: one[f'Transformer/encoder_norm/{name}'] for name in ('bias', 'scale')}
  np.testing.assert_allclose(norm['bias'], 0.25 * norm['scale'], rtol=1e-6)
