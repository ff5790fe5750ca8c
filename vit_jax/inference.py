"""Runs a model on images in files or arrays, batch by batch, without TensorFlow."""

import concurrent.futures
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax import sharding, trees
from vit_jax.data.single_image import SingleImage
from vit_jax.errors import BadImage, UserError, choose
from vit_jax.machine import cores
from vit_jax.weights import Loaded

# The fewest threads that decode, even on few cores, because they mostly wait for the disk.
_READERS = 4
# Padding is cut off in steps of an eighth of the canvas, so that few sizes are compiled. A step
# is a multiple of 32 pixels, to which reference code pads images.
_STEPS, _LEAST_STEP = 8, 32


class Predictions(NamedTuple):
  """Rows in the order of the images; rows of unreadable images are NaN."""

  logits: np.ndarray  # float32 [n, K]
  features: dict[str, np.ndarray]  # {layer: float32 [n, ...]}
  errors: list[str | None]  # why each image could not be read, or None


def predict_images(
  loaded: Loaded,
  images: Iterable,
  *,
  batch_size: int = 32,
  layers: Iterable[str] = (),
  pp: str | None = None,
) -> Predictions:
  """Returns the logits of images, and features by name.

  Args:
    images: paths, bytes, PIL images, or uint8 arrays [H, W, C].
    batch_size: number of images in a batch, at most. The last batch is padded to the size of
      the first, so that there is one compilation.
    layers: names of features to return: 'pre_logits', 'block11', ...
    pp: preprocessing to use instead of `loaded.pp`.

  Raises:
    UserError: for a model that is not a classifier, an unknown layer, a pipeline that does
      not fit the model, or one image instead of a list.
  """
  check_images(images, batch_size)
  loaded.model.check_outputs('classes', 'The model')

  def function(variables, batch):
    logits, out = loaded.model.apply(variables, batch['image'])
    rows = {layer: choose('layer', layer, out) for layer in layers}
    return jax.tree.map(lambda y: y.astype('float32'), {'logits': logits, **rows})

  layers = tuple(layers)
  rows, errors = run(loaded, images, SingleImage(pp or loaded.pp), batch_size, function)
  return Predictions(rows.pop('logits'), rows, errors)


def check_images(images, batch_size: int) -> None:
  """Raises UserError for one image instead of a list, or for an empty batch."""
  if isinstance(images, str | bytes | Path):
    raise UserError(f'images is {type(images).__name__}, one image: put it in a list.')
  if batch_size < 1:
    raise UserError(f'batch_size={batch_size}: expected 1 or more.')


def run(
  loaded: Loaded,
  images: Iterable,
  preprocess: SingleImage,
  batch_size: int,
  function: Callable[[Any, dict], dict[str, jax.Array]],
) -> tuple[dict[str, np.ndarray], list[str | None]]:
  """Runs a function on all images; returns ({name: rows [n, ...]}, reasons).

  `reasons` says of each image why it could not be read, or is None. The rows of such images
  are NaN, or -1 for integers, or False.

  Args:
    function: (variables, features of a batch of images) -> {name: rows}; it is jitted.
  """
  parts: list[dict[str, np.ndarray]] = []
  errors: list[str | None] = []
  # {kind of dtype: the value in rows of unreadable images}, NaN for other kinds.
  blanks = {'i': -1, 'b': False}
  for part, why in stream(loaded, images, preprocess, batch_size, function):
    errors += why
    rows = {}
    for name, x in part.items():
      x = np.array(x)
      x[[reason is not None for reason in why]] = blanks.get(x.dtype.kind, np.nan)
      rows[name] = x
    parts.append(rows)
  parts = parts or [_no_rows(loaded, function)]
  return {n: np.concatenate([rows[n] for rows in parts]) for n in parts[0]}, errors


def _no_rows(loaded: Loaded, function) -> dict[str, np.ndarray]:
  """Returns the rows of no images; traces the function, which takes seconds."""
  shape = (*loaded.image_size, loaded.channels)
  example = {
    'image': jax.ShapeDtypeStruct((1, *shape), 'float32'),
    'size': jax.ShapeDtypeStruct((1, 2), 'int32'),
  }
  rows = jax.eval_shape(function, loaded.variables, example)
  return {name: np.zeros((0, *x.shape[1:]), x.dtype) for name, x in rows.items()}


