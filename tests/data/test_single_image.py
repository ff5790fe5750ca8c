"""Single images without TensorFlow, beside the TensorFlow ops of the same names."""

import io

import numpy as np
import pytest
from PIL import Image, features

from tests.support import naming
from vit_jax.data import pipeline
from vit_jax.data.ops import registry
from vit_jax.data.single_image import SingleImage
from vit_jax.errors import BadImage, UserError


@pytest.fixture
def photo():
  rng = np.random.default_rng(0)
  small = Image.fromarray(rng.integers(0, 256, (9, 12, 3), np.uint8))
  return np.asarray(small.resize((90, 61), Image.BICUBIC))


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
  got, want = decode.numpy(photo), decode.apply(photo, None).numpy()
  # Exact here, float32 there: a level where the exact value is whole to within 1e-4.
  assert np.abs(got.astype(int) - want).max() <= 1
  assert np.mean(got != want) < 1e-3


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
  x = SingleImage('decode(1)|value_range(0, 1)')(path)
  assert x.shape == (16, 16, 1)
  np.testing.assert_allclose(x[..., 0], gray / 255, atol=0.03)  # JPEG, palettes
  assert SingleImage('decode|value_range(0, 1)')(path.read_bytes()).shape == (16, 16, 3)


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
  exif = Image.Exif()
  exif[0x0112] = 6
  Image.fromarray((x / 1.1).clip(0, 255).astype(np.uint8)).save(path, exif=exif)
  return path


@pytest.mark.parametrize(
  'pp',
  [
    'resize((90, 60))',
    'resize_small(80)|central_crop(72)',
    'resize(360)',
  ],
)
def test_a_large_jpeg_is_that_of_training(large, pp):
  pp = f'decode(precise=True)|{pp}|value_range(0, 255)'
  batches = pipeline.evaluate(f'folder:{large.parents[1]}', 'train', pp, 1)
  (batch,) = batches.iterate()
  got, want = SingleImage(pp)(large), np.asarray(batch['image'][0], np.float32)
  # At full size Pillow's chroma differs by a level, see `test_images`.
  assert np.abs(got - want).max() <= (1 if '360' in pp else 0)


@pytest.mark.parametrize('suffix', ['jpg', 'png', 'webp', 'tif', 'avif'])
def test_orientation_is_honoured(suffix, tmp_path):
  if not features.check('avif') and suffix == 'avif':
    pytest.skip('this Pillow has no AVIF')
  x = np.zeros((10, 20, 3), np.uint8)
  x[:, :10] = 255  # the left half: upright it is the upper one
  exif = Image.Exif()
  exif[0x0112] = 6
  path = tmp_path / f'a.{suffix}'
  Image.fromarray(x).save(path, exif=exif)
  upright = SingleImage('value_range(0, 1)')(path)
  assert upright.shape == (20, 10, 3)
  assert upright[:8].mean() > 0.9
  assert upright[12:].mean() < 0.1
  with Image.open(path) as image:
    np.testing.assert_array_equal(SingleImage('value_range(0, 1)')(image), upright)


def webp_of_broken_exif():
  exif = Image.Exif()
  exif[0x0112] = 6
  data = io.BytesIO()
  Image.new('RGB', (8, 8)).save(data, 'WEBP', exif=exif)
  assert b'II*\0' in data.getvalue() or b'MM\0*' in data.getvalue()
  return data.getvalue().replace(b'II*\0', b'yI*\0').replace(b'MM\0*', b'yM\0*')


