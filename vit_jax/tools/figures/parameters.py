"""Draws figures of parameters: `posemb` and `filters`."""

import math
import re

import jax.numpy as jnp
import numpy as np

from vit_jax import trees
from vit_jax.errors import UserError
from vit_jax.explain.parameters import filters_pca, posemb_similarity, rescale
from vit_jax.nn.positions import ADDED, PositionEmbedding
from vit_jax.tools import source
from vit_jax.tools.figures import Drawing, grids


def posemb(args) -> Drawing:
  """Draws how similar the position embeddings are (figure 7 centre)."""
  from vit_jax.explain import plots

  loaded = source.load(args, dtype='float32')
  table, grid = _positions(loaded)
  similarity = posemb_similarity(table, grid)
  kinds = {'learn2d': '2-D position embedding', 'sincos2d': 'Sine-cosine position'}
  model = loaded.model.untuned
  title = f'{kinds.get(model.posemb, "Position embedding")} similarity'
  notes = ()
  if model.posemb_where == 'every':
    notes = ('Every block adds its own positions; these are those of the first block.',)
  named = [((i, j), similarity[i, j]) for i, j in np.ndindex(*grid)]
  rows = grids(('patch_row', 'patch_column'), named)
  return Drawing(plots.tiles(similarity, title), rows, notes)


def filters(args) -> Drawing:
  """Draws the first layer's filters (figure 7 left).

  For a patch embedding, it draws the principal components. For an overlapping convolution,
  such as the root of a hybrid or a ResNet, it draws the filters themselves.
  """
  from vit_jax.explain import plots

  loaded = source.load(args, dtype='float32')
  family = loaded.model.family
  flat = trees.flatten(loaded.params)
  name = family.stem(flat)
  kernel = np.asarray(flat[name], np.float32)
  size, coloured = kernel.shape[:2], kernel.shape[2] == 3
  channels = ('red', 'green', 'blue') if coloured else ('grey',)
  colour = 'RGB' if coloured else 'Grey'
  if size == tuple(family.stride(loaded.model.fields())):
    n = min(28, math.prod(kernel.shape[:3]), kernel.shape[3])
    components = filters_pca(kernel, n)
    shown, explained = rescale(components.filters), components.explained
    title, across = f'{colour} embedding filters\n(first {n} principal components)', 7
    notes = (f'{n} components explain {explained.sum():.0%} of the variance.',)
  else:
    shown = rescale(np.moveaxis(kernel, -1, 0)[:64])
    explained = [''] * len(shown)
    title, across = f'Filters of the first convolution ({size[0]}x{size[1]})', 8
    notes = (f'{len(shown)} of the {kernel.shape[-1]} filters of {name}.',)
  rows = [('filter', 'explained', 'row', 'column', *channels)]
  values = components.filters if explained[0] != '' else np.moveaxis(kernel, -1, 0)
  for f, share in enumerate(explained):
    share = share if share == '' else f'{share:.7g}'
    for y, x in np.ndindex(*size):
      rows.append((f, share, y, x, *(f'{v:.7g}' for v in values[f, y, x])))
  return Drawing(plots.filters(shown, title, across), rows, notes)


def _positions(loaded) -> tuple[np.ndarray, tuple[int, int]]:
  """Returns the position embeddings that are added to the patches, [h w, D], and (h, w).

  If every block adds its own, returns those of the first block.
  """
  model, family = loaded.model.untuned, loaded.model.family
  if family.position is None:
    kind = type(model).__name__
    raise UserError(
      f'{loaded.source}: {kind} has no position embeddings; try `figures filters`.'
    )
  if model.posemb not in ADDED:
    raise UserError(
      f'{loaded.source}: posemb={model.posemb!r} has no table to draw; try '
      '`figures filters`.'
    )
  fields = model.fields()
  stride = family.stride(fields)
  grid = tuple(n // s for n, s in zip(loaded.image_size, stride, strict=True))
  patches = grid[0] * grid[1]
  module = PositionEmbedding(
    model.posemb, model.posemb_std, fields.get('posemb_tokens', 'prefix')
  )
  made = re.compile(r'Transformer/(encoderblock(_0)?/(rows/)?)?posembed_input/(.*)')
  # Take the first of scanned blocks.
  params = {
    m[4]: x[0] if m[1] and not m[2] else x
    for name, x in trees.flatten(loaded.params).items()
    if (m := made.fullmatch(name))
  }
  tokens = jnp.zeros((1, patches + model.prefix, model.width))
  added = module.apply({'params': params}, tokens, grid)[0]
  return np.asarray(added[-patches:]), grid
