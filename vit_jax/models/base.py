"""The base of all models, and the facts of a family of models.

Optimizers, weights, tools and tests know no particular model. They ask a `Model` or its
`Family`. Each module of `models/` ends with a `Family`: the names of its parameters and the
constraints on its images.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax import models
from vit_jax.check import Count, Range
from vit_jax.errors import UserError
from vit_jax.nn.layers import linear_head, unit
from vit_jax.nn.stack import REMAT

# {kind of outputs, see `Family.outputs`: how messages name it}.
OUTPUTS = {
  'classes': 'a class for an image',
  'boxes': 'boxes',
  'regions': 'boxes and masks of regions',
  'pixels': 'a class for every pixel',
  'maps': 'maps, for a head such as semantic_fpn',
}


@dataclasses.dataclass(frozen=True)
class Family:
  """The facts of one family. Regexes match whole parameter paths ('a/b/kernel').

  Functions of the fields take all fields of a model: see `Model.fields` and `models.complete`.

  Attributes:
    model: the Linen module's class, which has every field of the family.
    class_of: a function of `model` and those fields that are set. It returns the class to
      build: `model`, or a base of it that lacks some fields; None: always `model`.

  Names of models:
    variant: a function that maps a name such as 'B/16' to fields of `model`. It raises
      UserError for an unknown name.
    published: ((regex, function), ...), the names under which others publish models. The
      function takes the regex's groups and returns (variant or None, fields), or None if
      there is no such name. The names come without the tag after their dot.
    tiny: fields of models that run in milliseconds and have every part, for tests.

  Blocks and their depth:
    blocks: regex of the parameters of the repeated blocks. Its named groups are `block`,
      the path up to the block's number; `layer`, that number, which is absent if a scan has
      stacked the layers in a leading axis; and `stage` in models with several stages.
    before: regex of the parameters before the first block. Parameters that match neither
      `before` nor `blocks` follow the last block.
    transitions: regex of the parameters between two stages. They count as part of the
      stage that they lead to, which its named group `stage` gives.

  Tuning and optimizers:
    matrices: ((regex, (input axes, output axes)), ...), the parameters of blocks that act
      as matrices. Axes are counted from the end.
    branch_ends: regex of the modules whose output is the last branch of a block.
    prompts: keys of `tune.vpt.WHERE`, the places that prompts may have, the usual one first.

  Weights:
    of_weights: fields that a model takes from weights of its family, unless a config sets
      them.

  Classes:
    heads: regex of the parameters, other than those of a classifier's head, whose shapes
      depend on the number of classes.

  Images of other sizes, and parameters that are resized for them:
    positions: ((regex, axes), ...), the learned position tables [1, N, D], not stacked, that
      are resized for other grids. Their rows stand for positions of the grid ('hw', after
      rows for other tokens), for its rows ('h') or for its columns ('w').
    position: name of the position table before the first block, or None.
    offsets: regex of the learned tables of offsets that are resized for other sizes:
      [2 h - 1, 2 w - 1, M] for a window of h x w, or [2 n - 1, Dh] for one side of a map.
    pairs: regex of the learned tables [(2 h - 1) (2 w - 1) + r, M] that are resized for
      another grid: one row for each offset of two patches of a grid (h, w), and r more rows.
    stems: possible names of the first kernel [h, w, C, ...]. The first name that exists is
      used.
    patches: name of a patch kernel that can be resized to other patches, or None.
    stride: a function of the fields that returns the pixels per position of the last
      features, down and across.
    any_size: a function of the fields that returns whether one set of parameters serves
      images of any size.

  Inputs and outputs:
    outputs: the kind of a model's first output.
      'classes': logits [B, K]. 'maps': {name: [B, h, w, C]}. 'pixels': logits [B, H, W, K].
      'boxes': {'logits': [B, Q, K + 1], 'boxes': [B, Q, 4]}. 'regions': detections and
      perhaps masks, see `models.rcnn`.
    inputs: a function of the fields and (H, W) that returns {name: (h, w, C)}, the maps
      that a model without a backbone takes instead of an image; None: it takes images only.
  """

  model: type
  variant: Callable[[str], dict]
  tiny: tuple[dict, ...]
  class_of: Callable[[type, Mapping], type] | None = None
  published: tuple[tuple[str, Callable], ...] = ()

  blocks: str = r'(?!)(?P<block>)(?P<layer>)'  # The pattern (?!) matches nothing.
  before: str = '(?!)'
  transitions: str | None = None

  matrices: tuple[tuple[str, tuple[tuple[int, ...], tuple[int, ...]]], ...] = ()
  branch_ends: str = '(?!)'
  prompts: tuple[str, ...] = ()

  of_weights: tuple[str, ...] = ()

  heads: str = '(?!)'

  positions: tuple[tuple[str, str], ...] = ()
  position: str | None = None
  offsets: str | None = None
  pairs: str | None = None
  stems: tuple[str, ...] = ()
  patches: str | None = None
  stride: Callable[[Mapping], tuple[int, int]] = lambda fields: (fields['stride'],) * 2
  any_size: Callable[[Mapping], bool] = lambda fields: True

  outputs: Literal['classes', 'maps', 'pixels', 'boxes', 'regions'] = 'classes'
  inputs: Callable[[Mapping, tuple[int, int]], dict[str, tuple]] | None = None

  def make(self, **fields) -> 'Model':
    """Returns the model with these fields."""
    if self.class_of is None:
      return self.model(**fields)
    cls = self.class_of(self.model, fields)
    # If the class lacks a field, that field has its default value, so leave it out.
    return cls(**{k: v for k, v in fields.items() if hasattr(cls, k)})

  def around(self, backbone: 'Family') -> 'Family':
    """Returns the facts of a model of this family around a backbone of another family.

    The facts about blocks and images are the backbone's, and its parameters are below
    'backbone/'. All other parameters follow the last block.
    """
    inside = lambda regex: None if regex is None else f'backbone/(?:{regex})'
    below = lambda name: None if name is None else f'backbone/{name}'
    return dataclasses.replace(
      self,
      blocks=backbone.blocks.replace('(?P<block>', '(?P<block>backbone/', 1),
      before=inside(backbone.before),
      transitions=inside(backbone.transitions),
      matrices=(
        *self.matrices,
        *((inside(regex), axes) for regex, axes in backbone.matrices),
      ),
      branch_ends=inside(backbone.branch_ends),
      stems=tuple(map(below, backbone.stems)),
      positions=tuple((inside(regex), axes) for regex, axes in backbone.positions),
      offsets=inside(backbone.offsets),
      pairs=inside(backbone.pairs),
      position=below(backbone.position),
      patches=below(backbone.patches),
      stride=lambda fields: backbone.stride(fields['backbone']),
      any_size=lambda fields: backbone.any_size(fields['backbone']),
      inputs=None,
    )

  def is_stacked(self, name: str) -> bool:
    """Whether a parameter of this name has a leading axis of layers."""
    match = re.fullmatch(self.blocks, name)
    return bool(match) and match['layer'] is None

  def unstacked(self, name: str, layer: int) -> str:
    """Returns the unstacked name of one layer of a stacked parameter."""
    block = re.fullmatch(self.blocks, name)['block']
    return f'{block}_{layer}{name[len(block) :]}'

  def stacked(self, name: str) -> tuple[str, int] | None:
    """Returns (stacked name, layer) of a block's parameter; None for other parameters."""
    match = re.fullmatch(self.blocks, name)
    if not match or match['layer'] is None:
      return None
    return match['block'] + name[match.end('layer') :], int(match['layer'])

  def depths(
    self, shapes: Mapping[str, tuple[int, ...]]
  ) -> tuple[dict[str, int | range], int]:
    """Returns ({name: depth}, number of blocks L).

    The depth is 0 before the first block, 1 to L in the blocks, and L + 1 after them. A
    stacked parameter has the range of its layers' depths.

    Args:
      shapes: the shapes of all parameters of one model, or of its trained parameters.
    """
    blocks = {}
    for name, shape in shapes.items():
      if match := re.fullmatch(self.blocks, name):
        stage = int(match.groupdict().get('stage') or 0)
        layers = range(shape[0]) if match['layer'] is None else [int(match['layer'])]
        blocks[name] = [(stage, layer) for layer in layers]
    order = sorted({block for layers in blocks.values() for block in layers})
    number = {block: i + 1 for i, block in enumerate(order)}

    def depth(name):
      if name in blocks:
        first, last = (number[blocks[name][i]] for i in (0, -1))
        return range(first, last + 1) if self.is_stacked(name) else first
      if match := re.fullmatch(self.transitions or '', name):
        return min(
          n for (stage, _), n in number.items() if stage == int(match['stage'])
        )
      return 0 if re.fullmatch(self.before, name) else len(order) + 1

    return {name: depth(name) for name in shapes}, len(order)

  def matrix_axes(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns (input axes, output axes) of a matrix in a block; None for other parameters."""
    return next((axes for r, axes in self.matrices if re.fullmatch(r, name)), None)

  def position_axes(self, name: str) -> str | None:
    """Returns 'hw', 'h' or 'w' for a position table, see `positions`; None for others."""
    return next((axes for r, axes in self.positions if re.fullmatch(r, name)), None)

  def stem(self, names: Iterable[str]) -> str:
    """Returns the name of the first kernel [h, w, C, ...] among a model's parameters."""
    names = set(names)
    return next(name for name in self.stems if name in names)


class Model(nn.Module):
  """A model of a family in `models.MODELS`, alone or around a backbone.

  Called with images [B, H, W, C], `train` and `features`, it returns (outputs, out). The
  outputs are those of `Family.outputs`. `out` is a flat dict of named features, the same in
  training and evaluation, scanned or not; without `features`, it may lack all but
  'pre_logits'. The body computes in `dtype`; final norm, head and loss in float32.

  `tune.tuned.Tuned` passes every question on to the model that it wraps, except `shapes`.
  """

  backbone = None  # a field of the models that are built around another one

  @property
  def untuned(self) -> 'Model':
    """The model itself, without the parameters that a tuning method adds."""
    return self

  @property
  def family_name(self) -> str:
    """The key of the model's class in `models.MODELS`."""
    return _find(type(self.untuned))[0]

  @property
  def family(self) -> Family:
    """The facts of the family, combined with those of the backbone if there is one."""
    facts = _find(type(self.untuned))[1]
    return facts if self.backbone is None else facts.around(self.backbone.family)

  @nn.nowrap
  def fields(self) -> dict:
    """Returns {field: value}, with a backbone as the dict that `models.build` takes.

    Fields that the model's class lacks have their defaults, see `Family.class_of`.
    """
    every = dataclasses.fields(_find(type(self.untuned))[1].model)
    fields = {f.name: getattr(self, f.name, f.default) for f in every}
    del fields['parent'], fields['name']
    if (inside := self.backbone) is not None:
      fields['backbone'] = {'name': inside.family_name, **inside.fields()}
    return fields

  @nn.nowrap
  def change(self, **values) -> 'Model':
    """Returns the model with other values for fields; ignores values for unknown fields."""
    every = self.fields()
    fields = {name: value for name, value in values.items() if name in every}
    if self.backbone is not None and 'backbone' not in fields:
      fields['backbone'] = self.backbone.change(**values)
    if all(hasattr(self, name) for name in fields):
      return self.clone(**fields)
    return self.family.make(**{**every, **fields})

  @nn.nowrap
  def inputs(self, image_shape: tuple[int, int, int], batch: int = 1):
    """Returns the shapes of the inputs, [batch, H, W, C] or {name: [batch, h, w, C]}.

    Args:
      image_shape: (H, W, C) of the images. A model without a backbone takes the maps that a
        backbone would make of them.
    """
    shape = lambda x: jax.ShapeDtypeStruct((batch, *x), jnp.float32)
    if self.family.inputs is None:
      return shape(image_shape)
    maps = self.family.inputs(self.fields(), image_shape[:2])
    return {name: shape(x) for name, x in maps.items()}

  @nn.nowrap
  def shapes(self, image_shape: tuple[int, int, int]) -> dict:
    """Returns the shapes of the variables, {'params': ...}, for images (H, W, C).

    Each model and size is traced once, because tracing `init` takes longer than tracing the
    model.
    """
    shapes = _trace(self, tuple(image_shape))
    return jax.tree.map(lambda x: x, shapes)  # a copy, which the caller may change

  @nn.nowrap
  def check_outputs(self, kind: str, source: str) -> None:
    """Raises UserError unless the outputs are of this kind, see `Family.outputs`.

    Args:
      source: the first words of the message, such as the source of the weights.
    """
    if (outputs := self.family.outputs) != kind:
      raise UserError(
        f'{source} gives {OUTPUTS[outputs]}, where {kind} are expected. In Python, '
        'loaded = vit_jax.load(SOURCE) has the model: '
        'loaded.model.apply(loaded.variables, images).'
      )

  @staticmethod
  def maps(out: dict) -> dict:
    """Returns the maps [B, h, w, D] among named features.

    Tokens [B, N, D] count as a map on the grid of 'stem'. Tokens before the patches, such as
    a class token and registers, are left out.
    """
    h, w = out['stem'].shape[1:3]
    grid = lambda x: x[:, -h * w :].reshape(len(x), h, w, x.shape[-1])
    return {
      name: x if x.ndim == 4 else grid(x)
      for name, x in out.items()
      if x.ndim == 4 or (x.ndim == 3 and x.shape[1] >= h * w)
    }


def _find(cls: type) -> tuple[str, Family]:
  """Returns the entry of `models.MODELS` that has this class."""
  for name in models.MODELS:
    # The class is the family's own, or a base of it, see `Family.class_of`.
    if issubclass((facts := models.MODELS[name]).model, cls):
      return name, facts
  raise ValueError(f'no family of models.MODELS has the class {cls.__name__}')


@functools.lru_cache(maxsize=64)
def _trace(model, image_shape):
  return jax.eval_shape(model.init, jax.random.key(0), model.inputs(image_shape))


class Classifier(Model):
  """The fields of every classifier, and its head.

  Classifiers are called with images [B, H, W, C], in [-1, 1] unless they say otherwise.
  `train` turns on dropout and stochastic depth, which need the 'dropout' rng. `features`
  says whether the caller reads more of `out` than 'pre_logits'.
  """

  num_classes: Annotated[int, Range(1, 2**24)] | None = 1000  # None: no head
  # Initial logits. Sigmoid losses over i21k use -10, about ln(1/21843), the prior of a class.
  head_bias_init: float = 0.0
  # Values that the backward pass recomputes: see nn.stack.
  remat: Literal[REMAT] = 'none'
  # The dtype of the body. Final norm, pooling, head and all parameters are in float32.
  dtype: jnp.dtype = jnp.float32

  def classify(self, x, out: dict, features: bool, head: Callable = linear_head):
    """Returns (logits [B, K], out) for x [B, D]. x becomes out['pre_logits'].

    Args:
      features: whether the caller reads more of `out` than 'pre_logits'.
      head: a function of x, `num_classes` and `head_bias_init` that returns logits.
    """
    out = {**out, 'pre_logits': x} if features else {'pre_logits': x}
    return head(x, self.num_classes, self.head_bias_init), out


class ImageTower(Classifier):
  """A classifier that can be an image tower: its head may be a projection (CLIP).

  With `projection` and `unit`, the head compares images with texts.
  """

  projection: Count | None = None  # width of a linear layer before the head
  unit: bool = False  # whether the head's input is scaled to unit length
  head_bias: bool = True  # whether the head has a bias; False where it is a projection

  def classify(self, x, out: dict, features: bool):
    """Returns (logits [B, K], out) for x [B, D], see `Classifier.classify`."""
    if self.projection is not None:
      x = nn.Dense(self.projection, name='projection')(x)
    if self.unit:
      x = unit(x)
    head = functools.partial(linear_head, use_bias=self.head_bias)
    return super().classify(x, out, features, head)