def broken():
  data = io.BytesIO()
  Image.fromarray(
    np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
  ).save(data, 'JPEG')
  whole = data.getvalue()
  bomb = io.BytesIO()
  Image.new('1', (9000, 9000)).save(bomb, 'PNG')
  return {
    'empty': (b'', 'empty'),
    'text': (b'hello', 'type'),
    'truncated': (whole[: len(whole) // 2], 'truncated'),
    'bomb': (bomb.getvalue(), 'megapixels'),
    'exif': (webp_of_broken_exif(), 'TIFF'),
    'floats': (np.zeros((4, 4, 3), np.float32), r'float32 \(4, 4, 3\).*uint8'),
    'alpha': (np.zeros((4, 4, 4), np.uint8), r'\(4, 4, 4\).*1 or 3'),
    'missing': ('no/such.png', 'No such file'),
  }


@pytest.mark.filterwarnings('ignore::PIL.Image.DecompressionBombWarning')
@pytest.mark.parametrize('name', broken())
def test_broken_images_say_why(name):
  image, message = broken()[name]
  with pytest.raises(BadImage, match=message):
    SingleImage('value_range(0, 1)')(image)


def test_pipelines_that_do_not_predict():
  with pytest.raises(UserError, match='inception_crop'):
    SingleImage('decode|inception_crop(32)|value_range(-1, 1)')
  with pytest.raises(UserError, match=naming("'resice'", 'resize')):
    SingleImage('decode|resice(32)')
  with pytest.raises(
    UserError, match=naming("'decode|resize(32)'", 'one value_range')
  ):  # as in training
    SingleImage('decode|resize(32)')
  with pytest.raises(
    UserError, match=naming("'resize(32)|decode|value_range(0, 1)'", 'first')
  ):
    SingleImage('resize(32)|decode|value_range(0, 1)')
  with pytest.raises(BadImage, match=naming('central_crop', '64x64')):
    SingleImage('central_crop(64)|value_range(0, 1)')(np.zeros((32, 32, 3), np.uint8))


def same_in_training(tmp_path, files):
  """Asserts that training and prediction decode files {name: bytes} to the same pixels."""
  home = tmp_path / 'train' / 'a'
  home.mkdir(parents=True)
  for name, data in files.items():
    (home / name).write_bytes(data)
  pp = 'decode(3, precise=True)|resize((30, 40), method="nearest")|value_range(0, 255)'
  batches = pipeline.evaluate(
    str(tmp_path), 'train', pp, len(files), max_bad_fraction=0.0
  )
  (batch,) = batches.iterate()
  one = SingleImage(pp)
  for i, image in enumerate(batch['image']):
    np.testing.assert_array_equal(image, one(batches.source.name_of(i)))
  return batch['image']


@pytest.mark.parametrize('mode', ['RGB', 'RGBA'])
def test_the_first_frame_of_an_animated_webp_is_the_image(tmp_path, photo, mode):
  # TensorFlow refuses RGB ones.
  frames = [Image.fromarray(np.roll(photo, 7 * i, 0)).convert(mode) for i in range(3)]
  data = io.BytesIO()
  options = {'save_all': True, 'append_images': frames[1:], 'lossless': True}
  frames[0].save(data, 'WEBP', **options)
  (got,) = same_in_training(tmp_path, {'x.webp': data.getvalue()})
  still = io.BytesIO()
  frames[0].save(still, 'WEBP', lossless=True)
  (tmp_path / 'still').mkdir()
  (want,) = same_in_training(tmp_path / 'still', {'x.webp': still.getvalue()})
  np.testing.assert_array_equal(got, want)


def heic(photo, turned=1):
  pillow_heif = pytest.importorskip('pillow_heif')
  pillow_heif.register_heif_opener()
  data, exif = io.BytesIO(), Image.Exif()
  exif[0x0112] = turned
  Image.fromarray(photo).save(data, 'HEIF', quality=95, exif=exif)
  return data.getvalue()


def test_heic_is_the_same_in_training(tmp_path, photo):
  # HEIC turns an image by a property of its own ('irot'), which the decoder applies; the
  # EXIF orientation is for information (ISO/IEC 23008-12, annex A).
  got = same_in_training(tmp_path, {f'{i}.HEIC': heic(photo, i) for i in (1, 6)})
  want = SingleImage('resize((30, 40), method="nearest")|value_range(0, 255)')(photo)
  assert np.abs(got - want).mean() < 8  # lossy, with chroma subsampled
