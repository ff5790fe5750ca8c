"""A run on a user's folder of images, some of them broken."""

import json
import re
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.support import naming, runs
from vit_jax import config, errors
from vit_jax.data import bad_images
from vit_jax.train import progress
from vit_jax.train import run as train

pytestmark = pytest.mark.usefixtures('one_device')


def write_images(folder, count, seed):
  """Writes `count` JPEGs and PNGs of noise, of several sizes and modes."""
  folder.mkdir(parents=True)
  rng = np.random.default_rng(seed)
  for i in range(count):
    mode, channels = (('RGB', 3), ('L', 1), ('RGBA', 4))[i % 3]
    kind = 'png' if i % 2 or mode == 'RGBA' else 'jpg'
    shape = (20 + i, 24, channels) if channels > 1 else (20 + i, 24)
    pixels = rng.integers(0, 256, shape, np.uint8)
    Image.fromarray(pixels, mode=None).save(folder / f'{i}.{kind}')


def break_five(folder) -> set[str]:
  """Adds five files that are not images; returns their paths."""
  good = (folder / '0.jpg').read_bytes()
  (folder / 'truncated.jpg').write_bytes(good[: len(good) // 2])
  (folder / 'text.jpg').write_text('This is not an image.')
  (folder / 'empty.jpg').touch()
  png = (folder / '1.png').read_bytes()
  (folder / 'truncated.png').write_bytes(png[: len(png) // 2])
  size = struct.pack('>2I', 10_000, 10_000) + png[24:29]  # IHDR: 100 megapixels
  check = struct.pack('>I', zlib.crc32(b'IHDR' + size))
  (folder / 'bomb.png').write_bytes(png[:16] + size + check + png[33:])
  names = ('truncated.jpg', 'text.jpg', 'empty.jpg', 'truncated.png', 'bomb.png')
  return {str(folder / name) for name in names}


def train_on(folder, workdir, arguments='', *changes):
  # Ten batches of eight: every file is met at least once.
  small = 'variant=mu/4,res=16,batch=8,steps=10,warmup=2'
  c = config.load(f'configs/folder.py:data={folder},{small}{arguments}')
  config.override(c, ['evals.val.every=5', 'checkpoint.every=5', *changes])
  return train.train(c, workdir)


@pytest.fixture
def in_the_repository(monkeypatch):
  monkeypatch.chdir(runs.ROOT)


@pytest.mark.slow
def test_a_folder_with_five_broken_files(tmp_path, in_the_repository):
  folder, workdir = tmp_path / 'images', tmp_path / 'run'
  for seed, name in enumerate(('cat', 'dog', 'owl')):
    write_images(folder / 'train' / name, 8, seed)
    write_images(folder / 'val' / name, 3, 10 + seed)
  broken = break_five(folder / 'train' / 'dog')
  text = folder / 'val' / 'owl' / 'text.jpg'  # one of them is met in evaluation
  (folder / 'train' / 'dog' / 'text.jpg').rename(text)
  broken = {path for path in broken if not path.endswith('text.jpg')} | {str(text)}
  status, rows = train_on(folder, workdir)
  assert status['state'] == 'finished'
  listed = bad_images.read_log(workdir / 'bad_images.jsonl')
  assert {line['path'] for line in listed} == broken
  assert len(listed) == 5
  assert all(line['reason'] for line in listed)
  text = progress.summary(rows, status, {}, workdir, seconds=1.0)
  assert re.search(naming('5 images', f'{workdir}/bad_images.jsonl'), text)
  assert rows[-2]['train/masked'] >= 4
  # What an evaluation cannot read it leaves out, and says so.
  assert rows[-1]['val/examples'] == 9
  assert rows[-1]['val/bad_images'] == 1
  resolved = json.loads((workdir / 'config.json').read_text())['resolved']
  assert resolved['class_names'] == ['cat', 'dog', 'owl']
  assert resolved['num_examples'] == 28


@pytest.mark.slow  # test_data_folder splits such a folder; the run is the one above
def test_a_folder_of_classes_alone(tmp_path, in_the_repository):
  folder, workdir = tmp_path / 'images', tmp_path / 'run'
  for seed, name in enumerate(('cat', 'dog')):
    write_images(folder / name, 12, seed)
  broken = break_five(folder / 'cat')
  arguments = ',train=train[20%:],val=train[:20%]'
  status, rows = train_on(folder, workdir, arguments)
  assert status['state'] == 'finished'
  listed = [x['path'] for x in bad_images.read_log(workdir / 'bad_images.jsonl')]
  assert sorted(listed) == sorted(broken)
  held_out = rows[-1]['val/examples'] + rows[-1].get('val/bad_images', 0)
  assert held_out == round(0.2 * 29)


@pytest.mark.slow
def test_too_many_broken_files_end_the_run(tmp_path, in_the_repository):
  folder, workdir = tmp_path / 'images', tmp_path / 'run'
  for split in ('train', 'val'):
    write_images(folder / split / 'cat', 4, 0)
    write_images(folder / split / 'dog', 4, 1)
  break_five(folder / 'train' / 'dog')
  with pytest.raises(errors.UserError, match=naming(2, 13, 'max_bad_fraction', 1)):
    train_on(folder, workdir, '', 'data.max_bad_fraction=0.1')
  status = runs.status(workdir)
  assert (status['state'], status['exit']) == ('failed', 2)
  assert 'bad_images.jsonl' in status['error']
