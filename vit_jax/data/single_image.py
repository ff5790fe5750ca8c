"""String pipelines for prediction, without TensorFlow.

Pillow decodes the images, with the result of `decode(precise=True)`. The ops run in NumPy.
An op without a NumPy twin, such as the random ops of training, raises an error.
"""

import io
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from vit_jax.check import prefix_errors
from vit_jax.data import image_file
from vit_jax.data.ops import registry
from vit_jax.data.ops.decode import GAP, check_depth, probe
from vit_jax.errors import BadImage, UserError


class SingleImage:
  """Maps images in files, bytes or arrays to float32 [H, W, C].

  Skips ops that do not concern the image.

  Args:
    pp: a pipeline as in a config, such as 'decode|resize(224)|value_range(-1, 1)'.
    masks: whether the caller reads the mask that `canvas` adds, see `features`.

  Attributes:
    pads: whether an op of `pp` adds a mask of padding.

  Raises:
    UserError: for a malformed pipeline, an op without a NumPy twin, or an op that pads
      images whose masks the caller does not read.
  """

  def __init__(self, pp: str, masks: bool = False):
    ops = registry.parse(pp)
    ops = [op for op in ops if 'image' in op.maps]
    self.pp = pp
    self.pads = any('image_mask' in op.maps for op in ops)
    with prefix_errors(f'pp {pp!r}'):
      registry.check_images(op.name for op in ops)
      if training := [op.name for op in ops if op.numpy is None]:
        raise ValueError(
          f'{training[0]} is an op of training, without a NumPy twin: use the pp of an '
          'evaluation'
        )
      if self.pads and not masks:
        raise ValueError(
          'the model needs the mask of the padding: use data.single_image.features'
        )
    self._steps: list[Callable] = [op.numpy for op in ops]
    self._target = registry.target_of_decode(ops)

  def __call__(self, image) -> np.ndarray:
    """Returns float32 [H, W, C].

    Args:
      image: a path, bytes, a PIL image, or uint8 [H, W] or [H, W, C].

    Raises:
      BadImage: for an image that cannot be read, or is smaller than a crop.
    """
    return self.features(image)['image']

  def features(self, image) -> dict:
    """Returns 'image' float32 [H, W, C], 'size' and perhaps 'image_mask'.

    'size' is (height, width) of the original upright image in pixels. If an op pads, the
    'image_mask' uint8 [H, W] is 0 for padding. The arguments and errors are those of
    `__call__`.
    """
    x, size = _pixels(image, self._target)
    out = {'image': x, 'size': size}
    for step in self._steps:
      result = step(out['image'])
      out |= result if isinstance(result, dict) else {'image': result}
    return {**out, 'image': np.asarray(out['image'], np.float32)}


def batch(images: Iterable, pp: str) -> np.ndarray:
  """Returns a batch for a model, float32 [B, H, W, C].

  The arguments and errors are those of `features`. Besides, a pipeline that pads raises
  UserError.
  """
  return _batch(images, SingleImage(pp))['image']


def features(images: Iterable, pp: str) -> dict[str, np.ndarray]:
  """Returns 'image' float32 [B, H, W, C], 'size' int [B, 2], maybe 'image_mask' [B, H, W].

  Args:
    images: one uint8 array [B, H, W, C], or a list of the kinds of images that
      `SingleImage` takes, mixed at will.
    pp: the pipeline, see `SingleImage`.

  Raises:
    UserError: for a single image instead of a list, an empty list, or images that the
      pipeline leaves at different sizes.
    BadImage: for an image that cannot be read; the message has its number.
  """
  return _batch(images, SingleImage(pp, masks=True))


def pixels(image) -> np.ndarray:
  """Returns the pixels of an upright image, uint8 [H, W, C], with C = 1 or 3.

  Takes and raises the same as `SingleImage.__call__`.
  """
  return _pixels(image, None)[0]


def _batch(images: Iterable, preprocess: SingleImage) -> dict:
  if not isinstance(images, Iterable) or isinstance(images, str | bytes | Path):
    raise UserError(f'images is one {type(images).__name__}: put it in a list.')
  # An array of NumPy or JAX.
  if hasattr(images, 'ndim'):
    images = np.asarray(images)
    if images.ndim != 4:
      raise UserError(f'images has the shape {images.shape}: expected [B, H, W, C].')
  rows = []
  for i, image in enumerate(images):
    try:
      rows.append(preprocess.features(image))
    except BadImage as error:
      which = f' ({image})' if isinstance(image, str | Path) else ''
      raise BadImage(f'image {i}{which}: {error}') from None
  if not rows:
    raise UserError('No images were given: a batch has one or more.')
  shapes = sorted({x['image'].shape for x in rows})
  if len(shapes) != 1:
    raise UserError(
      f'{preprocess.pp!r} makes images of shapes {shapes}: a batch has one.'
    )
  return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _pixels(
  image, target: tuple[int, int] | None
) -> tuple[np.ndarray, tuple[int, int]]:
  """Returns upright pixels uint8 [H, W, C], and the original (height, width)."""
  from PIL import Image, ImageOps

  if isinstance(image, np.ndarray):
    x = image if image.ndim == 3 else image[..., None]
    if x.dtype != np.uint8 or x.ndim != 3 or x.shape[-1] not in (1, 3):
      raise BadImage(
        f'an array of {image.dtype} {image.shape}, expected uint8 [H, W, 1 or 3]'
      )
    return x, x.shape[:2]
  if isinstance(image, str | Path):
    image = image_file.read(image)
  if isinstance(image, bytes):
    # Raises for decompression bombs, and converts formats that only Pillow reads to PNG.
    data, orientation, size = probe(image, exif=True)
    try:
      image = Image.open(io.BytesIO(data))
      if target:
        width, height = target[::-1] if orientation < 5 else target
        # This has an effect on JPEG only.
        image.draft(None, (GAP * width, GAP * height))
      image = ImageOps.exif_transpose(image)
    except Exception as error:  # Pillow's plugins raise many types on broken files
      raise BadImage(str(error) or type(error).__name__) from None
  else:
    check_depth(image)
    image = ImageOps.exif_transpose(image)
    size = image.size[::-1]
  if image.mode.startswith('I'):
    # Of 16 bits, keep the high 8, as training does.
    x = (np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8)[..., None]
    return x, size
  x = np.asarray(image.convert('L' if image.mode in ('1', 'L') else 'RGB'))
  return x.reshape(image.height, image.width, -1), size
