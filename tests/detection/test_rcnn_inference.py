"""Objects in the pixels of files, as their library gives them: boxes, classes, masks."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import two_stage
from vit_jax import weights
from vit_jax.detection import boxes, inference


@pytest.mark.parametrize('name', ['mask_rcnn_fpn_d2', 'mask_rcnn_torchvision'])
def test_objects_of_the_reference(name):
  z, config = two_stage.expected(name), two_stage.config_of(name)
  canvas = z['image'].shape[1:3]
  most = 255 if 'pixel_mean' in config else 1
  mean = config.get('pixel_mean', config.get('image_mean'))
  std = config.get('pixel_std', config.get('image_std'))
  low, high = ([(x - m) / s for m, s in zip(mean, std, strict=True)] for x in (0, most))
  pp = f'decode|canvas({canvas})|value_range({low}, {high})'
  loaded = weights.load(str(two_stage.FOLDER / name), image_size=canvas)
  # The results of the second image are in pixels that the network did not see.
  height, width = z['sizes'][0]
  number = int(z.get('out_num', z['num_detections'])[0])
  # Both in one batch, which keeps the padding of the golden.
  images = [x[:h, :w] for x, (h, w) in zip(z['image'], z['sizes'], strict=True)]
  detections = inference.detect_images(loaded, images, pp=pp, batch_size=len(images))
  assert detections.errors == [None] * len(images)
  objects = np.flatnonzero(detections.valid[0])
  scores, labels, corners = (x[0, objects] for x in detections[:3])
  first = int('torchvision' in name)  # whose background is 0
  np.testing.assert_array_equal(labels + first, z['classes'][0, :number])
  # The goldens' tolerances: sums in another order.
  np.testing.assert_allclose(scores, z['scores'][0, :number], atol=5e-4)
  expected = z.get('out_boxes', z['boxes'])[0, :number]
  np.testing.assert_allclose(corners, expected, atol=2e-2)
  masks = np.array([detections.mask(0, q) for q in objects])
  bits = np.unpackbits(z['out_masks_bits_0'], axis=1)[:, : height * width]
  expected = bits.reshape(number, height, width).astype(bool)
  assert masks.any()
  # A pixel whose probability rounds to one half may fall to either side.
  assert (masks != expected).sum() <= 20


def test_regions_without_an_area_are_no_detections():
  outputs = {
    'boxes': jnp.array([[[0, 0, 1, 1], [0.5, 0, 0.5, 1], [0, 0, 1, 1]]]),
    'scores': jnp.ones((1, 3)),
    'labels': jnp.zeros((1, 3), int),
    'valid': jnp.array([[True, True, False]]),
  }
  assert boxes.postprocess(outputs)['valid'].tolist() == [[True, False, False]]
