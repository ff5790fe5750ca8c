"""A fake of ImageNet-21k: a tar of one tar a class, small enough to make in a second."""

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
  """Writes CLASSES x EACH images, a class's of one grey level, and two broken ones."""
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
