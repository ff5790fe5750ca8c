"""Prepared data sets: what TFDS itself writes, whatever the input and interruptions."""

import gzip
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import warnings

import numpy as np
import pytest
from conftest import naming
from PIL import Image

from vit_jax.data import sources
from vit_jax.data.ops.decode import BadImage
from vit_jax.data.prepare import beam as builder
from vit_jax.data.prepare import (
  buckets,
  checks,
  imagenet21k,
  images,
  manifest,
  report,
  writer,
)
from vit_jax.errors import DiskFull, UserError


def encoded(seed, kind='JPEG', size=(12, 9), **options):
  pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
  out = io.BytesIO()
  Image.fromarray(pixels).save(out, kind, **options)
  return out.getvalue()


def write_tar(path, files, mode='w'):
  """Writes {name: bytes}; a value that is a dict becomes a tar inside."""
  with tarfile.open(path, mode) as archive:
    for name, data in files.items():
      if isinstance(data, dict):
        data = tar_bytes(data)
      member = tarfile.TarInfo(name)
      member.size = len(data)
      archive.addfile(member, io.BytesIO(data))
  return str(path)


def tar_bytes(files):
  out = io.BytesIO()
  with tarfile.open(fileobj=out, mode='w') as archive:
    for name, data in files.items():
      member = tarfile.TarInfo(name)
      member.size = len(data)
      archive.addfile(member, io.BytesIO(data))
  return out.getvalue()


def synsets(classes=4, count=10):
  return {
    f'winter/n{37 * c + 7:08d}.tar': {
      f'n{37 * c + 7:08d}_{i}.JPEG': encoded(100 * c + i) for i in range(count)
    }
    for c in range(classes)
  }


def write_folder(root, files):
  for name, data in files.items():
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
  return str(root)


def examples(directory, split):
  """Returns [(label or labels, image bytes, name)] as TFDS alone reads them, in order."""
  import tensorflow_datasets as tfds

  made = tfds.builder_from_directory(directory)
  features = made.info.features
  label = features['label'] if 'label' in features else features['labels'].feature
  source = made.as_data_source(
    split=split, decoders={'image': tfds.decode.SkipDecoding()}
  )
  return [
    (
      tuple(
        label.int2str(int(i)) for i in np.atleast_1d(x.get('label', x.get('labels')))
      ),
      x['image'],
      x['file_name'].decode(),
    )
    for x in source
  ]


def names(directory, split):
  return [name for _, _, name in examples(directory, split)]


# --- the same as TFDS ----------------------------------------------------------------


@pytest.mark.parametrize('file_format', ['array_record', 'tfrecord'])
def test_the_files_are_those_that_tfds_writes(tmp_path, monkeypatch, file_format):
  from tensorflow_datasets.core.utils import shard_utils

  monkeypatch.setattr(buckets, '_BUCKET', 4000)  # several of each, of so few images
  three = lambda self, *args, **kwargs: 3
  monkeypatch.setattr(shard_utils.ShardConfig, 'get_number_shards', three)
  plan = imagenet21k.plan(write_tar(tmp_path / 'fall11_whole.tar', synsets()))
  ours, result = writer.prepare(plan, str(tmp_path / 'ours'), file_format=file_format)
  reference = builder.build(plan, str(tmp_path / 'tfds'), file_format=file_format)
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # TFDS's own
    reference.download_and_prepare()
  files = sorted(os.listdir(reference.data_dir))
  assert sorted({*files, 'report.json', 'report.txt'}) == sorted(os.listdir(ours))
  assert sum('-of-00003' in name for name in files) == 3
  for name in files:
    with open(f'{ours}/{name}', 'rb') as a, open(reference.data_path / name, 'rb') as b:
      a, b = a.read(), b.read()
    if name == 'dataset_info.json':  # which module wrote it
      a, b = ({**json.loads(x), 'moduleName': ''} for x in (a, b))
    assert a == b, name
  assert result['splits']['full']['examples'] == 40


def test_a_compressed_archive_gives_the_same(tmp_path):
  archive = synsets()
  plain = imagenet21k.plan(write_tar(tmp_path / 'a.tar', archive))
  # Repacked under another name and in another order of classes.
  backward = {f'x/y/{os.path.basename(k)}': archive[k] for k in reversed(archive)}
  squeezed = imagenet21k.plan(write_tar(tmp_path / 'b.tgz', backward, 'w:gz'))
  assert (len(plain.pieces), len(squeezed.pieces)) == (4, 1)
  a, b = (
    writer.prepare(p, str(tmp_path / d))[0] for p, d in ((plain, 'A'), (squeezed, 'B'))
  )
  assert examples(a, 'full') == examples(b, 'full')
  # By hashes, so mixed: any part is a random one.
  assert len({label for label, _, _ in examples(a, 'full[:12]')}) == 4


