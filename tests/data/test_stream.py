"""Streams: the shards of each host, whole epochs, restarts, what is read and kept in memory."""

import struct

import numpy as np
import pytest

from tests.support import naming
from tests.support.image_folder import take
from vit_jax.data import pipeline, sources
from vit_jax.data.sources import stream
from vit_jax.errors import UserError

PP = 'decode|random_crop(2)|flip_lr|value_range(-1, 1)'
SIZES = (30, 1, 44, 25, 40, 29)


def png(number):
  """A PNG of 3x3 pixels that differ from each other."""
  import io

  from PIL import Image

  pixels = np.random.default_rng(number).integers(0, 256, (3, 3, 3), np.uint8)
  out = io.BytesIO()
  Image.fromarray(pixels).save(out, 'PNG')
  return out.getvalue()


@pytest.fixture(scope='module')
def shards(tmp_path_factory):
  """Six TFRecord shards of 169 examples; the label is the number."""
  from tensorflow_datasets.proto import tf_example_pb2

  root = tmp_path_factory.mktemp('shards')
  number = 0
  for i, size in enumerate(SIZES):
    with open(root / f'train-{i:05d}-of-00006.tfrecord', 'wb') as file:
      for _ in range(size):
        example = tf_example_pb2.Example()
        feature = example.features.feature
        feature['image/encoded'].bytes_list.value.append(png(number))
        feature['image/class/label'].int64_list.value.append(number)
        data = example.SerializeToString()
        # Checksums are not looked at.
        file.write(struct.pack('<QI', len(data), 0) + data + bytes(4))
        number += 1
  return root


@pytest.fixture(autouse=True)
def short_runs(monkeypatch):
  monkeypatch.setattr(stream, 'RUN', 8)


def build(shards, split='train', buffer=20):
  options = {'stream': True, 'shuffle_buffer': buffer}
  return sources.build(f'records:{shards}', split, **options)


def opened(shards, batch=6, host=0, hosts=1, seed=0, **more):
  made, order = build(shards, **more).for_training(seed, batch, host, hosts)
  assert made is order
  return made


def positions(start, stop, batch=6, host=0, hosts=1):
  """A host's positions in batches [start, stop)."""
  share = batch // hosts
  return (
    np.arange(start, stop)[:, None] * batch + host * share + np.arange(share)
  ).ravel()


def train(shards, split='train', buffer=20, batch=6, **more):
  options = {'stream': True, 'shuffle_buffer': buffer}
  return pipeline.train(
    *(f'records:{shards}', split, PP, batch),
    num_classes=169,
    source_options=options,
    **more,
  )


@pytest.mark.parametrize('buffer', [1, 20, 64, 1000])
def test_each_epoch_is_every_example_once(shards, buffer):
  source = opened(shards, buffer=buffer)
  indices = source.indices(np.arange(169 * 3)).reshape(3, 169)
  np.testing.assert_array_equal(np.sort(indices, 1), [np.arange(169)] * 3)
  assert len({tuple(row) for row in indices}) == 3
  other = opened(shards, buffer=buffer, seed=1).indices(np.arange(169))
  assert np.any(other != indices[0])
  if buffer == 1:  # not shuffled but by runs
    assert (np.diff(indices[0]) == 1).mean() > 0.8


@pytest.mark.parametrize('hosts', [2, 3, 6])
def test_hosts_have_shards_of_their_own(shards, hosts):
  bounds = np.cumsum([0, *SIZES])
  for host in range(hosts):
    mine = [np.arange(*bounds[i : i + 2]) for i in range(host, 6, hosts)]
    mine = np.concatenate(mine)
    source = opened(shards, host=host, hosts=hosts)
    # Two epochs of its own, in batches that know nothing of them.
    batches = -(-2 * len(mine) // (6 // hosts))
    got = source.indices(positions(0, batches, host=host, hosts=hosts))
    for epoch in range(2):
      part = got[epoch * len(mine) : (epoch + 1) * len(mine)]
      np.testing.assert_array_equal(np.sort(part), mine)


def test_records_are_those_of_the_order(shards):
  source = opened(shards)
  where = np.arange(400)
  for chunk in np.split(where, [7, 50, 51, 200, 333]):
    indices = source.indices(chunk)
    assert [x['label'] for x in source.read_at(chunk, indices)] == list(indices)


def test_windows_are_read_once(shards):
  source = opened(shards, buffer=32)
  reads = []
  records = source.source.records
  source.source.records = lambda part: reads.extend(part) or records(part)
  for start in range(0, 169 * 2, 3):
    chunk = np.arange(start, start + 3)
    source.read_at(chunk, source.indices(chunk))
  # Two epochs and the window ahead of them: every record once each.
  source._pool.shutdown()
  assert np.bincount(reads).min() == 2
  assert len(reads) <= 2 * 169 + 2 * 32


def test_a_jump_reads_two_windows(shards):
  source = opened(shards, buffer=32)
  reads = []
  records = source.source.records
  source.source.records = lambda part: reads.extend(part) or records(part)
  chunk = np.arange(169 * 1000 + 60, 169 * 1000 + 62)
  indices = source.indices(chunk)
  assert [x['label'] for x in source.read_at(chunk, indices)] == list(indices)
  source._pool.shutdown()
  assert len(reads) == 2 * 32


def test_batches_from_a_step_on_are_those_of_an_uninterrupted_run(shards):
  batches = train(shards, seed=4)
  whole = take(batches.iterate(), 60)  # two epochs
  assert all(b['mask'].all() for b in whole)
  again = take(batches.iterate(), 3)  # from the start once more
  for start, got in [(0, again)] + [
    (k, take(train(shards, seed=4, workers=3).iterate(k), 3)) for k in (1, 28, 57)
  ]:
    for a, b in zip(got, whole[start : start + 3], strict=True):
      for key in b:
        np.testing.assert_array_equal(a[key], b[key])
  # Pixels are those of their label's image: flipped or not, a 2x2 of its 3x3.
  import io

  from PIL import Image

  image, label = whole[0]['image'][0], whole[0]['label'][0]
  pixels = np.asarray(Image.open(io.BytesIO(png(label))))
  assert np.isin(image.reshape(-1, 3), pixels.reshape(-1, 3)).all()


def test_another_number_of_hosts_is_another_data_set(shards):
  made = [train(shards, host=0, hosts=hosts).fingerprint for hosts in (1, 2)]
  assert made[0] != made[1]
  hosts = {train(shards, host=h, hosts=2).fingerprint for h in range(2)}
  assert hosts == {made[1]}
  assert train(shards, buffer=21).fingerprint != made[0]
  assert sources.build(f'records:{shards}', 'train').fingerprint != made[0]


def test_mistakes(shards):
  with pytest.raises(ValueError, match=naming(6, '7 hosts')):
    opened(shards, batch=7, hosts=7)
  options = {'num_classes': 169, 'source_options': {'stream': True}}
  args = (f'records:{shards}', 'train', PP, 4)
  with pytest.raises(UserError, match=naming("'stream'", 'source_options')):
    pipeline.evaluate(*args, **options)
  part = {'source': args[0], 'options': {'stream': True}}
  with pytest.raises(UserError, match=naming(args[0], "'stream'", 'mixture')):
    pipeline.train([part], 'train', PP, 4, num_classes=169)
