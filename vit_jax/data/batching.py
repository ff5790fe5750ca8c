"""From a data set of chunks to one of batches: the part of reading that is TensorFlow's.

A chunk is a few examples as `Reader` has read them, {name: [n, ...]}: what ops take
(`Preprocess.inputs`, and 'u'), and what goes with it into the batch untouched ('label',
'mask', 'index', 'position').
"""

from vit_jax.data import lazy_tf
from vit_jax.data.preprocess import Preprocess

# Examples in a chunk that ops see one by one, all in one thread: enough to hide what a data
# set of their own costs (3 ms), few enough not to delay the first batch.
CHUNK = 64


def as_arrays(dataset, preprocess: Preprocess, batch_size: int, workers: int | None):
  """Arrays of one shape: ops see a chunk at once, ten times faster for small images."""

  def transform(chunk):
    features, u = {k: chunk.pop(k) for k in preprocess.inputs}, chunk.pop('u')
    return {**chunk, **preprocess.arrays(features, u)}

  dataset = dataset.map(_as_it_is(transform), _parallel(workers), deterministic=True)
  return dataset.rebatch(batch_size)


def one_by_one(dataset, preprocess: Preprocess, batch_size: int, workers: int | None):
  """Encoded images: ops see one, and an error costs that one alone.

  (`ignore_errors` on the whole would shift every later example.)

    chunks     [A: 64 examples]  [B]   [C] ...
                      |           |     |    several at a time, each in a thread, their
                      v           v     v    results in order
    A's rows   1 2 3 4 5 ... 64  ...   ...
               | | x | |     |     `run`: decode, ops. 3 fails: it is dropped, but each
               v v   v v     v     of the others knows its row
    together   1 2   4 5 ... 64
    `fill`     1 2 0 4 5 ... 64    a blank in row 3, with mask 0
                      |           |     |
    batches    [A, B, C, ...] [...]          never a chunk in two batches
  """
  tf = lazy_tf.load()
  spec = preprocess.spec
  ops = preprocess.traced()

  def run(row, features, u):
    return row, ops(features, u)

  def of_chunk(chunk):
    number = tf.size(chunk['mask'])
    features = {name: chunk.pop(name) for name in preprocess.inputs}

    def fill(rows, done):
      def spread():
        at = tf.cast(rows[:, None], tf.int32)
        there = tf.scatter_nd(at, tf.ones_like(rows, tf.float32), [number])
        blank = {
          name: tf.scatter_nd(at, x, [number, *spec[name][0]])
          for name, x in done.items()
        }
        return blank, chunk['mask'] * there

      whole = lambda: (done, chunk['mask'])
      features, mask = tf.cond(tf.size(rows) == number, whole, spread)
      for name, (shape, _) in spec.items():
        features[name] = tf.ensure_shape(features[name], [None, *shape])
      return {**chunk, **features, 'mask': mask}

    rows = tf.data.Dataset.from_tensor_slices(
      (tf.range(number), features, chunk.pop('u'))
    )
    done = rows.map(run).ignore_errors().batch(tf.cast(number, tf.int64))
    blank = {
      name: tf.zeros([0, *shape], dtype) for name, (shape, dtype) in spec.items()
    }
    none = tf.data.Dataset.from_tensors((tf.zeros([0], tf.int32), blank))
    return fill(*done.concatenate(none).take(1).get_single_element())

  dataset = dataset.map(_as_it_is(of_chunk), _parallel(workers), deterministic=True)
  return dataset.rebatch(batch_size, drop_remainder=True)


def _parallel(workers: int | None):
  return workers or lazy_tf.load().data.AUTOTUNE


def _as_it_is(function):
  # AutoGraph would translate the source of every op, which holds no Python control
  # flow on tensors: most of the time to the first batch.
  return lazy_tf.load().autograph.experimental.do_not_convert(function)
