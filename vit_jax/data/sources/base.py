"""The contract of a source of examples, and a base class for arrays in memory.

A source raises ValueError for a mistake of the user in its name, split or options.
"""

import abc
import concurrent.futures
import contextlib
import functools
import hashlib
import types
from collections.abc import Iterable, Iterator

import numpy as np

from vit_jax.data import image_file
from vit_jax.data.features import Feature, ImageFeature, LabelFeature
from vit_jax.data.sources import order
from vit_jax.errors import UserError


class Source(abc.ABC):
  """Random access to the examples of one split. To add a data set, write one subclass.

  `__init__(target, split, **options)` opens a split of 'scheme:target'. Its keyword-only
  options are the config's `source_options`.

  Attributes:
    features: {name: kind of value}, see `data.features`; there is always an 'image'.
    name: the source as the user wrote it, for messages and reports.
    num_classes: K, or None if it is unknown.
    class_names: K names, or None.
    labels: the labels of all examples, int [N], which are checked before training. None if
      they are not known without reading images, or images have several.
    multi_hot: the labels of all examples, [N, K], if images have several and they are known
      without reading images; otherwise None.
    fingerprint: a cheap hexadecimal hash that changes when the examples change.
    exif: whether to apply the EXIF orientation, as for photographs from a camera. Sources
      of published data sets ignore it, because published results do.
    remarks: appended to the line that describes the source.
    lengths: {name: int [N]}, the length of a feature in each example, where it differs
      between examples and is known.
  """

  features: dict[str, Feature | ImageFeature | LabelFeature] = types.MappingProxyType(
    {'image': ImageFeature(), 'label': LabelFeature()}
  )
  name: str
  num_classes: int | None = None
  class_names: list[str] | None = None
  labels: np.ndarray | None = None
  multi_hot: np.ndarray | None = None
  exif: bool = False
  remarks: str = ''
  lengths = types.MappingProxyType({})
  fingerprint: str

  @property
  def image_shape(self) -> tuple[int, int, int] | None:
    """(H, W, C) if images are arrays; None if they are encoded."""
    return self.features['image'].shape

  @functools.cached_property
  def _readers(self) -> concurrent.futures.Executor:
    """Threads that read files."""
    return concurrent.futures.ThreadPoolExecutor(image_file.READERS)

  @abc.abstractmethod
  def __len__(self) -> int:
    """Returns the number of examples of the split."""

  @abc.abstractmethod
  def read(self, indices: np.ndarray) -> list[dict]:
    """Returns examples, dicts of the declared features.

    An image is bytes or uint8 [H, W, C]. The value of a `LabelFeature` is an int, or several
    ints. Any other feature is an array.

    An example that cannot be read has only the key 'error', the reason. An example with
    several labels may have a 'weight', float [n], the values of its labels in the multi-hot
    target; without it they are 1. An 'exif' overrides the attribute `exif`.
    """

  def read_at(self, positions: np.ndarray, indices: np.ndarray) -> list[dict]:
    """Reads the examples at some positions of the order that `plan_training` returned.

    A source that reads in that order, such as a stream, needs the positions.
    """
    return self.read(indices)

  def name_of(self, index: int) -> str:
    """Returns a name by which the user can find the example, such as its path."""
    return f'{self.name}#{index}'

  def describe(self, split: str = '') -> str:
    """Returns 'folder:photos, train: 1,200 images, 10 classes of 37 to 160; ...'."""
    text = f'{self.name}, {split}'.removesuffix(', ') + f': {len(self):,} images'
    if (k := self.num_classes) is not None:
      text += f', {k:,} {"class" if k == 1 else "classes"}'
      if k == 1 and 'boxes' not in self.features:
        text += ' (nothing to tell apart: all answers are right)'
      if self.labels is not None and len(self.labels):
        counts = np.bincount(self.labels, minlength=k)
        low, high = counts.min(), counts.max()
        text += f' of {low:,}' if low == high else f' of {low:,} to {high:,}'
    return f'{text}; {self.remarks}' if self.remarks else text

  def plan_training(self, seed: int, batch_size: int, host: int, hosts: int) -> tuple:
    """Returns the (source, order) that host number `host` reads in training."""
    return self, order.shuffle(len(self), seed)

  def plan_evaluation(self) -> tuple:
    """Returns the (source, order) of an evaluation: each example once, in order."""
    return self, order.Sequential(len(self))

  def parts(self) -> list[tuple['Source', int]]:
    """Returns the (source, label_offset) of each part that this source consists of."""
    return [(self, 0)]


