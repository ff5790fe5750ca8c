"""Captions: tables, tars of WebDataset and Parquet; their tokens, order and mistakes."""

import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from tests.support import naming
from vit_jax.data import pipeline, sources
from vit_jax.errors import UserError

pyarrow = pytest.importorskip('pyarrow')
parquet = pytest.importorskip('pyarrow.parquet')

PP = 'decode|resize(4)|value_range(-1, 1)'
# Images 0 to 6 are of the split train, 7 to 9 of val; image i is of the colour i.
CAPTIONS = [[f'image {i}', *([f'number {i}'] if i % 2 else [])] for i in range(10)]
SPLITS = {'train': range(7), 'val': range(7, 10)}
SCHEMES = ('captions', 'csv', 'wds', 'parquet')


def png(i: int) -> bytes:
  file = io.BytesIO()
  Image.new('RGB', (5, 6), (i, i, i)).save(file, 'png')
  return file.getvalue()


def write_captions(folder, csv=False):
  for split, numbers in SPLITS.items():
    (folder / split).mkdir()
    lines = [{'file_name': f'{i}.png', 'text': CAPTIONS[i]} for i in numbers]
    for i in numbers:
      (folder / split / f'{i}.png').write_bytes(png(i))
    text = '\n'.join(map(json.dumps, lines))
    if csv:
      rows = [f'{i}.png\t"{text}"' for i in numbers for text in CAPTIONS[i]]
      text = '\n'.join(['filepath\ttitle', *rows])
    (folder / split / ('a.csv' if csv else 'metadata.jsonl')).write_text(text)
  return f'captions:{folder}'


def write_tar(path, files):
  with tarfile.open(path, 'w') as tar:
    for name, data in files:
      info = tarfile.TarInfo(name)
      info.size = len(data)
      tar.addfile(info, io.BytesIO(data))


def write_wds(folder):
  for split, numbers in SPLITS.items():
    for shard, rows in enumerate((numbers[:4], numbers[4:])):
      files = []
      for i in rows:
        files.append((f'a/{i}.png', png(i)))
        if i % 3:
          files.append((f'a/{i}.txt', '\n'.join(CAPTIONS[i]).encode()))
        else:
          files.append((f'a/{i}.json', json.dumps({'caption': CAPTIONS[i]}).encode()))
        files.append((f'a/{i}.cls', str(i % 4).encode()))
      write_tar(folder / f'{split}-{shard}.tar', files)
  return f'wds:{folder}'


def write_parquet(folder):
  names = {'info': {'features': {'label': {'names': ['a', 'b', 'c', 'd']}}}}
  for split, numbers in SPLITS.items():
    table = pyarrow.table(
      {
        'image': [{'bytes': png(i), 'path': f'{i}.png'} for i in numbers],
        'caption': [CAPTIONS[i] for i in numbers],
        'label': [i % 4 for i in numbers],
      }
    )
    table = table.replace_schema_metadata({'huggingface': json.dumps(names)})
    parquet.write_table(
      table, folder / f'{split}-00000-of-00001.parquet', row_group_size=3
    )
  return f'parquet:{folder}'


WRITERS = {
  'captions': write_captions,
  'csv': lambda folder: write_captions(folder, csv=True),
  'wds': write_wds,
  'parquet': write_parquet,
}


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  return {name: WRITERS[name](tmp_path_factory.mktemp(name)) for name in SCHEMES}


def number(image: bytes) -> int:
  return Image.open(io.BytesIO(image)).getpixel((0, 0))[0]


@pytest.mark.parametrize('name', SCHEMES)
def test_examples_in_any_order(written, name):
  source = sources.build(written[name], 'train[:3]+validation+train[3:]')
  assert len(source) == 10
  order = np.random.default_rng(0).permutation(10)
  examples = source.read(order)
  ids = [number(example['image']) for example in examples]
  assert sorted(ids) == list(range(10))
  for i, example in zip(ids, examples, strict=True):
    assert example['text'] == CAPTIONS[i]
    assert example.get('label', i % 4) == i % 4
  again = source.read(np.arange(10))
  assert [again[i] for i in order] == examples
  other = sources.build(written[name], 'train')
  assert other.fingerprint != source.fingerprint
  assert source.name_of(0)


def batches(source, pp, split='train', **options):
  cls = pipeline.TrainBatches if options.pop('train', True) else pipeline.EvalBatches
  return cls(source, split, pp, 5, host=0, hosts=1, **options)


def read(text) -> str:
  return bytes(int(i) for i in text if i < 256).decode()


@pytest.mark.parametrize('name', SCHEMES)
def test_one_of_several_captions_by_position(written, name):
  data = batches(written[name], f'{PP}|tokenize("bytes", 12)')
  seen = {}
  rows = []
  for step, batch in zip(range(12), data.iterate(), strict=False):
    assert batch['text'].shape == (5, 12)
    texts = [read(text) for text in batch['text']]
    rows.append((step, batch['text']))
    for i, text in zip(batch['index'].tolist(), texts, strict=True):
      seen.setdefault(i, set()).add(text)
  assert sorted(map(len, seen.values())) == sorted(len(c) for c in CAPTIONS[:7])
  # A resumed run draws the same ones.
  later = next(data.iterate(7))
  np.testing.assert_array_equal(later['text'], rows[7][1])


