"""Images that cannot be read: masked, listed, and too many of them end the run."""

import json
import shutil

import numpy as np
import pytest

from tests.support import image_folder, naming
from tests.support.image_folder import FOLDER, same, take
from vit_jax.data import bad_images, pipeline, reader, sources
from vit_jax.errors import UserError


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return image_folder.write(tmp_path_factory.mktemp('images'))


@pytest.fixture
def broken(folder, tmp_path):
  """The folder with five files broken in five ways; returns (root, paths, good)."""
  good, root = tmp_path / 'good', tmp_path / 'broken'
  shutil.copytree(folder, good)
  shutil.copytree(folder, root)
  contents = {
    'a/0.jpg': lambda whole: whole[: len(whole) // 2],
    'a/1.png': lambda whole: whole[:60],
    'b/2.jpg': lambda whole: b'This is text, not a JPEG.',
    'c/0.jpg': lambda whole: b'',
    # 10^9 x 10^9 pixels by its header.
    'c/3.png': lambda whole: whole[:16] + (10**9).to_bytes(4, 'big') * 2 + whole[24:],
  }
  paths = [root / 'train' / name for name in contents]
  for path, content in zip(paths, contents.values(), strict=True):
    path.write_bytes(content(path.read_bytes()))
  return root, [str(path) for path in paths], good


@pytest.mark.parametrize('pp', [FOLDER, 'decode|resize(8)|value_range(-1,1)'])
def test_bad_images_are_masked_and_reported(broken, tmp_path, pp):
  root, paths, good = broken
  log = str(tmp_path / 'bad_images.jsonl')
  batches = pipeline.TrainBatches(str(root), 'train', pp, 13, bad_log=log)
  result = take(batches.iterate(), 6)  # two epochs
  expected = take(pipeline.TrainBatches(str(good), 'train', pp, 13).iterate(), 6)
  assert sum((batch['mask'] == 0).sum() for batch in result) == 2 * 5
  for a, b in zip(result, expected, strict=True):
    fine = a['mask'] == 1
    np.testing.assert_array_equal(a['image'][fine], b['image'][fine])
    np.testing.assert_array_equal(a['label'], b['label'])
    assert not a['image'][~fine].any()
  lines = bad_images.read_log(log)
  assert batches.bad_images == 5
  reasons = {line['path']: line['reason'] for line in lines}
  assert sorted(reasons) == sorted(paths)
  assert reasons[paths[2]] == 'not an image of a known type'
  assert reasons[paths[3]] == 'empty file'
  assert all(reasons.values())
  # A restart, and another pipeline, write no path twice.
  take(pipeline.TrainBatches(str(root), 'train', pp, 13, bad_log=log).iterate(2), 4)
  again = pipeline.EvalBatches(str(root), 'train', pp, 13, bad_log=log)
  assert sum(batch['mask'].sum() for batch in again.iterate()) == 39 - 5
  assert again.bad_images == 5
  assert bad_images.read_log(log) == lines


def test_a_line_cut_by_a_kill_costs_no_other(tmp_path):
  source, log = sources.build('digits', 'train'), tmp_path / 'bad_images.jsonl'
  add = lambda i: bad_images.BadImages(source, 1.0, str(log)).add(i, lambda: 'broken')
  for i in (0, 1):
    add(i)
  log.write_bytes(log.read_bytes()[:-20])
  for i in (2, 1):  # the one that was cut off is written again
    add(i)
  paths = [line['path'] for line in bad_images.read_log(log)]
  assert paths == [source.name_of(i) for i in (0, 2, 1)]
  whole = [line for line in log.read_text().splitlines() if line.endswith('}')]
  assert [json.loads(line)['path'] for line in whole] == paths


def test_a_batch_of_several_chunks_is_that_of_one(broken, monkeypatch):
  root, *_ = broken
  args = str(root), 'train', FOLDER, 13
  whole = take(pipeline.TrainBatches(*args).iterate(), 3)
  for chunk in (1, 5):  # chunks of one: some are empty
    monkeypatch.setattr(reader, 'CHUNK', chunk)
    same(take(pipeline.TrainBatches(*args).iterate(), 3), whole)


def test_too_many_bad_images_end_the_run(broken, tmp_path):
  root, *_ = broken
  log = str(tmp_path / 'bad_images.jsonl')
  args = (str(root), 'train', FOLDER, 13)
  batches = pipeline.TrainBatches(*args, max_bad_fraction=4 / 39, bad_log=log)
  with pytest.raises(UserError, match=naming(5, 39, 'max_bad_fraction', 4, log)):
    take(batches.iterate(), 3)
  assert len(bad_images.read_log(log)) == 5
  take(pipeline.TrainBatches(*args, max_bad_fraction=5 / 39).iterate(), 3)


@pytest.mark.parametrize(
  ('count', 'expected'), [(10, 5), (100, 20), (50_000, 50), (1_281_167, 1281)]
)
def test_how_many_bad_images_are_accepted(count, expected):
  assert bad_images.limit(count, None) == expected
  assert bad_images.limit(count, 0.25) == count // 4


def test_ops_that_fail_on_every_image_end_the_run_with_their_reason(folder):
  batches = pipeline.TrainBatches(
    str(folder), 'train', 'decode|random_crop(99)|value_range(-1,1)', 13
  )
  with pytest.raises(UserError, match=naming('random_crop', '99x99')):
    take(batches.iterate(), 3)
