"""Streams: the shards of each host, whole epochs, restarts, what is read, and how much memory it takes."""

import numpy as np
import pytest

from tests.support import example_records, naming
from tests.support.image_folder import same, take
from vit_jax.data import pipeline, sources
from vit_jax.data.sources import stream
from vit_jax.errors import UserError

PP = 'decode|random_crop(2)|flip_lr|value_range(-1, 1)'
SIZES = (30, 1, 44, 25, 40, 29)
COUNT = sum(SIZES)
BOUNDS = np.cumsum([0, *SIZES])


@pytest.fixture(scope='module')
def shards(tmp_path_factory):
  """Six TFRecord shards of 169 examples; label and grey level are the number."""
  root = tmp_path_factory.mktemp('shards')
  for i in range(6):
    items = map(example_records.example, range(*BOUNDS[i : i + 2]))
    example_records.write(root / f'train-{i:05d}-of-00006.tfrecord', items)
  return f'records:{root}'


@pytest.fixture(autouse=True)
def short_runs(monkeypatch):
  monkeypatch.setattr(stream, 'RUN', 8)


def opened(shards, batch=6, host=0, hosts=1, seed=0, buffer=20):
  options = {'stream': True, 'shuffle_buffer': buffer}
  source = sources.build(shards, 'train', **options)
  out, order = source.plan_training(seed, batch, host, hosts)
  assert out is order
  return out


def train(shards, buffer=20, batch=6, **more):
  options = {'stream': True, 'shuffle_buffer': buffer}
  more |= {'num_classes': COUNT, 'source_options': options}
  return pipeline.TrainBatches(shards, 'train', PP, batch, **more)


def labels(source, positions):
  return [x['label'] for x in source.read_at(positions, source.indices(positions))]


@pytest.mark.parametrize('buffer', [1, 20, 64, 1000])
def test_each_epoch_is_every_example_once(shards, buffer):
  source = opened(shards, buffer=buffer)
  indices = source.indices(np.arange(COUNT * 3)).reshape(3, COUNT)
  np.testing.assert_array_equal(np.sort(indices, 1), [np.arange(COUNT)] * 3)
  assert len({tuple(row) for row in indices}) == 3
  other = opened(shards, buffer=buffer, seed=1).indices(np.arange(COUNT))
  assert np.any(other != indices[0])
  if buffer == 1:  # not shuffled but by runs
    assert (np.diff(indices[0]) == 1).mean() > 0.8
  if buffer in (20, 64):  # every window has a shuffle of its own
    assert np.any(source._shuffle(0, 0) != source._shuffle(0, 1))


@pytest.mark.parametrize('hosts', [2, 3, 6])
def test_hosts_have_shards_of_their_own(shards, hosts):
  share = 6 // hosts
  for host in range(hosts):
    mine = [np.arange(*BOUNDS[i : i + 2]) for i in range(host, 6, hosts)]
    mine = np.concatenate(mine)
    # Two epochs of its own, in batches that know nothing of them.
    batches = np.arange(-(-2 * len(mine) // share))
    positions = batches[:, None] * 6 + host * share + np.arange(share)
    indices = opened(shards, host=host, hosts=hosts).indices(positions.ravel())
    for epoch in range(2):
      part = indices[epoch * len(mine) : (epoch + 1) * len(mine)]
      np.testing.assert_array_equal(np.sort(part), mine)


def test_records_are_those_of_the_order(shards):
  source = opened(shards)
  for positions in np.split(np.arange(400), [7, 50, 51, 200, 333]):
    assert labels(source, positions) == source.indices(positions).tolist()


def test_windows_are_read_once_and_a_jump_reads_two(shards):
  def reads_at(parts):
    source, reads = opened(shards, buffer=32), []
    records = source.source.records
    source.source.records = lambda part: reads.extend(part) or records(part)
    for positions in parts:
      assert labels(source, positions) == source.indices(positions).tolist()
    source._pool.shutdown()
    return reads

  reads = reads_at(np.arange(COUNT * 2).reshape(-1, 2))
  # Two epochs and the window ahead of them: every record once each.
  assert np.bincount(reads).min() == 2
  assert len(reads) <= 2 * COUNT + 2 * 32
  assert len(reads_at([np.arange(COUNT * 1000 + 60, COUNT * 1000 + 62)])) == 2 * 32


def test_batches_from_a_step_on_are_those_of_an_uninterrupted_run(shards):
  batches = train(shards, seed=4)
  whole = take(batches.iterate(), 60)  # two epochs
  for batch in whole:
    assert batch['mask'].all()
    assert (batch['image'] == batch['label'][:, None, None, None]).all()
  same(take(batches.iterate(), 3), whole[:3])  # from the start once more
  for step in (1, 28, 57):
    rest = take(train(shards, seed=4, workers=3).iterate(step), 3)
    same(rest, whole[step : step + 3])


def test_another_number_of_hosts_is_another_data_set(shards):
  alone, *two = (
    train(shards, host=host, hosts=hosts).fingerprint
    for host, hosts in ((0, 1), (0, 2), (1, 2))
  )
  assert two[0] == two[1] != alone
  assert train(shards, buffer=21).fingerprint != alone
  assert sources.build(shards, 'train').fingerprint != alone


def test_mistakes(shards):
  with pytest.raises(ValueError, match=naming(6, '7 hosts')):
    opened(shards, batch=7, hosts=7)
  options = {'num_classes': COUNT, 'source_options': {'stream': True}}
  with pytest.raises(UserError, match=naming("'stream'", 'source_options')):
    pipeline.EvalBatches(shards, 'train', PP, 4, **options)
  part = {'source': shards, 'options': {'stream': True}}
  with pytest.raises(UserError, match=naming(shards, "'stream'", 'mixture')):
    pipeline.TrainBatches([part], 'train', PP, 4, num_classes=COUNT)
