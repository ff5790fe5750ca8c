"""Batch inference on images in files or arrays, without TensorFlow."""

import concurrent.futures
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from vit_jax import models
from vit_jax.data.ops import registry
from vit_jax.data.single_image import SingleImage
from vit_jax.detection import boxes
from vit_jax.errors import BadImage, UserError, choose
from vit_jax.weights import Loaded

_READERS = 4  # threads that decode while the device computes


class Predictions(NamedTuple):
  """Rows in the order of the images; those of unreadable images are nan."""

  logits: np.ndarray  # float32 [n, K]
  features: dict[str, np.ndarray]  # layer -> float32 [n, ...]
  errors: list[str | None]  # why an image could not be read


class Detected(NamedTuple):
  """What a detector found with each of its Q queries; nothing is left out.

  Rows in the order of the images; those of unreadable images are nan, class -1, size 0.
  """

  scores: np.ndarray  # float32 [n, Q], the probability of the class
  labels: np.ndarray  # int32 [n, Q], the likeliest class other than "no object"
  boxes: np.ndarray  # float64 [n, Q, 4], left, top, right, bottom in pixels
  sizes: np.ndarray  # int32 [n, 2], heights and widths of the images
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
    loaded: what `weights.load` returned.
    images: paths, bytes, PIL images, or uint8 arrays [H, W, C].
    batch_size: images per step; the last step is padded, for one compilation.
    layers: names of features to keep: 'pre_logits', 'block11', ...
    pp: preprocessing other than `loaded.pp`.

  Raises:
    UserError: for a model that is not a classifier, an unknown layer, a pipeline that
      does not fit the model, one image where a list is expected.
  """
  _check(images, batch_size)
  models.check_classifies(loaded.model, 'The model')
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
    wanted = {layer: out[layer] for layer in layers}
    return jax.tree.map(lambda y: y.astype('float32'), (logits, wanted))

  variables = jax.device_put(loaded.variables)
  rows = {None: [], **{layer: [] for layer in layers}}
  empty = {None: logits.shape[1:], **{layer: out[layer].shape[1:] for layer in layers}}
  errors: list[str | None] = []
  for batch, why in _batches(loaded, images, preprocess, batch_size):
    errors += why
    y, features = run(variables, batch['image'])
    for key, value in {None: y, **features}.items():
      rows[key].append(_kept(value, why, np.nan))
  join = lambda key: (
    np.concatenate(rows[key]) if rows[key] else np.zeros((0, *empty[key]), np.float32)
  )
  return Predictions(join(None), {layer: join(layer) for layer in layers}, errors)


def detect_images(
  loaded: Loaded, images: Iterable, *, batch_size: int = 1, pp: str | None = None
) -> Detected:
  """Returns the boxes that a detector finds in images, in their own pixels.

  Args:
    loaded: what `weights.load` returned.
    images: paths, bytes, PIL images, or uint8 arrays [H, W, C].
    batch_size: images per step; the last step is padded, for one compilation.
    pp: preprocessing other than `loaded.pp`. It must keep whole images in place, without
      crops: boxes are fractions of them.

  Raises:
    UserError: for a model that is not a detector, a pipeline that does not fit the model
      or crops, one image where a list is expected.
  """
  from vit_jax.detection.tasks import detect  # brings optax

  _check(images, batch_size)
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
  for batch, why in _batches(loaded, images, SingleImage(pp, masks=True), batch_size):
    errors += why
    sizes.append(batch.pop('size')[: len(why)])
    for name, value in run(variables, batch).items():
      rows[name].append(_kept(value, why, -1 if name == 'labels' else np.nan))
  found = {name: np.concatenate(values) for name, values in rows.items()}
  size = np.concatenate(sizes)
  found['boxes'] = found['boxes'].astype(np.float64) * np.tile(size[:, None, ::-1], 2)
  return Detected(**found, sizes=size, errors=errors)


def _check(images, batch_size: int) -> None:
  if isinstance(images, str | bytes | Path):
    raise UserError(f'images is {type(images).__name__}, one image: put it in a list.')
  if batch_size < 1:
    raise UserError(f'batch_size={batch_size}: expected 1 or more.')


def _batches(
  loaded: Loaded, images: Iterable, preprocess: SingleImage, batch_size: int
) -> Iterator[tuple[dict[str, np.ndarray], list[str | None]]]:
  """Yields (what `SingleImage.features` gives of images, why each could not be read).

  Arrays have `batch_size` rows, zeros for images that could not be read and behind the
  last one; the lists end with the images.

  Raises:
    UserError: for images of another size than the model takes.
  """
  shape = (*loaded.image_size, loaded.channels)

  def read(image):
    try:
      found = preprocess.features(image)
    except BadImage as error:
      return {}, str(error)
    if (x := found['image']).shape != shape:
      raise UserError(
        f'The pipeline {preprocess.pp!r} gives images {x.shape}, the model takes {shape}.'
      )
    return found, None

  images = iter(images)
  with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
    while part := list(itertools.islice(images, batch_size)):
      found, why = zip(*pool.map(read, part), strict=True)
      batch = {
        'image': np.zeros((batch_size, *shape), np.float32),
        'size': np.zeros((batch_size, 2), np.int32),
      }
      if preprocess.pads:
        batch['image_mask'] = np.zeros((batch_size, *shape[:2]), np.uint8)
      for i, features in enumerate(found):
        for name, x in features.items():
          batch[name][i] = x
      yield batch, list(why)


def _kept(rows: jax.Array, why: list[str | None], lost: float) -> np.ndarray:
  """Returns the rows of images, without padding, `lost` where one could not be read."""
  kept = np.array(rows[: len(why)])
  kept[[reason is not None for reason in why]] = lost
  return kept
