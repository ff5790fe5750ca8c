"""Parses string pipelines, 'decode|resize(256)|flip_lr|value_range(-1, 1)', to functions.

An op is a factory: it gets the arguments from the text, checks them, and returns a function.
None of this imports TensorFlow, so that a mistake in a config is reported at once.
"""

import ast
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vit_jax.check import check as check_value
from vit_jax.check import parse_call, prefix_errors
from vit_jax.registry import Registry

# {name: factory}. Ops whose modules are imported have an entry in `_facts` too.
OPS = Registry(
  'op',
  {
    'decode': 'vit_jax.data.ops.basic:Decode',
    'resize': 'vit_jax.data.ops.basic:resize',
    'resize_as_weights': 'vit_jax.data.ops.basic:resize',
    'resize_small': 'vit_jax.data.ops.basic:resize_small',
    'central_crop': 'vit_jax.data.ops.basic:central_crop',
    'trim': 'vit_jax.data.ops.basic:trim',
    'value_range': 'vit_jax.data.ops.basic:ValueRange',
    'pad_to': 'vit_jax.data.ops.basic:PadTo',
    'tokenize': 'vit_jax.data.ops.text:Tokenize',
    'random_crop': 'vit_jax.data.ops.augment:random_crop',
    'inception_crop': 'vit_jax.data.ops.augment:InceptionCrop',
    'flip_lr': 'vit_jax.data.ops.augment:flip_lr',
    'random_resized_crop': 'vit_jax.data.ops.augment:RandomResizedCrop',
    'multi_crop': 'vit_jax.data.ops.augment:MultiCrop',
    'random_affine': 'vit_jax.data.ops.augment:random_affine',
    'random_erasing': 'vit_jax.data.ops.augment:random_erasing',
    'randaug': 'vit_jax.data.ops.randaugment:RandAugment',
    'randaug_increasing': 'vit_jax.data.ops.randaugment:IncreasingRandAugment',
    'color_jitter': 'vit_jax.data.ops.colors:color_jitter',
    'grayscale': 'vit_jax.data.ops.colors:grayscale',
    'gaussian_blur': 'vit_jax.data.ops.colors:gaussian_blur',
    'solarize': 'vit_jax.data.ops.colors:solarize',
    'three_augment': 'vit_jax.data.ops.colors:three_augment',
  },
)


@dataclasses.dataclass(frozen=True)
class Op:
  """A registered op. In a parsed pipeline it also has its arguments.

  Attributes:
    make, draws, maps, keeps_positions: see `op`. `make` is the factory of the function.
    text: the text of the op in the pipeline.
    arguments: all arguments by name, including defaults.
    written: the names of the arguments that the pipeline gives.
    apply: the op's function, which may have attributes `draws` and `maps` of its own.
  """

  name: str
  make: Callable
  draws: int
  maps: tuple[str, ...]
  keeps_positions: bool
  text: str = ''
  arguments: dict[str, Any] | None = None
  written: tuple[str, ...] = ()
  apply: Callable | None = None

  def __call__(self, features: dict, u) -> dict:
    """Applies the op to the features of an example, or of many."""
    if self.maps == ('image',):
      return {**features, 'image': self.apply(features['image'], u)}
    mapped = {name: features[name] for name in self.maps if name in features}
    changed = self.apply(mapped, u)
    # If an op forgot the boxes, they would stay in place on an image that moved.
    assert changed.keys() >= mapped.keys(), f'{self.name}: gives {list(changed)}'
    return {**features, **changed}

  def rewrite(self, **changes) -> str:
    """Returns the op as text, with `changes` of its arguments; the first one is positional."""
    first, *more = ({k: self.arguments[k] for k in self.written} | changes).items()
    words = [repr(first[1]), *(f'{key}={value!r}' for key, value in more)]
    return f'{self.name}({", ".join(words)})'

  @property
  def numpy(self) -> Callable | None:
    """The op for one NumPy image; it returns the image, or {'image': ..., more features}."""
    return getattr(self.apply, 'numpy', None)

  @property
  def on_device(self) -> Callable | None:
    """The op in JAX, (batch, u [B, draws]) -> batch, if it may run on the device."""
    return getattr(self.apply, 'on_device', None)

  @property
  def crop(self) -> Any:
    """The op's function if it is a crop, so that a JPEG may be decoded inside the crop only.

    It then has `box(height, width, u) -> (y, x, h, w)` and `finish(crop) -> image`.
    """
    return self.apply if hasattr(self.apply, 'box') else None


@dataclasses.dataclass(frozen=True)
class Twins:
  """An op's function in TensorFlow, and its twin for one NumPy image, see `Op.numpy`.

  Attributes:
    target: see `target_of_decode`.
  """

  tensorflow: Callable
  numpy: Callable
  target: tuple[int, int] | None = None

  def __call__(self, images, u):
    return self.tensorflow(images, u)


_facts: dict[str, Op] = {}


