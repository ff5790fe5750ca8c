"""Batches of examples, which do not depend on parallelism, number of hosts or restarts.

The way of an example from its bytes to the device:

  source.read -> Reader -> ops, in TensorFlow -> Batches -> sharding.global_batch
"""

import abc
import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Annotated

import numpy as np

from vit_jax import terminal
from vit_jax.check import Count, Fraction, Range, Section, Seed, prefix_errors
from vit_jax.data import sources, stalls
from vit_jax.data.bad_images import BadImages
from vit_jax.data.features import own_classes
from vit_jax.data.ops import registry
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.reader import Reader
from vit_jax.data.sources import base, mixture, sampling, subset
from vit_jax.data.sources.order import Repeated, batch_positions, host_slice
from vit_jax.distributed import is_first
from vit_jax.errors import UserError, printable

# Threads also wait for files, so more threads than processors may help.
_MOST = max(64, 16 * (os.cpu_count() or 1))
Workers = Annotated[
  int, Range(1, _MOST, why=f'threads, on {os.cpu_count()} processors')
]


def _check_options(where: str, options: dict, data: dict) -> None:
  if isinstance(data['source'], str):
    sources.check_options(where, options, data)
  elif options:
    with prefix_errors(where):
      raise ValueError("a list of sources: give each part its own 'options'")


def _build(source, split, options, classes):
  if isinstance(source, str):
    return sources.build(source, split, classes=classes, **options)
  _check_options('source_options', options, {'source': source})
  if classes is not None:
    subset.check_classes('classes', classes, {'source': source})
  return mixture.build(source, split)


class Batches(abc.ABC):
  """Base class of training and evaluation batches.

  Reports mistakes of the user before it imports TensorFlow.

  Attributes:
    num_examples: N, number of examples in the split.
    num_classes, class_names, fingerprint: see `base.Source`.
    batch_size: examples in a global batch.
    finish_on_device: a function of a batch, for use inside jit, that runs the last ops of
      `pp` on uint8 images.
  """

  def __init__(
    self,
    source: Annotated[str | list[dict], mixture.check_parts],
    split: str,
    pp: Annotated[str, registry.check_pipeline],
    batch_size: Annotated[int, Range(1, 2**24, why='a batch of them is in memory')],
    *,
    seed: Seed = 0,
    num_classes: Count | None = None,
    model_classes: int | None = None,
    source_options: Annotated[dict | None, _check_options] = None,
    classes: subset.Classes = None,
    sampling: Annotated[str | None, sampling.check_sampling] = None,
    repeats: Count = 1,
    max_bad_fraction: Fraction | None = None,
    bad_log: str | None = None,
    workers: Workers | None = None,
    host: int | None = None,
    hosts: int | None = None,
  ):
    """Opens the source; reads no image yet.

    Args:
      source: see `sources.build`. Training also takes a list of parts, see `mixture.build`.
      split: a split expression, such as 'train[:90%]'.
      pp: the string pipeline, see `ops`.
      batch_size: examples in a global batch, over all hosts.
      seed: seed of the order and of the augmentation.
      num_classes: K; None: the source's number. If the `data` section of a training run
        lacks it, the run passes the model's number.
      model_classes: K of the model to evaluate, used if neither `num_classes` nor the
        source gives a number.
      source_options: further arguments of the source's class.
      classes: indices or names of classes, such as [5, 6, 'cat']. Keeps only the examples
        of these classes and labels them 0, 1, 2 in this order; `split` then counts only
        these examples. None: all classes. An evaluation on the source that the run trains
        on uses the classes of training by default.
      sampling: 'balanced' or 'repeat(t=0.001)', to train on rare classes more often, see
        `data.sources.sampling`; for training only.
      repeats: how often an image comes in a batch, each time augmented anew, see
        `order.Repeated`; for training only.
      max_bad_fraction: the run ends if more than this fraction of the split's images
        cannot be decoded; None: see `bad_images.limit`.
      bad_log: file to which each such image is appended as a line of JSON.
      workers: number of decoding threads; None: as many as help.
      host, hosts: index of this host and number of hosts; None: those of JAX.
    """
    self._sampling, self._repeats = sampling, repeats
    # Check `pp` first, because opening the source may take long.
    registry.parse(pp)
    with base.opening():
      self.source = _build(source, split, source_options or {}, classes)
      self.split = split
      self.num_examples = len(self.source)
      counts = (num_classes, self.source.num_classes, model_classes)
      self.num_classes = next((k for k in counts if k is not None), None)
      self.class_names = self.source.class_names
      self.batch_size = batch_size
      if self.num_classes is None and 'label' in self.source.features:
        raise ValueError(f'{self.source.name} has no classes: set num_classes')
      for part, offset in self.source.parts():
        base.check_labels(part, self.num_classes, offset)
      if host is None or hosts is None:
        import jax

        host, hosts = jax.process_index(), jax.process_count()
      self._first, size = host_slice(batch_size, host, hosts)
      reading, order = self._open(seed, host, hosts)
      self.fingerprint = reading.fingerprint
    with prefix_errors(f'pp {pp!r}'):
      self._preprocess = Preprocess(pp, self.source, self.num_classes)
    self.finish_on_device = self._preprocess.finish
    self._bad = BadImages(self.source, max_bad_fraction, bad_log)
    self._reader = Reader(
      reading,
      self._preprocess,
      order,
      num_classes=self.num_classes,
      seed=seed,
      batch_size=size,
      workers=workers,
    )

  def classes_of(self, name: str) -> tuple[int, list[str] | None]:
    """Returns (K, names or None) of a feature's classes; raises UserError without it."""
    if name not in self.source.features:
      why = f' ({self.source.remarks})' if self.source.remarks else ''
      raise UserError(
        f'{self.source.name} has no {name}, only {[*self.source.features]}{why}.'
      )
    own = own_classes(self.source.features, name)
    return (len(own), own) if own else (self.num_classes, self.class_names)

  def describe(self) -> list[str]:
    """Describes each source in one line: its images, its classes and the skipped files."""
    parts = [part for part, _ in self.source.parts()]
    split = self.split if len(parts) == 1 else ''
    lines = [part.describe(split) + self._preprocess.surplus(part) for part in parts]
    return [printable(line) for line in lines]

  @property
  def bad_images(self) -> int:
    """Number of images that this host could not decode so far, each counted once."""
    return self._bad.count

  @functools.cached_property
  def spec(self) -> dict:
    """Shapes and dtypes of a global batch as it leaves the host, see `trace_batch`."""
    return trace_batch(self._preprocess, self.batch_size)

  @abc.abstractmethod
  def _open(self, seed, host, hosts):
    """Returns the (source, order) to read, see `Source.plan_training`."""

  def _iterate(self, first: int, last: int | None) -> Iterator[dict]:
    size = self._reader.batch_size
    batches = self._reader.batches(
      batch_positions(first, last, self.batch_size, self._first, size)
    )
    try:
      for batch in stalls.watch(batches):
        index, positions = batch['index'], batch.pop('position')
        for i in np.flatnonzero((batch['mask'] == 0) & (index >= 0)):
          reason = functools.partial(self._reader.diagnose, int(positions[i]))
          self._bad.add(int(index[i]), reason)
        yield {**batch, 'index': index.astype(np.int32)}
    finally:
      batches.close()


