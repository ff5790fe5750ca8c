"""From positions to NumPy batches, through tf.data."""

import atexit
import contextlib
import functools
import itertools
import re
import threading
import weakref
from collections.abc import Iterator

import numpy as np

from vit_jax.data import batching, lazy_tf, philox
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.sources.base import Source
from vit_jax.errors import BadImage, UserError

# TensorFlow's errors contain '{{function_node ...}} ' and ' [Op:DecodeImage] name: '.
_OPS_NOTES = re.compile(r'\{\{.*?\}\} ?| ?\[Op:\w+\]( name: ?)?')

# Bytes in a chunk of arrays.
_ARRAY_CHUNK_BYTES = 1 << 24

# TensorFlow's threads call Python: they must be idle before the interpreter ends, or
# both wait for each other forever.
_STREAMS: weakref.WeakSet = weakref.WeakSet()
_EXITING = threading.Event()


@atexit.register
def _close_streams() -> None:
  _EXITING.set()
  for stream in list(_STREAMS):
    with contextlib.suppress(ValueError):  # in use by another thread: it will end
      stream.close()


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
    self._preprocess = preprocess
    self._order = order
    self._num_classes = num_classes
    self._seed = seed
    self.batch_size = batch_size
    self._workers = workers
    self._prefetch = prefetch
    self._chunk = batching.CHUNK
    if not preprocess.one_by_one:
      size = int(np.prod(source.image_shape))
      self._chunk = max(1, _ARRAY_CHUNK_BYTES // size)
    self._starting = threading.Lock()
    self._start: tuple = ()

  def batches(self, positions: Iterator[np.ndarray]) -> Iterator[dict]:
    """Yields a batch for each array of positions, int64 [batch_size].

    A batch has the features, 'mask' float32, 'index' and 'position' int64 [batch_size].
    Close the iterator to stop its threads; at the interpreter's exit all are closed.
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

  @functools.cached_property
  def _dataset(self):
    """Made once: tracing its functions takes longer than a small evaluation."""
    tf = lazy_tf.load()
    dataset = tf.data.Dataset.from_generator(
      self._chunks, output_signature=self._signature
    )
    args = self._preprocess, self.batch_size, self._workers
    if self._preprocess.one_by_one:
      dataset = batching.one_by_one(dataset.prefetch(2), *args)
    else:
      dataset = batching.as_arrays(dataset, *args)
    options = tf.data.Options()
    options.deterministic = True
    # Its thread sleeps for up to a minute at a time, and tf.data may wait for it where an
    # iterator is closed (TensorFlow 2.21): at a run's end the other processes would give
    # up. Without it AUTOTUNE means all threads of the pool, from the start.
    options.autotune.enabled = False
    if self._workers:
      options.threading.private_threadpool_size = self._workers
    return dataset.prefetch(self._prefetch).with_options(options)

  @property
  def _signature(self) -> dict:
    tf = lazy_tf.load()
    out = {
      name: tf.TensorSpec([None, *shape], tf.string if dtype is None else dtype)
      for name, (shape, dtype) in self._preprocess.inputs.items()
    }
    if self._preprocess.label is not None:
      label = self._preprocess.label
      out['label'] = tf.TensorSpec([None, *label.shape], label.dtype)
    out['mask'] = tf.TensorSpec([None], tf.float32)
    out['u'] = tf.TensorSpec([None, sum(self._preprocess.draws)], tf.float32)
    return out | {key: tf.TensorSpec([None], tf.int64) for key in ('index', 'position')}

  def _chunks(self):
    positions, failure = self._start
    # TensorFlow would turn any exception into text: keep it, and end the stream.
    try:
      for batch in positions:
        for start in range(0, len(batch), self._chunk):
          if _EXITING.is_set():
            return
          yield self._read(batch[start : start + self._chunk])
    except Exception as error:
      failure.append(error)

  def _read(self, positions: np.ndarray) -> dict:
    """Returns a chunk, see `self._signature`."""
    indices = self._order.indices(positions)
    real = np.flatnonzero(indices >= 0)
    examples = self._source.read_at(positions[real], indices[real])
    rows, at = [], []  # examples that can be read, and their places in the chunk
    for i, example in zip(real.tolist(), examples, strict=True):
      if 'error' not in example:
        # `diagnose` finds the reason when the batch is used.
        with contextlib.suppress(BadImage):
          rows.append(self._preprocess.row(example, indices[i]))
          at.append(i)
    spread = functools.partial(_spread, number=len(positions))
    chunk = {
      name: spread(_stacked([row[name] for row in rows], shape, dtype), at)
      for name, (shape, dtype) in self._preprocess.inputs.items()
    }
    labels = [example.get('label') for example in examples]
    self._check_labels(labels, indices[real])
    if self._preprocess.label is not None:
      weights = [example.get('weight') for example in examples]
      chunk['label'] = spread(self._preprocess.label(labels, weights), real)
    return chunk | {
      'mask': spread(np.ones(len(at), np.float32), at),
      'u': philox.uniforms(self._seed, positions, self._preprocess.draws),
      'index': indices,
      'position': positions,
    }

  def _check_labels(self, labels, indices) -> None:
    several = [label for label in labels if label is not None]
    if not several:
      return
    # One part of a mixture may have one label an image where another has several.
    if any(np.ndim(label) for label in several if not isinstance(label, int)):
      every = np.concatenate([np.atleast_1d(label) for label in several])
    else:
      every = np.array(several)
    if np.all((every >= 0) & (every < self._num_classes)):
      return
    for label, index in zip(labels, indices, strict=True):
      for one in () if label is None else np.atleast_1d(label):
        if not 0 <= one < self._num_classes:
          raise UserError(
            f'{self._source.name_of(index)} has label {one}, but num_classes='
            f'{self._num_classes} allows 0 to {self._num_classes - 1}.'
          )

  def diagnose(self, position: int) -> str:
    """Returns the reason why the image at a position was masked, by reading it again."""
    tf = lazy_tf.load()
    (index,) = self._order.indices(np.array([position]))
    (example,) = self._source.read(np.array([index]))
    if 'error' in example:
      return example['error']
    try:
      row = self._preprocess.row(example, index)
      u = philox.uniforms(self._seed, [position], self._preprocess.draws)[0]
      inputs = self._preprocess.inputs.items()
      self._preprocess({k: tf.constant(row[k], dtype) for k, (_, dtype) in inputs}, u)
    except ValueError as error:  # BadImage, or an op that does not fit
      return str(error)
    except tf.errors.OpError as error:
      line = error.message.splitlines()[0]
      return f'broken: {_OPS_NOTES.sub("", line)[:200]}'
    return 'could not be read when its batch was made, but can now'


def _stacked(values: list, shape: tuple, dtype: np.dtype | None) -> np.ndarray:
  """Returns values of one shape, or of different lengths, as one array [n, *shape].

  Where the shape begins with None, each is followed by zeros up to the longest. Bytes
  (dtype None) are objects.
  """
  if shape[:1] == (None,):
    longest = max(map(len, values), default=0)
    out = np.zeros((len(values), longest, *shape[1:]), dtype)
    for row, value in zip(out, values, strict=True):
      row[: len(value)] = value
    return out
  if dtype is None:
    return np.array(values, object)
  if not values:
    return np.zeros((0, *shape), dtype)
  return np.stack(values).astype(dtype, copy=False)


def _spread(values: np.ndarray, at, number: int) -> np.ndarray:
  """Returns [number, ...] with values [n, ...] at `at`, zeros or b'' elsewhere."""
  if len(values) == number:
    return values
  shape = (number, *values.shape[1:])
  text = values.dtype == object
  out = np.full(shape, b'', object) if text else np.zeros(shape, values.dtype)
  out[at] = values
  return out
