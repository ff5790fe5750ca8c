"""A string pipeline applied to the images of one source."""

import functools

import numpy as np

from vit_jax.data import lazy_tf
from vit_jax.data.ops import augment, registry
from vit_jax.data.ops import decode as images_lib
from vit_jax.data.sources.base import Source
from vit_jax.errors import UserError


class Preprocess:
  """The ops of `pp`, split into those of the host, of the labels, of the device.

  Attributes:
    on_host: image ops run by TensorFlow. A last `value_range` on uint8 images is not
      among them: uint8 travels to the device, a quarter of the bytes.
    on_device: that `ops.ValueRange`, or None.
    label: the label op, or None.
    draws: how many random numbers each random op takes, in order.
  """

  def __init__(self, pp: str, source: Source):
    """Raises UserError where pp is wrong, or does not fit the source."""
    parsed = registry.parse(pp)
    labels = [op for op in parsed if op.kind == 'label']
    image = [op for op in parsed if op.kind == 'image']
    if len(labels) > 1:
      raise UserError(f'pp {pp!r}: more than one op for labels: {labels[1].text}.')
    names = [op.name for op in image]
    if source.image_shape is None and names[:1] != ['decode']:
      raise UserError(
        f"pp {pp!r}: {source.name} holds encoded images: begin with 'decode'."
      )
    registry.check_images(pp, names)
    self.pp = pp
    self.label = labels[0].apply if labels else None
    self.on_device = image.pop().apply if names[-1] == 'value_range' else None
    self.on_host = image
    # Never nothing: TensorFlow 2.21's unbatch crashes on rows of no elements.
    self.draws = tuple(op.draws for op in image if op.draws) or (1,)
    self._source = source

  def arrays(self, images, u):
    """Runs the host's ops on [..., H, W, C] and u [..., sum(draws)]."""
    return self._run(self.on_host, images, u)

  def encoded(self, data, orientation, u):
    """Runs the host's ops on one encoded image: string, int32 [], u [sum(draws)]."""
    decode, *rest = self.on_host
    args = (data, orientation, decode.apply.channels, decode.apply.precise)
    if rest and isinstance(rest[0].apply, augment.InceptionCrop):
      crop, *rest = rest
      box = lambda h, w: crop.apply.box(h, w, u[: crop.draws])
      image = crop.apply.finish(images_lib.decode_and_crop(*args, box))
      return self._run(rest, image, u[crop.draws :])
    return self._run(rest, images_lib.decode(*args), u)

  def _run(self, todo, images, u):
    start = 0
    for op in todo:
      images = op.apply(images, u[..., start : start + op.draws])
      start += op.draws
    return images

  @functools.cached_property
  def image_spec(self) -> tuple[tuple[int, int, int], np.dtype]:
    """Shape [H, W, C] and dtype of an image that leaves the host.

    Raises:
      UserError: if the ops do not fit the images, or leave their size open.
    """
    tf = lazy_tf.load()
    u = tf.TensorSpec([sum(self.draws)], tf.float32)
    try:
      if self._source.image_shape is None:
        specs = (tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int32), u)
        graph = tf.function(self.encoded, autograph=False).get_concrete_function(*specs)
      else:
        specs = (tf.TensorSpec(self._source.image_shape, tf.uint8), u)
        graph = tf.function(self.arrays, autograph=False).get_concrete_function(*specs)
    except (ValueError, tf.errors.InvalidArgumentError) as error:
      reason = str(error).strip().splitlines()[-1].strip()
      raise UserError(
        f'pp {self.pp!r} does not fit the images of {self._source.name}: {reason}'
      ) from None
    out = graph.structured_outputs
    if not out.shape.is_fully_defined():
      raise UserError(
        f'pp {self.pp!r} leaves images of different sizes {out.shape}, which make no '
        'batch: add resize(size), central_crop(size) or another crop.'
      )
    return tuple(out.shape), out.dtype.as_numpy_dtype
