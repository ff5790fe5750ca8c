"""Boxes of objects in images, in files or arrays, without TensorFlow."""

from collections.abc import Iterable
from typing import NamedTuple

import jax
import numpy as np

from vit_jax import inference, models
from vit_jax.data import single_image
from vit_jax.data.ops import registry
from vit_jax.data.single_image import SingleImage
from vit_jax.detection import boxes
from vit_jax.detection.tasks import detect
from vit_jax.weights import Loaded


class Detected(NamedTuple):
  """A detector's answers for each of its Q queries, in the order of the images.

  Rows of unreadable images are nan, with class -1 and size 0.
  """

  scores: np.ndarray  # float32 [n, Q], the probability of the class
  labels: np.ndarray  # int32 [n, Q], the likeliest class other than "no object"
  boxes: np.ndarray  # float64 [n, Q, 4], left, top, right, bottom in pixels
  sizes: np.ndarray  # int32 [n, 2], heights and widths of the images
  errors: list[str | None]  # why an image could not be read


def inputs(loaded: Loaded, images: Iterable) -> dict:
  """Returns the arguments of a detector: `model.apply(variables, **inputs(...))`.

  They are 'images' float32 [B, H, W, C] and, where `loaded.pp` pads images on a canvas,
  'mask' bool [B, H, W], False for padding.

  Args:
    images: paths, bytes, PIL images or uint8 arrays, as for `Loaded.preprocess`.
  """
  features = single_image.features(images, loaded.pp)
  loaded.check_images(features['image'])
  return detect.arguments(features)


def detect_images(
  loaded: Loaded, images: Iterable, *, batch_size: int = 1, pp: str | None = None
) -> Detected:
  """Returns the boxes that a detector predicts for images, in their own pixels.

  Args:
    images: paths, bytes, PIL images, or uint8 arrays [H, W, C].
    batch_size: images per step; the last step is padded, for one compilation.
    pp: preprocessing other than `loaded.pp`. It must not crop or flip, because boxes are
      fractions of whole images.

  Raises:
    UserError: for a model that is not a detector, a pipeline that does not fit the model
      or crops, one image where a list is expected.
  """
  inference.check(images, batch_size)
  models.check_outputs(loaded.model, 'boxes', 'The model')
  pp = pp or loaded.pp
  registry.check_positions(pp)
  shape = (batch_size, *loaded.image_size, loaded.channels)

  @jax.jit
  def run(variables, batch):
    outputs, _ = loaded.model.apply(variables, **detect.arguments(batch))
    # From 0 to 1: float32 would not hold the pixels of large images exactly.
    return boxes.postprocess(outputs, np.ones((batch_size, 2), np.float32))

  variables = jax.device_put(loaded.variables)
  example = {'image': jax.ShapeDtypeStruct(shape, 'float32')}
  empty = jax.eval_shape(run, variables, example)
  rows = {name: [np.zeros((0, *x.shape[1:]), x.dtype)] for name, x in empty.items()}
  sizes, errors = [np.zeros((0, 2), np.int32)], []
  preprocess = SingleImage(pp, masks=True)
  for batch, why in inference.batches(loaded, images, preprocess, batch_size):
    errors += why
    sizes.append(batch.pop('size')[: len(why)])
    for name, value in run(variables, batch).items():
      blank = -1 if name == 'labels' else np.nan
      rows[name].append(inference.without_padding(value, why, blank))
  arrays = {name: np.concatenate(values) for name, values in rows.items()}
  size = np.concatenate(sizes)
  arrays['boxes'] = arrays['boxes'].astype(np.float64) * np.tile(size[:, None, ::-1], 2)
  return Detected(**arrays, sizes=size, errors=errors)
