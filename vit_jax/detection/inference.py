"""Detects objects in images from files or arrays, without TensorFlow."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from vit_jax import inference
from vit_jax.data import single_image
from vit_jax.data.ops import registry
from vit_jax.data.single_image import SingleImage
from vit_jax.detection import boxes
from vit_jax.detection.regions.masks import paste
from vit_jax.detection.tasks import detect
from vit_jax.weights import Loaded


class Detected(NamedTuple):
  """Q detections in each of n images, in the order of the images.

  A DETR makes one detection per query; a two-stage detector may find fewer than Q. The
  rows of an unreadable image are not valid; they hold nan, or -1 in integer arrays.
  """

  scores: np.ndarray  # float32 [n, Q], the probability of the class
  labels: np.ndarray  # int32 [n, Q], the likeliest class other than "no object"
  boxes: np.ndarray  # float64 [n, Q, 4], corners in pixels of the image
  valid: np.ndarray  # bool [n, Q], False where there is no detection
  sizes: np.ndarray  # int32 [n, 2], heights and widths of the images
  errors: list[str | None]  # why an image could not be read
  # float32 [n, Q, m, m], probabilities inside the boxes.
  masks: np.ndarray | None = None
  grow: np.ndarray | None = None  # bool [n, Q], whether masks grow when they are drawn

  def mask(self, i: int, q: int) -> np.ndarray:
    """Draws the mask of detection q at the size of image i, as bool [H, W]."""
    each = self.masks[i, q][None], self.boxes[i, q][None]
    (mask,) = paste(*each, tuple(self.sizes[i]), self.grow is not None)
    return mask


def inputs(loaded: Loaded, images: Iterable) -> dict:
  """Returns the arguments of a detector: `model.apply(variables, **inputs(...))`.

  They are 'images' float32 [B, H, W, C] and, where `loaded.pp` pads images on a canvas,
  'mask' bool [B, H, W], False for padding.

  Args:
    images: paths, bytes, PIL images or uint8 arrays, as for `Loaded.preprocess`.
  """
  features = single_image.features(images, loaded.pp)
  loaded.check_shape(features['image'].shape[1:])
  return detect.arguments(features)


def detect_images(
  loaded: Loaded, images: Iterable, *, batch_size: int = 1, pp: str | None = None
) -> Detected:
  """Detects objects in images. Boxes are in pixels of the original images.

  Args:
    images: paths, bytes, PIL images, or uint8 arrays [H, W, C].
    batch_size: images per step. The last step is padded, so that the program is compiled once.
    pp: replaces `loaded.pp`. It must not crop or flip, because boxes are fractions of
      whole images.

  Raises:
    UserError: the model is not a detector, the pipeline crops or does not fit the model,
      or `images` is a single image.
  """
  inference.check_images(images, batch_size)
  if loaded.model.family.outputs != 'regions':
    loaded.model.check_outputs('boxes', 'The model')
  pp = pp or loaded.pp
  registry.check_positions(pp)

  def function(variables, batch):
    outputs, _ = loaded.model.apply(variables, **detect.arguments(batch))
    return {**boxes.postprocess(outputs), 'sizes': batch['size']}

  preprocess = SingleImage(pp, masks=True)
  rows, errors = inference.run(loaded, images, preprocess, batch_size, function)
  # Scale in float64, because float32 cannot hold pixels of large images exactly.
  scale = np.tile(rows['sizes'][:, None, ::-1], 2)
  rows['boxes'] = rows['boxes'].astype(np.float64) * scale
  return Detected(**rows, errors=errors)
