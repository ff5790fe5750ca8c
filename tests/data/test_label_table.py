"""Labels of images in a table: forms, splits, several labels, errors."""

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.support import image_folder, naming
from vit_jax.data import pipeline, sources
from vit_jax.errors import UserError


def build(folder, text, split='train', images=(), **options):
  """Writes a table, and files for its images that hold their names; opens the source."""
  (folder / 'a.csv').write_text(text)
  for name in images:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(name)
  return sources.build(f'labels:{folder}/a.csv', split, **options)


def labels_of(source):
  """Returns {content of an image: its label}."""
  examples = source.read(np.arange(len(source)))
  return {x['image'].decode(): np.asarray(x['label']).tolist() for x in examples}


FORMS = {
  'text': 'image,labels\n1.png,cat|dog\n2.png,\n3.png,dog; eel\n1.png,cat\n',
  'columns': '\ufeffpath,cat,dog,eel\n1.png,1,1,0\n2.png,0,0,0.0\n3.png,0,1,1\n',
}


@pytest.mark.parametrize('form', FORMS)
def test_several_labels(tmp_path, form):
  names = [f'{i}.png' for i in (1, 2, 3)]
  source = build(tmp_path, FORMS[form], images=names)
  assert source.class_names == ['cat', 'dog', 'eel']
  assert source.num_classes == 3
  assert source.features['label'].several
  assert labels_of(source) == {'1.png': [0, 1], '2.png': [], '3.png': [1, 2]}
  assert source.multi_hot.sum() == 4
  changed = build(tmp_path, FORMS[form].replace('3.png', '4.png'))
  assert changed.fingerprint != source.fingerprint


@pytest.mark.parametrize('form', FORMS)
def test_parquet_is_read_like_csv(tmp_path, form):
  columns = {'path': ['1.png', '2.png', '3.png']}
  if form == 'text':
    columns['labels'] = [['cat', 'dog'], None, ['dog', 'eel']]
  else:
    columns |= {'cat': [1.0, 0.0, 0.0], 'dog': [True, False, True], 'eel': [0, 0, 1]}
  pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / 'a.parquet')
  expected = build(tmp_path, FORMS[form], images=columns['path'])
  source = sources.build(f'labels:{tmp_path}/a.parquet', 'train')
  assert source.class_names == expected.class_names
  assert labels_of(source) == labels_of(expected)


def test_one_label_each_and_splits(tmp_path):
  rows = [('photos/1.png', 'b', 'train'), ('photos/2.png', 'a', 'val')]
  rows += [(f'photos/{i}.png', 'ab'[i % 2], 'train') for i in range(3, 9)]
  text = '\n'.join(['name,label,split', *map(','.join, rows)])
  source = build(tmp_path, text, images=[name for name, *_ in rows])
  assert not source.features['label'].several
  assert labels_of(source)['photos/1.png'] == 1
  assert len(source) == 7
  assert len(build(tmp_path, text, 'val')) == 1
  whole = [source.name_of(i) for i in range(7)]
  half = build(tmp_path, text, 'train[:4]')
  assert [half.name_of(i) for i in range(4)] == whole[:4]


def test_root_and_separator(tmp_path):
  text = 'image,labels\n1.png,clear sky sea\n2.png,sky\n'
  options = dict(root='photos', separator=' ')
  source = build(tmp_path, text, images=['photos/1.png', 'photos/2.png'], **options)
  assert source.class_names == ['clear', 'sea', 'sky']


def test_batches_hold_targets(tmp_path):
  image_folder.write_noise(tmp_path, [f'photos/{i}.png' for i in range(4)])
  rows = ''.join(f'photos/{i}.png,{i % 2},1\n' for i in range(4))
  (tmp_path / 'a.csv').write_text(f'image,odd,all\n{rows}')
  batches = pipeline.EvalBatches(
    f'labels:{tmp_path}/a.csv', 'train', 'decode|resize(8)|value_range', 4
  )
  (batch,) = batches.iterate()
  assert batch['label'].sum(0).tolist() == [2, 4]


@pytest.mark.parametrize(
  ('text', 'split', 'facts'),
  [
    ('image,labels\n1.png,a,b\n', 'train', ("'1.png,a,b'", '3', '2')),
    ('image,labels\n', 'train', ('header', 'row')),
    ('image,cat,cat\n1.png,0,1\n', 'train', ('twice', "'cat'")),
    ('image\n1.png\n', 'train', ('column', "['image']")),
    ('image,cat\n1.png,2\n', 'train', ("'cat'", "'2'", "'label'")),
    ('image,label\n1.png,a\n', 'val', ("'validation'", 'train[90%:]')),
    ('image,label\n1.png,a\n', 'trian', ("'trian'", "['train']")),
    ('image,label\n1.png,a\n', 'train', ('1.png', 'source_options.root')),
  ],
)
def test_wrong_tables(tmp_path, text, split, facts):
  with pytest.raises(UserError, match=naming('a.csv', *facts)):
    build(tmp_path, text, split)
