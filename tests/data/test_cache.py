"""The cache: the same batches, fewer reads, its bound, and sources with nothing to cache."""

import numpy as np
import pytest
from PIL import Image

from tests.support import naming
from tests.support.image_folder import same, take
from vit_jax.data import pipeline
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


@pytest.mark.parametrize('key', TRAIN)
def test_batches_are_the_same(folder, key):
  args = (f'folder:{folder}', 'train', TRAIN[key], 8)
  steps = 3 * COUNT // 8
  want = take(pipeline.train(*args, seed=2).iterate(), steps)
  assert sum((b['mask'] == 0).sum() for b in want) == 3 * 2
  size = 4000 if key == 'sizes' else None  # a part of them
  cached = pipeline.train(*args, seed=2, cache='decoded', cache_bytes=size)
  same(take(cached.iterate(), steps), want)
  # Once more, from a step on, with the cache as it now is.
  same(take(cached.iterate(5), steps - 5), want[5:])


def test_evaluation_reads_its_images_once(folder, monkeypatch):
  args = (f'folder:{folder}', 'train', TRAIN['all'], 8)
  want = list(pipeline.evaluate(*args).iterate())
  seen = counted(monkeypatch)
  batches = pipeline.evaluate(*args, cache='decoded')
  same(list(batches.iterate()), want)
  first = len(seen)
  same(list(batches.iterate()), want)
  assert len(seen) - first == 2  # the broken ones have no pixels


def test_bound_of_decoded_pixels(folder):
  batches = pipeline.train(
    *(f'folder:{folder}', 'train', TRAIN['one size'], 8),
    cache='decoded',
    cache_bytes=10 * 12 * 12 * 3,
  )
  take(batches.iterate(), 12)
  cached = batches._reader._source._cached
  assert len(cached._values) == 10
  assert all(x['shape'] == (12, 12, 3) for x in cached._values.values())
  assert cached.full


def test_several_labels_of_cached_examples(tmp_path):
  """A mixture of one source suffices for lists of labels on encoded images."""
  for name in 'ab':
    (tmp_path / name).mkdir()
    Image.new('RGB', (9, 9), (90, 0, 0)).save(tmp_path / name / '0.png')
  parts = [{'source': f'folder:{tmp_path}', 'weight': 2}]
  args = (parts, 'train', f'{TRAIN["one size"]}|onehot', 4)
  want = take(pipeline.train(*args).iterate(), 4)
  same(take(pipeline.train(*args, cache='decoded').iterate(), 4), want)


@pytest.mark.parametrize(
  ('change', 'facts'),
  [
    ({'cache': None, 'cache_bytes': 100}, ('cache_bytes=100', 'decoded')),
    (
      {'pp': 'decode|inception_crop(8)|value_range(-1, 1)'},
      ("cache='decoded'", 'inception_crop(8)', 'resize_small(256)'),
    ),
    ({'source': 'digits', 'pp': 'value_range(0,1)'}, ("cache='decoded'", 'digits')),
  ],
)
def test_mistakes(folder, change, facts):
  args = {'source': f'folder:{folder}', 'pp': TRAIN['all'], 'cache': 'decoded'} | change
  with pytest.raises(UserError, match=naming(*facts)):
    pipeline.train(**args, split='train', batch_size=8)
