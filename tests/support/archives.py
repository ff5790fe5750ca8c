"""Archives and folders of images to prepare data sets from; reading what was prepared."""

import io
import tarfile

import numpy as np
from PIL import Image

CLASSES, EACH = 20, 100


def add(archive, name, data):
  member = tarfile.TarInfo(name)
  member.size = len(data)
  archive.addfile(member, io.BytesIO(data))


def jpeg(height, width, level):
  out = io.BytesIO()
  Image.new('RGB', (width, height), (level,) * 3).save(out, 'JPEG')
  return out.getvalue()


def imagenet21k(path) -> None:
  """Writes CLASSES x EACH images, one grey level per class, and two broken images."""
  rng = np.random.default_rng(0)
  with tarfile.open(path, 'w:gz') as outer:
    for label in rng.permutation(CLASSES):
      wnid = f'n{1000 + 37 * label:08d}'
      inner = io.BytesIO()
      with tarfile.open(fileobj=inner, mode='w') as tar:
        for i in range(EACH):
          data = jpeg(*rng.integers(8, 25, 2), 10 * label + 20)
          add(tar, f'{wnid}_{i}.JPEG', data)
        if label == 7:
          add(tar, f'{wnid}_broken.JPEG', jpeg(24, 24, 0)[:-20])
          add(tar, f'{wnid}_empty.JPEG', b'')
      add(outer, f'winter21_whole/{wnid}.tar', inner.getvalue())


def encoded(seed, kind='JPEG', size=(12, 9), **options):
  pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
  out = io.BytesIO()
  Image.fromarray(pixels).save(out, kind, **options)
  return out.getvalue()


def write_tar(path, files, mode='w'):
  """Writes {name: bytes} as a tar; a value that is a dict becomes a tar inside it."""
  with tarfile.open(path, mode) as archive:
    for name, data in files.items():
      add(archive, name, tar_bytes(data) if isinstance(data, dict) else data)
  return str(path)


def tar_bytes(files):
  out = io.BytesIO()
  with tarfile.open(fileobj=out, mode='w') as archive:
    for name, data in files.items():
      add(archive, name, data)
  return out.getvalue()


def synsets(classes=4, count=10):
  return {
    f'winter/n{37 * c + 7:08d}.tar': {
      f'n{37 * c + 7:08d}_{i}.JPEG': encoded(100 * c + i) for i in range(count)
    }
    for c in range(classes)
  }


def write_folder(root, files):
  for name, data in files.items():
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
  return str(root)


def examples(directory, split):
  """Returns [(label or labels, image bytes, name)] as TFDS alone reads them, in order."""
  import tensorflow_datasets as tfds

  builder = tfds.builder_from_directory(directory)
  features = builder.info.features
  label = features['label'] if 'label' in features else features['labels'].feature
  source = builder.as_data_source(
    split=split, decoders={'image': tfds.decode.SkipDecoding()}
  )
  return [
    (
      tuple(
        label.int2str(int(i)) for i in np.atleast_1d(x.get('label', x.get('labels')))
      ),
      x['image'],
      x['file_name'].decode(),
    )
    for x in source
  ]
