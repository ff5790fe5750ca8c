"""Mixtures: exact proportions, every part's own epochs, labels, restarts, mistakes."""

from fractions import Fraction

import numpy as np
import pytest
from PIL import Image

from tests.support import naming
from tests.support.hostile_images import encode
from tests.support.image_folder import same, take, together
from vit_jax.data import bad_images, pipeline, sources
from vit_jax.data.sources import mixture, order
from vit_jax.errors import UserError

PP = 'random_crop(2)|flip_lr|value_range(-1, 1)'


def noise(count, weight=None, **more):
  """A part whose labels are its indices."""
  options = {'size': 3, 'num_examples': count, 'num_classes': count}
  part = {'source': 'synthetic', 'options': options} | more
  return part | ({} if weight is None else {'weight': weight})


PARTS = [
  noise(50, 0.7),
  noise(30, 0.2, label_offset=50),
  noise(7, 0.1, label_offset=80),
]


def joined(weights, sizes=None, seed=0):
  sizes = sizes or [100] * len(weights)
  orders = [order.Shuffled(size, k) for k, size in enumerate(sizes)]
  starts = np.cumsum([0, *sizes])
  return mixture.Interleaved(orders, starts, [Fraction(str(w)) for w in weights], seed)


# --- proportions -------------------------------------------------------------------


@pytest.mark.parametrize(
  'weights', [[1], [1, 1, 1], [0.7, 0.2, 0.1], [3, 1e-3, 5, 0.123], [1, 2e-6]]
)
def test_quotas_add_up_and_are_exact(weights):
  both = joined(weights)
  shares = [w / sum(weights) for w in weights]
  previous = [0] * len(weights)
  for block in [*range(1, 200), 10**6, 10**12]:
    served = both.count_before(block)
    assert sum(served) == block * both.block
    assert all(a <= b for a, b in zip(previous, served, strict=True))
    for count, share in zip(served, shares, strict=True):
      # To within one; and floats know a count of 10**15 to a quarter.
      assert abs(count - block * both.block * share) < 1 + 1e-15 * block * both.block
    previous = served
  assert all(n > 0 for n in both.count_before(1))


def test_weights_are_taken_as_written():
  # A tenth of every ten blocks, to the last example: 0.1 as a float would drift.
  assert joined([0.1, 0.9]).count_before(10 * 10**15)[0] == 1024 * 10**15


def test_every_part_goes_through_its_own_epochs():
  sizes, places = [40, 25, 5], np.arange(1024 * 3)
  both = joined([0.5, 0.3, 0.2], sizes)
  (parts, turns), indices = both.turns(places), both.indices(places)
  for k, size in enumerate(sizes):
    # Its places, in the order in which they come, are positions 0, 1, 2, ... of its own.
    np.testing.assert_array_equal(turns[parts == k], np.arange((parts == k).sum()))
    own = order.Shuffled(size, k).indices(turns[parts == k])
    np.testing.assert_array_equal(indices[parts == k], both._starts[k] + own)
  assert np.bincount(parts).tolist() == both.count_before(3)
  # Mixed within the block: of 64 neighbours, 32 +- 4 of the half.
  halves = (parts == 0).reshape(-1, 64).sum(1)
  assert halves.min() > 10
  assert halves.max() < 54
  assert np.any(parts[:1024] != parts[1024:2048])
  assert np.any(parts != joined([0.5, 0.3, 0.2], sizes, seed=1).turns(places)[0])
  # Places are arithmetic: each alone is the same.
  far = np.random.default_rng(0).integers(0, 10**12, 50)
  alone = [both.indices(far[i : i + 1])[0] for i in range(50)]
  np.testing.assert_array_equal(both.indices(far), alone)


# --- batches -----------------------------------------------------------------------


def test_same_batches_for_any_restart_and_hosts():
  train = lambda **more: pipeline.TrainBatches(PARTS, 'train', PP, 12, seed=3, **more)
  batches = train()
  assert batches.num_examples == 87
  assert batches.num_classes == 87
  whole = take(batches.iterate(), 9)
  for start in (1, 8):
    same(take(train().iterate(start), 9 - start), whole[start:])
  hosts = [take(train(host=h, hosts=3).iterate(2), 2) for h in range(3)]
  same(together(hosts), whole[2:4])


def test_proportions_of_labels():
  batches = take(pipeline.TrainBatches(PARTS, 'train', PP, 1024).iterate(), 5)
  labels = np.concatenate([batch['label'] for batch in batches])
  parts = np.digitize(labels, [50, 80])
  assert np.bincount(parts).tolist() == [3584, 1024, 512]
  for k, size in enumerate((50, 30, 7)):
    times = np.bincount(labels[parts == k] - (0, 50, 80)[k], minlength=size)
    assert times.max() - times.min() <= 1  # whole epochs, and part of one
  # Without weights by size.
  sized = [noise(300), noise(100, label_offset=300)]
  (batch,) = take(pipeline.TrainBatches(sized, 'train', PP, 1024).iterate(), 1)
  assert (batch['label'] < 300).sum() == 768


def test_parts_of_one_size_have_orders_of_their_own():
  source = mixture.build([noise(20), noise(20, label_offset=20)], 'train')
  _, both = source.plan_training(3, 12, 0, 1)
  a, b = (own.indices(np.arange(20)) for own in both._orders)
  assert np.any(a != b)


