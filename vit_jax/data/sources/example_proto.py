"""An image and its labels out of the bytes of a tf.train.Example; no TensorFlow."""

import functools
from collections.abc import Collection

import numpy as np

from vit_jax.errors import UserError, did_you_mean

Values = list[bytes] | np.ndarray


@functools.cache
def _example():
  # TFDS brings the compiled message along, and needs no TensorFlow for it. Measured:
  # 24 us for an image of 50 KB and three labels; a parser in Python took 74.
  from tensorflow_datasets.proto import tf_example_pb2

  return tf_example_pb2.Example


def parse(record: bytes, keys: Collection[str] | None = None) -> dict[str, Values]:
  """Returns the features of a serialised tf.train.Example.

  Args:
    record: the bytes of one example (tensorflow/core/example/example.proto).
    keys: the features to return; None: all.

  Returns:
    {name: values}: a list of bytes, float32 [n] or int64 [n]; a feature without a value
    is an empty list. Those not in the record are not in the dict.

  Raises:
    ValueError: if the bytes are not a tf.train.Example.
  """
  from google.protobuf.message import DecodeError

  try:
    features = _example().FromString(record).features.feature
    wanted = list(features) if keys is None else [k for k in keys if k in features]
    return {key: _values(features[key]) for key in wanted}
  except (DecodeError, UnicodeDecodeError) as error:
    raise ValueError(f'no tf.train.Example: {error}') from None


def _values(feature) -> Values:
  kind = feature.WhichOneof('kind')
  if kind is None:
    return []
  values = getattr(feature, kind).value
  dtype = {'float_list': np.float32, 'int64_list': np.int64}.get(kind)
  return list(values) if dtype is None else np.array(values, dtype)


class Fields:
  """The features that hold an image, its labels and, perhaps, their weights.

  Attributes:
    keys: their names.
    label_key: that of the labels.
  """

  def __init__(
    self, image_key: str, label_key: str, weight_key: str | None, label_offset: int
  ):
    self._image_key, self.label_key = image_key, label_key
    self._weight_key, self._offset = weight_key, label_offset
    self.keys = tuple(filter(None, (image_key, label_key, weight_key)))

  def read(self, record: bytes) -> tuple[bytes, np.ndarray, np.ndarray | None]:
    """Returns (encoded image, labels int64 [n], their weights float32 [n] or None).

    Raises:
      ValueError: if the record does not hold them: why, for a person.
    """
    try:
      features = parse(record, self.keys)
    except ValueError as error:
      raise ValueError(f'broken record: {error}') from None
    image = features.get(self._image_key, [])
    if len(image) != 1 or not isinstance(image[0], bytes):
      raise ValueError(f'{self._image_key} holds no image')
    labels = features.get(self.label_key, [])
    if len(labels) and getattr(labels, 'dtype', None) != np.int64:
      raise ValueError(f'{self.label_key} holds no integers')
    labels = np.asarray(labels, np.int64) + self._offset
    weights = features.get(self._weight_key, []) if self._weight_key else []
    if not len(weights):
      return image[0], labels, None
    weights = np.asarray(weights)
    if weights.dtype != np.float32:
      raise ValueError(f'{self._weight_key} holds no floats')
    if len(weights) != len(labels) or not np.all(np.isfinite(weights)):
      raise ValueError(f'{len(labels)} labels with weights {weights.tolist()}')
    return image[0], labels, weights

  def check(self, name: str, known: dict[str, Values]) -> None:
    """Refuses keys that are not among the known features, or hold something else.

    Raises:
      UserError: naming the source, what there is, and the option to set.
    """
    for option, key, kind in (
      ('image_key', self._image_key, bytes),
      ('label_key', self.label_key, np.int64),
      ('weight_key', self._weight_key, np.float32),
    ):
      if key is None:
        continue
      if key not in known:
        raise UserError(
          f'{name}: records have no feature {key!r}: they have {sorted(known)}. Set '
          f'data.source_options={{{option!r}: ...}}.{did_you_mean(key, known)}'
        )
      if len(known[key]) and not isinstance(known[key][0], kind):
        raise UserError(
          f'{name}: {option}={key!r} holds {type(known[key][0]).__name__}; expected '
          f'{kind.__name__}. Set data.source_options={{{option!r}: ...}}.'
        )
