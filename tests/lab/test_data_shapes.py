"""The source 'shapes': pixels agree with labels, and depend on the row alone."""

import dataclasses
import hashlib
import math
import re

import numpy as np
import pytest
from scipy import ndimage

from tests.support import naming
from vit_jax.data import sources
from vit_jax.errors import UserError
from vit_jax.lab.data import scenes

TASKS = ('class', 'count', 'position', 'distance')


def images_of(source, rows):
  return np.stack([example['image'] for example in source.read(np.asarray(rows))])


def objects(image):
  """Returns the connected parts that have a colour: their centroids, (y, x) from 0 to 1."""
  smooth = ndimage.uniform_filter(image / 255, (3, 3, 1))
  coloured = smooth.max(-1) - smooth.min(-1) > 0.28
  parts, number = ndimage.label(coloured, np.ones((3, 3)))
  centres = ndimage.center_of_mass(coloured, parts, range(1, number + 1))
  return (np.array(centres) + 0.5) / len(image)


# --- labels and pixels --------------------------------------------------------------


@pytest.mark.parametrize('task', ['count', 'position', 'distance'])
def test_the_label_is_true_of_the_pixels(task):
  size = 160 if task == 'count' else 96
  source = sources.build(f'shapes:{task}', 'train', size=size)
  for example in source.read(np.arange(60)):
    centres = objects(example['image'])
    name = source.class_names[example['label']]
    numbers = [float(number) for number in re.findall(r'[\d.]+', name)]
    if task == 'count':
      assert len(centres) == numbers[0]
    elif task == 'position':
      # Within a pixel of the cell: noise and the pixels move a centroid.
      assert len(centres) == 1
      offset = 4 * centres - (np.array([numbers]) - 0.5)
      assert np.abs(offset).max() < 0.5 + 4 / size
    else:
      distance, (least, most) = np.hypot(*(centres[0] - centres[1])), numbers
      assert len(centres) == 2
      assert least - 1 / size < distance < most + 1 / size


# Areas of shapes in a circle of radius 1.
AREAS = {
  'circle': math.pi,
  'square': 2,
  'triangle': 3 * math.sqrt(3) / 4,
  'star': 5 * math.sin(math.pi / 5) * math.cos(0.4 * math.pi) / math.cos(math.pi / 5),
  'cross': 2 * (1.9 * 0.62) - 0.62**2,
  'ring': math.pi * (1 - 0.5**2),
}


def test_shapes_have_the_area_the_centroid_and_the_colour_of_their_class():
  source = sources.build('shapes:class', 'train')
  rows = np.arange(150)
  size = 128
  scene = scenes.scenes('class', 0, 'train', rows)
  scene = dataclasses.replace(
    scene, shown=np.arange(5) == np.full((150, 1), 4), ground=0 * scene.ground
  )
  silent = dataclasses.replace(scene, noise=0 * scene.noise)
  images = scenes.draw(silent, size, np.zeros((150, size, size, 3), np.uint8))
  kinds = set()
  for i, label in enumerate(scene.label):
    colour, kind = source.class_names[label].split()
    kinds.add(kind)
    rgb = scene.colour[i, 4]
    hue = {0: 'red', 1: 'green', 2: 'blue'}[int(rgb.argmax())]
    mixed = {0: 'cyan', 1: 'magenta', 2: 'yellow'}[int(rgb.argmin())]
    assert colour in (hue, mixed)
    covered = images[i] @ rgb / 255 / (rgb @ rgb)
    radius = scene.radius[i, 4] * size
    # Half a pixel of 20 to 38: corners, and pixels of the edge rounded to 8 bits.
    assert covered.sum() == pytest.approx(AREAS[kind] * radius**2, rel=0.01)
    y, x = (np.array(ndimage.center_of_mass(covered)) + 0.5) / size
    assert (x, y) == pytest.approx((scene.x[i, 4], scene.y[i, 4]), abs=0.1 / size)
  assert kinds == set(AREAS) == set(scenes.KINDS)


def test_sine_and_cosine():
  turns = np.linspace(0, 1, 1001, endpoint=False, dtype=np.float32)
  cosine, sine = scenes.direction(turns)
  assert cosine.dtype == sine.dtype == np.float32
  # The first term that the Taylor polynomial leaves out: (pi / 2)**11 / 11! = 3.6e-6.
  np.testing.assert_allclose(sine, np.sin(2 * np.pi * turns), atol=5e-6)
  np.testing.assert_allclose(cosine, np.cos(2 * np.pi * turns), atol=5e-6)


