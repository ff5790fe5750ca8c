"""ConvNeXt: parameter counts and stages, against timm's."""

import jax
import numpy as np
import pytest
from conftest import GOLDEN

import vit_jax
from vit_jax import models, trees


# timm's, for 1000 and 21,841 classes.
@pytest.mark.parametrize(
  ('size', 'i1k', 'i21k'),
  [
    ('T', 28_589_128, 44_615_857),
    ('S', 50_223_688, 66_250_417),
    ('B', 88_591_464, 109_953_489),
    ('L', 197_767_336, 229_799_953),
    ('XL', 350_196_968, 392_900_177),
  ],
)
def test_parameters(size, i1k, i21k):
  model = models.build('convnext', size)
  images = jax.ShapeDtypeStruct((1, 32, 32, 3), 'float32')
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)['params']
  counts = {name: x.size for name, x in trees.flatten(shapes).items()}
  head = counts.pop('head/kernel') + counts.pop('head/bias')
  assert sum(counts.values()) + head == i1k
  assert sum(counts.values()) + head // 1000 * 21_841 == i21k


def test_stages_are_those_of_timm():
  expected = dict(np.load(GOLDEN / 'convnext_timm.expected.npz'))
  loaded = vit_jax.load(GOLDEN / 'convnext_timm')
  logits, out = jax.jit(loaded.model.apply)(loaded.variables, expected['image'])
  ours = {'logits': logits, 'embed': out['stem'], 'pre_logits': out['pre_logits']}
  ours |= {f'stage_{i}': out[f'stage{i}'] for i in range(1, 5)}
  for name, value in ours.items():  # timm's own float32 is 7e-6 off its float64
    scale = max(1, np.abs(expected[name]).max())
    np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-5 * scale)
