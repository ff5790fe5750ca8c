"""Claims about data and compute."""

from vit_jax.tools.inspect import paper_table
from vit_jax.tools.paper.seen import Seen
from vit_jax.tools.paper.verdicts import (
  NOT_SEEN,
  PARTLY,
  SEEN,
  SHAPES,
  compare,
  if_better,
  percent,
  points,
)
from vit_jax.tools.published import TABLE_6


def inductive_bias(seen: Seen):
  """ResNet against ViT on the least and on the most data."""
  of = lambda cell: seen.mean('data_size', cell, 'test/top1')
  small = of('resnet-3pct'), of('vit-3pct')
  large = of('resnet-100pct'), of('vit-100pct')
  first = compare(*small, SHAPES)
  verdict = SEEN if first > 0 and compare(*large, SHAPES) < 0 else NOT_SEEN
  if verdict == NOT_SEEN and first > 0:
    verdict = PARTLY
  ahead = lambda pair: (
    f'{points(pair[0] - pair[1])} {"ahead" if pair[0] > pair[1] else "behind"}'
  )
  return verdict, (
    f'On 3 % of the images a ResNet of equal compute has {percent(small[0])} and the ViT '
    f'{percent(small[1])}: it is {ahead(small)}. On all of them it has {percent(large[0])} '
    f'and the ViT {percent(large[1])}: {ahead(large)}. In the paper the ViT overtakes '
    'between 30 and 300 million images; here are 10,000 at most, and 300 steps.'
  )


def more_data(seen: Seen):
  """The ViT on all of the data against on the least."""
  of = lambda share: seen.mean('data_size', f'vit-{share}pct', 'test/top1')
  values = [of(share) for share in (3, 10, 30, 100)]
  return if_better(values[-1], values[0], SHAPES), (
    'For 3, 10, 30 and 100 % of the images, the same number of steps: '
    f'{percent(*values)}.'
  )


def compute_of_pre_training(seen: Seen):
  """exaFLOPs of Table 6, from our models."""
  wanted = {row.model for row in TABLE_6 if row.model.startswith('vit:')}
  off = [abs(row['ratio'] - 1) for row in paper_table.rows(wanted)]
  return SEEN if max(off) < 0.03 else NOT_SEEN, (
    f'Counted from the shapes of our models, the exaFLOPs of its {len(off)} ViTs and '
    f'hybrids differ from those printed by {max(off):.1%} at most. At full scale.'
  )