def test_bytes_are_kept_and_read_by_our_source(tmp_path):
  archive = synsets(3, 5)
  plan = imagenet21k.plan(write_tar(tmp_path / 'a.tar', archive))
  writer.prepare(plan, str(tmp_path))
  source = sources.build('tfds:imagenet21k', 'full', data_dir=str(tmp_path))
  assert source.class_names == ['n00000007', 'n00000044', 'n00000081']
  given = {data for tar in archive.values() for data in tar.values()}
  assert {x['image'] for x in source.read(np.arange(15))} == given


@pytest.mark.filterwarnings('ignore')  # Beam's and TFDS's own
def test_beam_gives_the_same(tmp_path):
  pytest.importorskip('apache_beam')
  files = {f'{c}/{i}.jpg': encoded(10 * ord(c) + i) for c in 'ab' for i in range(9)}
  files |= {'a/bad.jpg': b'', 'a/notes.txt': b'x'}
  tar = write_tar(tmp_path / 'photos.tar', files)
  split = 'train=70%,val=30%'
  one = images.plan([tar], 'one', split=split)
  many = images.plan([tar], 'one', split=split, ranges=True)
  a, alone = writer.prepare(one, str(tmp_path / 'A'))
  b, together = builder.prepare(
    many, str(tmp_path / 'B'), runner='DirectRunner', options=[]
  )
  assert alone == together
  for part in ('train', 'val'):
    assert examples(a, part) == examples(b, part)
  assert sorted(os.listdir(tmp_path / 'B/one')) == ['1.0.0']


def test_without_beam_the_extra_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'apache_beam', None)
  with pytest.raises(UserError, match=naming('apache-beam', 'vit_jax[beam]')):
    builder.load_beam()


# --- interruptions -------------------------------------------------------------------


class Killed(BaseException):
  """As a kill is: nothing catches it."""


def files_of(directory):
  out = {}
  for name in sorted(os.listdir(directory)):
    with open(os.path.join(directory, name), 'rb') as file:
      out[name] = file.read()
  return out


@pytest.fixture
def in_parts(monkeypatch):
  """Several buckets and shards of few images."""
  from tensorflow_datasets.core.utils import shard_utils

  monkeypatch.setattr(buckets, '_BUCKET', 4000)
  many = lambda self, *args, **kwargs: 4
  monkeypatch.setattr(shard_utils.ShardConfig, 'get_number_shards', many)


@pytest.mark.parametrize('mode', ['w', 'w:gz'])
def test_an_interrupted_run_goes_on(tmp_path, monkeypatch, in_parts, mode):
  tar = write_tar(tmp_path / 'a.tar', synsets(), mode)
  plan = imagenet21k.plan(tar)
  whole, _ = writer.prepare(plan, str(tmp_path / 'whole'))
  add, write = buckets.Writer.add, writer._write_shard
  read = []
  # Of 40 images, at the first, at the 7th, at the 16th after those that counted; then
  # at a shard.
  for number, target in ((1, 'add'), (7, 'add'), (16, 'add'), (3, 'shard')):
    left = [number]

    def add_some(self, place, data, left=left, target=target):
      add(self, place, data)
      read.append(place.key)
      if target == 'add':
        left[0] -= 1
      if left[0] == 0:
        raise Killed  # so that this image is on disk, but does not count

    def write_some(*args, left=left):
      left[0] -= 1
      if left[0] == 0:
        raise Killed
      return write(*args)

    monkeypatch.setattr(buckets.Writer, 'add', add_some)
    monkeypatch.setattr(writer, '_write_shard', write_some)
    with pytest.raises(Killed):
      writer.prepare(imagenet21k.plan(tar), str(tmp_path), checkpoint_every=0)
    assert os.listdir(tmp_path / 'imagenet21k') == ['incomplete.1.0.0']
    with pytest.raises(UserError, match=naming('imagenet21k', 'TFDS_DATA_DIR')):
      sources.build('imagenet21k', 'full', data_dir=str(tmp_path))
  monkeypatch.setattr(buckets.Writer, 'add', lambda *args: pytest.fail('read again'))
  monkeypatch.setattr(writer, '_write_shard', write)
  again, _ = writer.prepare(imagenet21k.plan(tar), str(tmp_path), checkpoint_every=0)
  assert len(set(read)) == 40
  assert len(read) == 43
  assert os.listdir(tmp_path / 'imagenet21k') == ['1.0.0']
  assert files_of(again) == files_of(whole)


