"""What a run prints about its data before it trains: counts, what is left out, likely slips."""

import importlib.util

import pytest
from PIL import Image

from tests.support import naming
from vit_jax.data import pipeline
from vit_jax.data.sources import listing

PP = 'decode|resize(8)|value_range(-1, 1)'


@pytest.fixture(params=[False, True], ids=['no pillow-heif', 'pillow-heif'])
def heif(request, monkeypatch):
  """Whether pillow-heif seems to be installed."""
  find = importlib.util.find_spec
  fake = lambda name: request.param if name == 'pillow_heif' else find(name)
  monkeypatch.setattr(listing.importlib.util, 'find_spec', fake)
  listing.extensions.cache_clear()
  yield request.param
  listing.extensions.cache_clear()


def write(root, *names):
  for name in names:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new('RGB', (6, 5)).save(file, 'PNG')


def photos(root):
  write(root, *(f'train/cat/{i}.png' for i in range(7)))
  write(root, *(f'train/dog/deep/{i}.jpg' for i in range(3)))
  write(root, 'train/cat/a.HEIC', 'train/dog/b.heif', 'train/dog/c.svg', 'train/x.jpg')
  write(
    root, 'train/dog/README', 'train/dog/.hidden.png', 'val/cat/1.png', 'val/dog/1.png'
  )
  return root


def test_numbers_and_files_that_are_left_out(tmp_path, heif):
  data = pipeline.train(f'folder:{photos(tmp_path)}', 'train', PP, 2)
  read = '12 images, 2 classes of 4 to 8' if heif else '10 images, 2 classes of 3 to 7'
  left_out = '1 .svg, 1 without extension'
  if not heif:
    left_out = f'1 .heic, 1 .heif, {left_out}'
    left_out += " (HEIC needs pillow-heif: pip install 'vit_jax[heif]')"
  (line,) = data.describe()
  start = f'folder:{tmp_path}, train: {read}; left out: {left_out}'
  assert line == f'{start}; in no class: 1 .jpg'
  (few,) = data.warnings()
  assert naming_all(few, "'dog'", 4 if heif else 3)
  assert 'cat' not in few
  val = pipeline.evaluate(f'folder:{tmp_path}', 'val', PP, 2)
  assert val.describe() == [f'folder:{tmp_path}, val: 2 images, 2 classes of 1']


def test_a_small_set_to_evaluate_on_is_warned_of(tmp_path):
  # A tenth of a folder is not stratified: here 'c', of two images, is not in it.
  write(tmp_path, *(f'train/{c}/{i}.png' for c in 'ab' for i in range(60)))
  write(tmp_path, 'train/c/0.png', 'train/c/1.png')
  tenth = pipeline.evaluate(f'folder:{tmp_path}', 'train[90%:]', PP, 2)
  assert len(tenth.source) == 12
  (line,) = tenth.warnings()
  assert naming_all(line, f'folder:{tmp_path}, train[90%:]', '12 images', '8.3%', "'c'")
  (whole,) = pipeline.evaluate(f'folder:{tmp_path}', 'train[:99]', PP, 2).warnings()
  assert naming_all(whole, '99 images')
  assert 'none of' not in whole
  for source, split in ((f'folder:{tmp_path}', 'train[:110]'), ('digits', 'test')):
    pp = PP if split != 'test' else 'value_range(-1, 1)'
    assert pipeline.evaluate(source, split, pp, 2).warnings() == []


def naming_all(text, *facts):
  import re

  return re.search(naming(*facts), text)


def test_a_clean_source_has_nothing_to_say():
  data = pipeline.train('digits', 'train', 'value_range(-1, 1)', 8)
  assert data.describe() == ['digits, train: 1,437 images, 10 classes of 133 to 154']
  assert data.warnings() == []
  mixed = [
    {'source': 'digits', 'split': f'train[{x}]', 'weight': 1} for x in (':9', '9:')
  ]
  data = pipeline.train(mixed, '', 'value_range(-1, 1)', 8)
  assert len(data.describe()) == 2
