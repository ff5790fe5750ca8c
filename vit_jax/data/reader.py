"""From positions to NumPy batches, through tf.data."""

import atexit
import contextlib
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Iterator

import numpy as np

from vit_jax.data import lazy_tf, philox
from vit_jax.data.cache import DecodedCache
from vit_jax.data.ops import decode as images
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.sources.base import Source
from vit_jax.errors import UserError

# Encoded images that are read at once, and of these the few that Python hands to
# TensorFlow at once and one thread decodes in a row: enough to hide the hand-over (0.2
# ms) and what a data set of its own costs, little enough not to delay the first batch.
_ENCODED_CHUNK = 64
_FEW = 16
_ARRAY_CHUNK_BYTES = 1 << 24

# TensorFlow's threads call Python: they must be idle before the interpreter ends, or
# both wait for each other for ever.
_STREAMS: weakref.WeakSet = weakref.WeakSet()
_EXITING = threading.Event()


@atexit.register
def _close_streams() -> None:
  _EXITING.set()
  for stream in list(_STREAMS):
    with contextlib.suppress(ValueError):  # in use by another thread: it will end
      stream.close()


def _as_it_is(function):
  # AutoGraph would translate the source of every op, which holds no Python control
  # flow on tensors: most of the time to the first batch.
  return lazy_tf.load().autograph.experimental.do_not_convert(function)


