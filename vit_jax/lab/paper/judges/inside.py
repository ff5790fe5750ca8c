"""Claims about what is inside a trained model."""

import numpy as np

from vit_jax.explain import attention
from vit_jax.lab.paper.seen import Seen, rank_correlation
from vit_jax.lab.paper.verdicts import NOT_SEEN, PARTLY, SEEN


def global_at_once(seen: Seen):
  """The farthest-looking head of the first layer."""
  first = _distances(seen)[0]
  whole = _even()
  verdict = NOT_SEEN
  if max(first) > 0.8 * whole:  # beside heads that are local, it is not just untrained
    verdict = SEEN if min(first) < 0.7 * whole else PARTLY
  return verdict, (
    f'In the first layer the mean attention distance of a head is {min(first):.1f} to '
    f'{max(first):.1f} pixels, over 128 digits of 32 px; uniform attention would give '
    f'{whole:.1f}. A head that attends to every patch alike, as in an untrained model, '
    'counts as one that looks far.'
  )


def distance_grows(seen: Seen):
  """Local heads in the first layer; mean distance of the last against the first."""
  layers = _distances(seen)
  means = [sum(v) / len(v) for _, v in sorted(layers.items())]
  local = min(layers[0]) < 0.7 * _even()
  grows = means[-1] > 1.05 * means[0]
  verdict = SEEN if local and grows else PARTLY if local or grows else NOT_SEEN
  return verdict, (
    'Mean attention distance by layer: '
    + ', '.join(f'{mean:.1f}' for mean in means)
    + f' pixels. The most local head of the first layer has {min(layers[0]):.1f}. The '
    "paper's model has 24 layers, this one three."
  )


def near_patches_are_alike(seen: Seen):
  """Rank correlation of similarity with closeness; rows and columns apart."""
  rows = seen.figure('posemb')
  side = len([key for key in rows[0] if key.isdigit()])
  alike = np.array([[float(row[str(i)]) for i in range(side)] for row in rows]).ravel()
  y, x, row, column = np.indices((len(rows) // side // side, side) * 2).reshape(4, -1)
  distance = np.hypot(y - row, x - column)
  others = distance > 0
  value = rank_correlation(-distance[others], alike[others])
  line = others & ((y == row) | (x == column))
  beside = alike[line].mean() - alike[others & ~line].mean()
  verdict = SEEN if value > 0.5 and beside > 0 else PARTLY if value > 0.1 else NOT_SEEN
  return verdict, (
    'The rank correlation of the cosine similarity of two embeddings with the closeness of '
    f'their patches is {value:.2f}; the mean similarity within a row or column differs from '
    f'that of other pairs by {beside:+.2f}. The table was learned on 4 x 4 patches, '
    'resized to 8 x 8, and trained for 200 steps more; interpolation itself makes '
    'neighbours similar.'
  )


def _distances(seen: Seen) -> dict[int, list[float]]:
  layers: dict[int, list[float]] = {}
  for row in seen.figure('distance'):
    layers.setdefault(int(row['layer']), []).append(float(row['pixels']))
  return layers


def _even() -> float:
  """Returns the distance of uniform attention over 8 x 8 patches of 4 pixels."""
  even = np.full((1, 1, 1, 64, 64), 1 / 64, np.float32)
  return float(attention.attention_distance(even, (8, 8), (4, 4))[0, 0])
