"""Prompts in the windows of a model that attends within windows: VPT's for Swin."""

import dataclasses
import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.nn.attention import MultiHeadDotProductAttention
from vit_jax.nn.dropout import Dropout
from vit_jax.nn.windows import Windows
from vit_jax.tune.tuned import Added


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Accompanied:
  """A map [B, H, W, C] and the prompts [B, p, C] that go with it from block to block."""

  map: jax.Array
  prompts: jax.Array

  @property
  def shape(self) -> tuple[int, ...]:
    """That of the map: all that a model asks about what is between its blocks."""
    return self.map.shape


@dataclasses.dataclass(frozen=True)
class Place:
  """Where prompts enter.

  Attributes:
    stage: name of the parameters, 'stage1'.
    width: C.
    blocks: paths of the blocks of this stage that have prompts of their own.
  """

  stage: str
  width: int
  blocks: tuple[str, ...]


class WindowPrompts(Added):
  """Parameters `stage1/prompts` [sets, p, C], ...: a set for each block, or one for all.

  Every window attends to a copy of the prompts before its own tokens, without a bias or a
  mask between the two, and the mean over the windows is what leaves the attention. Norms
  and MLPs treat prompts as they treat tokens. Where 2 x 2 neighbours are merged, a prompt
  is merged with three copies of itself.

  Attributes:
    places: in the order of the stages.
    number: p.
    shared: whether the blocks of a stage have the same prompts.
    scale: v; prompts start uniform in (-v, v).
    dropout: of the prompts.
    pool: of what the last norm, and so the head, gets the mean: see `vpt.Vpt`.
    blocks: paths of all blocks.
    merges: paths of what leads from one stage to the next.
    neighbours: (h, w) of those that are merged.
  """

  places: tuple[Place, ...]
  number: int
  shared: bool
  scale: float
  dropout: float
  pool: str | None
  blocks: tuple[str, ...]
  merges: tuple[str, ...]
  neighbours: tuple[int, int]

  @nn.compact
  def layers(self, images, train):
    init = lambda rng, shape, dtype: jax.random.uniform(
      rng, shape, dtype, -self.scale, self.scale
    )
    sets = lambda place: 1 if self.shared else len(place.blocks)
    made = {
      f'{place.stage}/prompts': (init, (sets(place), self.number, place.width))
      for place in self.places
    }
    own, params = {}, self.named_params(made)
    for place in self.places:
      prompts = params[f'{place.stage}/prompts'][None]
      if train and self.dropout:  # of each image on its own
        shape = (images.shape[0], *prompts.shape[1:])
        prompts = Dropout(self.dropout)(
          jnp.broadcast_to(prompts, shape), deterministic=False
        )
      for i, block in enumerate(place.blocks):
        own[block] = prompts[:, 0 if self.shared else i]
    found = {path: functools.partial(_block, own.get(path)) for path in self.blocks}
    found |= dict.fromkeys(self.merges, functools.partial(_merge, self.neighbours))

    def instead(module, path):
      if path in found:
        return functools.partial(found[path], module)
      return None if '/' in path else functools.partial(_behind_blocks, self.pool)

    return instead

  def features(self, out):
    return {name: _apart(x)[0] for name, x in out.items()}


def _apart(x):
  """Returns (map, prompts or None)."""
  return (x.map, x.prompts) if isinstance(x, Accompanied) else (x, None)


def _block(own, module, call, x, *args, windows: Windows, **kwargs):
  """What a block does for a map and its prompts; `own` are those that it begins with."""
  x, prompts = _apart(x)
  prompts = prompts if own is None else own
  if prompts is None or _is_being_made(module):
    return call(x, *args, windows=windows, **kwargs)
  B, (_, p, C) = x.shape[0], prompts.shape
  prompts = jnp.broadcast_to(prompts, (B, p, C)).astype(x.dtype)
  attending = {}

  # A block treats prompts as it does a map of one row. Their attention is that within the
  # windows, which need what enters it, and whose result goes on from there.
  def enter(call, x, **options):
    attending['prompts'] = x
    return x

  def attend(call, x, *, positions, **options):
    n = math.prod(windows.grid)
    shape = (B, n, p, C)
    copies = jnp.broadcast_to(attending['prompts'][:, None], shape).reshape(-1, p, C)
    x = call(
      jnp.concatenate([copies, x], axis=1), positions=_behind(p, positions), **options
    )
    attending['prompts'] = x[:, :p].reshape(shape).mean(1)
    return x[:, p:]

  def leave(call, x, **options):
    return attending['prompts']

  row = functools.partial(
    _apply, module, prompts[:, None], *args, windows=Windows((1, p), (1, p)), **kwargs
  )
  with _attention(enter):
    row()
  with _attention(attend):
    x = call(x, *args, windows=windows, **kwargs)
  with _attention(leave):
    prompts = row()[:, 0]
  return Accompanied(x, prompts)


def _merge(neighbours: tuple[int, int], module, call, x):
  """What a merging of h x w `neighbours` does for a map and its prompts."""
  x, prompts = _apart(x)
  if prompts is None or _is_being_made(module):
    return call(x)
  alike = prompts[:, None].repeat(neighbours[0], 1).repeat(neighbours[1], 2)
  return Accompanied(call(x), _apply(module, alike)[:, 0])


def _behind_blocks(pool: str | None, call, x, *args, **kwargs):
  """What a layer does that is in no block: the norm before the model pools its map."""
  x, prompts = _apart(x)
  if prompts is not None and pool in ('prompts', 'both'):
    tokens = [x.reshape(x.shape[0], 1, -1, x.shape[-1])] if pool == 'both' else []
    x = jnp.concatenate([prompts[:, None], *tokens], axis=2)
  return call(x, *args, **kwargs)


def _is_being_made(module) -> bool:
  """Whether its parameters are not there yet: they do not depend on prompts."""
  return not module.variables.get('params')


def _apply(module, *args, **kwargs):
  """Calls a module once more, with the parameters that it has."""
  params = {'params': module.variables['params']}
  return module.clone(parent=None).apply(params, *args, **kwargs)


def _attention(instead):
  """Returns the context in which attention layers do something else."""

  def intercept(call, args, kwargs, context):
    attends = isinstance(context.module, MultiHeadDotProductAttention)
    if attends and context.method_name == '__call__':
      return instead(call, *args, **kwargs)
    return call(*args, **kwargs)

  return nn.intercept_methods(intercept)


def _behind(p: int, positions):
  """Returns `positions` of tokens for these and p prompts before them, without biases."""

  def padded(query, key):
    query, key, bias = positions(query, key)
    return query, key, bias.behind(p)

  return padded
