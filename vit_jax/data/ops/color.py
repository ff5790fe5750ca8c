"""Changes the colours of one uint8 image [H, W, 3], in TensorFlow.

Each function gives the same levels as its namesake in Pillow. Like Pillow they compute in
integers, look levels up in tables of 256 entries computed in float64, and blend in float32.
Where big_vision differs, there is a parameter. Factors are numbers or float32 []. No
function sums floats over pixels, because the order would depend on the number of threads.
"""

from vit_jax.data.lazy_tf import tf


def autocontrast(image, single: bool = False):
  """Stretches each channel linearly to [0, 255], truncated; a constant channel stays.

  Args:
    single: compute in float32, not in Pillow's float64; some results differ by one level.
  """
  dtype = tf.float32 if single else tf.float64
  # Reduce over the rows first, because their memory is contiguous.
  low = tf.cast(tf.reduce_min(tf.reduce_min(image, 0), 0), dtype)
  high = tf.cast(tf.reduce_max(tf.reduce_max(image, 0), 0), dtype)
  plain = high == low
  scale = tf.where(plain, tf.ones([], dtype), 255 / (high - low))
  offset = tf.where(plain, tf.zeros([], dtype), -low * scale)
  # Compute on rows of 3 W numbers, because broadcasting along a last axis of 3 is slow.
  rows = tf.cast(_rows(image), dtype)
  repeats = [tf.shape(image)[1]]
  rows = _clip(rows * tf.tile(scale, repeats) + tf.tile(offset, repeats))
  return tf.reshape(rows, tf.shape(image))


