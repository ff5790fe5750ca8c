"""Records of examples, an image and a label each, in files of every name and format."""

import io

import numpy as np
from PIL import Image

KEYS = ('image/encoded', 'image/class/label')


def encoded(level):
  out = io.BytesIO()
  Image.fromarray(np.full((5, 6, 3), level, np.uint8)).save(out, 'PNG')
  return out.getvalue()


def serialised(features):
  """Returns {name: values} as TensorFlow serialises it."""
  import tensorflow as tf

  def feature(values):
    if isinstance(values, bytes):
      values = [values]
    if values and isinstance(values[0], bytes):
      return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    if values and isinstance(values[0], float):
      return tf.train.Feature(float_list=tf.train.FloatList(value=values))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))

  features = tf.train.Features(feature={k: feature(v) for k, v in features.items()})
  return tf.train.Example(features=features).SerializeToString()


def example(i, **more):
  image, label = KEYS
  return serialised({image: encoded(i), label: [i], 'id': b'x', **more})


def write(path, items):
  """Writes serialised examples with the formats' own writers."""
  path.parent.mkdir(parents=True, exist_ok=True)
  if 'array_record' in path.name:
    from array_record.python import array_record_module

    writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:1')
  else:
    import tensorflow as tf

    writer = tf.io.TFRecordWriter(str(path))
  for item in items:
    writer.write(item)
  writer.close()


SIZES = {'train': (5, 0, 9, 6), 'val': (4, 3)}

NAMES = {
  'tfrecord': '{split}-{i:05d}-of-{n:05d}.tfrecord',
  'bare': '{split}-{i:05d}-of-{n:05d}',
  'tfds': 'some-{split}.tfrecord-{i:05d}-of-{n:05d}',
  'array_record': '{split}-{i:05d}-of-{n:05d}.array_record',
  'tfds_array_record': 'some-{split}.array_record-{i:05d}-of-{n:05d}',
}


def write_all(tmp_path_factory):
  """{format: folder} of 20 + 7 examples in 4 + 2 shards; the label is the number."""
  out = {}
  items = [example(i) for i in range(27)]
  for key, name in NAMES.items():
    out[key] = tmp_path_factory.mktemp(key)
    rest = iter(items)
    for split, sizes in SIZES.items():
      for i, size in enumerate(sizes):
        path = out[key] / name.format(split=split, i=i, n=len(sizes))
        write(path, [next(rest) for _ in range(size)])
  return out
