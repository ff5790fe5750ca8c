"""VTAB-1k: every task is cut, labelled and decoded as the benchmark's own code does."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.support import naming, vtab_fakes
from vit_jax.data import pipeline, sources
from vit_jax.errors import DataError, UserError
from vit_jax.lab.data import vtab, vtab_tasks
from vit_jax.lab.data.vtab_tasks import TASKS

# Sizes of the data sets in the catalogue of TFDS, and (TFDS's split, from, to) of train800,
# val200 and test by Zhai et al.'s code.
REAL = json.loads(Path(__file__).with_name('vtab.json').read_text())['splits']
SAME = {'clevr_dist': 'clevr_count', 'dspr_ori': 'dspr_loc', 'snorb_elev': 'snorb_azim'}


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  """data_dir of all data sets of VTAB."""
  directory = tmp_path_factory.mktemp('vtab')
  vtab_fakes.write(directory)
  return {'data_dir': str(directory)}


@pytest.mark.parametrize('name', TASKS)
def test_splits_of_the_data_sets_as_they_are(name):
  sizes, *parts = REAL[SAME.get(name, name)]
  expected = dict(zip(('train800', 'val200', 'test'), map(tuple, parts), strict=True))
  assert vtab.find_splits(name, sizes) == expected


def label_of(name: str, i: int) -> int:
  """Returns the label of example i of `vtab_fakes`."""
  if name == 'dspr_loc':
    return i % 32 // 2
  if name == 'dspr_ori':
    return math.floor(i % 40 / 2.5)
  return i % TASKS[name].classes


def numbers_of(examples) -> list[int]:
  return [vtab_fakes.number_of(example['image']) for example in examples]


@pytest.mark.parametrize('name', TASKS)
def test_a_task(data, name):
  task = TASKS[name]
  parts = vtab.find_splits(name, vtab_fakes.SIZES[task.tfds])
  rows = {k: [(of, i) for i in range(*ends)] for k, (of, *ends) in parts.items()}
  assert (len(rows['train800']), len(rows['val200'])) == (800, 200)
  rows['train800val200'] = rows['train800'] + rows['val200']
  assert len({*rows['train800val200'], *rows['test']}) == 1000 + len(rows['test'])
  for split in ('train800val200', 'test'):
    source = sources.build(f'vtab:{name}', split, **data)
    examples = source.read(np.arange(len(source)))
    numbers = numbers_of(examples)
    assert numbers == [i for _, i in rows[split]]
    labels = [example['label'] for example in examples]
    assert labels == [label_of(name, i) for i in numbers]
    assert source.num_classes == task.classes
    assert source.class_names is None or len(source.class_names) == task.classes
    if split != 'test':
      assert set(labels) == set(range(task.classes))
  for split in ('train800', 'val200'):
    source = sources.build(f'vtab:{name}', split, **data)
    ends = [i for _, i in rows[split]][:: len(rows[split]) - 1]
    assert numbers_of(source.read([0, len(source) - 1])) == ends


# Colour, grey, and a mask whose bytes change.
@pytest.mark.parametrize('name', ['caltech101', 'snorb_azim', 'dspr_loc'])
def test_images_have_three_channels_of_bytes(data, name):
  args = (f'vtab:{name}', 'test[:4]', 'decode|resize(8)|value_range(-1, 1)', 4)
  (batch,) = pipeline.EvalBatches(*args, source_options=data).iterate()
  images = np.asarray(batch['image'])
  assert images.dtype == np.uint8
  assert images.shape == (4, 8, 8, 3)
  if name != 'caltech101':  # gray
    np.testing.assert_array_equal(images[..., :1].repeat(3, -1), images)
  if name.startswith('dspr'):
    assert set(np.unique(images[..., ::7, ::7, :])) <= {0, 255}  # its corners
    assert images.max() == 255


def test_split_expressions_count_through_the_parts(data):
  source = sources.build('vtab:svhn', 'val200[-5:]+train800[:1%]', **data)
  assert numbers_of(source.read(np.arange(13))) == [*range(2004, 2009), *range(8)]
  assert numbers_of(source.read([12, 0, 7])) == [7, 2004, 2]
  assert source.name_of(3) == 'vtab:svhn train[2004:2009]+train[0:8] #3'


def test_tasks_of_one_data_set_are_not_the_same_data(data):
  count, distance, again = (
    sources.build(f'vtab:clevr_{name}', 'train800', **data)
    for name in ('count', 'dist', 'count')
  )
  assert count.fingerprint == again.fingerprint != distance.fingerprint
  assert count.class_names[0] == '3 objects'


def highest_below(bounds, value):
  """The benchmark's rule: the last class whose lower bound is below the value."""
  return max(i for i, bound in enumerate(bounds) if bound - np.float32(value) < 0)


