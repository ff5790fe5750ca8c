"""Visual prompt tuning: VPT, arXiv 2203.12119."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from vit_jax.check import Range, Share
from vit_jax.errors import UserError, choose
from vit_jax.nn.attention import MultiHeadDotProductAttention
from vit_jax.nn.transformer import Encoder
from vit_jax.tune.frame import Frame
from vit_jax.tune.method import Method
from vit_jax.tune.prompts import POOLS, Places, Prompts
from vit_jax.tune.window_prompts import Place, WindowPrompts

WHERE = ('prepend', 'before_positions', 'add', 'pad')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vpt(Method):
  """Learned prompts beside the tokens, or around the image, and the head.

  Attributes:
    number: of prompts; of `pad`, pixels on each side.
    where: 'prepend': tokens behind the class token, with positions added to the others
      alone, or where a model attends within windows tokens before those of each window, the
      mean over the windows leaving it; 'before_positions': the same, with the class token's position added to them;
      'add': one prompt is added to every patch's token, or as many as there are patches
      one to each; 'pad': a frame around the image. By default the first of these that
      the model takes: 'prepend' for ViT, hybrids and Swin, 'add' for Mixer, whose number of
      tokens is fixed, 'pad' for convolutional models.
    deep: prompts of their own before every block, in the place of what the block before
      made of them (VPT-deep), instead of before the first alone (VPT-shallow).
    layers: of deep, which blocks have them, from 0; by default all. In front of the first
      of these there are none.
    shared: of deep, the same prompts before each block.
    dropout: of the prompts; 0.1 for deep in the released code.
    pool: for tokens, what the head gets in the place of what the model pools: the mean of
      the 'image' tokens, of the 'prompts', or of 'both'. Models that pool all their
      tokens pool those of the image by default; the released code of Swin pools 'both'.
  """

  by_block: ClassVar = True

  number: Annotated[int, Range(0, 2**16)] = 10
  where: Literal[WHERE] | None = None
  deep: bool = False
  layers: Sequence[Annotated[int, Range(0, 1000)]] | None = None
  shared: bool = False
  dropout: Share = 0.0
  pool: Literal[POOLS] | None = None

  def added(self, backbone):
    known = backbone.family.prompts
    if not known:
      raise UserError(
        f'config.tune.method=vpt has no place for prompts{_of(backbone)}: models that are '
        'built on a backbone take other methods, such as lora.'
      )
    where = self.where or known[0]
    choose('place for prompts, config.tune.where', where, known, _of(backbone))
    self._refuse_options_without_use(where, getattr(backbone.model, 'classifier', None))
    if self.number == 0:
      return None
    if where == 'pad':
      return Frame(self.number)
    if _attends_in_windows(backbone):
      return self._in_windows(backbone)
    return Prompts(
      self._places(backbone, where),
      self.number,
      1 if self.shared else len(self._layers(backbone)),
      _scale(backbone),
      self.dropout,
      self.pool,
    )

  def _refuse_options_without_use(self, where: str, classifier: str | None) -> None:
    wrong, of = None, f'prompts of where={where!r}'
    if where == 'pad':
      wrong = next((k for k in ('deep', 'dropout', 'pool') if getattr(self, k)), None)
    elif where == 'add' and self.pool:
      wrong = 'pool'
    elif classifier == 'none' and self.pool:
      wrong, of = 'pool', "classifier='none', which pools nothing"
    if wrong:
      raise UserError(
        f'config.tune.{wrong}={getattr(self, wrong)!r} has no meaning with {of}: '
        'leave it out.'
      )
    for key in ('layers', 'shared'):
      if getattr(self, key) and not self.deep:
        raise UserError(
          f'config.tune.{key}={getattr(self, key)!r} is for deep prompts: set '
          'config.tune.deep=True, or leave it out.'
        )

  def _layers(self, backbone) -> list[int]:
    number = len(backbone.blocks)
    if not self.deep:
      return [0]
    layers = range(number) if self.layers is None else self.layers
    if (
      not layers
      or sorted(set(layers)) != [*layers]
      or layers[0] < 0
      or layers[-1] >= number
    ):
      raise UserError(
        f'config.tune.layers={self.layers}: expected blocks in ascending order, of 0 to '
        f'{number - 1}.'
      )
    return [*layers]

  def _places(self, backbone, where: str) -> Places:
    model, blocks = backbone.model, backbone.blocks
    _, tokens, width = backbone.layers[blocks[0]].inputs
    classifier = getattr(model, 'classifier', None)
    first = int(classifier == 'token')
    for field, wrong in (
      ('posemb', ('relative',)),
      ('posemb_where', ('shared',)),
      ('attention', ('axial',)),
    ):
      if where != 'add' and getattr(model, field, None) in wrong:
        raise UserError(
          f'config.model.{field}={getattr(model, field)!r} has no place for further '
          "tokens, such as prompts: use config.tune.where='add', or another method."
        )
    layers = self._layers(backbone)
    if where == 'before_positions' and (not first or layers[0]):
      raise UserError(
        "config.tune.where='before_positions' gives prompts the position of the class "
        "token, before the first block: the model needs classifier='token', and "
        'config.tune.layers block 0.'
      )
    patches = tokens - first
    if where == 'add' and self.number not in (1, patches):
      raise UserError(
        f"config.tune.number={self.number} with where='add': expected 1, added to every "
        f'token, or {patches}, one for each of the patches.'
      )
    encoder = next((p for p, x in backbone.layers.items() if x.kind is Encoder), None)
    return Places(
      where, tuple(blocks[i] for i in layers), encoder, first, tokens, width, classifier
    )

  def _in_windows(self, backbone) -> WindowPrompts:
    stages: dict[str, list[str]] = {}
    for i in self._layers(backbone):
      block = backbone.blocks[i]
      match = re.fullmatch(backbone.family.blocks, f'{block}/')
      stages.setdefault(f'stage{match["stage"]}', []).append(block)
    layers = backbone.layers
    places = [
      Place(stage, layers[blocks[0]].inputs[-1], tuple(blocks))
      for stage, blocks in stages.items()
    ]
    transitions = backbone.family.transitions
    merges = [path for path in layers if re.fullmatch(transitions, f'{path}/')]
    stem = backbone.shapes[backbone.family.stem(backbone.shapes)]
    return WindowPrompts(
      tuple(places),
      self.number,
      self.shared,
      math.sqrt(6 / (math.prod(stem[:3]) + stem[3])),
      self.dropout,
      self.pool,
      tuple(backbone.blocks),
      tuple(merges),
      _neighbours([layers[path] for path in merges]),
    )


def _neighbours(merges) -> tuple[int, int]:
  """Returns (h, w) of those that merging layers merge; 1 x 1 maps are padded there."""
  ratios = [
    tuple(-(-n // m) for n, m in zip(x.inputs[1:3], x.outputs[1:3], strict=True))
    for x in merges
  ]
  return tuple(map(max, zip(*ratios, strict=True))) if ratios else (1, 1)


def _attends_in_windows(backbone) -> bool:
  """Whether blocks take maps [B, H, W, C] and have attention layers."""
  takes_maps = len(backbone.layers[backbone.blocks[0]].inputs) == 4
  kinds = {layer.kind for layer in backbone.layers.values()}
  return takes_maps and MultiHeadDotProductAttention in kinds


def _of(backbone) -> str:
  return f', those of {type(backbone.model).__name__}'


def _scale(backbone) -> float:
  """Returns v of the initial values, uniform in (-v, v): as of a patch's embedding."""
  fields = {name: getattr(backbone.model, name) for name in _fields(backbone.model)}
  patch = math.prod(backbone.family.stride(fields)) * backbone.image_shape[-1]
  width = backbone.layers[backbone.blocks[0]].inputs[-1]
  return math.sqrt(6 / (patch + width))


def _fields(model) -> list[str]:
  return [f.name for f in dataclasses.fields(model)]
