"""Single images without TensorFlow, beside the TensorFlow ops of the same names."""

import io

import numpy as np
import pillow_heif
import pytest
from PIL import Image

from tests.support import naming
from tests.support.hostile_images import encode, picture, png
from vit_jax.data import pipeline
from vit_jax.data.ops import registry
from vit_jax.data.single_image import SingleImage
from vit_jax.errors import BadImage, UserError

PLAIN = 'value_range(0, 1)'


@pytest.fixture
def photo():
  return np.asarray(picture(size=(90, 61)))


PIPELINES = [
  'resize(32)',
  "resize(150, rounding='nearest')",
  "resize((20, 200), rounding='none')",
  'resize((20, 40), antialias=True)',
  "resize(32, method='bicubic')",
  "resize(150, method='bicubic', rounding='nearest')",
  "resize(32, method='bicubic', antialias=True)",
  "resize(32, method='area')",
  "resize((32, 200), method='nearest')",
  'resize_small(40)|central_crop(33)',
  "resize_small(47, method='bicubic')|central_crop((32, 24))",
]


@pytest.mark.parametrize('pp', PIPELINES)
def test_ops_are_those_of_tensorflow(photo, pp):
  pp = f'{pp}|value_range(0, 255)'
  # White shows sums that are 1e-5 off, which truncation would make a level.
  for image in (photo, np.full_like(photo, 255), photo[:7, :50, :1]):
    x = image
    for op in registry.parse(pp):
      x = op({'image': x}, None)['image']
    np.testing.assert_array_equal(SingleImage(pp)(image), x)


def test_gray_is_tensorflows(photo):
  (decode,) = registry.parse('decode(1)')
  result, expected = decode.numpy(photo), decode.apply(photo, None).numpy()
  # Exact here, float32 there: a level where the exact value is whole to within 1e-4.
  assert np.abs(result.astype(int) - expected).max() <= 1
  assert np.mean(result != expected) < 1e-3
  luma = (photo @ [0.2989, 0.587, 0.114])[..., None]  # ITU-R BT.601, truncated
  assert np.abs(result - luma).max() <= 1


@pytest.mark.parametrize(
  'mode', ['1', 'L', 'LA', 'P', 'RGB', 'RGBA', 'CMYK', 'I;16', 'YCbCr']
)
def test_every_mode_of_image_is_read(mode, tmp_path):
  gray = np.tile(np.arange(16, dtype=np.uint8) * 16, (16, 1))
  if mode == '1':  # black and white
    gray = np.where(gray < 128, np.uint8(0), np.uint8(255))
  if mode == 'I;16':
    image = Image.fromarray(gray.astype(np.uint16) * 257)
  else:
    image = Image.fromarray(gray).convert(mode)
  path = tmp_path / ('a.jpg' if mode in ('CMYK', 'YCbCr') else 'a.png')
  image.save(path)
  x = SingleImage(f'decode(1)|{PLAIN}')(path)
  assert x.shape == (16, 16, 1)
  np.testing.assert_allclose(x[..., 0], gray / 255, atol=0.03)  # JPEG, palettes
  assert SingleImage(f'decode|{PLAIN}')(path.read_bytes()).shape == (16, 16, 3)


@pytest.mark.parametrize('kind', [np.float32, np.int32])
def test_numbers_of_32_bits_are_no_image(kind, tmp_path):
  image = Image.fromarray(np.linspace(0, 70_000, 256).reshape(16, 16).astype(kind))
  image.save(tmp_path / 'a.tif')
  for one in (image, tmp_path / 'a.tif'):
    with pytest.raises(BadImage, match=naming(32, 16, 'bits')):
      SingleImage(PLAIN)(one)


@pytest.fixture(scope='module')
def large(tmp_path_factory):
  """A folder with a JPEG of 700 x 901 px that stands upright by its EXIF."""
  path = tmp_path_factory.mktemp('large') / 'a' / 'a.jpg'
  path.parent.mkdir()
  rng = np.random.default_rng(0)
  x = np.zeros((700, 901, 3))
  for side in (4, 16, 64, 256):  # as photographs have it, less detail in what is small
    noise = Image.fromarray(rng.integers(0, 256, (side, side, 3), np.uint8))
    x += np.asarray(noise.resize((901, 700), Image.BICUBIC)) / side**0.5
  image = Image.fromarray((x / 1.1).clip(0, 255).astype(np.uint8))
  path.write_bytes(encode(image, 'JPEG', 6))
  return path