def op(
  name: str,
  *,
  draws: int = 0,
  maps: tuple[str, ...] = ('image',),
  keeps_positions: bool = False,
):
  """Registers a factory under the name that pipelines use.

  The factory returns a pure function in TensorFlow, `(images, u) -> images`. Images are uint8
  or float [..., H, W, C], and u is float32 [..., draws], uniform in [0, 1). There are no
  leading axes for one image, and one for a batch. An image must have the same result, bit for
  bit, alone and in any batch. The factory raises ValueError for a bad argument, to which the
  text of the op is added.

  An op that prediction needs returns `Twins`, or a function with a method `numpy`, because
  prediction has no TensorFlow.

  If the last ops of a pipeline have a method `on_device`, see `Op.on_device`, they run as part
  of the train step. An op that has nothing else is no function.

  Args:
    draws: how many random numbers the function takes. If that depends on the arguments, the
      function has an attribute `draws`.
    maps: the features that the function changes. If it changes other features than the
      image, the function maps `({name: value}, u)` to {name: value}, with all features that
      the example has. If they depend on the arguments, the function has an attribute
      `maps`.
    keeps_positions: whether every pixel keeps its position as a fraction of height and
      width, so that boxes stay valid without being changed.
  """

  def register(make):
    _facts[name] = Op(name, make, draws, maps, keeps_positions)
    # The table may have the op already, as 'module:name'.
    if OPS.data.get(name) != f'{make.__module__}:{make.__qualname__}':
      OPS.register(name, make)
    return make

  return register


def parse(pp: str) -> tuple[Op, ...]:
  """Parses a string pipeline to ops; the same text gives the same objects.

  Arguments are Python literals, by position or keyword.
  """
  with prefix_errors(f'data.pp {pp!r}'):
    if not isinstance(pp, str):
      raise ValueError("expected a string such as 'decode|resize(64)'")
    return _parse(pp)


@functools.cache
def _parse(pp: str) -> tuple[Op, ...]:
  return tuple(map(_bind, _pieces(pp))) if pp.strip() else ()


def check_pipeline(where: str, pp: str, _) -> None:
  """Raises UserError for a pipeline that makes no image for a model; a rule for `check`."""
  with prefix_errors(where):
    check_images(op.name for op in parse(pp) if 'image' in op.maps)


def check_images(names: Sequence[str]) -> None:
  """Raises ValueError if the image ops, given by their names, are in a wrong order."""
  names = list(names)
  if 'decode' in names[1:]:
    raise ValueError('decode must come first')
  if 'canvas' in names and set(names[names.index('canvas') + 1 :]) - {'value_range'}:
    raise ValueError(
      'only value_range may come after canvas, because boxes refer to the image without '
      'padding'
    )
  if names.count('value_range') != 1:
    raise ValueError('expected exactly one value_range, such as value_range(-1, 1)')


def check_positions(pp: str) -> None:
  """Raises UserError for a pipeline that crops or flips, because boxes refer to whole images."""
  with prefix_errors(f'pp {pp!r}'):
    for op in parse(pp):
      if 'image' in op.maps and not op.keeps_positions:
        raise ValueError(f'{op.text} moves pixels, but boxes refer to whole images')


def target_of_decode(ops: Sequence[Op]) -> tuple[int, int] | None:
  """Returns the (h, w) to which the op after `decode` resizes its image or crop.

  If it depends on the image, returns a lower bound. None if all pixels are needed, because
  that op does not resize, or because of `decode(whole=True)`.
  """
  if len(ops) < 2 or ops[0].name != 'decode' or ops[0].apply.whole:
    return None
  return getattr(ops[1].apply, 'target', None)


def _pieces(pp: str) -> Iterator[str]:
  """Yields the text of each op, by parsing the pipeline as Python."""
  text = f'({pp.strip()})'
  try:
    node = ast.parse(text, mode='eval').body
  except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
    reason = getattr(error, 'msg', error)
    raise ValueError(f"not ops with '|' between them: {reason}") from None
  nodes = []
  while isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
    nodes.append(node.right)
    node = node.left
  for piece in [node, *reversed(nodes)]:
    yield ast.get_source_segment(text, piece)


def _bind(text: str) -> Op:
  """Makes the op that a text describes, 'name' or 'name(1, key=2)'."""
  name, args, kwargs = parse_call(text)
  # Imports the module of the op, or raises an error that lists all names.
  OPS[name]
  op = _facts[name]
  signature = inspect.signature(op.make)
  try:
    bound = signature.bind(*args, **kwargs)
    for key, value in bound.arguments.items():
      parameter = signature.parameters[key]
      many = parameter.kind is parameter.VAR_KEYWORD
      kind = dict[str, parameter.annotation] if many else parameter.annotation
      check_value(key, value, kind)
    written = tuple(bound.arguments)
    bound.apply_defaults()
    apply = op.make(*args, **kwargs)
  except (TypeError, ValueError) as error:
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    usage = f'{op.name}{signature.replace(parameters=parameters)}'
    raise ValueError(f'{text} does not fit {usage}: {error}') from None
  own = {key: getattr(apply, key, getattr(op, key)) for key in ('draws', 'maps')}
  own |= {'text': text, 'arguments': bound.arguments, 'written': written}
  return dataclasses.replace(op, apply=apply, **own)