class View(Source):
  """Wraps a source and has its attributes; subclasses change the examples or their order."""

  def __init__(self, source: Source):
    self.source = source
    for key in Source.__annotations__:
      setattr(self, key, getattr(source, key))

  def __len__(self) -> int:
    return len(self.source)

  def name_of(self, index: int) -> str:
    return self.source.name_of(index)


class ArraySource(Source):
  """Images in memory: uint8 [N, H, W, C], and int labels [N] or 0/1 labels [N, K]."""

  def __init__(self, name: str, images: np.ndarray, labels: np.ndarray):
    self.name = name
    self.images = images
    several = labels.ndim == 2
    self.features = {
      'image': ImageFeature(images.shape[1:]),
      'label': LabelFeature(several),
    }
    self.labels, self.multi_hot = (None, labels) if several else (labels, None)
    self._labels = labels
    # Hash all labels and a thousand images: it is cheap, and shows a changed order or file.
    some = images[:: max(1, len(images) // 1000)]
    self.fingerprint = fingerprint((images.shape, labels.tobytes(), some.tobytes()))

  def __len__(self) -> int:
    return len(self.images)

  def read(self, indices: np.ndarray) -> list[dict]:
    several = self.labels is None
    return [
      {'image': image, 'label': np.flatnonzero(label) if several else label}
      for image, label in zip(self.images[indices], self._labels[indices], strict=True)
    ]


@contextlib.contextmanager
def opening() -> Iterator[None]:
  """Turns a ValueError about the user's data into a UserError."""
  try:
    yield
  except UserError:
    raise
  except ModuleNotFoundError as error:
    raise UserError(f"{error}: pip install 'vit_jax[train]'.") from error
  except ValueError as error:
    end = '' if str(error).endswith(('.', '?')) else '.'
    raise UserError(f'{error}{end}') from error


def fingerprint(parts: Iterable) -> str:
  """Returns a hash of the parts as 16 hexadecimal digits.

  A part that is not bytes is hashed as the text `str(part)`.
  """
  digest = hashlib.sha256()
  for part in parts:
    data = part if isinstance(part, bytes) else str(part).encode()
    digest.update(len(data).to_bytes(8, 'little') + data)
  return digest.hexdigest()[:16]


def check_labels(source: Source, num_classes: int, offset: int = 0) -> None:
  """Raises ValueError for labels outside [0, num_classes), if the source knows them.

  Args:
    offset: a number to add to the source's labels, see `Source.parts`.
  """
  shift = f' with label_offset={offset}' if offset else ''
  if source.labels is None:
    classes = source.num_classes
    if classes is not None and classes + offset > num_classes:
      raise ValueError(
        f'{source.name} has {classes} classes{shift}, but num_classes={num_classes}'
      )
    return
  labels = source.labels + offset
  low, high = int(labels.min()), int(labels.max())
  if low < 0 or high >= num_classes:
    bad = int(np.flatnonzero((labels < 0) | (labels >= num_classes))[0])
    raise ValueError(
      f'{source.name}: labels run from {low} to {high}{shift}, but num_classes='
      f'{num_classes} allows 0 to {num_classes - 1}. The first outside is '
      f'{source.name_of(bad)} with label {int(labels[bad])}'
    )