def test_a_killed_process_leaves_nothing_that_looks_whole(tmp_path):
  tar = write_tar(tmp_path / 'a.tar', synsets(4, 60))
  code = (
    'import sys, time\n'
    'from vit_jax.data.prepare import buckets, imagenet21k, writer\n'
    'add, left = buckets.Writer.add, [150]\n'
    'def add_some(*args):\n'
    '  add(*args)\n'
    '  left[0] -= 1\n'
    '  if not left[0]:\n'
    '    print("now", flush=True)\n'
    '    time.sleep(600)\n'
    'buckets.Writer.add = add_some\n'
    'plan = imagenet21k.plan(sys.argv[1])\n'
    'writer.prepare(plan, sys.argv[2], checkpoint_every=0.001)\n'
  )
  home = tmp_path / 'D/imagenet21k'
  args = [sys.executable, '-c', code, tar, str(tmp_path / 'D')]
  with subprocess.Popen(args, stdout=subprocess.PIPE, text=True) as process:
    assert process.stdout.readline() == 'now\n'
    process.send_signal(signal.SIGKILL)
  assert os.listdir(home) == ['incomplete.1.0.0']
  lines = []
  plan = imagenet21k.plan(tar)
  again, result = writer.prepare(plan, str(tmp_path / 'D'), log=lines.append)
  assert result['splits']['full']['examples'] == 240
  assert re.search(r'after \d+ images', lines[0])
  whole, _ = writer.prepare(plan, str(tmp_path / 'whole'))
  assert files_of(again) == files_of(whole)


def test_other_input_does_not_go_on(tmp_path, monkeypatch):
  tar = write_tar(tmp_path / 'a.tar', synsets())

  def stop(*args):
    raise Killed

  monkeypatch.setattr(writer, '_write_shard', stop)
  with pytest.raises(Killed):
    writer.prepare(imagenet21k.plan(tar), str(tmp_path))
  monkeypatch.undo()
  for side in (8, 16):  # begun without one
    with pytest.raises(UserError, match=naming('incomplete.1.0.0', 'delete')):
      writer.prepare(imagenet21k.plan(tar, max_side=side), str(tmp_path))
  write_tar(tmp_path / 'a.tar', synsets(5))
  with pytest.raises(UserError, match=naming('incomplete.1.0.0', 'delete')):
    writer.prepare(imagenet21k.plan(tar), str(tmp_path))


def test_two_at_once_are_refused(tmp_path):
  plan = imagenet21k.plan(write_tar(tmp_path / 'a.tar', synsets()))
  seen = []

  def log(line):
    with pytest.raises(UserError, match=naming('incomplete.1.0.0', 'process')):
      writer.prepare(plan, str(tmp_path))
    seen.append(line)

  writer.prepare(plan, str(tmp_path), log=log)
  assert seen


def test_disk_full_keeps_what_is_done(tmp_path, monkeypatch):
  plan = imagenet21k.plan(write_tar(tmp_path / 'a.tar', synsets()))
  usage = type('Usage', (), {'free': 1000})
  monkeypatch.setattr(writer.shutil, 'disk_usage', lambda path: usage)
  with pytest.raises(DiskFull, match=naming('GB', '--data_dir')):
    writer.prepare(plan, str(tmp_path))
  monkeypatch.undo()

  def full(*args):  # as ArrayRecord says it
    raise RuntimeError('write() failed: No space left on device; writing x')

  monkeypatch.setattr(writer, '_write_shard', full)
  with pytest.raises(DiskFull, match=naming(f'{tmp_path}/imagenet21k', 'again')):
    writer.prepare(plan, str(tmp_path))
  monkeypatch.undo()
  monkeypatch.setattr(writer, '_scatter', lambda *args: pytest.fail('read again'))
  assert writer.prepare(plan, str(tmp_path))[1]['splits']['full']['examples'] == 40


# --- damage --------------------------------------------------------------------------


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


