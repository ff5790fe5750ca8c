"""A string pipeline for single images, without TensorFlow: for prediction.

Pillow decodes, numpy resizes. Only ops that draw nothing are here; they compute what
their namesakes in `ops` do, to one level of 255.
"""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vit_jax import resample
from vit_jax.data.ops import arguments, registry
from vit_jax.data.ops import basic as ops
from vit_jax.data.ops.decode import BadImage, probe
from vit_jax.errors import UserError


class Still:
  """Images in files, bytes or arrays to float32 [H, W, C].

  Args:
    pp: ops as in a config, such as 'decode|resize(224)|value_range(-1, 1)'.

  An op for labels is passed over.

  Raises:
    UserError: for a pipeline that is none, or has an op of training.
  """

  def __init__(self, pp: str):
    self.steps: list[Callable] = []
    calls = registry.image_calls(pp)
    for name, args, kwargs in calls:
      if name not in _OPS:
        raise UserError(
          f'pp {pp!r}: {name} is for training; images to predict go through '
          f'{sorted(_OPS)} only. Give another pp.'
        )
      self.steps.append(_OPS[name](*args, **kwargs))
    registry.check_images(pp, [name for name, _, _ in calls])

  def __call__(self, image) -> np.ndarray:
    """Returns float32 [H, W, C].

    Args:
      image: a path, bytes, a PIL image, or uint8 [H, W] or [H, W, C].

    Raises:
      BadImage: for what cannot be read, or is smaller than a crop.
    """
    x = _pixels(image)
    for step in self.steps:
      x = step(x)
    return np.asarray(x, np.float32)


def _pixels(image) -> np.ndarray:
  """Returns uint8 [H, W, C], C 1 or 3, upright."""
  from PIL import Image, ImageOps

  if isinstance(image, np.ndarray):
    x = image if image.ndim == 3 else image[..., None]
    if x.dtype != np.uint8 or x.ndim != 3 or x.shape[-1] not in (1, 3):
      raise BadImage(
        f'an array of {image.dtype} {image.shape}: needed is uint8 [H, W, 1 or 3]'
      )
    return x
  if isinstance(image, str | Path):
    try:
      image = Path(image).read_bytes()
    except OSError as error:
      raise BadImage(error.strerror or str(error)) from None
  if isinstance(image, bytes):
    data, _ = probe(image, exif=True)  # refuses bombs, brings odd formats to PNG
    try:
      image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    except Exception as error:  # Pillow's plugins raise many types on broken files
      raise BadImage(str(error) or type(error).__name__) from None
  else:
    image = ImageOps.exif_transpose(image)
  if image.mode.startswith('I'):  # 16 bits: the high 8, as in training
    return (np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8)[..., None]
  gray = image.mode in ('1', 'L')
  return np.asarray(image.convert('L' if gray else 'RGB')).reshape(
    image.height, image.width, 1 if gray else 3
  )


def _decode(channels: int = 3, precise: bool = False):
  del precise  # Pillow always is

  def apply(x):
    if x.shape[-1] == channels:
      return x
    if channels == 3:
      return np.repeat(x, 3, axis=-1)
    luma = x.astype(np.float32) @ np.array([0.2989, 0.587, 0.114], np.float32)
    return _like(luma[..., None], x.dtype)

  return apply


def _resize(size, method: str = 'bilinear', antialias: bool = False):
  height, width = arguments.size_pair(size)
  return lambda x: _resized(x, height, width, method, antialias)


def _resize_small(smaller_size: int, method: str = 'area', antialias: bool = True):
  def apply(x):
    shape = np.asarray(x.shape[:2], np.float32)
    h, w = np.round(shape * np.float32(smaller_size / shape.min())).astype(int)
    return _resized(x, h, w, method, antialias)

  return apply


def _resized(x, height, width, method, antialias):
  rows = resample.matrix(x.shape[0], height, method, antialias)
  columns = resample.matrix(x.shape[1], width, method, antialias)
  return _like(resample.apply(x, rows, columns), x.dtype)


def _like(x, dtype):
  return np.clip(np.rint(x), 0, 255).astype(dtype) if dtype == np.uint8 else x


def _central_crop(size):
  height, width = arguments.size_pair(size)

  def apply(x):
    y0, x0 = (x.shape[0] - height) // 2, (x.shape[1] - width) // 2
    if y0 < 0 or x0 < 0:
      raise BadImage(f'central_crop: the image is smaller than {height}x{width}')
    return x[y0 : y0 + height, x0 : x0 + width]

  return apply


def _value_range(*args, **kwargs):
  op = ops.ValueRange(*args, **kwargs)
  return lambda x: op.scale_images(x.astype(np.float32), np.clip)


_OPS = {
  'decode': _decode,
  'resize': _resize,
  'resize_small': _resize_small,
  'central_crop': _central_crop,
  'value_range': _value_range,
}