@pytest.mark.parametrize('kind', ['clevr', 'kitti'])
def test_bins_of_distances(kind):
  bounds, low, high = {
    'clevr': (vtab_tasks.CLEVR_BOUNDS, 0.1, 20),
    'kitti': (vtab_tasks.KITTI_BOUNDS, -5, 90),
  }[kind]
  # Everything near a bound, and much else.
  edges = np.float32([b for b in bounds if low < b < high])
  near = [np.nextafter(edges, np.float32(to)) for to in (-999, 999)]
  values = np.concatenate([edges, *near, np.linspace(low, high, 300, dtype=np.float32)])
  for value in values:
    far = np.float32([value + 1, value, value + 7])
    rows = np.stack([0 * far, 0 * far - 99, far], 1)
    if kind == 'clevr':
      label = vtab_tasks.clevr_distance({'objects': {'pixel_coords': rows}})
    else:
      objects = {'location': rows, 'type': np.array([0, 2, 1])}
      label = vtab_tasks.kitti_distance({'objects': objects})
    assert label == highest_below(bounds, value), value
  if kind == 'kitti':
    # A van at 9 m behind a tram and a pedestrian; then nothing that is a vehicle.
    rows = np.float32([[0, 0, 3], [0, 0, 9], [0, 0, 5]])
    of = lambda types: {'objects': {'location': rows, 'type': np.array(types)}}
    assert vtab_tasks.kitti_distance(of([6, 1, 3])) == 1
    assert vtab_tasks.kitti_distance(of([6, 7, 3])) == 3
    nothing = {'objects': {'location': np.zeros([0, 3]), 'type': np.zeros([0])}}
    assert vtab_tasks.kitti_distance(nothing) == 3


def test_the_table():
  groups = [task.group for task in TASKS.values()]
  assert groups == 7 * ['natural'] + 4 * ['specialized'] + 8 * ['structured']
  assert sum(task.classes for task in TASKS.values()) == 940  # 795 + 62 + 83
  assert all(len(t.names) in (0, t.classes) for t in TASKS.values())
  unflipped = {'svhn', 'dspr_loc', 'dspr_ori', 'snorb_azim'}
  assert {name for name, task in TASKS.items() if not task.flip} == unflipped
  uncropped = {'clevr_count', 'clevr_dist', 'dspr_loc', 'dspr_ori', 'kitti_dist'}
  assert {name for name, task in TASKS.items() if not task.crop} == uncropped
  assert {name for name, task in TASKS.items() if task.small} == {
    *('cifar100', 'svhn', 'eurosat', 'dspr_loc', 'dspr_ori')
  }


def test_versions(tmp_path):
  kitti = lambda version, size: vtab_fakes.write_one(
    'kitti', tmp_path, dict.fromkeys(('train', 'validation', 'test'), size), version
  )
  kitti('3.1.0', 3)
  with pytest.raises(
    DataError, match=naming('vtab:kitti_dist', '3.1.0', 'at least 3.2')
  ):
    sources.build('vtab:kitti_dist', 'test', data_dir=str(tmp_path))
  kitti('3.2.0', 801)
  (tmp_path / 'kitti' / '4.0.0').symlink_to(tmp_path / 'kitti' / '3.1.0')
  assert len(sources.build('vtab:kitti_dist', 'test', data_dir=str(tmp_path))) == 801


@pytest.mark.parametrize(
  ('name', 'split', 'facts'),
  [
    ('vtab:clevr', 'test', ("VTAB task 'clevr'", 'clevr_count', 'snorb_elev')),
    ('vtab:svhn', 'train', ("'train'", 'train800', 'val200', 'vtab:svhn')),
    ('vtab:svhn', 'train800[900:]', ('vtab:svhn', '900', '800 examples')),
    ('vtab:dtd', 'test', ('vtab:dtd: ', 'tfds build dtd ')),
    ('vtab:clevr_dist', 'test', ('vtab:clevr_dist', '800', 'train[0:6]', '6')),
  ],
)
def test_mistakes(data, tmp_path, name, split, facts):
  directory = data if name == 'vtab:svhn' else {'data_dir': str(tmp_path)}
  if name == 'vtab:clevr_dist':  # a part of the data set
    vtab_fakes.write_one('clevr', tmp_path, dict.fromkeys(vtab_fakes.SIZES['clevr'], 7))
  with pytest.raises(UserError, match=naming(*facts)):
    sources.build(name, split, **directory)
