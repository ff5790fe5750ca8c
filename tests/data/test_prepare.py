"""TFDS builders: labels, order, bytes, broken images, damaged and interrupted input."""

import gzip
import io
import os

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.support import naming
from tests.support.archives import encoded, examples, synsets, write_folder, write_tar
from tests.support.hostile_images import encode
from vit_jax.data import prepare, sources
from vit_jax.errors import BadImage, UserError

JPG = encoded(0)


def prepared(kind, inputs, data_dir, **options):
  """Prepares a data set; returns (its directory, [(name, reason)] of broken images)."""
  builder, broken = prepare.builder(kind, inputs, str(data_dir), **options)
  builder.download_and_prepare(download_dir=str(data_dir / 'downloads'))
  return str(builder.data_path), broken


def test_an_archive_of_imagenet21k(tmp_path, monkeypatch):
  """Bytes, labels and order; a compressed one is the same and read once in each pass."""
  rewinds = []
  rewind = gzip._GzipReader._rewind
  monkeypatch.setattr(
    gzip._GzipReader, '_rewind', lambda self: rewinds.append(self._pos) or rewind(self)
  )
  archive = synsets(4, 40)
  tar = write_tar(tmp_path / 'fall11_whole.tar', archive)
  a, _ = prepared(prepare.IMAGENET21K, [tar], tmp_path / 'A')
  source = sources.build('tfds:imagenet21k', 'full', data_dir=str(tmp_path / 'A'))
  assert source.class_names == ['n00000007', 'n00000044', 'n00000081', 'n00000118']
  labels = {
    x: i for i, tar in enumerate(sorted(archive)) for x in archive[tar].values()
  }
  read = source.read(np.arange(len(source)))
  assert {x['image']: x['label'] for x in read} == labels
  # Repacked under another name and in another order of classes.
  backward = {f'x/y/{name[7:]}': archive[name] for name in reversed(archive)}
  tgz = write_tar(tmp_path / 'b.tgz', backward, 'w:gz')
  b, _ = prepared(prepare.IMAGENET21K, [tgz], tmp_path / 'B')
  assert examples(a, 'full') == examples(b, 'full')
  # Opening looks at the first block; a rewind later would read the archive again.
  assert not [at for at in rewinds if at > 1 << 20]
  # By hashes, so any part is a random one.
  assert len({label for label, _, _ in examples(a, 'full[:24]')}) == 4


@pytest.mark.parametrize('parts', [[''], ['train', 'val']])
def test_a_folder_gives_the_classes_of_the_source_folder(tmp_path, parts):
  names = [f'{s}/{c}/{i}.png' for s in ('train', 'val') for c in 'ba' for i in range(3)]
  names.append('train/b/deep/er/9.png')
  files = {name: encoded(i, 'PNG') for i, name in enumerate(names)}
  root = write_folder(tmp_path / 'pets', files | {'train/b/x.txt': b''})
  inputs = [os.path.join(root, part) for part in parts]
  prepared(prepare.images('pets'), inputs, tmp_path)
  for split in ('train', 'validation'):
    ours = sources.build('tfds:pets', split, data_dir=str(tmp_path))
    folder = sources.build(f'folder:{root}', split)
    assert ours.class_names == folder.class_names
    pairs = (
      sorted((x['image'], int(x['label'])) for x in s.read(np.arange(len(s))))
      for s in (ours, folder)
    )
    assert next(pairs) == next(pairs)


def test_an_image_that_is_given_twice(tmp_path):
  root = write_folder(tmp_path / 'pets', {'cat/1.png': encoded(0, 'PNG')})
  with pytest.raises(UserError, match=naming(f'{root}/cat', 'cat/1.png')):
    prepared(prepare.images('pets'), [root, root], tmp_path)