@pytest.mark.parametrize('mode', ['w', 'w:gz'])
@pytest.mark.parametrize('part', [0.3, 0.7, 0.97])
def test_an_archive_that_ends_early_is_an_error(tmp_path, mode, part):
  path = write_tar(tmp_path / 'a.tar', synsets(), mode)
  data = (tmp_path / 'a.tar').read_bytes()
  end = len(data)
  if mode == 'w':  # before the zeros at its end
    end = len(data.rstrip(b'\0'))
  (tmp_path / 'a.tar').write_bytes(data[: int(end * part)])
  with pytest.raises(UserError, match=naming(path, 'again')):
    writer.prepare(imagenet21k.plan(path), str(tmp_path))
  assert not (tmp_path / 'imagenet21k/1.0.0').exists()


def test_a_damaged_header_is_no_end(tmp_path):
  # tarfile takes it for one, in silence.
  path = write_tar(
    tmp_path / 'a.tar',
    {f'{c}/{i}.png': encoded(i, 'PNG') for c in 'ab' for i in range(9)},
  )
  data = bytearray((tmp_path / 'a.tar').read_bytes())
  at = data.index(b'b/3.png')
  data[at + 148 : at + 156] = b'99999999'  # the checksum
  (tmp_path / 'a.tar').write_bytes(data)
  with pytest.raises(UserError, match=naming(path, 'byte', 12288)):
    writer.prepare(images.plan([path], 'x'), str(tmp_path))


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


# --- folders, tars, lists ------------------------------------------------------------


def test_a_folder_gives_the_classes_of_the_source_folder(tmp_path):
  files = {
    f'{s}/{c}/{i}.png': encoded(i, 'PNG')
    for s in ('train', 'val')
    for c in 'ba'
    for i in range(3)
  }
  files |= {'train/b/deep/er/9.png': encoded(9, 'PNG'), 'train/b/x.txt': b''}
  root = write_folder(tmp_path / 'pets', files)
  made, result = writer.prepare(images.plan([root], 'pets'), str(tmp_path))
  for split in ('train', 'val'):
    folder = sources.build(f'folder:{root}', split)
    ours = sources.build('tfds:pets', split, data_dir=str(tmp_path))
    assert ours.class_names == folder.class_names
    pairs = [
      sorted((x['image'], int(x['label'])) for x in s.read(np.arange(len(s))))
      for s in (ours, folder)
    ]
    assert pairs[0] == pairs[1]
  assert result['splits']['train']['counts'] == {'a': 3, 'b': 4}
  assert 'train/b/deep/er/9.png' in names(made, 'train')


JPG = encoded(0)


@pytest.mark.parametrize(
  ('tars', 'expected'),
  [
    ({'all.tar': ['cat/1.jpg', 'dog/1.jpg']}, {'train': 'cat dog'}),
    ({'all.tar': ['./top/cat/1.jpg', './top/dog/1.jpg']}, {'train': 'cat dog'}),
    ({'cat.tar': ['1.jpg'], 'dog.tar': ['1.jpg']}, {'train': 'cat dog'}),
    ({'train.tar': ['cat/1.jpg'], 'val.tar': ['cat/1.jpg']}, {'train': 'cat', 'val': 'cat'}),
    ({'x.tar': ['x/test/cat/1.jpg', 'x/train/dog/1.jpg']}, {'test': 'cat', 'train': 'dog'}),
  ],
)  # fmt: skip
def test_the_class_in_a_tar_is_the_folder(tmp_path, tars, expected):
  paths = [
    write_tar(tmp_path / tar, dict.fromkeys(files, JPG)) for tar, files in tars.items()
  ]
  plan = images.plan(paths, 'x')
  _, result = writer.prepare(plan, str(tmp_path / 'A'))
  found = {
    split: ' '.join(c for c, n in record['counts'].items() if n)
    for split, record in result['splits'].items()
  }
  assert found == expected
  # The same, as a folder of tars.
  (tmp_path / 'tars').mkdir()
  for path in paths:
    os.rename(path, tmp_path / 'tars' / os.path.basename(path))
  _, again = writer.prepare(images.plan([f'{tmp_path}/tars'], 'x'), str(tmp_path / 'B'))
  assert again == result


