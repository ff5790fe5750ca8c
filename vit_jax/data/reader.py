"""Makes NumPy batches of the examples at given positions, through tf.data.

A chunk is a dict {name: [n, ...]} of a few examples. It holds the inputs of the ops
(`Preprocess.inputs` and 'u') and the features that go into the batch unchanged ('label',
'mask', 'index', 'position').
"""

import atexit
import contextlib
import functools
import itertools
import re
import threading
import weakref
from collections.abc import Iterator

import numpy as np

from vit_jax.data import philox
from vit_jax.data.lazy_tf import tf
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.sources.base import Source
from vit_jax.errors import BadImage, UserError

# Parts of TensorFlow's errors to remove: '{{function_node ...}} ', ' [Op:DecodeImage] name: '.
_OPS_NOTES = re.compile(r'\{\{.*?\}\} ?| ?\[Op:\w+\]( name: ?)?')

# Number of encoded images in a chunk. One thread processes a chunk as a `tf.data` data set
# of its own. A chunk is large enough to hide the cost of that data set (3 ms), and small
# enough not to delay the first batch.
CHUNK = 64
# Number of bytes in a chunk of arrays.
_ARRAY_CHUNK_BYTES = 1 << 24

# TensorFlow's threads call Python. They must be idle before the interpreter ends, or they
# and the interpreter wait for each other forever.
_STREAMS: weakref.WeakSet = weakref.WeakSet()
_EXITING = threading.Event()


@atexit.register
def _close_streams() -> None:
  _EXITING.set()
  for stream in list(_STREAMS):
    # A ValueError means that another thread uses the stream, which will end by itself.
    with contextlib.suppress(ValueError):
      stream.close()