def test_images_and_labels_belong_together():
  parts = [noise(20), noise(30, label_offset=20, split='test[:10]')]
  source = mixture.build(parts, 'train')
  assert len(source) == 30
  assert source.name_of(25) == 'synthetic#5'
  own = [sources.build('synthetic', 'train', **parts[k]['options']) for k in (0, 1)]
  indices = np.random.default_rng(0).permutation(30)
  for i, example in zip(indices, source.read(indices), strict=True):
    k, j = divmod(int(i), 20)
    (expected,) = own[k].read(np.array([j]))
    np.testing.assert_array_equal(example['image'], expected['image'])
    assert example['label'] == expected['label'] + 20 * k


@pytest.fixture
def folders(tmp_path):
  """Two folders: one with a broken file, one whose image is rotated by its EXIF."""
  image = np.zeros((20, 10, 3), np.uint8)
  image[:10] = 200  # upright: bright on the right
  for name, orientation in (('a', 1), ('b', 6)):
    home = tmp_path / name / 'train' / name
    home.mkdir(parents=True)
    (home / '0.jpg').write_bytes(encode(Image.fromarray(image), 'JPEG', orientation))
  (tmp_path / 'a' / 'train' / 'a' / '1.jpg').write_bytes(b'broken')
  return tmp_path


def test_encoded_images_keep_their_own_ways(folders, tmp_path):
  parts = [
    {'source': f'folder:{folders}/a'},
    {'source': f'folder:{folders}/b', 'label_offset': 1},
  ]
  log, pp = str(tmp_path / 'log'), 'decode|resize((4, 8))|value_range(-1, 1)'
  options = {'bad_log': log, 'max_bad_fraction': 1}
  batches = pipeline.TrainBatches(parts, 'train', pp, 3 * 1024, **options)
  assert batches.class_names == ['a', 'b']
  (batch,) = take(batches.iterate(), 1)
  assert (batch['mask'] == 0).sum() == 1024
  (line,) = bad_images.read_log(log)
  assert line['path'] == str(folders / 'a' / 'train' / 'a' / '1.jpg')
  right = batch['image'][:, :, 6:].mean((1, 2, 3))
  good = batch['mask'] == 1
  # Stored upright, the right half is as bright as all of it: half of 200.
  np.testing.assert_array_equal((right > 150)[good], (batch['label'] == 1)[good])


def test_if_one_part_has_several_labels_all_have(tmp_path):
  labels = np.array([[1, 0, 1], [0, 0, 0]])
  np.savez(tmp_path / 'a.npz', images=np.zeros((2, 3, 3, 3), np.uint8), labels=labels)
  parts = [{'source': f'{tmp_path}/a.npz'}, noise(2, label_offset=3)]
  batches = pipeline.TrainBatches(parts, 'train', 'value_range(-1, 1)', 1024)
  assert batches.spec['label'].shape == (1024, 5)
  (batch,) = take(batches.iterate(), 1)
  rows, counts = np.unique(batch['label'], axis=0, return_counts=True)
  expected = [[0, 0, 0, 0, 0], [0, 0, 0, 0, 1], [0, 0, 0, 1, 0], [1, 0, 1, 0, 0]]
  np.testing.assert_array_equal(rows, expected)
  np.testing.assert_array_equal(counts, [256] * 4)


# --- mistakes ----------------------------------------------------------------------


A, B = 'folder:{}/a', 'folder:{}/b'
FOLDERS = 'decode|resize(4)|value_range(-1, 1)'
# Parts of a mixture, and the words of the error.
REFUSED = [
  ([], ('data.source', 'empty')),
  (['digits'], ('data.source[0]', "'digits'", 'section')),
  ([{'split': 'train'}], ('data.source[0]', 'lacks source')),
  ([noise(3), noise(3, wieght=1)], ('data.source[1].wieght', 'weight')),
  ([noise(3, 1), noise(3)], ('data.source[1]', 'weight')),
  ([noise(3, 0)], ('data.source[0]', 'weight=0')),
  ([noise(3), {'source': 'digits'}], ('synthetic', (3, 3, 3), 'digits', (8, 8, 1))),
  ([noise(3, 1e-9), noise(3, 1)], ('1e-09', 1048576)),
  ([noise(3), noise(3, label_offset=5)], ('5 to 7', 'label_offset=5', 'num_classes=6')),
  ([noise(3), noise(3, label_offset=5)], ('0 to 5', 'synthetic#1', 6)),
  ([noise(3, label_offset=-1)], ('-1 to 1', 'label_offset=-1', 'synthetic#0')),
  ([{'source': A}, {'source': B}], (0, "'a'", "'b'", B, 'label_offset')),
]


@pytest.mark.parametrize(('parts', 'words'), REFUSED)
def test_mistakes(folders, parts, words):
  encoded = {'source': A} in parts
  parts = [
    {**part, 'source': part['source'].format(folders)} if 'source' in part else part
    for part in parts
  ]
  words = [str(word).format(folders) for word in words]
  pp, classes = (FOLDERS, None) if encoded else (PP, 6)
  with pytest.raises(UserError, match=naming(*words)):
    pipeline.TrainBatches(parts, 'train', pp, 4, num_classes=classes)


def test_classes_of_two_names_may_be_one(folders):
  parts = [{'source': A.format(folders)}, {'source': B.format(folders)}]
  parts[1]['label_offset'] = 0
  assert pipeline.TrainBatches(parts, 'train', FOLDERS, 4).class_names == ['a']
  with pytest.raises(UserError, match=naming(parts[0]['source'], 'config.evals')):
    pipeline.EvalBatches(parts[:1], 'train', FOLDERS, 4)
