"""What a source of examples is."""

import hashlib
from collections.abc import Iterable

import numpy as np

from vit_jax.data.sources import order
from vit_jax.errors import UserError


class Source:
  """Random access to the examples of one split. A new data set is one subclass.

  Attributes:
    name: the source as the user wrote it, for messages and reports.
    num_classes: K, or None where the source cannot know.
    class_names: K names, or None.
    labels: every example's label, int [N], where they are known without reading
      images, else None. They are then checked before training.
    multi_label: labels are lists of ints, and a batch's labels multi-hot.
    image_shape: (H, W, C) if images are uint8 arrays of one shape, held in memory or
      cheap to make; None if they are encoded bytes (JPEG, PNG, ...).
    exif: apply the EXIF orientation, as for photographs from a camera. Not for
      published data sets, whose published numbers ignore it.
    fingerprint: a cheap hash that changes when the examples do.
  """

  name: str
  num_classes: int | None = None
  class_names: list[str] | None = None
  labels: np.ndarray | None = None
  multi_label: bool = False
  image_shape: tuple[int, int, int] | None = None
  exif: bool = False
  fingerprint: str

  def __len__(self) -> int:
    raise NotImplementedError

  def read(self, indices: np.ndarray) -> list[dict]:
    """Returns examples {'image': bytes or uint8 [H,W,C], 'label': int or list[int]}.

    One that cannot be read has an 'error', the reason, and no image. With several
    labels there may be a 'weight', float [n], of each label: the value of its place in
    a multi-hot target, else 1. 'exif', if there, stands above the source's own.
    """
    raise NotImplementedError

  def read_at(self, positions: np.ndarray, indices: np.ndarray) -> list[dict]:
    """`read`, for the examples at `positions` of the order of `for_training`."""
    return self.read(indices)

  def name_of(self, index: int) -> str:
    """Returns a name by which a person finds the example: a path where it has one."""
    return f'{self.name}#{index}'

  def for_training(self, seed: int, batch_size: int, host: int, hosts: int) -> tuple:
    """Returns (source, order): what training reads, and how, on one of the hosts.

    Raises:
      UserError: if it cannot be read that way.
    """
    return self, order.shuffled(len(self), seed)

  def for_evaluation(self) -> tuple:
    """Returns (source, order): each example once, in order. Errors as in training."""
    return self, order.Sequential(len(self))

  def parts(self) -> list[tuple['Source', int]]:
    """Returns the sources that this one is made of, each with its `label_offset`."""
    return [(self, 0)]


class View(Source):
  """A source read through another object: all else is as the source says."""

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
    self.multi_label = labels.ndim == 2
    self.labels = None if self.multi_label else labels
    self._labels = labels
    self.image_shape = images.shape[1:]
    # All labels, and a thousand images: cheap, and sees a changed order or file.
    some = images[:: max(1, len(images) // 1000)]
    self.fingerprint = fingerprint((images.shape, labels.tobytes(), some.tobytes()))

  def __len__(self) -> int:
    return len(self.images)

  def read(self, indices: np.ndarray) -> list[dict]:
    return [
      {'image': image, 'label': np.flatnonzero(label) if self.multi_label else label}
      for image, label in zip(self.images[indices], self._labels[indices], strict=True)
    ]


def fingerprint(parts: Iterable) -> str:
  """Returns 16 hex digits that depend on the parts, bytes or what `str` shows."""
  digest = hashlib.sha256()
  for part in parts:
    data = part if isinstance(part, bytes) else str(part).encode()
    digest.update(len(data).to_bytes(8, 'little') + data)
  return digest.hexdigest()[:16]


def check_labels(source: Source, num_classes: int, offset: int = 0) -> None:
  """Raises UserError for labels outside [0, num_classes) that are known unread.

  Args:
    offset: what is added to the source's labels, see `Source.parts`.
  """
  shift = f' with label_offset={offset}' if offset else ''
  if source.labels is None:
    classes = source.num_classes
    if classes is not None and classes + offset > num_classes:
      raise UserError(
        f'{source.name} has {classes} classes{shift}, but num_classes={num_classes}.'
      )
    return
  labels = source.labels + offset
  low, high = int(labels.min()), int(labels.max())
  if low < 0 or high >= num_classes:
    bad = int(np.flatnonzero((labels < 0) | (labels >= num_classes))[0])
    raise UserError(
      f'{source.name}: labels run from {low} to {high}{shift}, but num_classes='
      f'{num_classes} allows 0 to {num_classes - 1}. The first outside is '
      f'{source.name_of(bad)} with label {int(labels[bad])}.'
    )
