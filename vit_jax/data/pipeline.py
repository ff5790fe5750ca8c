"""Batches of images and labels, the same for any parallelism, hosts and restart."""

import functools
from collections.abc import Iterator

import numpy as np

from vit_jax.data import cache as cache_lib
from vit_jax.data.bad_images import BadImages
from vit_jax.data.ops import registry
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.reader import Reader
from vit_jax.data.sources import base, mixture
from vit_jax.data.sources import order as order_lib
from vit_jax.data.sources import registry as sources
from vit_jax.errors import UserError


class Batches:
  """What training and evaluation share. Anything wrong is said before TensorFlow loads.

  Attributes:
    num_examples: N, of the split.
    num_classes, class_names, fingerprint: see `base.Source`.
    batch_size: of a global batch.
    rows: (first, number) of those of a global batch that are read here.
  """

  def __init__(
    self,
    source: str | list[dict],
    split: str,
    pp: str,
    batch_size: int,
    *,
    seed: int = 0,
    num_classes: int | None = None,
    source_options: dict | None = None,
    cache: str | None = None,
    cache_bytes: int | None = None,
    max_bad_fraction: float | None = None,
    bad_log: str | None = None,
    workers: int | None = None,
    prefetch: int = 2,
    host: int | None = None,
    hosts: int | None = None,
  ):
    """Opens the source; reads no image yet.

    Args:
      source: what to read, see `sources.build`. For training also a list of parts,
        each a dict with a 'source' and its 'weight', see `mixture.build`.
      split: a split expression, such as 'train[:90%]'.
      pp: the string pipeline, see `ops`.
      batch_size: examples in a global batch, over all hosts.
      seed: of order and augmentation, 0 <= seed < 2**63.
      num_classes: K; None: as the source says.
      source_options: further arguments of the source's class.
      cache: keep images in memory after the first epoch: 'raw', their files, or
        'decoded', their pixels before the first random op. See `cache`.
      cache_bytes: bound on what is kept, on each host; None: 4 GiB.
      max_bad_fraction: stop when more than this fraction of the split's images cannot
        be decoded; None: see `bad_images.limit`.
      bad_log: file to which each such image is appended as a JSON line; None: they
        are only counted.
      workers: threads that decode; None: as many as help.
      prefetch: batches made ahead.
      host, hosts: this host, among how many; None: as JAX says.

    Raises:
      UserError: for anything wrong in the arguments, or data that is not there.
    """
    registry.parse(pp)  # before a source that may take long to open
    self.source = _build(source, split, source_options or {})
    self.num_examples = len(self.source)
    self.num_classes = self.source.num_classes if num_classes is None else num_classes
    self.class_names = self.source.class_names
    self.batch_size = batch_size
    self._check(seed, workers, prefetch)
    if host is None or hosts is None:
      import jax

      host, hosts = jax.process_index(), jax.process_count()
    self.rows = order_lib.host_slice(batch_size, host, hosts)
    self._first, size = self.rows
    self._preprocess = Preprocess(pp, self.source)
    reading, self._order = self._open(seed, host, hosts)
    self.fingerprint = reading.fingerprint
    reading = cache_lib.attach(reading, self._preprocess, cache, cache_bytes)
    self._bad = BadImages(self.source, max_bad_fraction, bad_log)
    reader = Reader(
      reading,
      self._preprocess,
      self._order,
      num_classes=self.num_classes,
      seed=seed,
      batch_size=size,
      workers=workers,
      prefetch=prefetch,
    )
    try:
      reader.label_array([])
    except ValueError as error:
      raise UserError(f'pp {pp!r}: {error}.') from None
    self._reader = reader

  def _check(self, seed, workers, prefetch):
    if self.num_classes is None:
      raise UserError(f'{self.source.name} does not tell its classes: set num_classes.')
    if not isinstance(self.num_classes, int) or self.num_classes < 1:
      raise UserError(f'num_classes={self.num_classes!r} must be a positive integer.')
    for part, offset in self.source.parts():
      base.check_labels(part, self.num_classes, offset)
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
      raise UserError(f'seed={seed!r} must be an integer with 0 <= seed < 2**63.')
    if (workers is not None and workers < 1) or prefetch < 1:
      raise UserError(
        f'workers={workers!r} and prefetch={prefetch!r} must be positive.'
      )

  @property
  def bad_images(self) -> int:
    """How many different images could not be decoded so far, on this host."""
    return self._bad.count

  @functools.cached_property
  def spec(self) -> dict:
    """Shapes and dtypes of a global batch as it leaves the host.

    {'image': uint8 or float32 [B,H,W,C], 'label': int32 [B] or float32 [B,K],
    'mask': float32 [B]}, each a `jax.ShapeDtypeStruct`.

    Raises:
      UserError: if the ops do not fit the images, or leave their size open.
    """
    import jax

    label = self._reader.label_array([[] if self.source.multi_label else 0])
    shapes = {
      'image': self._preprocess.image_spec,
      'label': (label.shape[1:], label.dtype),
      'mask': ((), np.dtype(np.float32)),
    }
    return {
      key: jax.ShapeDtypeStruct((self.batch_size, *shape), dtype)
      for key, (shape, dtype) in shapes.items()
    }

  def on_device(self, batch: dict) -> dict:
    """Finishes a batch inside jit: images uint8 -> float32 in pp's value range."""
    import jax.numpy as jnp

    op = self._preprocess.on_device
    if op is None:
      return batch
    return {
      **batch,
      'image': op.scale_images(batch['image'].astype(jnp.float32), jnp.clip),
    }

  def _open(self, seed, host, hosts):
    """Returns (source, order)."""
    raise NotImplementedError

  def _iterate(self, first: int, last: int | None) -> Iterator[dict]:
    size = self._reader.batch_size
    positions = order_lib.positions(first, last, self.batch_size, self._first, size)
    batches = self._reader.batches(positions)
    try:
      for batch in batches:
        self._report_bad(batch.pop('position')[batch['mask'] == 0])
        yield batch
    finally:
      batches.close()

  def _report_bad(self, positions):
    indices = self._order.indices(positions)
    for position, index in zip(positions, indices, strict=True):
      if index >= 0:  # else padding
        self._bad.add(int(index), lambda p=position: self._reader.diagnose(int(p)))