@pytest.mark.parametrize('name', SCHEMES)
def test_all_captions_of_an_evaluation(written, name):
  pp = f'{PP}|tokenize("bytes", 12, captions=2)'
  data = batches(written[name], pp, 'val', train=False)
  (batch,) = data.iterate()
  assert batch['mask'].tolist() == [1, 1, 1, 0, 0]
  assert batch['text_mask'].shape == (5, 2)
  images = np.asarray(data.finish_on_device(batch)['image'])[:3, 0, 0, 0]
  for image, text, mask in zip(images, batch['text'], batch['text_mask'], strict=False):
    expected = CAPTIONS[round((image + 1) * 127.5)]
    captions = [read(x) for x, real in zip(text, mask, strict=True) if real]
    assert captions == expected


@pytest.mark.parametrize('name', ['wds', 'parquet'])
def test_streams_and_labels(written, name):
  options = {'stream': True, 'shuffle_buffer': 4}
  data = batches(written[name], PP, source_options=options)
  epoch = [batch for _, batch in zip(range(7), data.iterate(), strict=False)]
  index = np.concatenate([batch['index'] for batch in epoch])
  assert sorted(index[:7]) == list(range(7))
  label = np.concatenate([batch['label'] for batch in epoch])
  examples = data.source.read(index)
  assert [example['label'] for example in examples] == label.tolist()


def test_a_stream_has_an_order_of_its_own(written):
  for key, value in (('sampling', 'balanced'), ('repeats', 3)):
    options = {'source_options': {'stream': True}, key: value}
    with pytest.raises(UserError, match=naming(f'{key}={value!r}', "'stream'")):
      batches(written['parquet'], PP, **options)


def test_parquet_names_its_classes(written):
  source = sources.build(written['parquet'], 'val')
  assert source.class_names == ['a', 'b', 'c', 'd']
  assert source.labels.tolist() == [3, 0, 1]
  assert '3 rows at a time' in source.describe()


def test_parquet_with_several_labels(tmp_path):
  labels = [[0, 2], [], [1]]
  table = pyarrow.table({'image': [png(i) for i in range(3)], 'labels': labels})
  names = {
    'info': {'features': {'labels': {'feature': {'names': ['a', 'b', 'c', 'd']}}}}
  }
  table = table.replace_schema_metadata({'huggingface': json.dumps(names)})
  parquet.write_table(table, tmp_path / 'train.parquet')
  source = sources.build(f'parquet:{tmp_path}', 'train')
  assert source.class_names == ['a', 'b', 'c', 'd']
  assert [x['label'] for x in source.read(np.arange(3))] == labels
  assert source.multi_hot.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
  (batch,) = pipeline.EvalBatches(
    f'parquet:{tmp_path}', 'train', 'decode|resize(8)|value_range', 3
  ).iterate()
  assert batch['label'].tolist() == [[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0]]


def test_a_pattern_names_shards(written):
  folder = written['wds']
  source = sources.build(f'{folder}/train-{{0..1}}.tar', 'train')
  assert len(source) == 7
  assert source.name_of(4).endswith('train-1.tar#0')


def test_bad_examples_are_masked(tmp_path):
  files = [('0.png', png(0)), ('0.txt', b'a'), ('1.png', png(1)), ('2.txt', b'c')]
  files += [('3.png', png(3)), ('3.json', b'{')]
  write_tar(tmp_path / 'train.tar', files)
  data = batches(
    f'wds:{tmp_path}', f'{PP}|tokenize("bytes", 4)', train=False, max_bad_fraction=1.0
  )
  (batch,) = data.iterate()
  assert batch['mask'].tolist() == [1, 0, 0, 0, 0]
  assert data.bad_images == 3


MISTAKES = [
  ('wds:nothing', {}, ('wds:nothing', '.tar')),
  ('captions:{empty}', {}, ('.jsonl or .csv',)),
  ('{captions}', {'columns': {'text': 'words'}}, ('words', 'file_name')),
  ('{captions}', {'columns': {'texts': 'words'}}, ('texts', 'text')),
  ('{parquet}', {'columns': {'image': 'pixels'}}, ('pixels', 'caption')),
  ('{broken}', {}, ('broken', 'complete Parquet')),
  ('{captions}', {'classes': [0]}, ('classes',)),
]


@pytest.mark.parametrize(('source', 'options', 'words'), MISTAKES)
def test_mistakes_are_named(written, tmp_path, source, options, words):
  (tmp_path / 'empty').mkdir()
  (tmp_path / 'broken.parquet').write_bytes(b'PAR1')
  places = {'empty': tmp_path / 'empty', 'broken': f'parquet:{tmp_path}'}
  with pytest.raises(UserError, match=naming(*words)):
    sources.build(source.format(**places, **written), 'train', **options)


def test_texts_need_a_vocabulary_and_captions(written):
  with pytest.raises(UserError, match=naming('vocabulary', 'bytes')):
    batches(written['captions'], f'{PP}|tokenize')
  with pytest.raises(UserError, match=naming('digits', 'no captions')):
    batches('digits', "value_range|tokenize('bytes')")
  with pytest.raises(UserError, match=naming('captions', 'no label')):
    batches(written['captions'], PP).classes_of('label')
