"""Reads the headers of encoded images, and decodes them with orientation and crop."""

import functools
import io

import numpy as np

from vit_jax.data.lazy_tf import tf
from vit_jax.data.ops.arguments import MAX_PIXELS
from vit_jax.errors import BadImage

# First bytes of the formats that `tf.io.decode_image` reads.
_TF_MAGIC = (b'\xff\xd8\xff', b'\x89PNG\r\n\x1a\n', b'GIF8', b'BM', b'RIFF')
_ORIENTATION = 0x0112
# Major brands of HEIC files (ISO/IEC 23008-12, annex B); AVIF may have the last two too.
_HEIF_BRANDS = (b'heic', b'heix', b'heim', b'heis', b'hevc', b'hevx', b'mif1', b'msf1')

# A JPEG that will be made much smaller is decoded at 1/2, 1/4 or 1/8 of its size, but not
# below this many times the height and width of the result. Pillow's `thumbnail` does the
# same with the same number, its `reducing_gap`.
GAP = 2

# TensorFlow's names of the inverse DCT for JPEG, indexed by `precise`.
_DCT = ('INTEGER_FAST', 'INTEGER_ACCURATE')

# (transpose, flip up-down, flip left-right), in this order, for each EXIF orientation.
_STEPS = np.array(
  [
    [int(x) for x in s]
    for s in ['000', '000', '001', '011', '010', '100', '101', '111', '110']
  ],
  bool,
)


def probe(data: bytes, exif: bool) -> tuple[bytes, int, tuple[int, int]]:
  """Reads an image's header.

  Args:
    data: the file's bytes.
    exif: whether to read the EXIF orientation.

  Returns:
    (bytes that TensorFlow decodes, EXIF orientation 1..8, (height, width) of the upright
    image). The orientation is 1 if the file has none. Formats that only Pillow reads (TIFF,
    PPM, HEIC, ...) come back as PNG, and so does the first frame of an animated WebP.

  Raises:
    BadImage: for an empty file, an unknown format, a format whose package is missing, or a
      header with more than MAX_PIXELS.
  """
  from PIL import Image, ImageOps

  if not data:
    raise BadImage('empty file')
  try:
    with _open(data) as image:
      if image.width * image.height > MAX_PIXELS:
        raise Image.DecompressionBombError(
          f'{image.width}x{image.height} by its header'
        )
      if not data.startswith(_TF_MAGIC) or _is_animated_webp(data):
        check_depth(image)
        image = ImageOps.exif_transpose(image) if exif else image
        return _encode_png(image), 1, image.size[::-1]
      orientation = _orientation(image, data) if exif else 1
      return data, orientation, image.size[:: -1 if orientation < 5 else 1]
  except BadImage:
    raise
  except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
    raise BadImage(f'more than {MAX_PIXELS / 1e6:.0f} megapixels: {error}') from None
  except Exception as error:  # Pillow's plugins raise many types on broken headers
    reason = str(error).replace(repr(error.args[-1]), 'it') if error.args else ''
    if 'cannot identify' in str(error):
      raise BadImage('not an image of a known type') from None
    raise BadImage(f'broken header: {type(error).__name__} {reason}'.strip()) from None


def read_size(data: bytes, exif: bool) -> tuple[int, int] | None:
  """Returns (height, width) of the upright image by its header, or None if it is broken."""
  try:
    with _open(data) as image:
      sideways = exif and _orientation(image, data) >= 5
      return image.size if sideways else image.size[::-1]
  except Exception:  # Pillow's plugins raise many types on broken headers
    return None


def _open(data: bytes):
  from PIL import Image

  if data[4:8] == b'ftyp' and data[8:12] in _HEIF_BRANDS:
    _register_heif()
  return Image.open(io.BytesIO(data))


def check_depth(image) -> None:
  """Raises BadImage for a PIL image with one number of 32 bits per pixel.

  Nothing says which of these numbers is white. Pillow gives gray levels of 16 bits the same
  mode as integers of 32, for PNG and PPM alone.
  """
  if image.mode == 'F' or (image.mode == 'I' and image.format not in ('PNG', 'PPM')):
    kind = {'F': 'floats', 'I': 'integers'}[image.mode]
    raise BadImage(f'{kind} of 32 bits, expected 8 or 16 bits per channel')


@functools.cache
def _register_heif() -> None:
  try:
    import pillow_heif
  except ImportError:
    raise BadImage(
      "HEIC, which needs pillow-heif: pip install 'vit_jax[heif]'"
    ) from None
  # One thread per image: the reader already decodes several at a time.
  pillow_heif.options.DECODE_THREADS = 1
  pillow_heif.register_heif_opener()


def _is_animated_webp(data: bytes) -> bool:
  # TensorFlow does not decode an image with this flag to RGB, even if it has one frame.
  extended = data[:4] == b'RIFF' and data[12:16] == b'VP8X' and len(data) > 20
  return extended and bool(data[20] & 0x02)


def _orientation(image, data: bytes) -> int:
  # The EXIF of a PNG may stand behind its pixels, so Pillow decodes the whole image to find
  # it. Look only if the file has any.
  if image.format == 'PNG' and b'eXIf' not in data and b'profile type exif' not in data:
    return 1
  value = image.getexif().get(_ORIENTATION, 1)
  return value if value in range(1, 9) else 1