def _build(source, split, options):
  if not isinstance(source, list | tuple):
    return sources.build(source, split, **options)
  if options:
    raise UserError(
      f"source_options={options} beside a list of sources: give each part its 'options'."
    )
  return mixture.build(source, split)


class TrainBatches(Batches):
  """Endless shuffled batches: each epoch an exact permutation, none left out."""

  def _open(self, seed, host, hosts):
    return self.source.for_training(seed, self.batch_size, host, hosts)

  def iterate(self, start_step: int = 0) -> Iterator[dict]:
    """Yields this host's NumPy batches from global batch `start_step` on, at no cost.

    Close the iterator to stop its threads.

    Raises:
      UserError: for a label out of range, or too many undecodable images.
    """
    return self._iterate(start_step, None)


class EvalBatches(Batches):
  """Every example once, in the source's order; the last batch is padded.

  Padding and undecodable images have mask 0. Every host has the same number of
  batches. `seed` matters only if `pp` has random ops.
  """

  def _open(self, seed, host, hosts):
    return self.source.for_evaluation()

  def __len__(self) -> int:
    """Returns the number of batches."""
    return -(-self.num_examples // self.batch_size)

  def iterate(self) -> Iterator[dict]:
    """Yields this host's NumPy batches. Errors and closing as in training."""
    return self._iterate(0, len(self))


# A config's `data` section is bound to these signatures.
train = TrainBatches
evaluate = EvalBatches