class Reader:
  """Makes a host's batches from its positions."""

  def __init__(
    self,
    source: Source,
    preprocess: Preprocess,
    order,
    *,
    num_classes: int,
    seed: int,
    batch_size: int,
    workers: int | None = None,
    prefetch: int = 2,
  ):
    """`order` maps positions to indices, -1 for padding; `batch_size` is the host's."""
    self._source = source
    self._decoded = source if isinstance(source, DecodedCache) else None
    self._preprocess = preprocess
    self._order = order
    self._num_classes = num_classes
    self._seed = seed
    self.batch_size = batch_size
    self._workers = workers
    self._prefetch = prefetch
    self._starting = threading.Lock()
    self._start: tuple = ()

  def batches(self, positions: Iterator[np.ndarray]) -> Iterator[dict]:
    """Yields {'image', 'label', 'mask', 'position'} for each positions [batch_size].

    Close it to stop its threads; at the interpreter's exit all are closed.
    """
    stream = self._stream(positions)
    _STREAMS.add(stream)
    return stream

  def _stream(self, positions):
    failure: list[Exception] = []
    with self._starting:  # the data set calls `_chunks` before its first batch
      self._start = (positions, failure)
      batches = self._dataset.as_numpy_iterator()
      first = list(itertools.islice(batches, 1))
    yield from first
    yield from batches
    if failure:
      raise failure[0]

  def _chunks(self):
    positions, failure = self._start
    # TensorFlow would turn any exception into text: keep it, and end the stream.
    try:
      for batch in positions:
        for start in range(0, len(batch), self._chunk):
          if _EXITING.is_set():
            return
          chunk = self._read(batch[start : start + self._chunk])
          few = _FEW if self._source.image_shape is None else self._chunk
          for first in range(0, len(chunk['mask']), few):
            yield {key: value[first : first + few] for key, value in chunk.items()}
    except Exception as error:
      failure.append(error)

  @functools.cached_property
  def _dataset(self):
    """Made once: tracing its functions takes longer than a small evaluation."""
    tf = lazy_tf.load()
    dataset = tf.data.Dataset.from_generator(
      self._chunks, output_signature=self._signature
    )
    if self._source.image_shape is None:
      dataset = self._encoded(dataset.prefetch(2 * _ENCODED_CHUNK // _FEW))
    else:
      dataset = self._arrays(dataset)
    options = tf.data.Options()
    options.deterministic = True
    if self._workers:
      options.threading.private_threadpool_size = self._workers
    return dataset.prefetch(self._prefetch).with_options(options)

  def _read(self, positions: np.ndarray) -> dict:
    """Returns a chunk: what `self._signature` says."""
    indices = self._order.indices(positions)
    real = indices >= 0
    examples = self._source.read_at(positions[real], indices[real])
    chunk = {
      'label': self._labels(indices[real], examples, real),
      'mask': real.astype(np.float32),
      'position': positions,
      'u': philox.uniforms(self._seed, positions, self._preprocess.draws),
    }
    if self._source.image_shape is not None:
      image = np.zeros((len(positions), *self._source.image_shape), np.uint8)
      if examples:
        image[real] = np.stack([example['image'] for example in examples])
      return {**chunk, 'image': image}
    # What cannot be decoded, padding included, is empty: it fails, and is masked.
    data = np.full(len(positions), b'', object)
    orientation = np.ones(len(positions), np.int32)
    shape = np.zeros((len(positions), 3), np.int32)
    for i, example in zip(np.flatnonzero(real), examples, strict=True):
      if 'pixels' in example:
        data[i], shape[i] = example['pixels'], example['shape']
      elif 'error' not in example:
        # `diagnose` says why, when its batch is used.
        with contextlib.suppress(images.BadImage):
          data[i], orientation[i] = self._probe(example)
    chunk |= {'image': data, 'orientation': orientation}
    return chunk | ({'index': indices, 'shape': shape} if self._decoded else {})

  def _probe(self, example):
    return images.probe(example['image'], example.get('exif', self._source.exif))

  def _labels(self, indices, examples, real) -> np.ndarray:
    blank = [] if self._source.multi_label else 0
    for index, example in zip(indices, examples, strict=True):
      for label in np.atleast_1d(example['label']):
        if not 0 <= label < self._num_classes:
          raise UserError(
            f'{self._source.name_of(index)} has label {label}, but num_classes='
            f'{self._num_classes} allows 0 to {self._num_classes - 1}.'
          )
    given = iter(examples)
    labels = [next(given)['label'] if r else blank for r in real]
    out = self.label_array(labels)
    off = None
    for i, example in zip(np.flatnonzero(real), examples, strict=True):
      if 'weight' in example:
        off = self.label_array([[]])[0] if off is None else off
        at = example['label']
        out[i, at] = off[at] + (out[i, at] - off[at]) * example['weight']
    return out

  def label_array(self, labels: list) -> np.ndarray:
    """Returns int32 [n], or float32 [n, K] for several labels or a label op."""
    from vit_jax.data.ops import basic as ops

    if self._preprocess.label is not None:
      return self._preprocess.label(labels, self._num_classes)
    if self._source.multi_label:
      return ops.onehot()(labels, self._num_classes)
    return np.asarray(labels, np.int32)

  @property
  def _chunk(self) -> int:
    if self._source.image_shape is None:
      return _ENCODED_CHUNK
    return max(1, _ARRAY_CHUNK_BYTES // int(np.prod(self._source.image_shape)))

  @property
  def _signature(self) -> dict:
    tf = lazy_tf.load()
    label = self.label_array([] if not self._source.multi_label else [[]])
    out = {
      'label': tf.TensorSpec([None, *label.shape[1:]], label.dtype),
      'mask': tf.TensorSpec([None], tf.float32),
      'position': tf.TensorSpec([None], tf.int64),
      'u': tf.TensorSpec([None, sum(self._preprocess.draws)], tf.float32),
    }
    if self._source.image_shape is None:
      out['image'] = tf.TensorSpec([None], tf.string)
      out['orientation'] = tf.TensorSpec([None], tf.int32)
      if self._decoded:
        out['index'] = tf.TensorSpec([None], tf.int64)
        out['shape'] = tf.TensorSpec([None, 3], tf.int32)
    else:
      out['image'] = tf.TensorSpec([None, *self._source.image_shape], tf.uint8)
    return out

  def _arrays(self, dataset):
    """Images of one shape: the ops see a chunk at once, ten times faster for small."""

    def transform(chunk):
      chunk['image'] = self._preprocess.arrays(chunk['image'], chunk.pop('u'))
      return chunk

    transform = _as_it_is(transform)
    dataset = dataset.map(transform, self._parallel, deterministic=True)
    return dataset.rebatch(self.batch_size)

  def _encoded(self, dataset):
    """A few images at a time as a data set of their own: an error costs its image alone.

    (`ignore_errors` on the whole would shift every later example.)
    """
    tf = lazy_tf.load()
    shape, dtype = self._preprocess.image_spec
    keys = ('image', 'orientation', *(('index', 'shape') if self._decoded else ()), 'u')
    make = self._decoded.image if self._decoded else self._preprocess.encoded

    def decode(row, *args):
      return row, make(*args)

    def together(few):
      number = tf.size(few['mask'])
      args = [few.pop(key) for key in keys]

      def fill(rows, images):
        """Puts blanks, with mask 0, where an image is missing."""

        def spread():
          at = tf.cast(rows[:, None], tf.int32)
          there = tf.scatter_nd(at, tf.ones_like(rows, tf.float32), [number])
          return tf.scatter_nd(at, images, [number, *shape]), few['mask'] * there

        whole = lambda: (images, few['mask'])
        images, mask = tf.cond(tf.size(rows) == number, whole, spread)
        return {**few, 'image': tf.ensure_shape(images, [None, *shape]), 'mask': mask}

      rows = tf.data.Dataset.from_tensor_slices((tf.range(number), *args))
      good = rows.map(decode).ignore_errors().batch(_FEW)
      none = tf.data.Dataset.from_tensors(
        (tf.zeros([0], tf.int32), tf.zeros([0, *shape], dtype))
      )
      return good.concatenate(none).take(1).map(fill)

    dataset = dataset.interleave(
      _as_it_is(together),
      cycle_length=2 * (self._workers or os.cpu_count() or 1),
      num_parallel_calls=self._parallel,
      deterministic=True,
    )
    # Each few are of one batch: they are put together, never divided.
    return dataset.rebatch(self.batch_size, drop_remainder=True)

  @property
  def _parallel(self):
    return self._workers or lazy_tf.load().data.AUTOTUNE

  def diagnose(self, position: int) -> str:
    """Returns why the image at a position was masked, by trying once more."""
    tf = lazy_tf.load()
    index = self._order.indices(np.array([position]))
    example = self._source.read(index)[0]
    if 'error' in example:
      return example['error']
    try:
      data, orientation = self._probe(example)
      u = philox.uniforms(self._seed, [position], self._preprocess.draws)[0]
      self._preprocess.encoded(tf.constant(data), tf.constant(orientation), u)
    except ValueError as error:  # BadImage, or an op that does not fit
      return str(error)
    except tf.errors.OpError as error:
      return f'broken: {error.message.splitlines()[0][:200]}'
    return 'could not be read when its batch was made, but can now'
