"""TFDS builders: labels, order, bytes, broken images, damaged and interrupted input."""

import gzip
import io
import json

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.support import naming
from tests.support.archives import encoded, examples, synsets, write_folder, write_tar
from vit_jax.data import prepare, sources
from vit_jax.errors import BadImage, UserError

JPG = encoded(0)


def prepared(kind, inputs, data_dir, **options):
  """Prepares a data set; returns (its directory, [(name, reason)] of broken images)."""
  builder, broken = prepare.builder(kind, inputs, str(data_dir), **options)
  builder.download_and_prepare(download_dir=str(data_dir / 'downloads'))
  return str(builder.data_path), broken


def test_bytes_and_labels_of_imagenet21k_are_kept(tmp_path):
  archive = synsets(3, 5)
  tar = write_tar(tmp_path / 'fall11_whole.tar', archive)
  prepared(prepare.IMAGENET21K, [tar], tmp_path)
  source = sources.build('tfds:imagenet21k', 'full', data_dir=str(tmp_path))
  assert source.class_names == ['n00000007', 'n00000044', 'n00000081']
  want = {
    data: sorted(archive).index(tar)
    for tar in archive
    for data in archive[tar].values()
  }
  assert {x['image']: x['label'] for x in source.read(np.arange(15))} == want
  info = (tmp_path / 'imagenet21k/1.0.0/dataset_info.json').read_text()
  assert json.loads(info)['fileFormat'] == 'array_record'


def test_a_compressed_archive_gives_the_same_and_is_read_once_in_each_pass(
  tmp_path, monkeypatch
):
  rewinds = []
  rewind = gzip._GzipReader._rewind
  monkeypatch.setattr(
    gzip._GzipReader, '_rewind', lambda self: rewinds.append(self._pos) or rewind(self)
  )
  archive = synsets(4, 40)
  a, _ = prepared(
    prepare.IMAGENET21K, [write_tar(tmp_path / 'a.tar', archive)], tmp_path / 'A'
  )
  # Repacked under another name and in another order of classes.
  backward = {f'x/y/{name[7:]}': archive[name] for name in reversed(archive)}
  tgz = write_tar(tmp_path / 'b.tgz', backward, 'w:gz')
  b, _ = prepared(prepare.IMAGENET21K, [tgz], tmp_path / 'B')
  assert examples(a, 'full') == examples(b, 'full')
  # Opening looks at the first block; a rewind later would read the archive again.
  assert not [at for at in rewinds if at > 1 << 20]
  # By hashes, so any part is a random one.
  assert len({label for label, _, _ in examples(a, 'full[:24]')}) == 4


def test_a_folder_gives_the_classes_of_the_source_folder(tmp_path):
  files = {
    f'{s}/{c}/{i}.png': encoded(i, 'PNG')
    for s in ('train', 'val')
    for c in 'ba'
    for i in range(3)
  }
  files |= {'train/b/deep/er/9.png': encoded(9, 'PNG'), 'train/b/x.txt': b''}
  root = write_folder(tmp_path / 'pets', files)
  prepared(prepare.images('pets'), [root], tmp_path)
  for split, ours in (('train', 'train'), ('val', 'validation')):
    folder = sources.build(f'folder:{root}', split)
    ours = sources.build('tfds:pets', ours, data_dir=str(tmp_path))
    assert ours.class_names == folder.class_names
    pairs = [
      sorted((x['image'], int(x['label'])) for x in s.read(np.arange(len(s))))
      for s in (ours, folder)
    ]
    assert pairs[0] == pairs[1]


@pytest.mark.parametrize(
  ('tars', 'expected'),
  [
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
  ],
)
def test_the_class_in_a_tar_is_the_folder(tmp_path, tars, expected):
  (tmp_path / 'tars').mkdir()
  paths = [
    write_tar(
      tmp_path / 'tars' / tar,
      dict.fromkeys(files, JPG) | {'._x/1.jpg': b'', 'cat/notes.txt': b''},
      'w:gz' if tar.endswith('gz') else 'w',
    )
    for tar, files in tars.items()
  ]
  for i, inputs in enumerate((paths, [f'{tmp_path}/tars'])):
    made, _ = prepared(prepare.images('x'), inputs, tmp_path / str(i))
    for split, labels in expected.items():
      labels_there = [label for (label,), _, _ in examples(made, split)]
      assert ' '.join(sorted(labels_there)) == labels


