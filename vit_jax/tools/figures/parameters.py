"""Figures of parameters alone: posemb, filters, interpolation."""

import re

import jax.numpy as jnp
import numpy as np

from vit_jax import models, trees
from vit_jax.errors import UserError
from vit_jax.explain import filters as stem_filters
from vit_jax.explain.filters import to_show
from vit_jax.explain.positions import posemb_similarity
from vit_jax.nn.positions import ADDED, PositionEmbedding
from vit_jax.tools import source
from vit_jax.tools.figures.drawn import Drawn, grids
from vit_jax.weights import adapt

_COMPONENTS = 4  # of the position embeddings, shown by `interpolation`


def posemb(args) -> Drawn:
  """Draws how similar the position embeddings are (figure 7 centre)."""
  from vit_jax.explain import plots

  loaded = source.load(args, dtype='float32')
  table, grid = _positions(loaded)
  similarity = posemb_similarity(table, grid)
  kinds = {'learn2d': '2-D position embedding', 'sincos2d': 'Sine-cosine position'}
  model = models.core(loaded.model)
  title = f'{kinds.get(model.posemb, "Position embedding")} similarity'
  notes = ()
  if model.posemb_where == 'every':
    notes = ('Every block adds positions of its own: these are those of the first.',)
  named = [((i, j), similarity[i, j]) for i, j in np.ndindex(*grid)]
  rows = grids(('patch_row', 'patch_column'), named)
  return Drawn(plots.tiles(similarity, title), rows, notes)


def filters(args) -> Drawn:
  """Draws the first layer's filters (figure 7 left).

  A patch embedding is shown by its principal components; a convolution that overlaps,
  such as the root of a hybrid or a ResNet, by the filters themselves.
  """
  from vit_jax.explain import plots

  loaded = source.load(args, dtype='float32')
  family = models.family_of(loaded.model)
  flat = trees.flatten(loaded.params)
  name = family.stem(flat)
  kernel = np.asarray(flat[name], np.float32)
  size, colour = kernel.shape[:2], 'RGB' if kernel.shape[2] == 3 else 'Grey'
  if size == tuple(family.stride(models.fields_of(loaded.model))):
    n = min(args.count or 28, *_components(kernel))
    found = stem_filters.filters_pca(kernel, n)
    shown, explained = to_show(found.filters), found.explained
    title, across = f'{colour} embedding filters\n(first {n} principal components)', 7
    notes = (f'{n} components explain {explained.sum():.0%} of the variance.',)
  else:
    shown = to_show(np.moveaxis(kernel, -1, 0)[: args.count or 64])
    explained = [''] * len(shown)
    title, across = f'Filters of the first convolution ({size[0]}x{size[1]})', 8
    notes = (f'{len(shown)} of the {kernel.shape[-1]} filters of {name}.',)
  rows = [('filter', 'explained', 'row', 'column', *_channels(kernel))]
  values = found.filters if explained[0] != '' else np.moveaxis(kernel, -1, 0)
  for f, share in enumerate(explained):
    share = share if share == '' else f'{share:.7g}'
    for y, x in np.ndindex(*size):
      rows.append((f, share, y, x, *(f'{v:.7g}' for v in values[f, y, x])))
  return Drawn(plots.filters(shown, title, across), rows, notes)


def interpolation(args) -> Drawn:
  """Draws learned positions before and after they are resized for larger images."""
  from vit_jax.explain import plots

  loaded = source.load(args, dtype='float32')
  positions, old = _positions(loaded)
  family = models.family_of(loaded.model)
  if family.position not in trees.flatten(loaded.params):
    model = models.core(loaded.model)
    raise UserError(
      f'interpolation shows how a learned table is resized; {args.source} has '
      f'posemb={model.posemb!r}, posemb_where={model.posemb_where!r}. '
      'posemb shows such positions.'
    )
  stride = family.stride(models.fields_of(loaded.model))
  new = _new_grid(args.to, stride, old)
  table = np.asarray(trees.flatten(loaded.params)[family.position])
  resized = adapt.resize_positions(table, old, new, args.resize)[0]
  patches = {old: positions, new: resized[len(resized) - new[0] * new[1] :]}
  mean = positions.mean(0)
  # Rows of unit length: the directions in which positions differ most.
  directions = np.linalg.svd(positions - mean, full_matrices=False)[2][:_COMPONENTS]
  titles = ['Similarity to\nthe centre patch']
  titles += [f'Principal\ncomponent {i + 1}' for i in range(len(directions))]
  shown, rows = {}, []
  for when, (grid, rows_of_grid) in zip(
    ('before', 'after'), patches.items(), strict=True
  ):
    H, W = (n * s for n, s in zip(grid, stride, strict=True))
    centre = posemb_similarity(rows_of_grid, grid)
    images = [centre[grid[0] // 2, grid[1] // 2]]
    images += list(((rows_of_grid - mean) @ directions.T).T.reshape(-1, *grid))
    shown[f'{grid[0]}x{grid[1]} patches\n({H}x{W} px)'] = images
    panels = [' '.join(title.split()) for title in titles]
    rows += [((when, *each), x) for each, x in zip(zip(panels), images, strict=True)]
  return Drawn(plots.before_after(shown, titles), grids(('when', 'panel'), rows))


def _new_grid(to, stride: tuple[int, int], old: tuple[int, int]) -> tuple[int, int]:
  """Returns the grid for images of --to pixels; by default 384 for 224, as the paper."""
  if to is None:
    return tuple(round(n * 384 / 224) for n in old)
  if any(n % s for n, s in zip(to, stride, strict=True)):
    H, W = (-(-n // s) * s for n, s in zip(to, stride, strict=True))
    raise UserError(
      f'--to {to[0]}x{to[1]}: not a multiple of the {stride[0]}x{stride[1]} px of a '
      f'patch; {H}x{W} is.'
    )
  return to[0] // stride[0], to[1] // stride[1]


def _positions(loaded) -> tuple[np.ndarray, tuple[int, int]]:
  """Returns ([h w, D], (h, w)): what a model adds to its patches, of any kind of positions.

  Where every block adds its own, those of the first.
  """
  model, family = models.core(loaded.model), models.family_of(loaded.model)
  if family.position is None:
    raise UserError(
      f'{loaded.source}: {type(model).__name__} has no position embeddings; filters, '
      'gradient and integrated work for it.'
    )
  if model.posemb not in ADDED:
    raise UserError(
      f'{loaded.source} adds no position embeddings to its tokens (posemb='
      f"'{model.posemb}'); rollout, attention, distance and filters work for it."
    )
  stride = family.stride(models.fields_of(model))
  grid = tuple(n // s for n, s in zip(loaded.image_size, stride, strict=True))
  patches = grid[0] * grid[1]
  module = PositionEmbedding(model.posemb, model.posemb_std)
  made = re.compile(r'Transformer/(encoderblock(_0)?/(rows/)?)?posembed_input/(.*)')
  params = {
    m[4]: x[0] if m[1] and not m[2] else x  # of scanned blocks
    for name, x in trees.flatten(loaded.params).items()
    if (m := made.fullmatch(name))
  }
  tokens = jnp.zeros((1, patches + (model.classifier == 'token'), model.width))
  found = module.apply({'params': params}, tokens, grid)[0]
  return np.asarray(found[-patches:]), grid


def _components(kernel: np.ndarray) -> tuple[int, int]:
  return int(np.prod(kernel.shape[:3])), kernel.shape[3]


def _channels(kernel: np.ndarray) -> tuple[str, ...]:
  return ('red', 'green', 'blue') if kernel.shape[2] == 3 else ('grey',)
