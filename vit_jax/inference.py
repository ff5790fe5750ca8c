"""Batch inference on images in files or arrays, without TensorFlow."""

import concurrent.futures
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from vit_jax import models
from vit_jax.data.single_image import SingleImage
from vit_jax.errors import BadImage, UserError, choose
from vit_jax.weights import Loaded

_READERS = 4  # threads that decode while the device computes


class Predictions(NamedTuple):
  """Rows in the order of the images; those of unreadable images are nan."""

  logits: np.ndarray  # float32 [n, K]
  features: dict[str, np.ndarray]  # layer -> float32 [n, ...]
  errors: list[str | None]  # why an image could not be read


def predict_images(
  loaded: Loaded,
  images: Iterable,
  *,
  batch_size: int = 32,
  layers: Iterable[str] = (),
  pp: str | None = None,
) -> Predictions:
  """Returns logits, and features by name, of images.

  Args:
    images: paths, bytes, PIL images, or uint8 arrays [H, W, C].
    batch_size: images per step; the last step is padded, for one compilation.
    layers: names of features to keep: 'pre_logits', 'block11', ...
    pp: preprocessing other than `loaded.pp`.

  Raises:
    UserError: for a model that is not a classifier, an unknown layer, a pipeline that
      does not fit the model, one image where a list is expected.
  """
  check(images, batch_size)
  models.check_outputs(loaded.model, 'classes', 'The model')
  preprocess, layers = SingleImage(pp or loaded.pp), tuple(layers)
  shape = (batch_size, *loaded.image_size, loaded.channels)
  apply = loaded.model.apply
  logits, out = jax.eval_shape(
    apply, loaded.variables, jax.ShapeDtypeStruct(shape, 'float32')
  )
  for layer in layers:
    choose('layer', layer, out)

  @jax.jit
  def run(variables, x):
    logits, out = apply(variables, x)
    features = {layer: out[layer] for layer in layers}
    return jax.tree.map(lambda y: y.astype('float32'), (logits, features))

  variables = jax.device_put(loaded.variables)
  rows = {None: [], **{layer: [] for layer in layers}}
  empty = {None: logits.shape[1:], **{layer: out[layer].shape[1:] for layer in layers}}
  errors: list[str | None] = []
  for batch, why in batches(loaded, images, preprocess, batch_size):
    errors += why
    y, features = run(variables, batch['image'])
    for key, value in {None: y, **features}.items():
      rows[key].append(without_padding(value, why, np.nan))
  join = lambda key: (
    np.concatenate(rows[key]) if rows[key] else np.zeros((0, *empty[key]), np.float32)
  )
  return Predictions(join(None), {layer: join(layer) for layer in layers}, errors)


def check(images, batch_size: int) -> None:
  """Raises UserError for one image in place of a list, or an empty batch."""
  if isinstance(images, str | bytes | Path):
    raise UserError(f'images is {type(images).__name__}, one image: put it in a list.')
  if batch_size < 1:
    raise UserError(f'batch_size={batch_size}: expected 1 or more.')


def batches(
  loaded: Loaded, images: Iterable, preprocess: SingleImage, batch_size: int
) -> Iterator[tuple[dict[str, np.ndarray], list[str | None]]]:
  """Yields (features of images, for each of them why it could not be read, or None).

  Arrays have `batch_size` rows, zeros for images that could not be read and behind the
  last one; the lists end with the images. Features: see `SingleImage.features`.

  Raises:
    UserError: for images of another size than the model takes.
  """
  shape = (*loaded.image_size, loaded.channels)

  def read(image):
    try:
      features = preprocess.features(image)
    except BadImage as error:
      return {}, str(error)
    if (x := features['image']).shape != shape:
      raise UserError(
        f'The pipeline {preprocess.pp!r} gives images {x.shape}, the model takes {shape}.'
      )
    return features, None

  images = iter(images)
  with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
    while part := list(itertools.islice(images, batch_size)):
      rows, why = zip(*pool.map(read, part), strict=True)
      batch = {
        'image': np.zeros((batch_size, *shape), np.float32),
        'size': np.zeros((batch_size, 2), np.int32),
      }
      if preprocess.pads:
        batch['image_mask'] = np.zeros((batch_size, *shape[:2]), np.uint8)
      for i, features in enumerate(rows):
        for name, x in features.items():
          batch[name][i] = x
      yield batch, list(why)


def without_padding(rows: jax.Array, why: list[str | None], lost: float) -> np.ndarray:
  """Returns the rows of images; `lost` where one could not be read."""
  rows = np.array(rows[: len(why)])
  rows[[reason is not None for reason in why]] = lost
  return rows