def _encode_png(image) -> bytes:
  from PIL import Image

  if image.mode.startswith('I'):
    # Of 16 bits per pixel, keep the high 8.
    values = np.asarray(image).astype(np.float64) / 257
    image = Image.fromarray(np.clip(np.round(values), 0, 255).astype(np.uint8))
  out = io.BytesIO()
  image.convert('RGB').save(out, 'PNG', compress_level=0)
  return out.getvalue()


def decode(data, orientation, upright, channels: int, precise: bool, target=None):
  """Returns the image uint8 [H, W, channels], upright.

  Args:
    data: scalar string tensor: JPEG, PNG, GIF (first frame), BMP or WebP.
    orientation: int32 scalar, EXIF 1..8.
    upright: int32 [2], height and width from `probe`.
    precise: whether to use the accurate inverse DCT for JPEG instead of the fast one.
    target: (h, w) that the image will be resized to, or a lower bound of it. A JPEG may
      then be decoded at 1/2, 1/4 or 1/8 of its size (see `GAP`). None: at full size.
  """

  jpeg = functools.partial(tf.io.decode_jpeg, data, channels, dct_method=_DCT[precise])
  reduced = lambda: _choose_ratio(lambda ratio: jpeg(ratio=ratio), upright, target)
  whole = lambda: _pixels(data, channels, precise)
  image = tf.cond(tf.io.is_jpeg(data), reduced, whole) if target else whole()
  return _upright(image, orientation)


def decode_and_crop(
  data, orientation, upright, channels: int, precise: bool, box, target=None
):
  """Returns the crop uint8 [h, w, channels] of the upright image.

  Decodes a JPEG inside the crop only, which saves most of the work. At a reduced size the
  result has every pixel of that size that overlaps the crop.

  Args:
    box: a function that maps (height, width) of the upright image to the crop (y, x, h, w).
    target: (h, w) that the crop will be resized to. For the other arguments see `decode`.
  """

  def decode_window():
    y, x, h, w = box(upright[0], upright[1])
    window = tf.cond(
      orientation > 1,
      lambda: _window_as_stored(y, x, h, w, upright, orientation),
      lambda: tf.stack([y, x, h, w]),
    )

    def decode_at(ratio):
      begin, end = window[:2] // ratio, -(-(window[:2] + window[2:]) // ratio)
      cut = tf.concat([begin, end - begin], 0)
      return tf.image.decode_and_crop_jpeg(
        data, cut, channels, ratio, dct_method=_DCT[precise]
      )

    return _upright(_choose_ratio(decode_at, (h, w), target), orientation)

  def whole():
    image = _upright(_pixels(data, channels, precise), orientation)
    y, x, h, w = box(tf.shape(image)[0], tf.shape(image)[1])
    return image[y : y + h, x : x + w]

  return tf.cond(tf.io.is_jpeg(data), decode_window, whole)


def _choose_ratio(at, size, target: tuple[int, int] | None):
  """Decodes at 1/1, 1/2, 1/4 or 1/8, the smallest that is at least GAP times `target`.

  Args:
    at: a function that decodes at 1/ratio of the size, called as at(1), at(2), ...
    size: (h, w) at full size.
  """
  if target is None:
    return at(1)
  times = tf.minimum(size[0] // (GAP * target[0]), size[1] // (GAP * target[1]))
  halvings = tf.reduce_sum(tf.cast(times >= [2, 4, 8], tf.int32))
  return tf.switch_case(halvings, [functools.partial(at, r) for r in (1, 2, 4, 8)])


def _window_as_stored(y, x, h, w, upright, orientation):
  """Maps a window of the upright image to the stored image: int32 [4], y, x, h, w."""
  transpose, ud, lr = tf.unstack(tf.gather(tf.constant(_STEPS), orientation))
  # Undo the steps in reverse.
  x = tf.where(lr, upright[1] - x - w, x)
  y = tf.where(ud, upright[0] - y - h, y)
  return tf.where(transpose, tf.stack([x, y, w, h]), tf.stack([y, x, h, w]))


def _pixels(data, channels: int, precise: bool):
  """Decodes an image without turning it upright.

  Only JPEG goes to `decode_jpeg`, which would return a WebP with four dimensions.
  """
  image = lambda: tf.io.decode_image(data, channels, expand_animations=False)
  jpeg = lambda: tf.io.decode_jpeg(data, channels, dct_method=_DCT[True])
  image = tf.cond(tf.io.is_jpeg(data), jpeg, image) if precise else image()
  return tf.ensure_shape(image, [None, None, channels])


def _upright(image, orientation):
  def transform():
    transpose, ud, lr = tf.unstack(tf.gather(tf.constant(_STEPS), orientation))
    out = tf.cond(transpose, lambda: tf.transpose(image, [1, 0, 2]), lambda: image)
    out = tf.cond(ud, lambda: tf.reverse(out, [0]), lambda: out)
    return tf.cond(lr, lambda: tf.reverse(out, [1]), lambda: out)

  return tf.cond(orientation > 1, transform, lambda: image)