class Reader:
  """Makes one host's batches, given the positions of its examples in the training order."""

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
  ):
    """Prepares reading; reads nothing yet.

    Args:
      order: maps positions to indices; -1 is padding.
      batch_size: number of examples in this host's part of a batch.
    """
    self._source, self._preprocess, self._order = source, preprocess, order
    self._num_classes, self._seed, self.batch_size = num_classes, seed, batch_size
    self._workers = workers
    self._chunk = CHUNK
    if not preprocess.one_by_one:
      self._chunk = max(1, _ARRAY_CHUNK_BYTES // int(np.prod(source.image_shape)))
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
    # The data set calls `_chunks`, which takes `_start`, before it makes the first batch.
    with self._starting:
      self._start = (positions, failure)
      batches = self._dataset.as_numpy_iterator()
      first = list(itertools.islice(batches, 1))
    yield from first
    yield from batches
    if failure:
      raise failure[0]

  # --- tf.data -----------------------------------------------------------------------

  @functools.cached_property
  def _dataset(self):
    """The `tf.data` data set, made once, because tracing takes longer than a small evaluation."""
    dataset = tf.data.Dataset.from_generator(
      self._chunks, output_signature=self._signature
    )
    one_by_one = self._preprocess.one_by_one
    run = self._run_one_by_one() if one_by_one else self._run_at_once
    if one_by_one:
      dataset = dataset.prefetch(2)
    # AutoGraph would translate the source code of every op, which takes most of the time
    # before the first batch. It is not needed, because ops have no Python control flow.
    run = tf.autograph.experimental.do_not_convert(run)
    workers = self._workers or tf.data.AUTOTUNE
    dataset = dataset.map(run, workers, deterministic=True)
    dataset = dataset.rebatch(self.batch_size, drop_remainder=one_by_one)
    options = tf.data.Options()
    options.deterministic = True
    # The thread of autotune sleeps for up to a minute at a time, and tf.data may wait for
    # it when an iterator is closed (TensorFlow 2.21). At the end of a run, the other
    # processes would not wait that long. Without autotune, AUTOTUNE means all threads of
    # the pool from the start.
    options.autotune.enabled = False
    if self._workers:
      options.threading.private_threadpool_size = self._workers
    return dataset.prefetch(2).with_options(options)

  def _run_at_once(self, chunk: dict) -> dict:
    """Runs the ops on all examples of a chunk at once, ten times faster for small images."""
    features = {k: chunk.pop(k) for k in self._preprocess.inputs}
    arrays = self._preprocess.arrays(features, chunk.pop('u'))
    return {**chunk, **arrays}

  def _run_one_by_one(self):
    """Returns a function that runs the ops on each example of a chunk.

    An error masks that example alone. (`ignore_errors` on the whole data set would shift
    every later example.)

      chunks     [A: 64 examples]  [B]   [C] ...
                        |           |     |    several at a time, each in a thread, their
                        v           v     v    results in order
      A's rows   1 2 3 4 5 ... 64  ...   ...
                 | | x | |     |     `run`: decode, ops. 3 fails: it is dropped, but each
                 v v   v v     v     of the others knows its row
      joined     1 2   4 5 ... 64
      `fill`     1 2 0 4 5 ... 64    a blank in row 3, with mask 0
                        |           |     |
      batches    [A, B, C, ...] [...]          never a chunk in two batches
    """
    spec, ops = self._preprocess.spec, self._preprocess.trace()
    inputs = list(self._preprocess.inputs)

    def fill(rows, done, mask):
      number = tf.size(mask)

      def spread():
        at = tf.cast(rows[:, None], tf.int32)
        shape = lambda name: [number, *spec[name][0]]
        blank = {name: tf.scatter_nd(at, x, shape(name)) for name, x in done.items()}
        there = tf.scatter_nd(at, tf.ones_like(rows, tf.float32), [number])
        return blank, mask * there

      return tf.cond(tf.size(rows) == number, lambda: (done, mask), spread)

    def run_chunk(chunk):
      number = tf.size(chunk['mask'])
      features = {name: chunk.pop(name) for name in inputs}
      rows = (tf.range(number), features, chunk.pop('u'))
      rows = tf.data.Dataset.from_tensor_slices(rows)
      done = rows.map(lambda row, features, u: (row, ops(features, u))).ignore_errors()
      done = done.batch(tf.cast(number, tf.int64))
      blank = {k: tf.zeros([0, *shape], dtype) for k, (shape, dtype) in spec.items()}
      none = tf.data.Dataset.from_tensors((tf.zeros([0], tf.int32), blank))
      rows, done = done.concatenate(none).take(1).get_single_element()
      features, mask = fill(rows, done, chunk['mask'])
      for name, (shape, _) in spec.items():
        features[name] = tf.ensure_shape(features[name], [None, *shape])
      return {**chunk, **features, 'mask': mask}

    return run_chunk

  @property
  def _signature(self) -> dict:
    out = {
      name: tf.TensorSpec([None, *shape], tf.string if dtype is None else dtype)
      for name, (shape, dtype) in self._preprocess.inputs.items()
    }
    if (label := self._preprocess.label) is not None:
      out['label'] = tf.TensorSpec([None, *label.shape], label.dtype)
    out['mask'] = tf.TensorSpec([None], tf.float32)
    out['u'] = tf.TensorSpec([None, sum(self._preprocess.draws)], tf.float32)
    return out | {key: tf.TensorSpec([None], tf.int64) for key in ('index', 'position')}

  # --- NumPy -------------------------------------------------------------------------

  def _chunks(self):
    positions, failure = self._start
    # TensorFlow would turn any exception into text: keep the exception, and end the stream.
    try:
      for batch in positions:
        for start in range(0, len(batch), self._chunk):
          if _EXITING.is_set():
            return
          yield self._read(batch[start : start + self._chunk])
    except Exception as error:
      failure.append(error)

  def _read(self, positions: np.ndarray) -> dict:
    """Returns a chunk, see `_signature`."""
    indices = self._order.indices(positions)
    real = np.flatnonzero(indices >= 0)
    examples = self._source.read_at(positions[real], indices[real])
    # The examples that can be read, and their places in the chunk.
    rows, at = [], []
    u = philox.uniforms(self._seed, positions, self._preprocess.draws)
    for i, example in zip(real.tolist(), examples, strict=True):
      if 'error' not in example:
        # `diagnose` finds the reason later, when the batch is used.
        with contextlib.suppress(BadImage):
          rows.append(self._preprocess.row(example, u[i]))
          at.append(i)
    spread = functools.partial(_spread, number=len(positions))
    chunk = {
      name: spread(_stack([row[name] for row in rows], shape, dtype), at)
      for name, (shape, dtype) in self._preprocess.inputs.items()
    }
    labels = [example.get('label') for example in examples]
    self._check_labels(labels, indices[real])
    if self._preprocess.label is not None:
      weights = [example.get('weight') for example in examples]
      chunk['label'] = spread(self._preprocess.label(labels, weights), real)
    return chunk | {
      'mask': spread(np.ones(len(at), np.float32), at),
      'u': u,
      'index': indices,
      'position': positions,
    }

  def _check_labels(self, labels, indices) -> None:
    for label, index in zip(labels, indices, strict=True):
      for one in () if label is None else np.atleast_1d(label).tolist():
        if not 0 <= one < self._num_classes:
          raise UserError(
            f'{self._source.name_of(index)} has label {one}, but num_classes='
            f'{self._num_classes} allows 0 to {self._num_classes - 1}.'
          )

  def diagnose(self, position: int) -> str:
    """Reads the image at a position again and returns the reason why it was masked."""
    (index,) = self._order.indices(np.array([position]))
    (example,) = self._source.read(np.array([index]))
    if 'error' in example:
      return example['error']
    try:
      u = philox.uniforms(self._seed, [position], self._preprocess.draws)[0]
      row = self._preprocess.row(example, u)
      inputs = self._preprocess.inputs.items()
      self._preprocess({k: tf.constant(row[k], dtype) for k, (_, dtype) in inputs}, u)
    except ValueError as error:  # BadImage, or an op that does not fit
      return str(error)
    except tf.errors.OpError as error:
      line = error.message.splitlines()[0]
      return f'broken: {_OPS_NOTES.sub("", line)[:200]}'
    return 'could not be read when its batch was made, but can now'


def _stack(values: list, shape: tuple, dtype: np.dtype | None) -> np.ndarray:
  """Stacks values into one array [n, *shape].

  If the shape begins with None, pads the values with zeros to the longest. Bytes (dtype
  None) are stacked as objects.
  """
  if dtype is None:
    return np.array(values, object)
  if shape[:1] == (None,):
    out = np.zeros((len(values), max(map(len, values), default=0), *shape[1:]), dtype)
    for row, value in zip(out, values, strict=True):
      row[: len(value)] = value
    return out
  if not values:
    return np.zeros((0, *shape), dtype)
  return np.stack(values).astype(dtype, copy=False)


def _spread(values: np.ndarray, at, number: int) -> np.ndarray:
  """Puts values [n, ...] at the rows `at` of a new array [number, ...] of zeros or b''."""
  if len(values) == number:
    return values
  shape = (number, *values.shape[1:])
  text = values.dtype == object
  out = np.full(shape, b'', object) if text else np.zeros(shape, values.dtype)
  out[at] = values
  return out
