"""Whether an image is whole, and in a form that every reader of the data set decodes."""

import io

import numpy as np

from vit_jax.data.ops.decode import probe
from vit_jax.errors import BadImage

# Pillow's 95 is visually lossless; only what is turned or made smaller is re-encoded.
_QUALITY = 95


def check(data: bytes, upright: bool, max_side: int | None = None) -> tuple[bytes, str]:
  """Decodes an image to see whether it can be.

  A JPEG is decoded at an eighth of its size, which reads all of its bytes and takes
  two thirds of the time.

  Args:
    data: the file's bytes.
    upright: turn an image as its EXIF orientation says: readers of prepared data sets
      ignore it.
    max_side: pixels of the longer side; an image with more is made smaller, its aspect
      ratio kept to a pixel, and becomes a JPEG. None: any.

  Returns:
    (bytes to keep, what was changed: words of 'turned', 'converted' and 'shrunk').
    Unchanged bytes are JPEG, PNG, GIF, BMP or WebP; other formats come back as PNG.

  Raises:
    BadImage: with the reason.
  """
  from PIL import Image, ImageOps

  kept, orientation, _ = probe(data, exif=upright)
  try:
    with Image.open(io.BytesIO(kept)) as image:
      if max_side and max(image.size) > max_side:
        changes = 'shrunk turned' if orientation > 1 else 'shrunk'
        return _shrunk(image, upright, max_side), changes
      if kept is not data:
        return kept, 'converted'
      if orientation == 1:
        image.draft('L', (1, 1))
        image.load()
        return data, ''
      kind = 'JPEG' if image.format in ('JPEG', 'MPO') else 'PNG'
      out = io.BytesIO()
      ImageOps.exif_transpose(image).save(out, kind, quality=_QUALITY)
      return out.getvalue(), 'turned'
  except Exception as error:  # Pillow's plugins raise many types on broken data
    raise BadImage(f'cannot be decoded: {error or type(error).__name__}') from None


def _shrunk(image, upright: bool, side: int) -> bytes:
  """Returns a JPEG of an opened image, gray if it is, its longer side `side` pixels."""
  from PIL import Image, ImageOps

  turn = ImageOps.exif_transpose if upright else (lambda image: image)
  if image.mode.startswith('I'):  # 16 bits: the high 8, as in training
    values = np.asarray(turn(image)).astype(np.uint32) >> 8
    image = Image.fromarray(values.astype(np.uint8))
  elif image.mode not in ('L', 'RGB', 'CMYK'):
    image = image.convert('L' if image.mode in ('1', 'LA') else 'RGB')
  # A JPEG is decoded at a half, a quarter or an eighth, see `decode.GAP`, but at three times
  # the size or more: this is done once, and for good.
  image.thumbnail((side, side), reducing_gap=3)
  image = turn(image)
  out = io.BytesIO()
  image.convert('L' if image.mode == 'L' else 'RGB').save(out, 'JPEG', quality=_QUALITY)
  return out.getvalue()