class TrainBatches(Batches):
  """Endless shuffled batches. Each epoch is a permutation that leaves no example out."""

  def _open(self, seed, host, hosts):
    reading, order = self.source.plan_training(seed, self.batch_size, host, hosts)
    if reading is not self.source and (self._sampling or self._repeats > 1):
      option = f'repeats={self._repeats}'
      if self._sampling:
        option = f'sampling={self._sampling!r}'
      raise ValueError(
        f"{self.source.name}: {option} reads at random, so leave out 'stream'"
      )
    if self._sampling:
      order = sampling.order(self._sampling, self.source, seed)
    if self._repeats > 1:
      order = Repeated(order, self.num_examples, self._repeats, self.batch_size)
    return reading, order

  def iterate(self, start_step: int = 0) -> Iterator[dict]:
    """Yields this host's NumPy batches from global batch `start_step` on.

    Starting at a later step costs nothing. Close the iterator to stop its threads. Raises
    UserError when there are too many bad images.
    """
    return self._iterate(start_step, None)


class EvalBatches(Batches):
  """Every example once, in the source's order. The last batch is padded.

  Padding and images that cannot be decoded have mask 0. Every host has the same number of
  batches. `seed` matters only if `pp` has random ops.
  """

  def _open(self, seed, host, hosts):
    return self.source.plan_evaluation()

  def __len__(self) -> int:
    return -(-self.num_examples // self.batch_size)

  def iterate(self) -> Iterator[dict]:
    """Yields this host's NumPy batches, as in training, and shows the progress."""
    text, quiet = printable(f'{self.source.name}, {self.split}'), not is_first()
    with contextlib.closing(self._iterate(0, len(self))) as batches:
      yield from terminal.progress(batches, len(self), text, 'batches', quiet)


def trace_batch(preprocess: Preprocess, batch_size: int) -> dict:
  """Returns the shapes and dtypes of a global batch, as TensorFlow traces the pipeline.

  {name: `jax.ShapeDtypeStruct`}: 'image' uint8 or float32 [B, H, W, C]; 'label' int32
  [B], or float32 [B, K] where images have several labels or pp an op for them; other
  features of the source, in the shapes that pp gives them; 'u' float32 [B, draws] for random
  ops on the device; 'mask' float32 [B], 0 for padding and images that cannot be read;
  'index' int32 [B], of the example in the split (modulo 2**32), -1 for padding.
  """
  import jax

  with prefix_errors(f'pp {preprocess.pp!r}'):
    shapes = dict(preprocess.spec)
  if preprocess.label is not None:
    shapes['label'] = preprocess.label.shape, preprocess.label.dtype
  shapes |= {'mask': ((), np.dtype(np.float32)), 'index': ((), np.dtype(np.int32))}
  spec = {
    key: jax.ShapeDtypeStruct((batch_size, *shape), dtype)
    for key, (shape, dtype) in shapes.items()
  }
  if 'u' in spec:
    # Changes of colour check the images that they get.
    with prefix_errors(f'pp {preprocess.pp!r}'):
      jax.eval_shape(preprocess.finish, spec)
  return spec


def scale_on_device(batch: dict) -> dict:
  """Maps images uint8 to float32 in [-1, 1], as most pipelines do on the device."""
  (op,) = registry.parse('value_range(-1, 1)')
  return op.on_device(batch)


# Rules for the config's `data` sections. The run itself sets the parameters named here.
check_train = Section(
  TrainBatches, ('seed', 'bad_log', 'host', 'hosts', 'model_classes')
)
check_evaluate = Section(
  EvalBatches, ('sampling', 'repeats', 'bad_log', 'host', 'hosts', 'model_classes')
)
