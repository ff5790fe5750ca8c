"""A folder of images, a pipeline for it, and its first batches."""

import numpy as np
from PIL import Image

FOLDER = 'decode|inception_crop(8)|flip_lr|value_range(-1, 1)'


def write(root):
  """Writes three classes, each with 13 images for training and 5 for validation."""
  rng = np.random.default_rng(0)
  for split, count in (('train', 13), ('val', 5)):
    for label, name in enumerate('abc'):
      (root / split / name).mkdir(parents=True)
      for i in range(count):
        height, width = rng.integers(12, 30, 2)
        image = np.full((height, width, 3), 40 + 80 * label, np.uint8)
        image[: height // 2] += 40
        suffix = ('jpg', 'png')[i % 2]
        Image.fromarray(image).save(root / split / name / f'{i}.{suffix}')
  return root


def write_noise(root, names, size=(32, 32), enlarged=None):
  """Writes an image of random pixels for each name, `SUBFOLDER/STEM.SUFFIX`.

  Args:
    size: (height, width) of the random pixels.
    enlarged: (width, height) that they are resized to, smoothly; None: as they are.
  """
  rng = np.random.default_rng(0)
  for name in names:
    image = Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8))
    if enlarged:
      image = image.resize(enlarged)
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    image.save(root / name)
  return root


def take(batches, count):
  """Returns the first `count` batches, and closes the stream."""
  out = [batch for _, batch in zip(range(count), batches, strict=False)]
  batches.close()
  return out


def together(hosts):
  """Joins the batches of several hosts, a list for each host."""
  return [
    {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    for parts in zip(*hosts, strict=True)
  ]


def same(result, expected):
  """Asserts that two lists of batches are equal, bit for bit."""
  assert len(result) == len(expected)
  for a, b in zip(result, expected, strict=True):
    assert a.keys() == b.keys()
    for key in b:
      np.testing.assert_array_equal(a[key], b[key])
      assert a[key].dtype == b[key].dtype