@pytest.mark.parametrize(
  'pp', ['resize((90, 60))', 'resize_small(80)|central_crop(72)', 'resize(360)']
)
def test_a_large_jpeg_is_that_of_training(large, pp):
  pp = f'decode(precise=True)|{pp}|value_range(0, 255)'
  (batch,) = pipeline.EvalBatches(
    f'folder:{large.parents[1]}', 'train', pp, 1
  ).iterate()
  result, expected = SingleImage(pp)(large), np.asarray(batch['image'][0], np.float32)
  # At full size Pillow's chroma differs by a level, see `test_images`.
  assert np.abs(result - expected).max() <= (1 if '360' in pp else 0)


@pytest.mark.parametrize('form', ['JPEG', 'PNG', 'WEBP', 'TIFF', 'AVIF'])
def test_orientation_is_honoured(form):
  x = np.zeros((10, 20, 3), np.uint8)
  x[:, :10] = 255  # the left half: upright it is the upper one
  data = encode(Image.fromarray(x), form, 6)
  upright = SingleImage(PLAIN)(data)
  assert upright.shape == (20, 10, 3)
  assert upright[:8].mean() > 0.9
  assert upright[12:].mean() < 0.1
  with Image.open(io.BytesIO(data)) as image:
    np.testing.assert_array_equal(SingleImage(PLAIN)(image), upright)


def with_broken_exif():
  data = encode(picture(), 'WEBP', 6)
  broken = data.replace(b'II*\0', b'yI*\0').replace(b'MM\0*', b'yM\0*')
  assert broken != data
  return broken


SMALL = np.zeros((4, 4, 3), np.uint8)
# A pipeline, an image, and the words of the error.
REFUSED = [
  (PLAIN, b'', ('empty',)),
  (PLAIN, encode(picture(size=(300, 200)), 'JPEG')[:2000], ('truncated',)),
  (PLAIN, png(9000, 9000, b''), ('megapixels',)),
  (PLAIN, with_broken_exif(), ('TIFF',)),
  (PLAIN, np.float32(SMALL), ('float32 (4, 4, 3)', 'uint8')),
  (PLAIN, np.zeros((4, 4, 4), np.uint8), ('(4, 4, 4)', '1 or 3')),
  (PLAIN, 'no/such.png', ('No such file',)),
  (f'central_crop(64)|{PLAIN}', SMALL, ('central_crop', '64x64')),
  # Pipelines that do not predict.
  (f'decode|inception_crop(32)|{PLAIN}', None, ('{}', 'inception_crop')),
  ('decode|resice(32)', None, ('{}', "'resice'", 'resize')),
  ('decode|resize(32)', None, ('{}', 'one value_range')),  # as in training
  (f'resize(32)|decode|{PLAIN}', None, ('{}', 'first')),
]


@pytest.mark.parametrize(('pp', 'image', 'words'), REFUSED)
def test_what_cannot_be_read(pp, image, words):
  words = [word.replace('{}', pp) for word in words]
  with pytest.raises(UserError if image is None else BadImage, match=naming(*words)):
    SingleImage(pp)(image)


def same_in_training(home, *files, suffix):
  """Asserts that training and prediction decode files to the same pixels; returns them."""
  (home / 'train' / 'a').mkdir(parents=True)
  for i, data in enumerate(files):
    (home / 'train' / 'a' / f'{i}.{suffix}').write_bytes(data)
  pp = 'decode(3, precise=True)|resize((30, 40), method="nearest")|value_range(0, 255)'
  options = {'max_bad_fraction': 0.0}
  batches = pipeline.EvalBatches(str(home), 'train', pp, len(files), **options)
  (batch,) = batches.iterate()
  one = SingleImage(pp)
  for i, image in enumerate(batch['image']):
    np.testing.assert_array_equal(image, one(batches.source.name_of(i)))
  return batch['image']


@pytest.mark.parametrize('mode', ['RGB', 'RGBA'])
def test_the_first_frame_of_an_animated_webp_is_the_image(tmp_path, photo, mode):
  # TensorFlow refuses RGB ones.
  first, *rest = (
    Image.fromarray(np.roll(photo, i, 0)).convert(mode) for i in (0, 7, 14)
  )
  still = encode(first, 'WEBP', lossless=True)
  moving = encode(first, 'WEBP', lossless=True, save_all=True, append_images=rest)
  a, b = same_in_training(tmp_path, still, moving, suffix='webp')
  np.testing.assert_array_equal(a, b)


def test_heic_is_the_same_in_training(tmp_path, photo):
  pillow_heif.register_heif_opener()
  # HEIC turns an image by a property of its own ('irot'), which the decoder applies; the
  # EXIF orientation is for information (ISO/IEC 23008-12, annex A).
  image = Image.fromarray(photo)
  files = [encode(image, 'HEIF', orientation, quality=95) for orientation in (1, 6)]
  result = same_in_training(tmp_path, *files, suffix='HEIC')
  expected = SingleImage('resize((30, 40), method="nearest")|value_range(0, 255)')(
    photo
  )
  assert np.abs(result - expected).mean() < 8  # lossy, with chroma subsampled
