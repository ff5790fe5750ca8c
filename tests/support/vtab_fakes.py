"""VTAB's data sets in miniature, with the features of TFDS's own builders.

Large enough to be cut as the real ones are: 800 examples to train on and 200 to choose by.
Example i of a split has the label i % K of every task, and a small image that depends on
i % `PERIODS`, so that the tasks can be learned.
"""

import functools
import io
from collections.abc import Iterable

import numpy as np
from PIL import Image

from vit_jax.lab.data.vtab_tasks import TASKS

_OWN = {'train': 810, 'validation': 210, 'test': 30}
# {name in TFDS: examples of its splits}
SIZES = {
  'caltech101': {'train': 2010, 'test': 30},
  'cifar100': {'train': 2010, 'test': 30},
  'dtd': _OWN,
  'oxford_flowers102': _OWN,
  'oxford_iiit_pet': {'train': 1010, 'test': 30},
  'sun397/tfds': _OWN,
  'svhn_cropped': {'train': 2010, 'test': 30},
  'patch_camelyon': _OWN,
  'eurosat/rgb': {'train': 1340},
  'resisc45': {'train': 1340},
  'diabetic_retinopathy_detection/btgraham-300': _OWN,
  'clevr': {'train': 2010, 'validation': 30, 'test': 3},
  'dmlab': _OWN,
  'dsprites': {'train': 2010},
  'kitti': _OWN,
  'smallnorb': {'train': 810, 'test': 430},
}
# After how many examples those with two tasks, or other values than classes, repeat.
PERIODS = {'clevr': 24, 'dsprites': 160, 'smallnorb': 18}
# The depth of the closest object for each class, one on the upper bound of the class.
CLEVR_DEPTHS = (8.0, 8.25, 9.0, 9.25, 10.0, 10.5)
KITTI_DEPTHS = (8.0, 19.5, 20.5)


def write(data_dir, tasks: Iterable[str] = TASKS, **options) -> None:
  """Prepares the data sets of `vtab:NAME`, 0.15 CPU seconds each.

  Args:
    tasks: names of the tasks whose data sets are written.
    **options: of `write_one`.
  """
  for name in dict.fromkeys(TASKS[task].tfds for task in tasks):
    write_one(name, data_dir, SIZES[name], **options)


def write_one(
  name: str,
  data_dir,
  sizes: dict[str, int],
  version: str | None = None,
  file_format: str = 'array_record',
  full_size: bool = False,
) -> None:
  """Prepares one data set of TFDS.

  Args:
    name: of TFDS.
    version: None: the newest.
    full_size: images have the height and width that the features declare, where they do,
      as TFDS needs to decode them; else 8 x 8, dSprites 4 x 4.
  """
  import tensorflow_datasets as tfds

  name = f'{name}:{version}' if version else name
  builder = tfds.builder(name, data_dir=str(data_dir), file_format=file_format)
  examples = {
    split: [_example(builder, i, full_size) for i in range(size)]
    for split, size in sizes.items()
  }
  write_examples(builder, examples, file_format)


def write_examples(builder, examples: dict[str, list], file_format='array_record'):
  """Prepares a data set of TFDS from the examples of its splits."""
  import tensorflow_datasets as tfds

  builder.data_path.mkdir(parents=True)
  writer = tfds.core.SequentialWriter(
    builder.info, max_examples_per_shard=10**6, file_format=file_format
  )
  writer.initialize_splits(list(examples))
  for split, made in examples.items():
    writer.add_examples({split: made})
  writer.close_splits(list(examples))


def number_of(data: bytes) -> int:
  """Returns i of an image's bytes, as a source reads them."""
  with Image.open(io.BytesIO(data)) as image:
    if image.size in ((4, 4), (64, 64)):  # The files of dSprites, written anew
      bits = np.asarray(image)[:: image.size[1] // 4, :: image.size[0] // 4] > 0
      return int.from_bytes(np.packbits(bits).tobytes(), 'big')
  return int.from_bytes(data[-4:], 'big')


def _example(builder, i: int, full_size: bool) -> dict:
  features = builder.info.features
  period = PERIODS.get(builder.name)
  if period is None:
    period = features['label'].num_classes if 'label' in features else 4
  out = {}
  for name, feature in features.items():
    out[name] = _value(feature, i, i % period, full_size)
  if builder.name in _SPECIAL:
    out |= _SPECIAL[builder.name](features, i, full_size)
  return out


def _value(feature, i: int, look: int = 0, full_size: bool = False):
  from tensorflow_datasets import features as tfds

  match feature:
    case tfds.Image():
      size = tuple(n or 8 for n in feature.shape[:2]) if full_size else (8, 8)
      image = _image(look, size, feature.shape[-1] == 1, feature.encoding_format)
      return io.BytesIO(image + i.to_bytes(4, 'big'))
    case tfds.ClassLabel():
      return i % feature.num_classes
    case tfds.Text():
      return f'example {i}'
    case tfds.BBoxFeature():
      return tfds.BBox(0.25, 0.25, 0.75, 0.75)
    case tfds.Sequence():
      return []
    case _:
      return np.zeros(feature.shape, feature.np_dtype)


@functools.cache
def _image(look: int, size: tuple, gray: bool, encoding: str | None) -> bytes:
  noise = np.random.default_rng(look).integers(0, 256, (8, 8, 3), np.uint8)
  return _encoded(noise[..., 0] if gray else noise, size, encoding or 'PNG')


def _encoded(pixels: np.ndarray, size: tuple[int, int], encoding: str) -> bytes:
  out = io.BytesIO()
  image = Image.fromarray(pixels).resize(size[::-1], Image.Resampling.NEAREST)
  image.save(out, encoding)
  return out.getvalue()


def _clevr(features, i: int, _) -> dict:
  one = {name: _value(f, i) for name, f in features['objects'].feature.items()}
  closest = CLEVR_DEPTHS[i % 6]
  depths = [closest + 3 * k for k in range(i % 8 + 3)][::-1]
  return {'objects': [{**one, 'pixel_coords': [1, 2, depth]} for depth in depths]}


def _kitti(features, i: int, _) -> dict:
  one = {name: _value(f, i) for name, f in features['objects'].feature.items()}
  depths = [*KITTI_DEPTHS[i % 4 : i % 4 + 1], *[50] * (i % 4 < 3)]
  objects = [(('Car', 'Van', 'Truck')[i % 3], depth) for depth in depths]
  if i % 8 < 4:  # others, closer, which do not count
    objects.insert(0, ('Pedestrian', 2))
  return {
    'objects': [
      {**one, 'type': kind, 'location': [-3, 1, depth]} for kind, depth in objects
    ]
  }


def _dsprites(features, i: int, full_size: bool) -> dict:
  bits = np.unpackbits(np.frombuffer(i.to_bytes(2, 'big'), np.uint8)).reshape(4, 4)
  size = (64, 64) if full_size else (4, 4)
  return {'image': io.BytesIO(_encoded(bits, size, 'PNG'))}


_SPECIAL = {'clevr': _clevr, 'kitti': _kitti, 'dsprites': _dsprites}
