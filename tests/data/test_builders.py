"""Prepared data sets are those that TFDS itself writes, from any archive, with Beam or not."""

import dataclasses
import gzip
import json
import os
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from tests.support import naming
from tests.support.archives import encoded, examples, synsets, write_tar
from vit_jax.data import sources
from vit_jax.data.prepare import beam as builder
from vit_jax.data.prepare import buckets, imagenet21k, images, report, writer
from vit_jax.errors import UserError


@pytest.mark.parametrize('file_format', ['array_record', 'tfrecord'])
def test_the_files_are_those_that_tfds_writes(tmp_path, monkeypatch, file_format):
  from tensorflow_datasets.core import example_serializer
  from tensorflow_datasets.core.utils import shard_utils

  monkeypatch.setattr(buckets, '_BUCKET', 4000)  # several of each, of so few images
  # TFDS leaves the order of an example's keys to chance.

  def in_order(self, example):
    return self.get_tf_example(example).SerializeToString(deterministic=True)

  serializer = example_serializer.ExampleSerializer
  monkeypatch.setattr(serializer, 'serialize_example', in_order)
  three = lambda self, *args, **kwargs: 3
  monkeypatch.setattr(shard_utils.ShardConfig, 'get_number_shards', three)
  plan = imagenet21k.plan(write_tar(tmp_path / 'fall11_whole.tar', synsets()))
  ours, result = writer.prepare(plan, str(tmp_path / 'ours'), file_format=file_format)
  reference = builder.build(plan, str(tmp_path / 'tfds'), file_format=file_format)
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # TFDS's own
    reference.download_and_prepare()
  files = sorted(os.listdir(reference.data_dir))
  assert sorted({*files, 'report.json', 'report.txt'}) == sorted(os.listdir(ours))
  assert sum('-of-00003' in name for name in files) == 3
  for name in files:
    with open(f'{ours}/{name}', 'rb') as a, open(reference.data_path / name, 'rb') as b:
      a, b = a.read(), b.read()
    if name == 'dataset_info.json':  # which module wrote it
      a, b = ({**json.loads(x), 'moduleName': ''} for x in (a, b))
    assert a == b, name
  assert result['splits']['full']['examples'] == 40


def test_a_compressed_archive_gives_the_same(tmp_path):
  archive = synsets()
  plain = imagenet21k.plan(write_tar(tmp_path / 'a.tar', archive))
  # Repacked under another name and in another order of classes.
  backward = {f'x/y/{os.path.basename(k)}': archive[k] for k in reversed(archive)}
  squeezed = imagenet21k.plan(write_tar(tmp_path / 'b.tgz', backward, 'w:gz'))
  assert (len(plain.pieces), len(squeezed.pieces)) == (4, 1)
  a, b = (
    writer.prepare(p, str(tmp_path / d))[0] for p, d in ((plain, 'A'), (squeezed, 'B'))
  )
  assert examples(a, 'full') == examples(b, 'full')
  # By hashes, so mixed: any part is a random one.
  assert len({label for label, _, _ in examples(a, 'full[:12]')}) == 4


def test_bytes_are_kept_and_read_by_our_source(tmp_path):
  archive = synsets(3, 5)
  plan = imagenet21k.plan(write_tar(tmp_path / 'a.tar', archive))
  writer.prepare(plan, str(tmp_path))
  source = sources.build('tfds:imagenet21k', 'full', data_dir=str(tmp_path))
  assert source.class_names == ['n00000007', 'n00000044', 'n00000081']
  given = {data for tar in archive.values() for data in tar.values()}
  assert {x['image'] for x in source.read(np.arange(15))} == given


@pytest.mark.beam
@pytest.mark.filterwarnings('ignore')  # Beam's and TFDS's own
def test_beam_gives_the_same(tmp_path):
  files = {f'{c}/{i}.jpg': encoded(10 * ord(c) + i) for c in 'ab' for i in range(9)}
  files |= {'a/bad.jpg': b'', 'a/notes.txt': b'x'}
  tar = write_tar(tmp_path / 'photos.tar', files)
  split = 'train=70%,val=30%'
  one = images.plan([tar], 'one', split=split)
  many = images.plan([tar], 'one', split=split, ranges=True)
  a, alone = writer.prepare(one, str(tmp_path / 'A'))
  b, together = builder.prepare(
    many, str(tmp_path / 'B'), runner='DirectRunner', options=[]
  )
  assert alone == together
  for part in ('train', 'val'):
    assert examples(a, part) == examples(b, part)
  assert sorted(os.listdir(tmp_path / 'B/one')) == ['1.0.0']


def test_without_beam_the_extra_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'apache_beam', None)
  with pytest.raises(UserError, match=naming('apache-beam', 'vit_jax[beam]')):
    builder.load_beam()


def test_a_report_of_parts_is_the_report(tmp_path):
  plan = imagenet21k.plan(write_tar(tmp_path / 'a.tar', synsets() | {'x.txt': b'1'}))
  whole, parts = report.Tally(), []
  for piece in plan.pieces:
    parts.append(report.Tally())
    for outcome in plan.outcomes(piece):
      whole.add(outcome)
      parts[-1].add(outcome)
  parts = [report.Tally(json.loads(json.dumps(part.state()))) for part in parts]
  total = report.Tally()
  for part in reversed(parts):
    total.merge(part)
  labels = tuple(sorted(whole.classes))
  assert report.make(total, 'x', '1.0.0', labels) == report.make(
    whole, 'x', '1.0.0', labels
  )


def test_ranges_of_a_tar_add_up(tmp_path, monkeypatch):
  from vit_jax.data.prepare import tars

  monkeypatch.setattr(tars, '_RANGE', 5000)
  long = 'c' * 150  # takes a header more
  files = {f'{c}/{i}.jpg': encoded(i) for c in ('a', long) for i in range(20)}
  plan = images.plan([write_tar(tmp_path / 'x.tar', files)], 'x', ranges=True)
  assert len(plan.pieces) > 4
  found = [o.place.key for piece in plan.pieces for o in plan.outcomes(piece)]
  assert found == [f'x/{name}' for name in files]
  packed = tmp_path / 'x.tar.gz'
  packed.write_bytes(gzip.compress((tmp_path / 'x.tar').read_bytes()))
  with pytest.raises(UserError, match=naming(str(packed), 'gunzip', '--beam_runner')):
    images.plan([str(packed)], 'x', ranges=True)


def records_of(directory) -> list[bytes]:
  from array_record.python import array_record_module

  out = []
  for path in sorted(directory.glob('*.array_record*')):
    reader = array_record_module.ArrayRecordReader(str(path))
    out += reader.read_all()
    reader.close()
  return out


@pytest.mark.parametrize('multi_label', [False, True])
def test_the_order_of_keys_is_not_left_to_chance(tmp_path, multi_label):
  from tensorflow_datasets.proto import tf_example_pb2

  files = {f'{c}/{i}.png': encoded(i, 'PNG') for c in 'ab' for i in range(5)}
  plan = images.plan([write_tar(tmp_path / 'x.tar', files)], 'x')
  plan = dataclasses.replace(plan, multi_label=multi_label)
  home, _ = writer.prepare(plan, str(tmp_path))
  records = records_of(Path(home))
  assert len(records) == 10
  for record in records:
    example = tf_example_pb2.Example.FromString(record)
    assert record == example.SerializeToString(deterministic=True)
    # Sorted, as said by the bytes and not by who wrote them.
    at = [record.index(key.encode()) for key in sorted(example.features.feature)]
    assert at == sorted(at)
