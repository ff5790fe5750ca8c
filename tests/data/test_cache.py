"""Caches: the same batches, fewer reads, bounds, and sources with nothing to cache."""

import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from tests.support import naming
from tests.support.image_folder import same, take
from vit_jax.data import cache, pipeline, sources
from vit_jax.data.sources.base import View
from vit_jax.errors import UserError

# Before the first random op: one size, sizes that differ, all of it, and floats (of
# JPEGs decoded at a half where they are large enough).
TRAIN = {
  'one size': 'decode|resize(12)|random_crop(8)|flip_lr|value_range(-1, 1)',
  'sizes': 'decode|resize_small(12)|random_crop(8)|value_range(-1, 1)',
  'decode': 'decode|random_crop(8)|value_range(-1, 1)',
  'all': 'decode|resize_small(12)|central_crop(8)|value_range(-1, 1)',
  'float': "decode|resize(6, rounding='none')|central_crop(5)|flip_lr|value_range(-1, 1)",
  'crop': 'decode|resize(20)|inception_crop(8)|value_range(-1, 1)',
}
COUNT = 37


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """37 JPEGs and PNGs of different sizes, some turned by their EXIF, two broken."""
  root = tmp_path_factory.mktemp('images')
  rng = np.random.default_rng(0)
  exif = Image.Exif()
  exif[0x0112] = 6
  for i in range(COUNT):
    path = root / 'ab'[i % 2] / f'{i}.{("jpg", "png")[i % 3 == 0]}'
    path.parent.mkdir(exist_ok=True)
    height, width = rng.integers(16, 40, 2)
    pixels = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
    image = Image.fromarray(pixels).resize((width, height))
    image.save(path, **({'exif': exif} if i % 5 == 0 else {}))
  for i in (7, 9):
    path = next(root.glob(f'*/{i}.*'))
    path.write_bytes(path.read_bytes()[: 150 * (i == 7)])
  return root


def counted(monkeypatch):
  """Returns a list that grows by every index read from a folder."""
  from vit_jax.data.sources.folder import Folder

  read, seen = Folder.read, []

  def reads(self, indices):
    seen.extend(int(i) for i in indices)
    return read(self, indices)

  monkeypatch.setattr(Folder, 'read', reads)
  return seen


@pytest.mark.slow
@pytest.mark.parametrize(
  'key', [pytest.param(k, marks=() if k == 'crop' else pytest.mark.slow) for k in TRAIN]
)
def test_batches_are_the_same(folder, key):
  args = (f'folder:{folder}', 'train', TRAIN[key], 8)
  steps = 3 * COUNT // 8
  want = take(pipeline.train(*args, seed=2).iterate(), steps)
  assert sum((b['mask'] == 0).sum() for b in want) == 3 * 2
  kinds = {'crop': [('decoded', None), ('raw', None)]}
  kinds['sizes'] = [('decoded', 4000), ('raw', 4000)]  # a part of them
  for kind, size in kinds.get(key, [('decoded', None)]):
    cached = pipeline.train(*args, seed=2, cache=kind, cache_bytes=size)
    same(take(cached.iterate(), steps), want)
    # Once more, from a step on, with the cache as it now is.
    same(take(cached.iterate(5), steps - 5), want[5:])


@pytest.mark.parametrize('kind', cache.KINDS)
def test_what_is_kept_is_not_read_again(folder, monkeypatch, kind):
  seen = counted(monkeypatch)
  args = (f'folder:{folder}', 'train', TRAIN['one size'], COUNT)
  take(pipeline.train(*args, cache=kind, prefetch=1, workers=1).iterate(), 20)
  counts = np.bincount(seen, minlength=COUNT)
  if kind == 'raw':
    assert counts.max() == 1
    return
  source = sources.build(*args[:2])
  broken = [source.name_of(i).endswith(('/7.jpg', '/9.png')) for i in range(COUNT)]
  # Pixels come back after their batch was asked for, and what is read ahead meanwhile asks
  # again: up to six batches, of a whole epoch each here, for a worker's two times 16
  # images and what is made and prefetched before and after it.
  assert counts[np.logical_not(broken)].max() <= 7
  assert counts[broken].min() >= 20  # they have no pixels


