"""Sources whose images are arrays: bundled digits, .npz files, synthetic noise."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import numpy as np

from vit_jax import files
from vit_jax.check import INT32, Count, Range
from vit_jax.data.features import ImageFeature, LabelFeature
from vit_jax.data.sources import splits
from vit_jax.data.sources.base import ArraySource, Source, fingerprint
from vit_jax.errors import UserError

# A large file may decompress to at most this many times its size. Drawn images compress
# well: dSprites (3 GB) shrinks to a hundredth.
_TIMES = 200
Side = Annotated[int, Range(1, 8000, why='64 megapixels, as `decode` takes')]


class Digits(ArraySource):
  """Bundled handwritten digits: 1,797 real images, uint8 [8, 8, 1].

  Optical Recognition of Handwritten Digits (UCI, CC BY 4.0), in the order of
  scikit-learn's `load_digits`; its 0 to 16 dark pixels are scaled to 0 to 255. 'test' is
  every fifth image (360, those with index % 5 == 0), 'train' the other 1,437.
  """

  def __init__(self, target: str, split: str):
    if target:
      raise UserError(f"Source 'digits' takes no path, got {target!r}.")
    with np.load(Path(__file__).with_name('digits.npz')) as file:
      images, labels = file['images'], file['labels'].astype(int)
    test = np.arange(len(images)) % 5 == 0
    pools = {'train': np.flatnonzero(~test), 'test': np.flatnonzero(test)}
    sizes = {name: len(pool) for name, pool in pools.items()}
    parts = splits.select(split, sizes, 'digits')
    self._rows = np.concatenate([pools[name][part] for name, part in parts])
    super().__init__('digits', images[self._rows], labels[self._rows])
    self.num_classes = 10
    self.class_names = [str(i) for i in range(10)]

  def name_of(self, index: int) -> str:
    return f'digits#{self._rows[index]}'


class Arrays(ArraySource):
  """An .npz file of uint8 images and labels; nothing in it is executed.

  Its keys are `images` and `labels` (one split, 'train'), or `train_images`,
  `train_labels`, `test_images`, ... for each split, or Keras's `x_train`, `y_train`,
  `x_test`, `y_test`. Images are uint8 [N,H,W] or [N,H,W,C]. Labels are int [N], or 0/1
  [N,K] for several labels per image. `class_names`, which is optional, is text [K].
  """

  def __init__(self, target: str, split: str):
    path = os.path.expanduser(target)
    if not os.path.isfile(path):
      raise UserError(f'arrays: no file {path!r}. Write it with numpy.savez.')
    members, _ = files.open_npz(path, _TIMES)
    file = {name: load() for name, (_, _, load) in members.items()}
    pairs = _split_keys(file)
    if not pairs:
      raise UserError(
        f'arrays: {path} holds {sorted(file)}; expected images and labels, or '
        'train_images and train_labels, or x_train and y_train.'
      )
    data = {name: _read_pair(path, file, *keys) for name, keys in pairs.items()}
    sizes = {name: len(images) for name, (images, _) in data.items()}
    parts = splits.select(split, sizes, path)
    images, labels = (
      np.concatenate([data[name][k][part] for name, part in parts]) for k in (0, 1)
    )
    super().__init__(f'arrays:{path}', images, labels)
    if self.labels is None:
      self.num_classes = labels.shape[1]
    else:
      # Count over all splits, so that a split without the last class has the same K.
      self.num_classes = 1 + max(int(y.max()) for _, y in data.values() if y.size)
    if (names := file.get('class_names')) is not None:
      if names.ndim != 1 or names.dtype.kind != 'U' or len(names) < self.num_classes:
        raise UserError(
          f'arrays: {path}: class_names is {names.dtype} {names.shape}; expected text '
          f'[K] for K={self.num_classes} classes.'
        )
      self.class_names = names.tolist()
      if self.labels is not None:
        # The last classes may have no image.
        self.num_classes = len(names)


def _split_keys(keys: Iterable[str]) -> dict[str, tuple[str, str]]:
  pairs = {}
  if 'images' in keys and 'labels' in keys:
    pairs['train'] = ('images', 'labels')
  for key in keys:
    if key.endswith('_images') and f'{key[:-7]}_labels' in keys:
      pairs[key[:-7]] = (key, f'{key[:-7]}_labels')
    if key.startswith('x_') and f'y_{key[2:]}' in keys:
      pairs[key[2:]] = (key, f'y_{key[2:]}')
  return pairs


def _read_pair(path, file, image_key, label_key):
  images, labels = file[image_key], file[label_key]
  images = images[..., None] if images.ndim == 3 else images
  if images.ndim != 4 or images.dtype != np.uint8 or not all(images.shape[1:]):
    raise UserError(
      f'arrays: {path}: {image_key} is {images.dtype} {images.shape}; expected uint8 '
      '[N, H, W] or [N, H, W, C], not empty.'
    )
  if labels.ndim == 2 and labels.shape[1] == 1:
    labels = labels[:, 0]  # Keras keeps CIFAR's labels as [N, 1].
  multi_hot = labels.ndim == 2 and not np.any((labels != 0) & (labels != 1))
  if not (labels.ndim == 1 and labels.dtype.kind in 'iu') and not multi_hot:
    raise UserError(
      f'arrays: {path}: {label_key} is {labels.dtype} {labels.shape}; expected '
      'integers [N], or zeros and ones [N, K].'
    )
  if labels.size and not 0 <= labels.min() <= labels.max() < INT32:
    least, most = labels.min(), labels.max()
    raise UserError(
      f'arrays: {path}: {label_key} has {least} to {most}: count classes from 0.'
    )
  if len(images) != len(labels):
    raise UserError(
      f'arrays: {path}: {len(images)} {image_key} but {len(labels)} {label_key}.'
    )
  return images, labels.astype(bool if multi_hot else np.int64)


class Synthetic(Source):
  """Noise that depends on the index only, for measuring throughput and for dry runs."""

  _POOL = 1 << 16

  def __init__(
    self,
    target: str,
    split: str,
    *,
    size: Side | tuple[Side, Side] = 224,
    num_classes: Count = 1000,
    num_examples: Annotated[int, Range(1, 2**31)] = 10_000,
  ):
    if target:
      raise UserError(f"Source 'synthetic' takes options, not a path: got {target!r}.")
    shape = (size, size, 3) if isinstance(size, int) else (*size, 3)
    sizes = dict.fromkeys(('train', 'validation', 'test'), num_examples)
    parts = splits.select(split, sizes, 'synthetic')
    self._rows = np.concatenate([part for _, part in parts])
    self.name = 'synthetic'
    self.features = {'image': ImageFeature(shape), 'label': LabelFeature()}
    self.num_classes = num_classes
    self.labels = self._rows % num_classes
    # An image is a window into one pool of noise, which is faster than a generator.
    length = int(np.prod(shape)) + self._POOL
    self._pool = np.random.Generator(np.random.Philox(0)).integers(
      0, 256, length, np.uint8
    )
    self.fingerprint = fingerprint((shape, num_classes, self._rows.tobytes()))

  def __len__(self) -> int:
    return len(self._rows)

  def read(self, indices: np.ndarray) -> list[dict]:
    size = int(np.prod(self.image_shape))
    # Multiplying by an odd number is a bijection modulo 2**k, so neighbours differ.
    starts = self._rows[indices] * 40503 % self._POOL
    return [
      {'image': self._pool[start : start + size].reshape(self.image_shape), 'label': y}
      for start, y in zip(starts, self.labels[indices], strict=True)
    ]
