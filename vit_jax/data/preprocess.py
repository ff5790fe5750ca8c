"""Applies a string pipeline to the examples of one source."""

import functools
import itertools

import numpy as np

from vit_jax.data.features import (
  ClassIndex,
  Feature,
  ImageFeature,
  LabelFeature,
  MultiHot,
  TextFeature,
)
from vit_jax.data.image_file import check_size
from vit_jax.data.lazy_tf import tf
from vit_jax.data.ops import decode, registry
from vit_jax.data.sources.base import Source
from vit_jax.errors import BadImage

# Suffix of the input that holds the length of a ragged feature.
_LENGTH = '/length'
_RESERVED = {'mask', 'index', 'position', 'u', 'orientation', 'upright'}
# Cache of `Preprocess.trace`, shared by all pipelines of the process.
_TRACED: dict = {}


class Preprocess:
  """The ops of `pp`, split between the host and the device.

  Attributes:
    on_host: the ops that TensorFlow runs.
    on_device: the last ops, if they may run on the device, see `registry.Op.on_device`.
      `value_range` is one, because uint8 pixels are a quarter of the bytes to copy there.
    label: `ClassIndex`, `MultiHot`, or None if an image as a whole has no label.
    draws: how many random numbers each random op takes, in order.
    inputs: {name: (shape, dtype)} of the example that the ops take; dtype None: encoded
      bytes.
    one_by_one: whether the ops see one example at a time, as encoded images and features of
      different lengths require; otherwise they see arrays of many examples.
  """

  def __init__(self, pp: str, source: Source, num_classes: int):
    """Parses `pp`; raises ValueError if it is wrong or does not fit the source."""
    self.pp, self._source = pp, source
    ops = list(registry.parse(pp))
    names = [op.name for op in ops if 'image' in op.maps]
    if source.image_shape is None and names[:1] != ['decode']:
      raise ValueError(f"{source.name} holds encoded images: begin with 'decode'")
    registry.check_images(names)
    features, label = dict(source.features), source.features.get('label')
    self.label = None
    if isinstance(label, LabelFeature):
      del features['label']
      self.label = MultiHot(num_classes) if label.several else ClassIndex()
    self._tokenize = next((op.apply for op in ops if op.name == 'tokenize'), None)
    if isinstance(features.pop('text', None), TextFeature):
      if self._tokenize:
        assert self._tokenize.tokenizer
        features |= self._tokenize.features
    elif self._tokenize:
      raise ValueError(f'{source.name} has no captions: leave tokenize out')
    self._check_located(ops, features)
    self._others = [k for k, f in features.items() if isinstance(f, Feature)]
    self._ragged = [name for name in self._others if features[name].is_ragged]
    self._pixel_maps = [name for name in self._others if features[name].is_pixel_map]
    assert not {*self._others} & _RESERVED, 'names in use'
    self.inputs = {}
    for name, feature in features.items():
      self.inputs |= self._inputs_of(name, feature)
    self.one_by_one = source.image_shape is None or bool(self._ragged)
    may = lambda op: op.on_device or 'image' not in op.maps
    last = [*itertools.takewhile(may, reversed(ops))]
    self.on_device = [op for op in reversed(last) if op.on_device]
    self.on_host = ops = [op for op in ops if op not in self.on_device]
    self._check_order()
    # A map of labels has the size of the whole image, which then has to be decoded whole.
    self._target = None if self._pixel_maps else registry.target_of_decode(ops)
    # At least one number: TensorFlow 2.21's unbatch crashes on rows of no elements.
    every = [*self.on_host, *self.on_device]
    self.draws = tuple(op.draws for op in every if op.draws) or (1,)
    if self._tokenize:
      before = [op.draws for op in ops[: [op.name for op in ops].index('tokenize')]]
      self._drawn = slice(sum(before), sum(before) + self._tokenize.draws)

  def _check_order(self) -> None:
    images = [op for op in self.on_host if 'image' in op.maps]
    for op in images[:-1]:
      if not callable(op.apply) or 'local' in op.maps:
        raise ValueError(
          f'{images[-1].text} cannot follow {op.text}: put it before, or leave it out'
        )

  def _check_located(self, ops, features) -> None:
    located = [k for k, f in features.items() if isinstance(f, Feature) and f.located]
    for op in ops:
      left = [name for name in located if name not in op.maps]
      if 'image' in op.maps and not op.keeps_positions and left:
        raise ValueError(
          f'{op.text} moves pixels, but not the {" and ".join(left)} of '
          f'{self._source.name}: leave it out, or register it with maps= or '
          'keeps_positions=True'
        )

  def _inputs_of(self, name, feature) -> dict:
    if isinstance(feature, ImageFeature):
      if feature.shape is None:
        header = {'orientation': (), 'upright': (2,)}
        header = {key: (shape, np.dtype(np.int32)) for key, shape in header.items()}
        return {name: ((), None), **header}
      return {name: (feature.shape, np.dtype(np.uint8))}
    if feature.is_pixel_map:
      return {name: ((), None)}
    out = {name: (feature.shape, np.dtype(feature.dtype))}
    if feature.is_ragged:
      out[name + _LENGTH] = (), np.dtype(np.int32)
    return out

  # --- in NumPy ----------------------------------------------------------------------

  def row(self, example: dict, u: np.ndarray) -> dict:
    """Returns the `inputs` of an example; raises BadImage if it cannot be decoded.

    Args:
      u: float32 [sum(draws)], the random numbers.
    """
    if self._tokenize:
      ids = self._tokenize.ids(example.get('text', ()), u[self._drawn])
      example = {**example, **ids}
    row = {name: example[name] for name in ('image', *self._others)}
    row |= {name + _LENGTH: len(example[name]) for name in self._ragged}
    if self._source.image_shape is None:
      check_size(len(example['image']))
      exif = example.get('exif', self._source.exif)
      read = decode.probe(example['image'], exif)
      row['image'], row['orientation'], row['upright'] = read
    for name in self._pixel_maps:
      if (size := row[name].shape) != row['upright']:
        raise BadImage(f'its {name} are {size}, but the image is {row["upright"]}')
      row[name] = row[name].tobytes()
    return row

  # --- in JAX ------------------------------------------------------------------------

  def finish(self, batch: dict) -> dict:
    """Runs the ops on the device on a batch [B, ...], inside jit."""
    batch, start = dict(batch), 0
    u = batch.pop('u', None)
    for op in self.on_device:
      batch = op.on_device(batch, u[:, start : start + op.draws] if op.draws else None)
      start += op.draws
    return batch

  # --- in TensorFlow -----------------------------------------------------------------

  def __call__(self, row: dict, u) -> dict:
    """Runs the host's ops on the tensors of one example.

    Args:
      row: the tensors of `inputs`; a ragged feature may be padded.
      u: float32 [sum(draws)], the random numbers.

    Returns:
      The features without the `LabelFeature`, and the features that ops add. If ops on the
      device are random, 'u' has their numbers.
    """
    if self._source.image_shape is not None:
      return self.arrays(self._features(row['image'], row), u)
    first, *rest = self.on_host
    args = [row[name] for name in ('image', 'orientation', 'upright')]
    args += [first.apply.channels, first.apply.precise]
    if rest and (crop := rest[0].crop) and not self._pixel_maps:
      n = rest[0].draws
      box = lambda h, w: crop.box(h, w, u[:n])
      image = crop.finish(decode.decode_and_crop(*args, box, self._target))
      rest, u = rest[1:], u[n:]
    else:
      image = decode.decode(*args, self._target)
    return self._run(rest, self._features(image, row), u)

  def _features(self, image, row) -> dict:
    features = {'image': image, **{name: row[name] for name in self._others}}
    for name in self._ragged:
      features[name] = features[name][: row[name + _LENGTH]]
    for name in self._pixel_maps:
      features[name] = tf.reshape(tf.io.decode_raw(row[name], tf.uint8), row['upright'])
    return features

  def surplus(self, source: Source) -> str:
    """Describes how many examples are longer than `pad_to` allows; '' if none are."""
    text = ''
    for op in self.on_host:
      for name, most in getattr(op.apply, 'lengths', {}).items():
        if number := int((source.lengths.get(name, np.zeros(0)) > most).sum()):
          text += f'; {number:,} with more than {most} {name}, the others cut off'
    return text

  def arrays(self, features: dict, u) -> dict:
    """Runs the host's ops on decoded features [..., *shape] and u [..., sum(draws)]."""
    return self._run(self.on_host, features, u)

  def trace(self):
    """Traces `self` into a concrete TensorFlow function of one example.

    Equal pipelines share one graph, because tracing takes as long as a small evaluation.
    """
    key = (self.pp, *(op.text for op in self.on_host), *self.inputs.items())
    if key not in _TRACED:
      specs = {
        name: tf.TensorSpec(shape, tf.string if dtype is None else dtype)
        for name, (shape, dtype) in self.inputs.items()
      }
      u = tf.TensorSpec([sum(self.draws)], tf.float32)
      function = tf.function(self, autograph=False)
      _TRACED[key] = function.get_concrete_function(specs, u)
    return _TRACED[key]

  @functools.cached_property
  def spec(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """{name: (shape, dtype)} of an example as it leaves the host, without its `label`."""
    try:
      traced = self.trace().structured_outputs
    except (ValueError, tf.errors.InvalidArgumentError) as error:
      reason = str(error).strip().splitlines()[-1].strip()
      raise ValueError(f'does not fit {self._source.name}: {reason}') from None
    for name, out in traced.items():
      if not out.shape.is_fully_defined():
        add = 'resize(size)' if name == 'image' else f'pad_to({name}=LENGTH)'
        raise ValueError(f'leaves {name} with different sizes {out.shape}: add {add}')
    return {k: (tuple(x.shape), x.dtype.as_numpy_dtype) for k, x in traced.items()}

  def _run(self, ops, features: dict, u) -> dict:
    start = 0
    for op in ops:
      features = op(features, u[..., start : start + op.draws])
      start += op.draws
    if any(op.draws for op in self.on_device):
      features['u'] = u[..., start:]
    return features