def stream(
  loaded: Loaded,
  images: Iterable,
  preprocess: SingleImage,
  batch_size: int,
  function: Callable[[Any, dict], dict[str, jax.Array]],
  mesh: jax.sharding.Mesh | None = None,
) -> Iterator[tuple[dict[str, np.ndarray], list[str | None]]]:
  """Runs a function batch by batch: yields ({name: rows}, why each image was not read).

  The next images are decoded while the device computes. Only a few batches are in memory,
  however many images there are. Rows of images that could not be read have no meaning.

  Args:
    function: see `run`.
    mesh: a mesh whose devices share each batch; the batch size must be a multiple of
      `sharding.batch_divisor`. None: one device computes.
  """
  function = jax.jit(function, compiler_options=sharding.compiler_options(mesh))
  divisor = 1 if mesh is None else sharding.batch_divisor(mesh)
  split = None if mesh is None else sharding.batch_sharding(mesh)
  whole = None if mesh is None else sharding.replicated_sharding(mesh)
  variables = jax.device_put(loaded.variables, whole)
  results = (
    (function(variables, jax.device_put(batch, split)), why)
    for batch, why in _batches(loaded, images, preprocess, batch_size, divisor)
  )
  for rows, why in _ahead(results):
    yield {k: np.asarray(x)[: len(why)] for k, x in rows.items()}, why


def _ahead(items: Iterable) -> Iterator:
  """Yields each item only after the next one has been made."""
  return (item for item, _ in itertools.pairwise(itertools.chain(items, [None])))


def _batches(
  loaded: Loaded,
  images: Iterable,
  preprocess: SingleImage,
  batch_size: int,
  divisor: int,
) -> Iterator[tuple[dict[str, np.ndarray], list[str | None]]]:
  """Yields (features of a batch of images, why each image could not be read or None).

  Batches have `batch_size` rows. If there are fewer images in all, the only batch has as many
  rows as images, rounded up to a multiple of `divisor`.

  Rows of images that could not be read, and rows after the last image, are zeros. The list
  of reasons ends with the last image. For features see `SingleImage.features`. While a batch
  is used, the next one is decoded. Padding that no image of a batch needs is cut off, unless
  the model has tables of positions.
  """
  shape = (*loaded.image_size, loaded.channels)
  family = loaded.model.family
  # Tables of positions would be resized for other canvases.
  params = trees.flatten(loaded.variables.get('params', {}))
  is_table = lambda name: (
    family.position_axes(name) or re.fullmatch(family.offsets or '(?!)', name)
  )
  trims = preprocess.pads and not any(map(is_table, params))

  def read(image):
    try:
      features = preprocess.features(image)
    except BadImage as error:
      return {}, str(error)
    loaded.check_shape(features['image'].shape, preprocess.pp)
    return features, None

  images, size = iter(images), 0
  with concurrent.futures.ThreadPoolExecutor(max(_READERS, cores())) as pool:
    parts = iter(lambda: [*itertools.islice(images, batch_size)], [])
    for part in _ahead([pool.submit(read, x) for x in part] for part in parts):
      rows, why = zip(*(future.result() for future in part), strict=True)
      # The first batch is full unless it holds all images; later ones are padded to its
      # size.
      size = size or -(-len(why) // divisor) * divisor
      batch = {
        'image': np.zeros((size, *shape), np.float32),
        'size': np.zeros((size, 2), np.int32),
      }
      if preprocess.pads:
        batch['image_mask'] = np.zeros((size, *shape[:2]), np.uint8)
      for i, features in enumerate(rows):
        for name, x in features.items():
          batch[name][i] = x
      yield _trim(batch) if trims else batch, list(why)


def _trim(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Cuts off padding at the right and below, where no image of the batch has pixels."""
  mask = batch['image_mask']
  ends = []
  for axis, length in enumerate(mask.shape[1:]):
    used = int(mask.any((0, 2 - axis)).sum())
    step = max(length // _STEPS // _LEAST_STEP * _LEAST_STEP, _LEAST_STEP)
    ends.append(min(max(-(-used // step), 1) * step, length))
  height, width = ends
  cut = {name: batch[name][:, :height, :width] for name in ('image', 'image_mask')}
  return batch | cut
