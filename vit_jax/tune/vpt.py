"""Visual prompt tuning (VPT, arXiv 2203.12119)."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.check import Range, Share
from vit_jax.models.vit import Encoder
from vit_jax.nn.layers import Dropout
from vit_jax.nn.positions import PositionEmbedding
from vit_jax.tune.method import Method
from vit_jax.tune.tuned import Addition

WHERE = ('prepend', 'before_positions', 'add', 'pad')
POOLS = ('image', 'prompts', 'both')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vpt(Method):
  """Trains the head and prompts, which are tokens or a frame around the image.

  Attributes:
    number: the number of prompts; with where='pad', the width of the frame in pixels.
    where: where prompts enter. By default, it is the first of these that the model takes:
      'prepend' for ViT and hybrids, 'add' for Mixer, whose number of tokens is fixed, and 'pad'
      for convolutional models.
      'prepend': as tokens after the class token, without position embeddings.
      'before_positions': the same, with the position embedding of the class token.
      'add': one prompt is added to every patch token, or one prompt per patch to its token.
      'pad': as a frame around the image.
    deep: whether every block has its own prompts (VPT-deep), which replace the tokens that the
      block before made of its prompts. Otherwise, only the first block has prompts
      (VPT-shallow).
    layers: with deep, the blocks that have prompts, counted from 0; by default all. Blocks
      before the first of them run without prompts.
    shared: with deep, whether all blocks have the same prompts.
    dropout: rate of dropout on the prompts; the released code has 0.1 for deep prompts.
    pool: which tokens are averaged for the head, instead of the model's own pooling: the
      'image' tokens, the 'prompts', or 'both'. By default, models that average all tokens
      average only the image tokens.
  """

  by_block: ClassVar = True

  number: Annotated[int, Range(0, 2**16)] = 10
  where: Literal[WHERE] | None = None
  deep: bool = False
  layers: Sequence[Annotated[int, Range(0, 1000)]] | None = None
  shared: bool = False
  dropout: Share = 0.0
  pool: Literal[POOLS] | None = None

  def make_added(self, backbone):
    places, name = backbone.family.prompts, type(backbone.model).__name__
    where = self.where or next(iter(places), None)
    if where not in places:
      raise ValueError(
        f'where={where!r}: {name} has {list(places) or "no place"} for prompts. The methods '
        'lora, adapter and bias work with every model'
      )
    classifier = getattr(backbone.model, 'classifier', None)
    self._refuse_useless_options(where, classifier)
    if self.number == 0:
      return None
    if where == 'pad':
      return Frame(self.number)
    return Prompts(
      self._places(backbone, where, classifier),
      self.number,
      1 if self.shared else len(self._layers(backbone)),
      _scale(backbone),
      self.dropout,
      self.pool,
    )

  def _refuse_useless_options(self, where: str, classifier: str | None) -> None:
    useless = ('pool',) if where == 'add' or classifier == 'none' else ()
    if where == 'pad':
      useless = ('deep', 'dropout', 'pool')
    if not self.deep:
      useless += ('layers', 'shared')
    for key in useless:
      if getattr(self, key):
        raise ValueError(
          f'{key}={getattr(self, key)!r} has no meaning with where={where!r}, '
          f'deep={self.deep}, classifier={classifier!r}: leave it out'
        )

  def _layers(self, backbone) -> list[int]:
    number = len(backbone.blocks)
    if not self.deep:
      return [0]
    layers = list(range(number) if self.layers is None else self.layers)
    if not layers or sorted(set(layers)) != layers or layers[-1] >= number:
      raise ValueError(
        f'layers={self.layers}: expected blocks in ascending order, of 0 to {number - 1}'
      )
    return layers

  def _places(self, backbone, where: str, classifier: str | None) -> 'Places':
    model, blocks, layers = backbone.model, backbone.blocks, self._layers(backbone)
    _, tokens, width = backbone.layers[blocks[0]].inputs
    first = getattr(model, 'prefix', 0)
    fixed = {'posemb': 'relative', 'posemb_where': 'shared', 'attention': 'axial'}
    for field, value in fixed.items() if where != 'add' else ():
      if getattr(model, field, None) == value:
        raise ValueError(
          f'config.model.{field}={value!r} has no place for further tokens, such as '
          "prompts: use where='add', or another method"
        )
    if where == 'before_positions' and (not first or layers[0]):
      raise ValueError(
        "where='before_positions' gives prompts the position of the class token, before "
        "the first block: it needs classifier='token' and block 0 in layers"
      )
    patches = tokens - first
    if where == 'add' and self.number not in (1, patches):
      raise ValueError(
        f"number={self.number} with where='add': expected 1, added to every token, or "
        f'{patches}, one for each of the patches'
      )
    encoders = (p for p, x in backbone.layers.items() if issubclass(x.kind, Encoder))
    encoder = next(encoders, None)
    paths = tuple(blocks[i] for i in layers)
    return Places(where, paths, encoder, first, tokens, width, classifier)


def _scale(backbone) -> float:
  """Returns v: prompts are drawn uniformly from (-v, v), as in a patch embedding."""
  stride = backbone.family.stride(backbone.model.fields())
  patch = math.prod(stride) * backbone.image_shape[-1]
  width = backbone.layers[backbone.blocks[0]].inputs[-1]
  return math.sqrt(6 / (patch + width))


class Places(NamedTuple):
  """Where the prompts of a model are.

  Attributes:
    where: 'prepend', 'before_positions' or 'add', see `Vpt`.
    blocks: paths of the blocks that have prompts.
    encoder: path of the encoder, whose tokens are pooled; None if there is no Transformer.
    first: number of tokens before the prompts, such as the class token.
    tokens: number of tokens N without prompts.
    width: D.
    classifier: the field `classifier` of the model, or None if it has no such field.
  """

  where: str
  blocks: tuple[str, ...]
  encoder: str | None
  first: int
  tokens: int
  width: int
  classifier: str | None


class Prompts(Addition):
  """The parameter `prompts` [sets, p, D], one set for each block or one for all.

  Attributes:
    number: p.
    scale: v; prompts are initialised uniformly in (-v, v).
    pool: see `Vpt`.
  """

  places: Places
  number: int
  sets: int
  scale: float
  dropout: float
  pool: str | None

  @nn.compact
  def layers(self, images, train):
    at = self.places
    init = lambda rng, shape, dtype: jax.random.uniform(
      rng, shape, dtype, -self.scale, self.scale
    )
    shape = (self.sets, self.number, at.width)
    prompts = self.param('prompts', init, shape, jnp.float32)[None]
    if train and self.dropout:
      # Each image has its own dropout mask.
      prompts = jnp.broadcast_to(prompts, (images.shape[0], *shape))
      prompts = Dropout(self.dropout)(prompts, deterministic=False)
    replacements = {}
    for i, block in enumerate(at.blocks):
      if i or at.where != 'before_positions':
        replacements[block] = self._wrap_block(prompts[:, 0 if self.sets == 1 else i])
    if at.where != 'add':
      replacements[at.encoder] = self._wrap_encoder(prompts[:, 0])

    def find_replacement(module, path):
      if at.where != 'add' and isinstance(module, PositionEmbedding):
        return self._positions
      return replacements.get(path)

    return find_replacement

  def _wrap_block(self, prompts):
    """Wraps a block, so that it gets these prompts [1 or B, p, D]."""

    def block(call, x, *args, **kwargs):
      own = prompts.astype(x.dtype)
      if self.places.where == 'add':
        first = self.places.first
        x = jnp.concatenate([x[:, :first], x[:, first:] + own], axis=1)
      else:
        x = self._insert(own, self._remove(x))
      return call(x, *args, **kwargs)

    return block

  def _insert(self, prompts, x):
    first = self.places.first
    prompts = jnp.broadcast_to(prompts, (x.shape[0], *prompts.shape[1:]))
    return jnp.concatenate([x[:, :first], prompts, x[:, first:]], axis=1)

  def _remove(self, x):
    """Removes the prompts, if there are any, from tokens [B, N or N + p, D]."""
    first, more = self.places.first, x.shape[1] - self.places.tokens
    return jnp.concatenate([x[:, :first], x[:, first + more :]], axis=1) if more else x

  def _positions(self, call, x, grid):
    added = call(self._remove(x), grid)  # [1, N, D]
    if x.shape[1] == self.places.tokens:
      return added
    # Prompts have no position, or the position of the class token.
    like = added[:, :1] if self.places.where == 'before_positions' else 0 * added[:, :1]
    like = jnp.broadcast_to(like, (1, self.number, added.shape[-1]))
    return self._insert(like, added)

  def _wrap_encoder(self, prompts):
    """Wraps the encoder; `prompts` [1 or B, p, D] are the prompts of the first block."""

    def encoder(call, x, grid, *, num_queries=None, **options):
      if self.places.where == 'before_positions':
        x = self._insert(prompts.astype(x.dtype), x)
      num_queries = None if self.pool else num_queries
      x, out = call(x, grid, num_queries=num_queries, **options)
      return self._select_pooled(x), out

    return encoder

  def _select_pooled(self, x):
    """Rearranges tokens so that the model's own pooling gives the mean named by `pool`."""
    first, behind = self.places.first, self.places.first + self.number
    parts = {
      'image': x[:, behind:],
      'prompts': x[:, first:behind],
      'both': x[:, first:],
    }
    if self.places.classifier != 'token':
      pooled = parts[self.pool or 'image']
      return jnp.concatenate([x[:, :first], pooled], axis=1) if first else pooled
    if self.pool is None:
      return x
    return jnp.concatenate([parts[self.pool].mean(1, keepdims=True), x[:, 1:]], axis=1)


class Frame(Addition):
  """A frame of learned pixels, `pixels` wide on each side (VPT, section 4.3, 'pad').

  Its parameters are `rows` [2 p, W + 2 p, C], above and below the image, and `columns`
  [H, 2 p, C], to the left and right of it.
  """

  pixels: int

  @nn.compact
  def images(self, images):
    B, H, W, C = images.shape
    p = self.pixels
    init = lambda rng, shape, dtype: jax.random.uniform(rng, shape, dtype, -1, 1)
    rows = self.param('rows', init, (2 * p, W + 2 * p, C), jnp.float32)
    columns = self.param('columns', init, (H, 2 * p, C), jnp.float32)
    each = lambda x: jnp.broadcast_to(x.astype(images.dtype), (B, *x.shape))
    left, right, above, below = map(
      each, (columns[:, :p], columns[:, p:], rows[:p], rows[p:])
    )
    images = jnp.concatenate([left, images, right], axis=2)
    return jnp.concatenate([above, images, below], axis=1)
