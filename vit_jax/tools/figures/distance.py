"""Figure of how far heads look, by depth: distance."""

import numpy as np

from vit_jax import explain, models
from vit_jax.explain import attention
from vit_jax.tools import predict, source
from vit_jax.tools.figures.drawn import Drawn


def draw(args) -> Drawn:
  """Draws each head's mean attention distance (figures 7 right and 11)."""
  from vit_jax.explain import plots

  paths = [str(path) for path in predict.find(args.images)]
  loaded = source.load(args, dtype='float32')
  each = explain.attention_distances(loaded, paths, renormalize=not args.plain)
  mean, std = each.mean(0), each.std(0)  # [L, M]
  patch = models.family_of(loaded.model).stride(models.fields_of(loaded.model))
  grid = tuple(n // p for n, p in zip(loaded.image_size, patch, strict=True))
  N = grid[0] * grid[1]
  even = np.full((1, 1, 1, N, N), 1 / N, np.float32)
  uniform = float(attention.attention_distance(even, grid, patch)[0, 0])
  rows = [('layer', 'head', 'pixels', 'std_over_images', 'images')]
  for (layer, head), value in np.ndenumerate(mean):
    rows.append((layer, head, f'{value:.7g}', f'{std[layer, head]:.7g}', len(paths)))
  notes = (f'{len(paths)} images; uniform attention is {uniform:.1f} pixels.',)
  if len(paths) < 10:
    notes += ('The paper averages over 128 images; so few say little about a head.',)
  return Drawn(plots.heads(mean, std, uniform), rows, notes)
