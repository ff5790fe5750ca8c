"""Order, random numbers and split expressions, against independent references."""

import numpy as np
import pytest

from tests.support import naming
from vit_jax.data import philox, pipeline
from vit_jax.data.sources import order, splits


@pytest.mark.parametrize(
  ('counter', 'key', 'expected'),
  [
    # Known answers published with Random123 (kat_vectors, philox4x32 10).
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
      (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
      (0xA4093822, 0x299F31D0),
      (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
  ],
)
def test_philox_known_answers(counter, key, expected):
  np.testing.assert_array_equal(philox.philox(counter, key), expected)


def test_uniforms_depend_on_seed_position_and_op_only():
  positions = np.array([0, 7, 2**40 + 3])
  u = philox.uniforms(5, positions, (2, 5))
  assert u.shape == (3, 7)
  assert u.dtype == np.float32
  np.testing.assert_array_equal(philox.uniforms(5, positions[1:2], (2, 5)), u[1:2])
  # An op added behind, or one op taking more numbers, leaves the others alone.
  np.testing.assert_array_equal(philox.uniforms(5, positions, (2, 5, 3))[:, :7], u)
  np.testing.assert_array_equal(philox.uniforms(5, positions, (4, 5))[:, 4:], u[:, 2:])
  assert not np.any(philox.uniforms(6, positions, (2, 5)) == u)
  assert philox.uniforms(5, positions, ()).shape == (3, 0)


def test_uniforms_are_uniform():
  u = philox.uniforms(0, np.arange(20_000), (3,))
  assert u.min() >= 0
  assert u.max() < 1
  counts = np.stack([np.histogram(c, 20, (0, 1))[0] for c in u.T])
  # Each bin is binomial(20000, 1/20): mean 1000, deviation 31; 5 of them of 60 bins.
  assert np.abs(counts - 1000).max() < 155
  # Correlation of independent columns has deviation 1 / sqrt(20000) = 0.007.
  off = np.corrcoef(u.T) - np.eye(3)
  assert np.abs(off).max() < 0.035


def test_repeated_augmentation_is_that_of_timms_sampler():
  N, B, times = 50, 16, 3
  one = order.Shuffled(N, seed=3)
  repeated = order.Repeated(one, N, times, B)
  positions = np.arange(10 * B)
  batches = repeated.indices(positions).reshape(10, B)
  # The sampler repeats each image of a permutation, and ends an epoch after N of them.
  epochs = one.indices(np.arange(4 * N)).reshape(4, N)
  expected = np.repeat(epochs, times, axis=1)[:, :N].ravel()[: 10 * B].reshape(10, B)
  np.testing.assert_array_equal(np.sort(batches), np.sort(expected))
  # Mixup mixes each image with the one before it.
  assert (batches != np.roll(batches, 1, axis=1)).all()
  # Any position is known by itself, so that runs resume, on any number of hosts.
  some = repeated.indices(positions[::-7])
  np.testing.assert_array_equal(some, batches.ravel()[::-7])


def test_copies_of_an_image_are_augmented_anew():
  args = 'digits', 'train[:40]', 'random_affine(90, 0.2)|value_range(-1, 1)', 6
  batch = next(pipeline.TrainBatches(*args, repeats=3).iterate())
  first, second = batch['index'][:2]
  assert batch['index'].tolist() == [first, second] * 3
  assert len({image.tobytes() for image in batch['image']}) == 6


def test_each_epoch_is_an_exact_permutation():
  shuffled = order.Shuffled(13, seed=3)
  epochs = shuffled.indices(np.arange(13 * 5)).reshape(5, 13)
  for epoch, row in enumerate(epochs):
    expected = np.random.Generator(np.random.Philox([3, epoch])).permutation(13)
    np.testing.assert_array_equal(row, expected)
  assert len({tuple(row) for row in epochs}) == 5
  assert tuple(order.Shuffled(13, seed=4).indices(np.arange(13))) != tuple(epochs[0])


@pytest.mark.parametrize('seed', [0, 2**63 - 1])
def test_scattered_is_a_bijection(seed):
  for count in [*range(1, 150), 255, 256, 257, 4096, 9973, 65_537, 100_000]:
    scattered = order.Scattered(count, seed)
    epochs = scattered.indices(np.arange(2 * count)).reshape(2, count)
    np.testing.assert_array_equal(np.sort(epochs, 1), [np.arange(count)] * 2)
    if count > 20:  # otherwise it may be a coincidence
      assert np.any(epochs[0] != epochs[1])
      assert np.any(epochs[0] != order.Scattered(count, seed ^ 1).indices(epochs[0]))


def test_scattered_is_arithmetic():
  count = 3_000_000_019
  positions = np.random.default_rng(0).integers(0, 10 * count, 1000)
  indices = order.Scattered(count, 7).indices(positions)
  assert indices.dtype == np.int64
  assert indices.min() >= 0
  assert indices.max() < count
  # Independent of the order and grouping of the queries, hence of the number of hosts.
  for i in (0, 500, 999):
    alone = order.Scattered(count, 7).indices(positions[i:])
    np.testing.assert_array_equal(alone, indices[i:])


def chi_squared(counts):
  """Returns how many deviations a chi-squared statistic lies above its mean."""
  expected = counts.sum() / counts.size
  statistic = ((counts - expected) ** 2 / expected).sum()
  freedom = counts.size - 1
  return (statistic - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize('count', [10_007, 2**25 + 1, 10**12])
def test_scattered_looks_random(count):
  number = min(count, 200_000)
  bins = lambda x: np.histogram(x, 50, (0, count))[0]
  statistics = []
  for seed, epoch in ((0, 0), (0, 1), (1, 0)):
    scattered = order.Scattered(count, seed)
    places = np.arange(number) + epoch * count + (count - number) // 2
    a, later = scattered.indices(places), scattered.indices(places + count)
    # Where they are (a whole epoch has each value once), how far neighbours are from
    # each other, and how far one place is from itself in the next epoch.
    if number < count:
      statistics.append(chi_squared(bins(a)))
    statistics.append(chi_squared(bins(np.diff(a) % count)))
    statistics.append(chi_squared(bins((later - a) % count)))
    pairs = np.histogram2d(a[:-1], a[1:], 10, [(0, count)] * 2)[0]
    statistics.append(chi_squared(pairs))
  # Twelve standard variables at most; 5 deviations above happen once in 3 million. (A
  # chi-squared of 49 degrees has a longer tail: once in ten thousand.)
  assert max(statistics) < 5


def test_only_large_orders_are_scattered():
  assert type(order.shuffle(order.EXACT, 0)) is order.Shuffled
  assert type(order.shuffle(order.EXACT + 1, 0)) is order.Scattered


def test_hosts_that_cannot_share_a_batch():
  with pytest.raises(ValueError, match=naming('batch_size=6', 4)):
    order.host_slice(6, 0, 4)


SIZES = {'train': 101, 'test': 7}


@pytest.mark.parametrize(
  ('expression', 'expected'),
  [
    ('train', [('train', 0, 101)]),
    ('train[:90%]', [('train', 0, 91)]),
    ('train[90%:]', [('train', 91, 101)]),
    ('train[-10%:]', [('train', 91, 101)]),
    ('train[10:20]+test', [('train', 10, 20), ('test', 0, 7)]),
    (' test[ -3 : ] + train[5:1_0]', [('test', 4, 7), ('train', 5, 10)]),
  ],
)
def test_split_expressions(expression, expected):
  assert splits.ranges(expression, SIZES, 'x') == expected


def test_percentages_agree_with_tfds():
  import tensorflow_datasets as tfds

  template = tfds.core.ShardedFileTemplate(
    dataset_name='x', data_dir='/x', filetype_suffix='tfrecord'
  )
  infos = tfds.core.splits.SplitDict(
    tfds.core.splits.SplitInfo(
      name=name,
      shard_lengths=[size],
      num_bytes=0,
      filename_template=template.replace(split=name),
    )
    for name, size in SIZES.items()
  )
  for percent in range(0, 101, 7):
    for text in (f'train[:{percent}%]', f'train[-{percent}%:]', f'test[{percent}%:]'):
      expected = sum(i.take for i in infos[text].file_instructions)
      part, _ = splits.ranges(f'{text}+test', SIZES, 'x')
      assert part[2] - part[1] == expected, text


@pytest.mark.parametrize(
  ('expression', 'facts'),
  [
    ('trian', ('train', 'test')),
    ('train[:', ('train[:90%]',)),
    ('train[1.5:]', ('train[:90%]',)),
    ('train[:102]', (102, 101)),
    ('train[50:50]', (101, "'train[90%:]'")),
  ],
)
def test_wrong_splits(expression, facts):
  with pytest.raises(ValueError, match=naming(f"'{expression}'", *facts)):
    splits.select(expression, SIZES, 'x')
