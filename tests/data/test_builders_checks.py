"""Images in a prepared data set: kept, left out, shrunk, turned upright."""

import io
import os

import numpy as np
import pytest
from PIL import Image

from tests.support.archives import (
  encoded,
  examples,
  synsets,
  tar_bytes,
  write_folder,
  write_tar,
)
from vit_jax.data.prepare import checks, imagenet21k, images, report, writer
from vit_jax.errors import BadImage


def test_what_is_broken_is_left_out_and_listed(tmp_path):
  archive = synsets(4, 6)
  first, second, third, _ = archive
  wnid = 'n00000007'
  archive[first] |= {
    f'{wnid}_cut.JPEG': encoded(1, size=(64, 64))[:-200],
    f'{wnid}_none.JPEG': b'',
    f'{wnid}_text.JPEG': b'<html>not found</html>',
    f'{wnid}_png.JPEG': encoded(2, 'PNG'),
    f'{wnid}_bmp.JPEG': encoded(3, 'BMP'),
    f'{wnid}_tiff.tif': encoded(4, 'TIFF'),
    'README.txt': b'hello',
    '._n00000007_0.JPEG': b'\0\5\x16\7',
  }
  inner = tar_bytes(archive[second])
  archive[second] = inner[: len(inner) // 2 - len(inner) // 2 % 512 + 100]
  archive[third] = b''
  archive['winter/LICENSE'] = b'free'
  for mode in ('w', 'w:gz'):
    plan = imagenet21k.plan(write_tar(tmp_path / f'a{len(mode)}.tar', archive, mode))
    made, result = writer.prepare(plan, str(tmp_path / mode))
    broken = {
      os.path.basename(f['path']): f['reason'] for f in result['broken']['files']
    }
    some = result['splits']['full']['counts']['n00000044']
    assert 0 < some < 6
    assert broken.pop(f'{wnid}_cut.JPEG').startswith('cannot be decoded')
    assert broken.pop(f'{wnid}_none.JPEG') == 'empty file'
    assert broken.pop(f'{wnid}_text.JPEG') == 'not an image of a known type'
    assert broken.pop('n00000044.tar').startswith('damaged, the rest is left out')
    assert broken.pop('n00000081.tar').startswith('damaged, the rest is left out')
    assert all(name.startswith('n00000044_') for name in broken)  # where it was cut
    skipped = {os.path.basename(f['path']) for f in result['skipped']['files']}
    assert skipped == {'README.txt', 'LICENSE'}
    assert result['num_classes'] == 4
    full = result['splits']['full']
    assert full['counts'] == {
      'n00000007': 9,
      'n00000044': some,
      'n00000081': 0,
      'n00000118': 6,
    }
    assert full['none'] == ['n00000081']
    assert (full['min'], full['max']) == (0, 9)
    assert result['converted'] == 1
    found = {name: data for _, data, name in examples(made, 'full')}
    assert found[f'{wnid}/{wnid}_bmp.JPEG'] == encoded(3, 'BMP')
    assert found[f'{wnid}/{wnid}_tiff.tif'].startswith(b'\x89PNG')
    pixels = np.asarray(Image.open(io.BytesIO(found[f'{wnid}/{wnid}_tiff.tif'])))
    np.testing.assert_array_equal(pixels, Image.open(io.BytesIO(encoded(4, 'TIFF'))))


@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'GIF', 'BMP', 'WEBP'])
def test_a_whole_image_is_kept_as_it_is(kind):
  data = encoded(0, kind, size=(50, 40))
  assert checks.check(data, upright=True) == (data, '')
  if kind in ('JPEG', 'PNG', 'WEBP'):
    with pytest.raises(BadImage):
      checks.check(data[: len(data) * 2 // 3], upright=True)


@pytest.mark.parametrize('orientation', [1, 6])
@pytest.mark.parametrize('mode', ['RGB', 'L', 'RGBA', 'P', 'CMYK', 'I;16'])
def test_large_images_are_made_smaller(mode, orientation):
  kind = 'JPEG' if mode in ('RGB', 'L', 'CMYK') else 'PNG'
  exif = Image.Exif()
  exif[0x0112] = orientation
  # Bands of gray, across.
  ramp = np.add.outer(np.arange(300), np.arange(403))
  gray = ((ramp // 60) * 20 + 10).astype(np.uint8)
  image = Image.fromarray(gray)
  image = (
    Image.fromarray(gray.astype(np.uint16) * 257)
    if mode == 'I;16'
    else image.convert('RGB' if mode in ('P', 'CMYK') else mode).convert(mode)
  )
  out = io.BytesIO()
  image.save(out, kind, exif=exif, **({'quality': 95} if kind == 'JPEG' else {}))
  kept, note = checks.check(out.getvalue(), True, 100)
  assert note.split() == ['shrunk'] + ['turned'] * (orientation == 6)
  small = Image.open(io.BytesIO(kept))
  assert small.format == 'JPEG'
  assert small.mode == ('L' if mode in ('L', 'I;16') else 'RGB')
  assert small.getexif().get(0x0112, 1) == 1
  want = Image.fromarray(gray).resize((100, 74), Image.BICUBIC)
  want = want.rotate(-90, expand=True) if orientation == 6 else want
  assert small.size == want.size
  off = np.abs(np.asarray(small.convert('L'), int) - np.asarray(want))
  assert off.mean() < 2  # two compressions, and where steps of 20 levels fall
  # What is not larger stays as it is, and so does the shorter side alone.
  again, note = checks.check(kept, True, 100)
  assert again is kept
  assert note == ''
  assert checks.check(kept, True, 101) == (kept, '')


def test_a_data_set_of_smaller_images(tmp_path):
  files = {
    'a/large.jpg': encoded(1, 'JPEG', size=(30, 90)),
    'a/small.jpg': encoded(2, 'JPEG', size=(8, 9)),
    'b/large.png': encoded(3, 'PNG', size=(90, 30)),
  }
  root = write_folder(tmp_path / 'in', files)
  plan = lambda **options: images.plan([root], 'x', **options)
  made, result = writer.prepare(plan(max_side=60), str(tmp_path))
  kept = {name: data for _, data, name in examples(made, 'train')}
  assert kept['a/small.jpg'] == files['a/small.jpg']
  sizes = {n: Image.open(io.BytesIO(data)).size for n, data in kept.items()}
  sides = {name: max(size) for name, size in sizes.items()}
  assert sides == {'a/large.jpg': 60, 'a/small.jpg': 9, 'b/large.png': 60}
  assert result['shrunk'] == 2
  assert 'made smaller: 2' in report.text(result)
  assert '60 pixels' in (tmp_path / 'x/1.0.0/dataset_info.json').read_text()
  marks = [plan(max_side=side).fingerprint() for side in (None, 60, 61)]
  assert len({*marks}) == 3
  assert marks[0] == plan().fingerprint()


def test_a_broken_large_image_is_not_made_smaller():
  data = encoded(0, 'JPEG', size=(160, 320))
  with pytest.raises(BadImage):
    checks.check(data[: len(data) * 2 // 3], True, 64)


def test_photographs_are_turned_upright():
  from PIL import ImageOps

  exif = Image.Exif()
  exif[0x0112] = 6
  data = encoded(0, 'JPEG', size=(16, 32), exif=exif, quality=95)
  kept, note = checks.check(data, upright=True)
  assert note == 'turned'
  upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))), int)
  image = Image.open(io.BytesIO(kept))
  assert image.getexif().get(0x0112, 1) == 1
  # A second compression of noise, the worst of images: 10 levels in the mean at most.
  assert np.abs(np.asarray(image, int) - upright).mean() < 10
  assert checks.check(data, upright=False) == (data, '')
