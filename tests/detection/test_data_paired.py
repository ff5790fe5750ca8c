"""Boxes beside images, as YOLO's text and Pascal VOC's XML: layouts, splits, bad files."""

import os

import numpy as np
import pillow_heif
import pytest
from PIL import Image

from vit_jax.data import sources
from vit_jax.errors import UserError

XML = """<annotation><size><width>40</width><height>20</height></size>
<object><name>dog</name><difficult>0</difficult>
<bndbox><xmin>5</xmin><ymin>3</ymin><xmax>14</xmax><ymax>12</ymax></bndbox></object>
<object><name>cat</name><difficult>1</difficult>
<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>40</xmax><ymax>20</ymax></bndbox></object>
</annotation>"""
LABEL = '1 0.25 0.5 0.1 0.4\n\n0 0.5 0.5 1.0 0.5 1.0 1.0\n'


def add(root, images, annotations, name, text):
  """Writes an image of 40 x 20 pixels and, if there is a text, its annotation."""
  for place in (images, annotations):
    (root / place).mkdir(parents=True, exist_ok=True)
  Image.new('RGB', (40, 20)).save(root / images / f'{name}.png')
  if text is not None:
    ending = 'xml' if text.startswith('<') else 'txt'
    (root / annotations / f'{name}.{ending}').write_text(text)


def read(source):
  return source.read(np.arange(len(source)))


def opened(source, split='train', **options):
  return sources.build(source, split, **options)


YOLO = {
  'splits inside': [('images/train', 'labels/train'), ('images/val', 'labels/val')],
  'splits outside': [
    ('train/images', 'train/labels'),
    ('valid/images', 'valid/labels'),
  ],
}


@pytest.mark.parametrize('layout', YOLO)
@pytest.mark.parametrize('names', ['[cat, dog]', '{0: cat, 1: dog}'])
def test_yolo(layout, names, tmp_path):
  (tmp_path / 'data.yaml').write_text(f'path: ../datasets\nnames: {names}\nnc: 2\n')
  for images, labels in YOLO[layout]:
    add(tmp_path, images, labels, 'a', LABEL)
    add(tmp_path, images, labels, 'b', None)
  source = opened(f'yolo:{tmp_path}')
  assert source.class_names == ['cat', 'dog']
  assert len(source) == len(opened(f'yolo:{tmp_path}', 'val')) == 2
  rows = {os.path.basename(source.name_of(i)): x for i, x in enumerate(read(source))}
  expected = [[0.3, 0.2, 0.7, 0.3], [0.5, 0.5, 1.0, 1.0]]
  np.testing.assert_allclose(rows['a.png']['boxes'], expected, atol=1e-6)
  assert rows['a.png']['label'].tolist() == [1, 0]
  assert rows['b.png']['boxes'].shape == (0, 4)
  with pytest.raises(UserError, match=r'a\.png has boxes without polygons'):
    opened(f'yolo:{tmp_path}', masks=True)


@pytest.mark.parametrize('ending', ['jpg', 'png'])
def test_yolo_polygons_are_masks_and_photographs_are_upright(tmp_path, ending):
  (tmp_path / 'classes.txt').write_text('cat\ndog\n')
  add(tmp_path, 'images', 'labels', 'a', '0 0 0 0.5 0 0.5 1 0 1')
  photo = Image.new('RGB', (20, 40))
  exif = photo.getexif()
  exif[0x0112] = 6
  (tmp_path / 'images' / 'a.png').unlink()
  photo.save(tmp_path / 'images' / f'a.{ending}', exif=exif)
  source = opened(f'yolo:{tmp_path}', masks=True)
  assert source.exif
  assert source.truth().sizes.tolist() == [[20, 40]]
  (row,) = read(source)
  np.testing.assert_allclose(row['extents'], [[0, 0, 1, 0.5]], atol=0.03)
  assert source.truth().areas.tolist() == [400]


def test_sizes_of_heic(tmp_path):
  (tmp_path / 'classes.txt').write_text('cat\ndog\n')
  add(tmp_path, 'images', 'labels', 'a', '0 0.5 0.5 1 1')
  (tmp_path / 'images' / 'a.png').unlink()
  photo = pillow_heif.from_pillow(Image.new('RGB', (40, 20)))
  photo.save(tmp_path / 'images' / 'a.heic')
  assert opened(f'yolo:{tmp_path}').truth().sizes.tolist() == [[20, 40]]


VOC = {
  'VOC': ('JPEGImages', 'Annotations'),
  'side by side': ('train', 'train'),
  'folders': ('images', 'annotations'),
}


@pytest.mark.parametrize('layout', VOC)
def test_voc(layout, tmp_path):
  for name, text in (('a', XML), ('b', '<annotation/>'), ('c', None)):
    add(tmp_path, *VOC[layout], name, text)
  number = 3
  if layout == 'VOC':
    lists = tmp_path / 'ImageSets' / 'Main'
    lists.mkdir(parents=True)
    (lists / 'train.txt').write_text('b\na\n')
    (lists / 'dog_train.txt').write_text('a 1\nb -1\n')
    number = 2
  source = opened(f'voc:{tmp_path}')
  assert source.class_names == ['cat', 'dog']
  assert len(source) == number
  assert '1 crowds, not trained on' in source.remarks
  rows = {os.path.basename(source.name_of(i)): x for i, x in enumerate(read(source))}
  np.testing.assert_allclose(rows['a.png']['boxes'], [[0.1, 0.1, 0.6, 0.35]], atol=1e-6)
  assert rows['a.png']['label'].tolist() == [1]
  truth = source.truth()
  assert truth.boxes.tolist() == [[4, 2, 10, 10], [0, 0, 40, 20]]
  assert truth.crowd.tolist() == [False, True]


