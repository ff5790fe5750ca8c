"""coco/2017 and voc of TFDS in miniature, with the features of TFDS's own builders."""

import io

import numpy as np
import pytest
from PIL import Image

from tests.support import naming
from tests.support.vtab_fakes import write_examples
from vit_jax.data import sources

# Objects of each image: top, left, bottom, right from 0 to 1; label; crowd; area in pixels.
OBJECTS = [
  [((0.25, 0.1, 0.75, 0.5), 3, False, 50), ((0, 0, 1, 1), 7, True, 600)],
  [],
  [((0.5, 0.5, 0.5, 0.9), 1, False, 0), ((0.1, 0.2, 0.3, 0.4), 79, False, 20)],
]


def picture(index, broken=False):
  out = io.BytesIO()
  Image.new('RGB', (30, 20), (index, 0, 0)).save(out, 'PNG')
  return io.BytesIO(b'no image' if broken else out.getvalue())


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory):
  import tensorflow_datasets as tfds

  out = str(tmp_path_factory.mktemp('tfds'))
  box = lambda values: tfds.features.BBox(*map(float, values))
  coco = [
    {
      'image': picture(i, broken=i == 3),
      'image/filename': f'{i}.png',
      'image/id': i,
      'objects': [
        {'id': k, 'bbox': box(b), 'label': label, 'is_crowd': crowd, 'area': area}
        for k, (b, label, crowd, area) in enumerate(objects)
      ],
    }
    for i, objects in enumerate([*OBJECTS, []])
  ]
  write_examples(
    tfds.builder('coco/2017', data_dir=out, file_format='array_record'),
    {'validation': coco},
  )
  one = {'is_truncated': False, 'is_difficult': False, 'pose': 'frontal'}
  voc = {
    'image': picture(0),
    'image/filename': 'a',
    'labels': [4],
    'labels_no_difficult': [4],
    'objects': [one | {'bbox': box((0.1, 0.2, 0.6, 0.4)), 'label': 4}],
  }
  write_examples(
    tfds.builder('voc/2007', data_dir=out, file_format='array_record'), {'test': [voc]}
  )
  return out


def test_coco(data_dir):
  source = sources.build('tfds:coco/2017', 'validation', data_dir=data_dir)
  assert source.num_classes == len(source.class_names) == 80
  first, second, third, _ = source.read(np.arange(4))
  np.testing.assert_allclose(first['boxes'], [OBJECTS[0][0][0]])
  assert first['label'].tolist() == [3]  # the crowd is not trained on
  assert second['boxes'].shape == (0, 4)
  assert third['label'].tolist() == [79]  # nor a box without an area
  truth = source.truth()
  assert truth.image.tolist() == [0, 0, 2, 2]
  assert truth.crowd.tolist() == [False, True, False, False]
  assert truth.areas.tolist() == [50, 600, 0, 20]
  np.testing.assert_allclose(truth.boxes[0], [3, 5, 12, 10], rtol=1e-6)
  np.testing.assert_array_equal(truth.sizes, [[20, 30]] * 3 + [[0, 0]])
  with pytest.raises(ValueError, match=naming('masks')):
    source.truth(masks=True)


def test_data_with_labels_and_objects(data_dir):
  build = lambda **options: sources.build(
    'tfds:voc/2007', 'test', data_dir=data_dir, **options
  )
  assert build().features['label'].several  # labels of images
  source = build(objects_key='objects')
  (example,) = source.read(np.arange(1))
  np.testing.assert_allclose(example['boxes'], [[0.1, 0.2, 0.6, 0.4]])
  truth = source.truth()
  np.testing.assert_allclose(truth.areas, [6 * 10], rtol=1e-5)  # the box's area
  with pytest.raises(ValueError, match=naming("'labels'", "objects_key='objects'")):
    build(objects_key='labels')
  with pytest.raises(ValueError, match=naming('label_key', 'objects_key')):
    build(objects_key='objects', label_key='labels')