def test_splits_by_name_are_stable(tmp_path):
  files = {f'{c}/{i}.jpg': JPG for c in 'ab' for i in range(100)}
  root = write_folder(tmp_path / 'in', files)
  split = 'train=80%,val=15%,test=5%'
  before, result = writer.prepare(images.plan([root], 'x', split=split), str(tmp_path))
  counts = {s: r['examples'] for s, r in result['splits'].items()}
  # 200 draws: 160, 30, 10 with deviations 5.7, 5.0, 3.1; three of them.
  for name, mean, deviation in (('train', 160, 17), ('val', 30, 15), ('test', 10, 9)):
    assert abs(counts[name] - mean) <= deviation
  write_folder(
    tmp_path / 'in', {f'{c}/new{i}.jpg': JPG for c in 'ab' for i in range(50)}
  )
  plan = images.plan([root], 'x', split=split, version='1.1.0')
  after, _ = writer.prepare(plan, str(tmp_path))
  for name in counts:
    old = names(before, name)
    assert [x for x in names(after, name) if 'new' not in x] == old
  # Both versions are there; the newest is read.
  assert len(sources.build('tfds:x:1.0.0', 'train', data_dir=str(tmp_path))) < len(
    sources.build('tfds:x', 'train', data_dir=str(tmp_path))
  )


LISTS = {
  'plain.csv': 'a.jpg,cat\nsub/b.jpg,dog\n',
  'header.csv': '\ufefffile_name,label\na.jpg,cat\n"sub/b.jpg",dog\n\n',
  'tabs.tsv': 'path\tlabel\na.jpg\tcat\nsub/b.jpg\tdog\n',
  'lines.jsonl': '{"path": "./a.jpg", "label": "cat"}\n{"path": "sub/b.jpg", "label": "dog"}\n',
}  # fmt: skip


@pytest.mark.parametrize('name', LISTS)
@pytest.mark.parametrize('where', ['beside', 'folder', 'tar'])
def test_a_list_of_labels(tmp_path, name, where):
  (tmp_path / name).write_text(LISTS[name])
  files = {'a.jpg': encoded(1), 'sub/b.jpg': encoded(2), 'c.jpg': encoded(3)}
  given = [str(tmp_path / name)]
  if where == 'beside':
    write_folder(tmp_path, files)
  elif where == 'folder':
    given.append(write_folder(tmp_path / 'elsewhere', files))
  else:
    given.append(write_tar(tmp_path / 'images.tar', files))
  made, _ = writer.prepare(images.plan(given, 'x'), str(tmp_path))
  assert sorted(examples(made, 'train')) == [
    (('cat',), files['a.jpg'], 'a.jpg'),
    (('dog',), files['sub/b.jpg'], 'sub/b.jpg'),
  ]


def test_several_labels_and_splits_of_a_list(tmp_path):
  (tmp_path / 'l.csv').write_text(
    'path,label,label,split\na.jpg,3,0,train\nb.jpg,1,,test\n'
  )
  write_folder(tmp_path, {'a.jpg': encoded(1), 'b.jpg': encoded(2)})
  made, result = writer.prepare(images.plan([f'{tmp_path}/l.csv'], 'x'), str(tmp_path))
  assert [x[0] for x in examples(made, 'train')] == [('3', '0')]
  assert result['splits']['train']['none'] == ['1', '2']  # numbers keep their value
  source = sources.build('tfds:x', 'train+test', data_dir=str(tmp_path))
  assert source.features['label'].several
  assert source.num_classes == 4
  assert [list(x['label']) for x in source.read(np.arange(2))] == [[3, 0], [1]]


def test_labels_may_be_none_in_json(tmp_path):
  (tmp_path / 'l.jsonl').write_text(
    '{"path": "a.jpg", "labels": ["x"]}\n{"path": "b.jpg", "labels": []}\n'
  )
  write_folder(tmp_path, {'a.jpg': encoded(1), 'b.jpg': encoded(2)})
  made, _ = writer.prepare(images.plan([f'{tmp_path}/l.jsonl'], 'x'), str(tmp_path))
  assert sorted(x[0] for x in examples(made, 'train')) == [(), ('x',)]


@pytest.mark.parametrize('where', ['folder', 'tar'])
def test_listed_files_that_are_missing_are_reported(tmp_path, where):
  (tmp_path / 'l.csv').write_text('a.jpg,cat\nno.jpg,dog\nbad.jpg,dog\n')
  files = {'a.jpg': encoded(1), 'bad.jpg': b'no image'}
  given = [f'{tmp_path}/l.csv']
  if where == 'tar':
    given.append(write_tar(tmp_path / 'i.tar', files | {'more.jpg': encoded(2)}))
  else:
    write_folder(tmp_path, files)
  _, result = writer.prepare(images.plan(given, 'x'), str(tmp_path))
  assert [f['path'] for f in result['broken']['files']] == ['bad.jpg', 'no.jpg']
  assert result['splits']['train']['none'] == ['dog']
  assert result['skipped']['number'] == (where == 'tar')