def equalize(image):
  """Spreads the levels of each channel so that its histogram becomes as even as possible.

  A channel in which fewer than 255 pixels are below the highest level stays as it is.
  """
  indices = _indices(image)
  # Without weights, `Bincount` counts.
  none = tf.zeros([0], tf.int32)
  counts = tf.raw_ops.Bincount(
    arr=tf.reshape(indices, [-1]), size=tf.constant(768), weights=none
  )
  counts = tf.reshape(counts, [3, 256])
  # The highest level that occurs. Pillow computes the step without its pixels.
  levels = tf.range(256)
  last = tf.reduce_max(tf.where(counts > 0, levels, 0), 1)
  total = tf.reduce_sum(counts, 1)
  step = (total - tf.gather(counts, last, batch_dims=1))[:, None] // 255
  below = tf.cumsum(counts, 1, exclusive=True)
  table = tf.minimum((below + step // 2) // tf.maximum(step, 1), 255)
  table = tf.where(step > 0, table, levels)
  return _look_up(tf.cast(table, tf.uint8), indices)


def invert(image):
  """Subtracts each level of a uint8 image from 255, as `PIL.ImageOps.invert` does."""
  return tf.bitwise.invert(image)


def posterize(image, bits):
  """Keeps the `bits` highest bits of each level. `bits` is int or int32 [], from 0 to 8."""
  cleared = tf.bitwise.left_shift(1, 8 - bits)
  return tf.bitwise.bitwise_and(image, tf.cast(256 - cleared, tf.uint8))


def solarize(image, threshold):
  """Inverts the levels from `threshold` on, int or int32 [] from 0 to 256."""
  some = tf.cast(threshold < 256, tf.uint8)
  high = tf.cast(image >= tf.cast(tf.minimum(threshold, 255), tf.uint8), tf.uint8)
  # XOR is several times as fast as `tf.where`.
  return tf.bitwise.bitwise_xor(image, some * high * 255)


def solarize_add(image, addition):
  """Adds `addition`, int or int32 [], to the levels below 128, up to 255."""
  low = tf.cast(image < tf.constant(128, tf.uint8), tf.uint8)
  added = tf.cast(tf.minimum(addition, 255), tf.uint8)
  return image + tf.minimum(low * added, 255 - image)


def grey(image):
  """Returns the luma of ITU-R BT.601-2, int32 [H, W], rounded as in Pillow's mode L."""
  r, g, b = tf.unstack(tf.cast(image, tf.int32), axis=-1)
  return tf.bitwise.right_shift(19595 * r + 38470 * g + 7471 * b + 0x8000, 16)


def grey_of_tf(image):
  """Returns `tf.image.rgb_to_grayscale` of uint8, int32 [H, W], in exact arithmetic.

  TensorFlow weights the channels, multiplies by 255.5 / 255 and truncates. It does so in
  float32, which differs by one level where the exact value is within 1e-4 of an integer.
  """
  r, g, b = tf.unstack(tf.cast(image, tf.int32), axis=-1)
  return (2989 * r + 5870 * g + 1140 * b) * 511 // 5_100_000


def _mean_grey(image):
  """Returns int32 []: the mean of `grey`, rounded."""
  levels = tf.cast(grey(image), tf.int64)
  count = tf.size(levels, tf.int64)
  return tf.cast((2 * tf.reduce_sum(levels) + count) // (2 * count), tf.int32)


def color(image, factor, to_grey=grey):
  """Blends with the grey image: factor 0 gives grey, 1 the image, 2 twice the colour."""
  target = tf.cast(to_grey(image), tf.float32)
  return _clip(_blend(tf.repeat(target[..., None], 3, -1), image, factor))


def contrast(image, factor, target=None):
  """Blends with one level of grey: `target`, int32 [], or the mean of the image."""
  target = _mean_grey(image) if target is None else target
  return _clip(_blend(tf.cast(target, tf.float32), image, factor))


def brightness(image, factor):
  """Multiplies the levels, which blends with black."""
  return _clip(_blend(0.0, image, factor))


def sharpness(image, factor, truncate: bool = False):
  """Blends with the image smoothed by (1 1 1, 1 5 1, 1 1 1) / 13; the border stays.

  Args:
    truncate: whether to truncate the smoothed levels instead of rounding them.
  """
  # In a row of 3 W numbers, the neighbours of a pixel are 3 places away.
  rows = tf.cast(_rows(image), tf.float32)
  sums = rows[:-2] + rows[1:-1] + rows[2:]
  sums = sums[:, :-6] + sums[:, 3:-3] + sums[:, 6:]
  inner = rows[1:-1, 3:-3]
  # The sums are integers, so the argument of floor is at least 1/26 away from an integer:
  # rounding errors cannot change the result.
  smooth = tf.floor((sums + 4 * inner + (0.5 if truncate else 6.5)) / 13)
  inner = _blend(smooth, inner, factor)
  inner = tf.concat([rows[1:-1, :3], inner, rows[1:-1, 3:][:, -3:]], 1)
  rows = tf.concat([rows[:1], inner, rows[1:][-1:]], 0)
  return _clip(tf.reshape(rows, tf.shape(image)))


def _blend(target, image, factor):
  return target + factor * (tf.cast(image, tf.float32) - target)


def _clip(x):
  """Clips to [0, 255] and truncates, as Pillow's `Image.blend` does."""
  return tf.cast(tf.minimum(tf.maximum(x, 0), 255), tf.uint8)


def _rows(image):
  """Reshapes an image [H, W, 3] to [H, 3 W]."""
  return tf.reshape(image, [tf.shape(image)[0], 3 * tf.shape(image)[1]])


def _indices(image):
  """Returns int32 [H, 3 W]: the index of each level in a flat table [3, 256]."""
  rows = tf.cast(_rows(image), tf.int32)
  return rows + tf.tile([0, 256, 512], [tf.shape(image)[1]])


def _look_up(table, indices):
  """Looks up `_indices` in a table uint8 [3, 256]; returns uint8 [H, W, 3]."""
  out = tf.gather(tf.reshape(table, [-1]), indices)
  return tf.reshape(out, [tf.shape(indices)[0], -1, 3])
