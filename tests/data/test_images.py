"""Headers, decoding, EXIF orientation, and what must not be decoded."""

import io
import resource
import sys

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.support.hostile_images import bmp, encode, gif, picture, png
from vit_jax.data import lazy_tf
from vit_jax.data.ops import decode as images
from vit_jax.errors import BadImage

tf = lazy_tf.load()


def decode(data, exif=True, channels=3, precise=False):
  data, *header = images.probe(data, exif)
  return images.decode(tf.constant(data), *header, channels, precise).numpy()


LOSSLESS = [
  ('PNG', {}),
  ('BMP', {}),
  ('WEBP', {'lossless': True}),
  ('TIFF', {}),
  ('TIFF', {'compression': 'tiff_lzw'}),
  ('PPM', {}),
  ('TGA', {}),
]


@pytest.mark.parametrize(('fmt', 'options'), LOSSLESS)
@pytest.mark.parametrize('mode', ['RGB', 'L'])
def test_lossless_formats(fmt, options, mode):
  image = picture().convert(mode)
  result = decode(encode(image, fmt, **options))
  np.testing.assert_array_equal(result, np.asarray(image.convert('RGB')))


@pytest.mark.parametrize('subsampling', [0, 2])
def test_precise_jpeg_agrees_with_pillow(subsampling):
  data = encode(picture(size=(53, 37)), 'JPEG', quality=95, subsampling=subsampling)
  expected = np.asarray(Image.open(io.BytesIO(data)).convert('RGB'))
  np.testing.assert_array_equal(decode(data, precise=True), expected)  # the same DCT
  # The fast one is off by up to about ten levels, one or two on average.
  assert 0 < np.abs(decode(data).astype(int) - expected).mean() < 2.5


@pytest.mark.parametrize('orientation', range(1, 9))
@pytest.mark.parametrize(
  ('fmt', 'options'),
  [('PNG', {}), ('WEBP', {'lossless': True}), ('TIFF', {}), ('JPEG', {'quality': 95})],
)
def test_orientation(fmt, options, orientation):
  data = encode(picture(), fmt, orientation, **options)
  stored = Image.open(io.BytesIO(data))
  expected = np.asarray(ImageOps.exif_transpose(stored).convert('RGB')).astype(int)
  assert expected.shape == ((20, 30, 3) if orientation < 5 else (30, 20, 3))
  result = decode(data, precise=True)
  assert np.abs(result - expected).max() <= (2 if fmt == 'JPEG' else 0)  # chroma
  if fmt != 'TIFF':  # Pillow turns it in any case
    assert decode(data, exif=False).shape == (20, 30, 3)


@pytest.mark.parametrize('orientation', range(1, 9))
@pytest.mark.parametrize('fmt', ['JPEG', 'PNG'])
def test_fused_crop(fmt, orientation):
  # Without chroma subsampling, whose interpolation looks across the crop's edge, a
  # JPEG decoded in a window has the pixels of one decoded whole.
  options = {'subsampling': 0} if fmt == 'JPEG' else {}
  data = encode(picture(size=(53, 37)), fmt, orientation, **options)
  whole = decode(data)
  data, *header = images.probe(data, exif=True)
  box = lambda h, w: (h // 3, w // 5, h // 2, w // 4)
  result = images.decode_and_crop(tf.constant(data), *header, 3, False, box).numpy()
  y, x, h, w = box(*whole.shape[:2])
  np.testing.assert_array_equal(result, whole[y : y + h, x : x + w])


def size_of(data):
  return images.probe(data, exif=True)[2]


@pytest.mark.parametrize(
  ('target', 'shape', 'orientation', 'mode'),
  [
    ((51, 75), (203, 301), 1, 'RGB'),
    ((50, 75), (102, 151), 6, 'RGB'),
    ((10, 60), (102, 151), 3, 'L'),
    ((20, 30), (51, 76), 6, 'L'),
    ((3, 5), (26, 38), 3, 'RGB'),
  ],
)
def test_a_jpeg_is_reduced_as_pillow_does(target, shape, orientation, mode):
  size = (203, 301) if orientation < 5 else (301, 203)
  data = encode(picture(size=size[::-1]).convert(mode), 'JPEG', orientation)
  args = tf.constant(data), orientation, size_of(data), 3
  result = images.decode(*args, True, target).numpy().astype(int)
  assert result.shape == (*shape, 3)
  image = Image.open(io.BytesIO(data))
  height, width = target if orientation < 5 else target[::-1]
  image.draft(None, (2 * width, 2 * height))
  expected = np.asarray(ImageOps.exif_transpose(image).convert('RGB'))
  np.testing.assert_array_equal(result, expected)
  # The fast DCT differs in chroma, which at a half has all of its pixels.
  fast = images.decode(*args, False, target).numpy()
  assert np.abs(result - fast).max() <= 4
  if shape == (203, 301):
    np.testing.assert_array_equal(fast, decode(data))


@pytest.mark.parametrize('orientation', [1, 5, 8])
def test_a_crop_of_a_reduced_jpeg(orientation):
  size = (240, 336) if orientation < 5 else (336, 240)
  data = encode(picture(size=size[::-1]), 'JPEG', orientation, subsampling=0)
  box = lambda h, w: (37, 50, 121, 90)  # a quarter has rows 9 to 39, columns 12 to 34
  args = tf.constant(data), orientation, size_of(data), 3, True
  result = images.decode_and_crop(*args, box, (11, 11)).numpy()
  image = Image.open(io.BytesIO(data))
  image.draft(None, (image.width // 4, image.height // 4))
  expected = np.asarray(ImageOps.exif_transpose(image))[9:40, 12:35]
  np.testing.assert_array_equal(result, expected)


def test_a_truncated_jpeg_is_broken_at_any_size():
  data = encode(picture(size=(300, 200)), 'JPEG')
  size, data = size_of(data), tf.constant(data[: len(data) // 2])
  for target in (None, (50, 50), (9, 9)):
    with pytest.raises(tf.errors.InvalidArgumentError):
      images.decode(data, 1, size, 3, False, target)


@pytest.mark.parametrize(
  'data',
  [
    png(13_000, 13_000, bytes(13_000 * (13_000 // 8 + 1))),  # whole: 505 MB as RGB
    png(10**9, 10**9, b''),
    gif(12_000),
    bmp(9000),
  ],
  ids=['png', 'png, header only', 'gif', 'bmp'],
)
def test_bombs_are_refused_by_their_header(data):
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  with pytest.raises(BadImage, match='64 megapixels'):
    images.probe(data, exif=True)
  after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  # ru_maxrss is in KiB (bytes on macOS).
  assert (after - before) * (1 if sys.platform == 'darwin' else 1024) < 50e6
