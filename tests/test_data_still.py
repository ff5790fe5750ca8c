"""Single images without TensorFlow, beside the TensorFlow ops of the same names."""

import io

import numpy as np
import pytest
from conftest import naming
from PIL import Image, features

from vit_jax.data.ops import registry
from vit_jax.data.ops.decode import BadImage
from vit_jax.data.ops.numpy_ops import Still
from vit_jax.errors import UserError


@pytest.fixture
def photo():
  rng = np.random.default_rng(0)
  small = Image.fromarray(rng.integers(0, 256, (9, 12, 3), np.uint8))
  return np.asarray(small.resize((90, 61), Image.BICUBIC))


PIPELINES = [
  'resize(32)',
  'resize((20, 40), antialias=True)',
  "resize(32, method='bicubic')",
  "resize(32, method='bicubic', antialias=True)",
  "resize(150, method='bicubic')",
  "resize(32, method='area')",
  "resize((32, 200), method='nearest')",
  'resize_small(40)|central_crop(33)',
  "resize_small(47, method='bicubic')|central_crop((32, 24))",
  'decode(1)|resize(32)',
]


@pytest.mark.parametrize('pp', PIPELINES)
def test_ops_are_those_of_tensorflow(photo, pp):
  pp = f'{pp}|value_range(0, 255)'
  x = photo
  for op in registry.parse(pp):
    x = op.apply(np.asarray(x) if not hasattr(x, 'numpy') else x, None)
  ours = Still(pp)(photo)
  assert ours.dtype == np.float32
  assert ours.shape == tuple(x.shape)
  # One level where rounding falls the other way: TensorFlow's cubic comes from a table
  # of 1,024 entries, its gray from float32 in [0, 1].
  difference = np.abs(ours - x.numpy())
  assert difference.max() <= 1
  assert np.mean(difference > 0) < (0.6 if 'decode(1)' in pp else 0.05)


def test_value_range_may_be_per_channel(photo):
  mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
  low, high = tuple(((0 - mean) / std).tolist()), tuple(((1 - mean) / std).tolist())
  pp = f'value_range({low}, {high})'
  expected = (photo / 255 - mean) / std
  np.testing.assert_allclose(Still(pp)(photo), expected, atol=1e-6)
  (op,) = registry.parse(pp)
  np.testing.assert_allclose(op.apply(photo, None), expected, atol=1e-6)
  with pytest.raises(UserError, match=naming('value_range((0, 0, 0), 1)', 'channel')):
    Still('value_range((0, 0, 0), 1)')


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
  x = Still('decode(1)|value_range(0, 1)')(path)
  assert x.shape == (16, 16, 1)
  np.testing.assert_allclose(x[..., 0], gray / 255, atol=0.03)  # JPEG, palettes
  assert Still('decode|value_range(0, 1)')(path.read_bytes()).shape == (16, 16, 3)


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
  upright = Still('value_range(0, 1)')(path)
  assert upright.shape == (20, 10, 3)
  assert upright[:8].mean() > 0.9
  assert upright[12:].mean() < 0.1
  with Image.open(path) as image:
    np.testing.assert_array_equal(Still('value_range(0, 1)')(image), upright)


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
    Still('value_range(0, 1)')(image)


def test_ops_for_labels_are_passed_over(photo):
  pp = 'resize(32)|value_range(-1, 1)'
  np.testing.assert_array_equal(Still(f'{pp}|onehot(10)')(photo), Still(pp)(photo))


def test_pipelines_that_do_not_predict():
  with pytest.raises(UserError, match=naming('inception_crop', "'central_crop'")):
    Still('decode|inception_crop(32)|value_range(-1, 1)')
  with pytest.raises(UserError, match=naming("'resice'", 'resize')):
    Still('decode|resice(32)')
  with pytest.raises(
    UserError, match=naming("'decode|resize(32)'", 'one value_range')
  ):  # as in training
    Still('decode|resize(32)')
  with pytest.raises(
    UserError, match=naming("'resize(32)|decode|value_range(0, 1)'", 'first')
  ):
    Still('resize(32)|decode|value_range(0, 1)')
  with pytest.raises(BadImage, match=naming('central_crop', '64x64')):
    Still('central_crop(64)|value_range(0, 1)')(np.zeros((32, 32, 3), np.uint8))
