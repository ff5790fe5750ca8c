"""The facts of a family of models.

Optimizers, weights, tools and tests know no model: each page of `models/` ends with a
`Family`, the names of its parameters and the constraints on its images.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

# The outputs of models, see `Family.outputs`, in words.
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

  Attributes:
    model: the Linen module's class.
    variant: 'B/16' -> fields of `model`; UserError for an unknown name.
    blocks: parameters of the repeated blocks, with the named groups `block`, the path
      up to the block's number; `layer`, that number, absent where a scan has stacked
      the layers in a leading axis; and `stage`, where there are several.
    before: parameters before the first block; those that match neither follow the last.
    transitions: parameters between two stages, with the group `stage`: they belong to
      the stage that they lead to.
    matrices: ((regex, (input axes, output axes)), ...): parameters of blocks that act
      as matrices, axes counted from the end.
    branch_ends: modules whose output is the last branch of a block.
    prompts: places for prompts, of `tune.vpt.WHERE`, the usual one first.
    stems: names of the first kernel [h, w, C, ...]; the first name that exists counts.
    positions: ((regex, axes), ...): learned position tables [1, N, D], not stacked, that
      are resized for other grids; their rows are positions of the grid ('hw', after rows
      of other tokens), of its rows ('h') or of its columns ('w').
    offsets: regex of learned tables of offsets, [2 h - 1, 2 w - 1, M] in a window of
      h x w or [2 n - 1, Dh] along one side of a map, which are resized for another.
    pairs: regex of learned tables [(2 h - 1) (2 w - 1) + r, M] by the offset of two patches
      of a grid (h, w), with r more rows, that are resized for another grid.
    position: name of the position table before the first block, or None.
    patches: name of a patch kernel that can be resized to other patches, or None.
    stride: fields -> pixels per position of the last features, down and across.
    any_size: fields -> whether one set of parameters serves images of any size.
    published: ((regex, function), ...): names that others publish models under; the
      function of the regex's groups returns (variant or None, fields), or None for no
      such name. A tag behind a dot has been cut off.
    tiny: fields of models that run in milliseconds and have every part, for tests.
    outputs: a model's outputs beside `out`: 'classes', logits [B, K]; 'maps', {name:
      [B, h, w, C]}; 'pixels', logits [B, H, W, K]; 'boxes', {'logits': [B, Q, K + 1],
      'boxes': [B, Q, 4]}; 'regions', detections and perhaps masks, see `models.rcnn`.
    inputs: (fields, (H, W)) -> {name: (h, w, C)}, the maps that a model without a
      backbone takes in the place of an image; None: it takes images only.
  """

  model: type
  variant: Callable[[str], dict]
  tiny: tuple[dict, ...]
  blocks: str = r'(?!)(?P<block>)(?P<layer>)'  # (?!) matches nothing
  before: str = '(?!)'
  branch_ends: str = '(?!)'
  prompts: tuple[str, ...] = ()
  stems: tuple[str, ...] = ()
  stride: Callable[[Mapping], tuple[int, int]] = lambda fields: (fields['stride'],) * 2
  any_size: Callable[[Mapping], bool] = lambda fields: True
  transitions: str | None = None
  matrices: tuple[tuple[str, tuple[tuple[int, ...], tuple[int, ...]]], ...] = ()
  positions: tuple[tuple[str, str], ...] = ()
  offsets: str | None = None
  pairs: str | None = None
  position: str | None = None
  patches: str | None = None
  published: tuple[tuple[str, Callable], ...] = ()
  outputs: Literal['classes', 'maps', 'pixels', 'boxes', 'regions'] = 'classes'
  inputs: Callable[[Mapping, tuple[int, int]], dict[str, tuple]] | None = None

  def around(self, backbone: 'Family') -> 'Family':
    """Returns the facts of a model of this family with a backbone of another.

    Blocks and all that concerns images are the backbone's, whose parameters are below
    'backbone/'; what is built on it follows the last block.
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
    """Whether a parameter has a leading axis of layers, by its name."""
    match = re.fullmatch(self.blocks, name)
    return bool(match) and match['layer'] is None

  def unstacked(self, name: str, layer: int) -> str:
    """Returns the name that one layer of a stacked parameter has on its own."""
    block = re.fullmatch(self.blocks, name)['block']
    return f'{block}_{layer}{name[len(block) :]}'

  def stacked(self, name: str) -> tuple[str, int] | None:
    """Returns (name when stacked, layer); None for what is not in a block."""
    match = re.fullmatch(self.blocks, name)
    if not match or match['layer'] is None:
      return None
    return match['block'] + name[match.end('layer') :], int(match['layer'])

  def depths(
    self, shapes: Mapping[str, tuple[int, ...]]
  ) -> tuple[dict[str, int | range], int]:
    """Returns ({name: depth}, number of blocks L).

    The depth is 0 before the first block, 1 to L in the blocks, L + 1 after them; of a
    stacked parameter it is the range of its layers' depths.

    Args:
      shapes: of all parameters of one model, or of the part that is trained.
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
    """Returns the (input axes, output axes) of a matrix of the blocks, else None."""
    return next((axes for r, axes in self.matrices if re.fullmatch(r, name)), None)

  def position_axes(self, name: str) -> str | None:
    """Returns 'hw', 'h' or 'w' of a position table, see `positions`; else None."""
    return next((axes for r, axes in self.positions if re.fullmatch(r, name)), None)

  def stem(self, names: Iterable[str]) -> str:
    """Returns which of a model's parameters is its first kernel, [h, w, C, ...]."""
    names = set(names)
    return next(name for name in self.stems if name in names)