@pytest.mark.parametrize('kind', cache.KINDS)
@pytest.mark.slow
def test_evaluation_reads_its_images_once(folder, monkeypatch, kind):
  args = (f'folder:{folder}', 'train', TRAIN['all'], 8)
  want = list(pipeline.evaluate(*args).iterate())
  seen = counted(monkeypatch)
  batches = pipeline.evaluate(*args, cache=kind)
  same(list(batches.iterate()), want)
  first = len(seen)
  same(list(batches.iterate()), want)
  # The broken ones have no pixels.
  assert len(seen) - first == (2 if kind == 'decoded' else 0)


def test_a_cache_fills_and_stays(folder):
  whole = sources.build(f'folder:{folder}', 'train')
  sizes = [len(x['image']) for x in whole.read(np.arange(COUNT))]
  raw = cache.RawCache(whole, sum(sizes[:10]) + 1)
  for _ in range(2):
    got = raw.read(np.arange(COUNT))
    assert [len(x['image']) for x in got] == sizes
    kept = sorted(raw._kept._values)
    assert kept == [i for i in range(11) if sizes[i]][: len(kept)]
    assert raw._kept._used <= sum(sizes[:10]) + 1
  assert isinstance(raw, View)
  assert (raw.name, raw.labels is whole.labels) == (whole.name, True)
  assert raw.name_of(3) == whole.name_of(3)


@pytest.mark.slow
def test_bound_of_decoded_pixels(folder):
  batches = pipeline.train(
    *(f'folder:{folder}', 'train', TRAIN['one size'], 8),
    cache='decoded',
    cache_bytes=10 * 12 * 12 * 3,
  )
  take(batches.iterate(), 12)
  kept = batches._reader._source._kept
  assert len(kept._values) == 10
  assert all(x['shape'] == (12, 12, 3) for x in kept._values.values())
  assert kept.full


@pytest.mark.slow
def test_several_labels_of_kept_examples(tmp_path):
  """A mixture of one source suffices for lists of labels on encoded images."""
  for name in 'ab':
    (tmp_path / name).mkdir()
    Image.new('RGB', (9, 9), (90, 0, 0)).save(tmp_path / name / '0.png')
  parts = [{'source': f'folder:{tmp_path}', 'weight': 2}]
  args = (parts, 'train', f'{TRAIN["one size"]}|onehot', 4)
  want = take(pipeline.train(*args).iterate(), 4)
  for kind in cache.KINDS:
    same(take(pipeline.train(*args, cache=kind).iterate(), 4), want)


@pytest.mark.parametrize(
  ('change', 'facts'),
  [
    ({'cache': 'decode'}, ('cache', "'decode'", 'decoded')),
    ({'cache_bytes': 100}, ('cache_bytes=100', 'raw', 'decoded')),
    ({'cache': 'raw', 'cache_bytes': 0}, ('cache_bytes=0',)),
    (
      {'cache': 'decoded', 'pp': 'decode|inception_crop(8)|value_range(-1, 1)'},
      ("cache='decoded'", 'inception_crop(8)', "cache='raw'", 'resize_small(256)'),
    ),
    (
      {'cache': 'raw', 'source': 'digits', 'pp': 'value_range(0,1)'},
      ("cache='raw'", 'digits'),
    ),
    (
      {'cache': 'decoded', 'source': 'digits', 'pp': 'value_range(0,1)'},
      ("cache='decoded'", 'digits'),
    ),
  ],
)
def test_mistakes(folder, change, facts):
  args = {'source': f'folder:{folder}', 'pp': TRAIN['all']} | change
  for make in (pipeline.train, pipeline.evaluate):
    with pytest.raises(UserError, match=naming(*facts)):
      make(**args, split='train', batch_size=8)


@pytest.mark.slow  # as in test_data_pipeline, with pixels kept
def test_interpreter_exits_with_a_stream_open(folder):
  code = (
    'from vit_jax.data import pipeline\n'
    f'it = pipeline.train("folder:{folder}", "train", {TRAIN["one size"]!r}, 8, host=0, '
    'hosts=1, cache="decoded").iterate()\nnext(it)\n'
  )
  done = subprocess.run(
    [sys.executable, '-W', 'error', '-c', code],
    capture_output=True,
    text=True,
    timeout=60,
    env=os.environ | {'TF_CPP_MIN_LOG_LEVEL': '2'},
  )
  assert done.returncode == 0, done.stderr
  assert 'Traceback' not in done.stderr