def test_broken_images_are_left_out_by_name(tmp_path):
  archive = synsets(2, 6)
  first, _ = archive
  wnid = 'n00000007'
  archive[first] |= {
    f'{wnid}_cut.JPEG': encoded(1, size=(64, 64))[:-200],
    f'{wnid}_none.JPEG': b'',
    f'{wnid}_text.JPEG': b'<html>not found</html>',
    f'{wnid}_bmp.JPEG': encoded(3, 'BMP'),
    f'{wnid}_tiff.tif': encoded(4, 'TIFF'),
    'README.txt': b'hello',
  }
  for mode, tar in (('w', 'a.tar'), ('w:gz', 'a.tgz')):
    path = write_tar(tmp_path / tar, archive, mode)
    made, broken = prepared(prepare.IMAGENET21K, [path], tmp_path / tar[2:])
    reasons = {name.rpartition('_')[2]: reason for name, reason in broken}
    assert reasons.pop('cut.JPEG').startswith('cannot be decoded')
    assert reasons.pop('none.JPEG') == 'empty file'
    assert reasons.pop('text.JPEG') == 'not an image of a known type'
    assert not reasons
    stored = {name: data for _, data, name in examples(made, 'full')}
    assert len(stored) == 12 + 2
    assert stored[f'{wnid}/{wnid}_bmp.JPEG'] == encoded(3, 'BMP')
    assert stored[f'{wnid}/{wnid}_tiff.tif'].startswith(b'\x89PNG')


@pytest.mark.parametrize('mode', ['w', 'w:gz'])
@pytest.mark.parametrize('part', [0.3, 0.97])
def test_an_archive_that_ends_early_is_an_error(tmp_path, mode, part):
  path = write_tar(tmp_path / f'a.{"tgz" if ":" in mode else "tar"}', synsets(), mode)
  with open(path, 'rb') as file:
    data = file.read()
  end = len(data.rstrip(b'\0')) if mode == 'w' else len(data)
  with open(path, 'wb') as file:
    file.write(data[: int(end * part)])
  with pytest.raises(UserError, match=naming(path, 'again')):
    prepared(prepare.IMAGENET21K, [path], tmp_path)
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
  root = write_folder(
    tmp_path / 'in', {f'{c}/{i}.jpg': JPG for c in 'ab' for i in '12'}
  )
  checked, number = prepare.checked, []

  def stops(*args):
    number.append(1)
    if len(number) == 3:
      raise KeyboardInterrupt
    return checked(*args)

  monkeypatch.setattr(prepare, 'checked', stops)
  with pytest.raises(KeyboardInterrupt):
    prepared(prepare.images('x'), [root], tmp_path)
  with pytest.raises(UserError, match=naming('tfds:x')):
    sources.build('tfds:x', 'train', data_dir=str(tmp_path))
  monkeypatch.undo()
  prepared(prepare.images('x'), [root], tmp_path)
  assert len(sources.build('tfds:x', 'train', data_dir=str(tmp_path))) == 4


@pytest.mark.parametrize('orientation', [1, 6])
@pytest.mark.parametrize('mode', ['RGB', 'L', 'RGBA', 'P', 'CMYK', 'I;16'])
def test_large_images_are_shrunk(mode, orientation):
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
  stored = prepare.checked(out.getvalue(), True, 100)
  small = Image.open(io.BytesIO(stored))
  assert small.format == 'JPEG'
  assert small.mode == ('L' if mode in ('L', 'I;16') else 'RGB')
  assert small.getexif().get(0x0112, 1) == 1
  want = Image.fromarray(gray).resize((100, 74), Image.BICUBIC)
  want = want.rotate(-90, expand=True) if orientation == 6 else want
  assert small.size == want.size
  off = np.abs(np.asarray(small.convert('L'), int) - np.asarray(want))
  assert off.mean() < 2  # two compressions, and where steps of 20 levels fall
  assert prepare.checked(stored, True, 100) is stored  # no larger than that


def test_only_photographs_are_turned_upright():
  exif = Image.Exif()
  exif[0x0112] = 6
  data = encoded(0, 'JPEG', size=(16, 32), exif=exif, quality=95)
  image = Image.open(io.BytesIO(prepare.checked(data, upright=True)))
  upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))), int)
  assert image.getexif().get(0x0112, 1) == 1
  # A second compression of noise, the worst of images: 10 levels in the mean at most.
  assert np.abs(np.asarray(image, int) - upright).mean() < 10
  assert prepare.checked(data, upright=False) is data
  with pytest.raises(BadImage):
    prepare.checked(data[: len(data) * 2 // 3], True, 8)


@pytest.mark.filterwarnings('ignore')  # Beam's and TFDS's own
def test_beam_gives_the_same(tmp_path):
  pytest.importorskip('apache_beam')
  archive = synsets(3, 9)
  tar = write_tar(tmp_path / 'a.tar', archive)
  alone, _ = prepared(prepare.IMAGENET21K, [tar], tmp_path / 'A')
  builder, _ = prepare.builder(
    prepare.IMAGENET21K, [tar], str(tmp_path / 'B'), beam=True
  )
  config = prepare.download_config('DirectRunner', [])
  builder.download_and_prepare(
    download_dir=str(tmp_path / 'unused'), download_config=config
  )
  assert examples(str(builder.data_path), 'full') == examples(alone, 'full')
