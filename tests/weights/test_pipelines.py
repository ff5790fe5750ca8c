"""Pipelines as timm and transformers write them."""

import numpy as np
import pytest
from PIL import Image

from vit_jax.data.single_image import SingleImage
from vit_jax.weights import pipelines


@pytest.mark.parametrize(
  'pp',
  [
    "decode|resize((32, 48), method='bicubic', antialias=True, rounding='nearest')"
    '|value_range(-1, 1)',
    "decode|resize_small(40, method='bilinear', antialias=True, rounding='nearest')"
    '|central_crop((32, 32))|value_range((-2.0, -1.8, -1.2), (3.0, 2.2, 0.8))',
  ],
)
def test_preprocessing_goes_through_both_libraries(pp):
  described = pipelines.described(pp)
  image = np.asarray(Image.effect_noise((90, 70), 60))[..., None].repeat(3, -1)
  expected = SingleImage(pp)(image)
  for back in (
    pipelines.of_timm(described.timm(), described.size),
    pipelines.of_hf(described.hf(), described.size),
  ):
    np.testing.assert_allclose(SingleImage(back)(image), expected, atol=1e-5)


@pytest.mark.parametrize(
  'pp',
  [
    'decode|resize(32)|flip_lr|value_range(-1, 1)',
    "decode|resize(32, method='area')|value_range(-1, 1)",
    'decode|resize(32)|value_range(-1, 1, clip=True)',
    'decode|resize(32)',
  ],
)
def test_pipelines_that_they_cannot_say(pp):
  assert pipelines.described(pp) is None
