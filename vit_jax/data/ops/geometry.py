"""Functions on images [..., H, W, C] that several ops share, in TensorFlow."""

from vit_jax.data.lazy_tf import tf


def resize_to(images, size, method: str, antialias: bool, rounding: str):
  """Resizes to (h, w) with half-pixel centres; for `rounding` see `to_levels`."""
  out = tf.image.resize(images, size, method, antialias=antialias)
  # Only bicubic weights may be negative, and so give values outside of [0, 255].
  return to_levels(out, images.dtype, rounding, clip=method == 'bicubic')


def extend_to_segments(function):
  """Extends a function of images to 'segments' [..., H, W].

  Args:
    function: (images [..., H, W, C], u, resize) -> images. It resizes by calling `resize`,
      which is `resize_to` for images, and for segments takes the nearest pixel.

  Returns:
    An op's function, (features, u) -> features.
  """

  def nearest(images, size, *how):
    del how
    return resize_to(images, size, 'nearest', False, 'nearest')

  def apply(features, u):
    out = {'image': function(features['image'], u, resize_to)}
    if 'segments' in features:
      segments = features['segments'][..., None]
      out['segments'] = function(segments, u, nearest)[..., 0]
    return out

  return apply


def to_levels(images, dtype, rounding: str = 'nearest', clip: bool = True):
  """Converts images computed in float32 to the dtype of the op's input.

  Args:
    rounding: how to convert to uint8. 'truncate' clips and drops the fraction, as
      big_vision does; 'nearest' clips and rounds half to even; 'none' leaves float32,
      unclipped, as vision_transformer does. Float images stay as computed.
    clip: whether values may lie outside of [0, 255], and so have to be clipped.
  """
  if dtype != tf.uint8:
    return tf.cast(images, dtype)
  if rounding == 'none':
    return tf.cast(images, tf.float32)
  # Still uint8: no arithmetic was done, so there is nothing to round.
  if images.dtype == tf.uint8:
    return images
  images = tf.clip_by_value(images, 0, 255) if clip else images
  return tf.cast(tf.round(images) if rounding == 'nearest' else images, tf.uint8)


def each(function, images, u, shape=None, dtype=None):
  """Applies `function(image, u)` to one image, or to each image of a batch.

  Args:
    shape, dtype: shape and dtype of one result; None if they are those of an image.
  """
  if images.shape.rank == 3:
    return function(images, u)
  spec = tf.TensorSpec(shape or images.shape[1:], dtype or images.dtype)
  return tf.map_fn(lambda x: function(*x), (images, u), fn_output_signature=spec)


def height_width(images):
  """Returns (H, W), int32 scalars."""
  shape = tf.shape(images)
  return shape[-3], shape[-2]


def excess(images, height, width, name):
  """Returns how much larger the images are, int32 [2]; raises if they are smaller."""
  message = f'{name}: the image is smaller than {height}x{width}'
  static = images.shape[-3:-1]
  if static.is_fully_defined() and (static[0] < height or static[1] < width):
    raise ValueError(message)
  rest = tf.shape(images)[-3:-1] - tf.constant((height, width))
  with tf.control_dependencies([tf.debugging.assert_non_negative(rest, message)]):
    return tf.identity(rest)


def cut(images, y, x, height: int, width: int):
  """Cuts out the window [..., height, width, C] whose top left corner is (y, x)."""
  out = images[..., y : y + height, x : x + width, :]
  return tf.ensure_shape(out, [*images.shape[:-3], height, width, images.shape[-1]])
