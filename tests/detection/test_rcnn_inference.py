"""Objects in the pixels of files, as detectron2 gives them: boxes, classes and masks."""

import jax.numpy as jnp
import numpy as np

from tests.support import two_stage
from vit_jax import weights
from vit_jax.detection import boxes, inference


def test_objects_of_detectron2():
  name = 'mask_rcnn_fpn_d2'
  z, config = two_stage.expected(name), two_stage.config_of(name)
  canvas = z['image'].shape[1:3]
  mean, std = config['pixel_mean'], config['pixel_std']
  low, high = ([(x - m) / s for m, s in zip(mean, std, strict=True)] for x in (0, 255))
  pp = f'decode|canvas({canvas})|value_range({low}, {high})'
  loaded = weights.load(str(two_stage.FOLDER / name), image_size=canvas)
  # The results of the second image are in pixels that the network did not see.
  height, width = z['sizes'][0]
  image, number = z['image'][0, :height, :width], int(z['out_num'][0])
  found = inference.detect_images(loaded, [image], pp=pp)
  assert found.errors == [None]
  objects = np.flatnonzero(found.valid[0])
  scores, labels, corners = (x[0, objects] for x in found[:3])
  np.testing.assert_array_equal(labels, z['classes'][0, :number])
  # The goldens' tolerances: sums in another order.
  np.testing.assert_allclose(scores, z['scores'][0, :number], atol=5e-4)
  np.testing.assert_allclose(corners, z['out_boxes'][0, :number], atol=2e-2)
  masks = np.array([found.mask(0, q) for q in objects])
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