@pytest.mark.parametrize('task', TASKS)
def test_classes_are_balanced(task):
  source = sources.build(f'shapes:{task}', 'train', num_examples=20_000)
  counts = np.bincount(source.labels, minlength=source.num_classes)
  share = 1 / source.num_classes
  assert len(counts) == len(source.class_names) == source.num_classes
  # Five standard deviations of a binomial distribution.
  assert np.abs(counts - 20_000 * share).max() < 5 * math.sqrt(
    20_000 * share * (1 - share)
  )
  rows = np.array([3, 19_999, 7])
  assert [x['label'] for x in source.read(rows)] == list(source.labels[rows])


# --- a function of the row alone ----------------------------------------------------

HASHES = {
  'class': 'fcb14bb604335208',
  'count': 'fa57d028b2099a5e',
  'position': 'c747dc4ecd85115b',
  'distance': 'd6d294eb06f90257',
}


@pytest.mark.parametrize('task', TASKS)
def test_pixels_are_the_same_everywhere(task):
  """Recorded hashes: another one means another data set; then it needs another name."""
  digest = hashlib.sha256()
  for split, size in (('train', 32), ('test', 17)):
    digest.update(
      images_of(sources.build(f'shapes:{task}', split, size=size), range(64))
    )
  assert digest.hexdigest()[:16] == HASHES[task]


@pytest.mark.parametrize('task', TASKS)
def test_pixels_depend_on_the_row_alone(task):
  source = sources.build(f'shapes:{task}', 'train')
  # Each kind is drawn in windows of the size of the largest shape of a batch.
  rows = np.array([99_999, 5, 4_321, 6, 5, *range(60)])
  together = images_of(source, rows)
  alone = np.concatenate([images_of(source, [row]) for row in rows])
  np.testing.assert_array_equal(together, alone)
  part = sources.build(f'shapes:{task}', 'val[-9:]+train[4_000:5_000]', seed=0)
  np.testing.assert_array_equal(images_of(part, [9 + 321])[0], together[2])
  assert part.name_of(9 + 321) == f'shapes:{task}/train#4321'
  assert part.name_of(0) == f'shapes:{task}/validation#4991'
  fewer = sources.build(f'shapes:{task}', 'train[:100]', num_examples=100)
  np.testing.assert_array_equal(images_of(fewer, [5, 6]), together[[1, 3]])
  prints = [
    sources.build(f'shapes:{task}', split, **options).fingerprint
    for split in ('train[:100]', 'train[1:100]')
    for options in ({}, {'seed': 1}, {'size': 33})
  ]
  assert prints[0] == fewer.fingerprint
  assert len(set(prints)) == 6


def test_splits_seeds_and_tasks_share_no_image():
  every = [
    images_of(sources.build(f'shapes:{task}', split, seed=seed), range(30))
    for task in TASKS
    for split in ('train', 'validation', 'test')
    for seed in (0, 1)
  ]
  flat = np.concatenate(every).reshape(4 * 3 * 2 * 30, -1)
  assert len(np.unique(flat, axis=0)) == len(flat)


def test_two_thousand_million_examples_take_no_memory():
  source = sources.build('shapes:count', 'train', num_examples=2**31 - 1)
  assert (len(source), source.labels, source.num_classes) == (2**31 - 1, None, 8)
  last = sources.build('shapes:count', 'train[-1:]', num_examples=2**31 - 1)
  np.testing.assert_array_equal(images_of(source, [2**31 - 2]), images_of(last, [0]))


@pytest.mark.parametrize(
  ('source', 'split', 'options', 'facts'),
  [
    ('shapes:conut', 'train', {}, ("'conut'", 'position', '"count"')),
    ('shapes', 'tain', {}, ("'tain'", 'validation', '"train"')),
    ('shapes', 'train[5_001:]+val[5001:]', {}, ('5001', '5000')),
    ('shapes', 'train', {'size': 7}, ('size=7', 8, 8000)),
    ('shapes', 'train', {'num_examples': 2**31}, ('num_examples=', 2**31 - 1)),
  ],
)
def test_wrong_arguments(source, split, options, facts):
  with pytest.raises(UserError, match=naming(*facts)):
    sources.build(source, split, **options)


def test_captions_name_the_class():
  source = sources.build('shapes', 'train', num_examples=50)
  for example in source.read(np.arange(50)):
    colour, kind = source.class_names[example['label']].split()
    assert len(example['text']) == 5
    assert all(colour in text and kind in text for text in example['text'])
  assert 'text' not in sources.build('shapes:count', 'train').features