BOMB = '<!DOCTYPE a [<!ENTITY x "xxxxxxxxxx">]><annotation>&x;</annotation>'
FILE = (
  '<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><annotation>&x;</annotation>'
)
HOSTILE = {
  'entities': ('voc', BOMB, 'in another format: it has a document type'),
  'external entities': ('voc', FILE, 'in another format: it has a document type'),
  'UTF-16': ('voc', BOMB.encode('utf-16'), 'in another format: it has a document type'),
  'broken XML': ('voc', '<annotation>', 'in another format: no element found'),
  'encoding': (
    'voc',
    '<?xml version="1.0" encoding="x"?><a/>',
    'in another format: unknown enc',
  ),
  'no name': ('voc', '<a><object/></a>', 'an object needs a name and bndbox'),
  'nan': ('voc', XML.replace('>14<', '>nan<'), 'an object needs a name and bndbox'),
  'size': ('voc', XML.replace('>40<', f'>{9**40}<'), 'expected pixels'),
  'deep XML': ('voc', '<a>' * 100_000, 'in another format: no element found'),
  'words': ('yolo', 'dog 0 0 1 1', "'dog 0 0 1 1', expected 'CLASS X Y WIDTH HEIGHT'"),
  'pixels': ('yolo', '0 20 10 4 4', 'from 0 to 1'),
  'not a number': ('yolo', '0 nan 0 1 1', 'from 0 to 1'),
  'too few': ('yolo', '0 0.5 0.5 0.1', '3 numbers after the class'),
  'class': ('yolo', '7 0.5 0.5 1 1', 'the class 7, but 2 classes have names, from 0'),
  'half a class': ('yolo', '0.5 0.5 0.5 1 1', 'the class 0.5, but 2 classes'),
  'not UTF-8': ('yolo', b'0 \xff', "in another format: 'utf-8' codec"),
  'large': ('yolo', b' ' * (9 << 20), '9,437,184 bytes, above the limit of 8,388,608'),
}


@pytest.mark.parametrize('case', HOSTILE)
def test_hostile_annotations(case, tmp_path):
  scheme, content, message = HOSTILE[case]
  add(tmp_path, 'images', 'labels', 'a', None)
  (tmp_path / 'annotations').mkdir()
  if scheme == 'yolo':
    (tmp_path / 'classes.txt').write_text('cat\ndog')
  place = 'labels/a.txt' if scheme == 'yolo' else 'annotations/a.xml'
  content = content.encode() if isinstance(content, str) else content
  (tmp_path / place).write_bytes(content)
  with pytest.raises(UserError, match=message.replace('(', r'\(')) as error:
    opened(f'{scheme}:{tmp_path}')
  assert '\n' not in str(error.value)
  assert len(str(error.value)) < 400


NAMES = {
  'no names': (None, 'has no data.yaml or classes.txt'),
  'not YAML': ('names: [', 'in another format'),
  'deep YAML': ('[' * 5_000, 'in another format'),
  'a number': ('names: 3', "expected 'names'"),
  'a gap': ('names: {0: cat, 2: dog}', "expected 'names'"),
  'aliases': ('a: &a [x, x]\nnames: [*a, *a]', "expected 'names'"),
  'code': ('names: !!python/object/apply:os.getcwd []', 'in another format'),
  'twice': ('names: [cat, cat]', 'each class needs a name of its own'),
}


@pytest.mark.parametrize('case', NAMES)
def test_bad_names(case, tmp_path):
  text, message = NAMES[case]
  add(tmp_path, 'images', 'labels', 'a', LABEL)
  if text is not None:
    (tmp_path / 'data.yaml').write_text(text)
  with pytest.raises(UserError, match=message):
    opened(f'yolo:{tmp_path}')


@pytest.mark.parametrize('scheme', ['yolo', 'voc'])
def test_a_folder_that_is_not_there(scheme, tmp_path):
  with pytest.raises(UserError, match=f"no such directory: '{tmp_path}/nowhere'"):
    opened(f'{scheme}:{tmp_path}/nowhere')


def test_images_that_cannot_be_read_are_bad_images(tmp_path):
  (tmp_path / 'classes.txt').write_text('cat\ndog')
  add(tmp_path, 'images', 'labels', 'a', LABEL)
  (tmp_path / 'images' / 'a.png').write_text('no image')
  os.mkfifo(tmp_path / 'images' / 'b.png')
  source = opened(f'yolo:{tmp_path}')
  rows = {os.path.basename(source.name_of(i)): x for i, x in enumerate(read(source))}
  assert rows['a.png']['image'] == b'no image'  # the decoder reports it
  assert 'not a regular file' in rows['b.png']['error']


def test_bad_folders(tmp_path):
  (tmp_path / 'classes.txt').write_text('cat\ndog')
  with pytest.raises(UserError, match='no such directory'):
    opened(f'voc:{tmp_path}/none')
  add(tmp_path, 'images', 'labels', 'a', None)
  with pytest.raises(UserError, match=r'none of 1 images .* has a file'):
    opened(f'yolo:{tmp_path}')
  add(tmp_path, 'images', 'annotations', 'b', XML.replace('dog', 'bird'))
  with pytest.raises(UserError, match=r"'bird' is not in classes\.txt"):
    opened(f'voc:{tmp_path}')
  with pytest.raises(UserError, match="split 'test'"):
    opened(f'voc:{tmp_path}', 'test')