def test_a_name_twice_counts_once(tmp_path):
  with tarfile.open(tmp_path / 'x.tar', 'w') as archive:
    for seed in (1, 2):
      data = encoded(seed)
      member = tarfile.TarInfo('cat/1.jpg')
      member.size = len(data)
      archive.addfile(member, io.BytesIO(data))
  plan = images.plan([f'{tmp_path}/x.tar'], 'x')
  made, result = writer.prepare(plan, str(tmp_path))
  assert [data for _, data, _ in examples(made, 'train')] == [encoded(1)]
  assert result['splits']['train']['counts'] == {'cat': 1}
  assert result['skipped']['files'][0]['reason'] == 'a second file of this name'


@pytest.mark.parametrize(
  ('text', 'facts'),
  [
    ('', ('path,label',)),
    ('a.jpg\n', ('line 1', "'a.jpg'", 'label')),
    (
      'path,label\na.jpg,x\na.jpg,y\n',
      ('line 3', "'a.jpg'", 'line 2', 'path,label,label'),
    ),
    ('path,kind\na.jpg,x\n', ("'kind'", "'path'", "'label'", "'split'")),
    ('a.jpg,"x\ny"\n', ('line 1', r"'x\ny'")),
    (',x\n', ('line 1', 'path')),
    ('path,split,label\na.jpg,,x\nb.jpg,test,x\n', ("'a.jpg'", 'split')),
    ('path,split,label\na.jpg,my split,x\n', ('line 2', "'my split'", "'train'")),
    ('a.jpg,7777777777\n', (7777777777, 'from 0')),
  ],
)
def test_wrong_lists(tmp_path, text, facts):
  (tmp_path / 'l.csv').write_text(text)
  (tmp_path / 'a.jpg').write_bytes(JPG)
  with pytest.raises(UserError, match=naming(f'{tmp_path}/l.csv', *facts)):
    images.plan([f'{tmp_path}/l.csv'], 'x')


@pytest.mark.parametrize(
  ('text', 'facts'),
  [
    ('{"path": "a"', ('JSON', 'column 13')),
    ('["a", "b"]', ('"path": "a.jpg"', '"label": "cat"')),
    ('{"path": "a", "label": 1.5}', ('label', 'integer', 'list')),
    ('{"path": "a", "label": "x", "labels": []}', ('label', 'labels')),
    ('{"path": "a", "lable": "x"}', ("'lable'", 'path', 'label', 'split')),
  ],
)
def test_wrong_json_lines(tmp_path, text, facts):
  (tmp_path / 'l.jsonl').write_text(text)
  with pytest.raises(UserError, match=naming('l.jsonl, line 1', *facts)):
    manifest.read(f'{tmp_path}/l.jsonl')


def test_a_report_of_parts_is_the_report(tmp_path):
  plan = imagenet21k.plan(write_tar(tmp_path / 'a.tar', synsets() | {'x.txt': b'1'}))
  whole, parts = report.Tally(), []
  for piece in plan.pieces:
    parts.append(report.Tally())
    for outcome in plan.outcomes(piece):
      whole.add(outcome)
      parts[-1].add(outcome)
  parts = [report.Tally(json.loads(json.dumps(part.state()))) for part in parts]
  total = report.Tally()
  for part in reversed(parts):
    total.merge(part)
  labels = tuple(sorted(whole.classes))
  assert report.make(total, 'x', '1.0.0', labels) == report.make(
    whole, 'x', '1.0.0', labels
  )


def test_ranges_of_a_tar_add_up(tmp_path, monkeypatch):
  from vit_jax.data.prepare import tars

  monkeypatch.setattr(tars, '_RANGE', 5000)
  long = 'c' * 150  # takes a header more
  files = {f'{c}/{i}.jpg': encoded(i) for c in ('a', long) for i in range(20)}
  plan = images.plan([write_tar(tmp_path / 'x.tar', files)], 'x', ranges=True)
  assert len(plan.pieces) > 4
  found = [o.place.key for piece in plan.pieces for o in plan.outcomes(piece)]
  assert found == [f'x/{name}' for name in files]
  packed = tmp_path / 'x.tar.gz'
  packed.write_bytes(gzip.compress((tmp_path / 'x.tar').read_bytes()))
  with pytest.raises(UserError, match=naming(str(packed), 'gunzip', '--beam_runner')):
    images.plan([str(packed)], 'x', ranges=True)