# Files of each archive, and the class of each split.
TARS = [
  ({'all.tar': ['cat/1.jpg', 'dog/1.jpg']}, {'train': 'cat dog'}),
  ({'all.tgz': ['./top/cat/1.jpg', './top/dog/1.jpg']}, {'train': 'cat dog'}),
  ({'cat.tar': ['1.jpg'], 'dog.tar': ['1.jpg']}, {'train': 'cat dog'}),
  (
    {'train.tar': ['cat/1.jpg'], 'val.tar': ['cat/1.jpg']},
    {'train': 'cat', 'validation': 'cat'},
  ),
  (
    {'x.tar': ['x/test/cat/1.jpg', 'x/train/dog/1.jpg']},
    {'test': 'cat', 'train': 'dog'},
  ),
]


@pytest.mark.parametrize(('tars', 'expected'), TARS)
def test_the_class_in_a_tar_is_the_folder(tmp_path, tars, expected):
  (tmp_path / 'tars').mkdir()
  paths = []
  for tar, names in tars.items():
    files = dict.fromkeys(names, JPG) | {'._x/1.jpg': b'', 'cat/notes.txt': b''}
    mode = 'w:gz' if tar.endswith('gz') else 'w'
    paths.append(write_tar(tmp_path / 'tars' / tar, files, mode))
  for i, inputs in enumerate((paths, [f'{tmp_path}/tars'])):
    directory, _ = prepared(prepare.images('x'), inputs, tmp_path / str(i))
    for split, labels in expected.items():
      stored = sorted(label for (label,), _, _ in examples(directory, split))
      assert ' '.join(stored) == labels


def test_broken_images_are_left_out_by_name(tmp_path):
  archive, wnid = synsets(2, 6), 'n00000007'
  first, _ = archive
  archive[first] |= {
    f'{wnid}_cut.JPEG': encoded(1, size=(64, 64))[:-200],
    f'{wnid}_none.JPEG': b'',
    f'{wnid}_text.JPEG': b'<html>not found</html>',
    f'{wnid}_turned.JPEG': (turned := encode(Image.new('L', (4, 8)), 'JPEG', 6)),
    f'{wnid}_bmp.JPEG': encoded(3, 'BMP'),
    f'{wnid}_tiff.tif': encoded(4, 'TIFF'),
    'README.txt': b'hello',
  }
  path = write_tar(tmp_path / 'a.tgz', archive, 'w:gz')
  directory, broken = prepared(prepare.IMAGENET21K, [path], tmp_path)
  reasons = {name.rpartition('_')[2]: reason for name, reason in broken}
  assert reasons.pop('cut.JPEG').startswith('cannot be decoded')
  assert reasons.pop('none.JPEG') == 'empty file'
  assert reasons.pop('text.JPEG') == 'not an image of a known type'
  assert not reasons
  stored = {name: data for _, data, name in examples(directory, 'full')}
  assert len(stored) == 12 + 3
  assert stored[f'{wnid}/{wnid}_turned.JPEG'] == turned
  assert stored[f'{wnid}/{wnid}_bmp.JPEG'] == encoded(3, 'BMP')
  assert stored[f'{wnid}/{wnid}_tiff.tif'].startswith(b'\x89PNG')


@pytest.mark.parametrize(('mode', 'part'), [('w', 0.97), ('w:gz', 0.3)])
def test_an_archive_that_ends_early_is_an_error(tmp_path, mode, part):
  path = tmp_path / ('a.tgz' if ':' in mode else 'a.tar')
  write_tar(path, synsets(), mode)
  data = path.read_bytes()
  end = len(data.rstrip(b'\0')) if mode == 'w' else len(data)
  path.write_bytes(data[: int(end * part)])
  with pytest.raises(UserError, match=naming(path, 'again')):
    prepared(prepare.IMAGENET21K, [str(path)], tmp_path)
  assert not (tmp_path / 'imagenet21k/1.0.0').exists()


def test_a_damaged_header_is_no_end(tmp_path):
  # tarfile takes it for one, in silence.
  files = {f'{c}/{i}.png': encoded(i, 'PNG') for c in 'ab' for i in range(9)}
  path = write_tar(tmp_path / 'a.tar', files)
  data = bytearray((tmp_path / 'a.tar').read_bytes())
  at = data.index(b'b/3.png')
  data[at + 148 : at + 156] = b'99999999'  # the checksum
  (tmp_path / 'a.tar').write_bytes(data)
  with pytest.raises(UserError, match=naming(path, 'invalid header')):
    prepare.builder(prepare.images('x'), [path], str(tmp_path))


