"""Batch inference on images in files or arrays, without TensorFlow."""

import concurrent.futures
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from vit_jax import models
from vit_jax.data.single_image import SingleImage
from vit_jax.errors import BadImage, UserError, choose
from vit_jax.pretrained import Loaded

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
    loaded: what `pretrained.load` returned.
    images: paths, bytes, PIL images, or uint8 arrays [H, W, C].
    batch_size: images per step; the last step is padded, for one compilation.
    layers: names of features to keep: 'pre_logits', 'block11', ...
    pp: preprocessing other than `loaded.pp`.

  Raises:
    UserError: for a model that is not a classifier, an unknown layer, a pipeline that
      does not fit the model, one image where a list is expected.
  """
  if isinstance(images, str | bytes | Path):
    raise UserError(f'images is {type(images).__name__}, one image: put it in a list.')
  if batch_size < 1:
    raise UserError(f'batch_size={batch_size}: expected 1 or more.')
  models.check_classifies(loaded.model, 'The model')
  preprocess, layers = SingleImage(pp or loaded.pp), tuple(layers)
  H, W = loaded.image_size
  shape = (batch_size, H, W, loaded.channels)
  apply = loaded.model.apply
  logits, out = jax.eval_shape(
    apply, loaded.variables, jax.ShapeDtypeStruct(shape, 'float32')
  )
  for layer in layers:
    choose('layer', layer, out)

  def run(variables, x):
    logits, out = apply(variables, x)
    wanted = {layer: out[layer] for layer in layers}
    return jax.tree.map(lambda y: y.astype('float32'), (logits, wanted))

  run, variables = jax.jit(run), jax.device_put(loaded.variables)
  rows = {None: [], **{layer: [] for layer in layers}}
  empty = {None: logits.shape[1:], **{layer: out[layer].shape[1:] for layer in layers}}
  errors: list[str | None] = []

  def read(image):
    try:
      x = preprocess(image)
    except BadImage as error:
      return None, str(error)
    if x.shape != shape[1:]:
      raise UserError(
        f'The pipeline {pp or loaded.pp!r} gives images {x.shape}, the model takes '
        f'{shape[1:]}.'
      )
    return x, None

  images = iter(images)
  with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
    while part := list(itertools.islice(images, batch_size)):
      read_images, why = zip(*pool.map(read, part), strict=True)
      errors += why
      batch = np.zeros(shape, np.float32)
      for i, x in enumerate(read_images):
        if x is not None:
          batch[i] = x
      y, features = run(variables, batch)
      bad = [i for i, x in enumerate(read_images) if x is None]
      for key, value in {None: y, **features}.items():
        value = np.array(value[: len(part)])
        value[bad] = np.nan
        rows[key].append(value)
  join = lambda key: (
    np.concatenate(rows[key]) if rows[key] else np.zeros((0, *empty[key]), np.float32)
  )
  return Predictions(join(None), {layer: join(layer) for layer in layers}, errors)
