"""ConvNeXt: parameter counts and stages, against timm's."""

import pytest
from abstract import abstract_params

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
  counts = {n: x.size for n, x in trees.flatten(abstract_params(model, 32)).items()}
  head = counts.pop('head/kernel') + counts.pop('head/bias')
  assert sum(counts.values()) + head == i1k
  assert sum(counts.values()) + head // 1000 * 21_841 == i21k