def test_an_interrupted_run_is_not_taken_for_complete(tmp_path, monkeypatch):
  files = {f'{c}/{i}.jpg': JPG for c in 'ab' for i in '12'}
  root, checked = write_folder(tmp_path / 'in', files), iter([JPG, JPG])
  monkeypatch.setattr(
    prepare, 'clean_image', lambda *_: next(checked, None) or interrupt()
  )
  with pytest.raises(KeyboardInterrupt):
    prepared(prepare.images('x'), [root], tmp_path)
  with pytest.raises(UserError, match=naming('tfds:x')):
    sources.build('tfds:x', 'train', data_dir=str(tmp_path))
  monkeypatch.undo()
  prepared(prepare.images('x'), [root], tmp_path)
  assert len(sources.build('tfds:x', 'train', data_dir=str(tmp_path))) == 4


def interrupt():
  raise KeyboardInterrupt


@pytest.mark.parametrize(
  ('mode', 'orientation'),
  [('RGB', 6), ('L', 1), ('RGBA', 6), ('P', 1), ('CMYK', 1), ('I;16', 6)],
)
def test_large_images_are_shrunk(mode, orientation):
  bands = np.add.outer(np.arange(300), np.arange(403)) // 60
  gray = (bands * 20 + 10).astype(np.uint8)
  image = Image.fromarray(gray)
  if mode == 'I;16':
    image = Image.fromarray(gray.astype(np.uint16) * 257)
  elif mode != 'L':
    image = image.convert('RGB').convert(mode)
  jpeg = mode in ('RGB', 'L', 'CMYK')
  options = {'quality': 95} if jpeg else {}
  data = encode(image, 'JPEG' if jpeg else 'PNG', orientation, **options)
  stored = prepare.clean_image(data, True, 100)
  small = Image.open(io.BytesIO(stored))
  assert small.format == 'JPEG'
  assert small.mode == ('L' if mode in ('L', 'I;16') else 'RGB')
  assert small.getexif().get(0x0112, 1) == 1
  expected = Image.fromarray(gray).resize((100, 74), Image.BICUBIC)
  expected = expected.rotate(-90, expand=True) if orientation == 6 else expected
  assert small.size == expected.size
  off = np.abs(np.asarray(small.convert('L'), int) - np.asarray(expected))
  assert off.mean() < 2  # two compressions, and where steps of 20 levels fall
  assert prepare.clean_image(stored, True, 100) is stored  # no larger than that


def test_only_photographs_are_turned_upright():
  data = encode(Image.open(io.BytesIO(JPG)), 'JPEG', 6, quality=95)
  image = Image.open(io.BytesIO(prepare.clean_image(data, upright=True)))
  upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))), int)
  assert image.getexif().get(0x0112, 1) == 1
  # A second compression of noise, the worst of images: 10 levels in the mean at most.
  assert np.abs(np.asarray(image, int) - upright).mean() < 10
  assert prepare.clean_image(data, upright=False) is data
  with pytest.raises(BadImage):
    prepare.clean_image(data[: len(data) * 2 // 3], True, 8)


@pytest.mark.filterwarnings('ignore')  # Beam's and TFDS's own
def test_beam_gives_the_same(tmp_path):
  pytest.importorskip('apache_beam')
  archive = synsets(3, 9)
  tar = write_tar(tmp_path / 'a.tar', archive)
  alone, _ = prepared(prepare.IMAGENET21K, [tar], tmp_path / 'A')
  folder, unused = str(tmp_path / 'B'), str(tmp_path / 'unused')
  builder, _ = prepare.builder(prepare.IMAGENET21K, [tar], folder, beam=True)
  config = prepare.download_config('DirectRunner', [])
  builder.download_and_prepare(download_dir=unused, download_config=config)
  assert examples(str(builder.data_path), 'full') == examples(alone, 'full')
