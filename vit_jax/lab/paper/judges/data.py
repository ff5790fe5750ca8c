"""Claims about data and compute."""

from vit_jax.lab import paper_table
from vit_jax.lab.paper.seen import Seen
from vit_jax.lab.paper.verdicts import (
  DIGITS,
  NOT_SEEN,
  PARTLY,
  SEEN,
  SHAPES,
  compare,
  if_better,
  percent,
  points,
)
from vit_jax.lab.published import TABLE_6


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
    f'Trained on 3 % of the images, a ResNet of equal compute reaches {percent(small[0])} '
    f'and the ViT {percent(small[1])}: the ResNet is {ahead(small)}. On all of them the '
    f'ResNet reaches {percent(large[0])} and the ViT {percent(large[1])}: the ResNet is '
    f'{ahead(large)}. In the paper the ViT is behind on 9 million images and ahead from 90 '
    'million on; here there are at most 10,000, for 300 steps.'
  )


def more_data(seen: Seen):
  """The ViT on all of the data against on the least."""
  of = lambda share: seen.mean('data_size', f'vit-{share}pct', 'test/top1')
  values = [of(share) for share in (3, 10, 30, 100)]
  cells = seen.cells('data_size')
  few = next(key for key in cells['vit-3pct'] if key.endswith('5shot'))
  transfer = [seen.mean('data_size', f'vit-{n}pct', few) for n in (3, 100)]
  verdict = if_better(values[-1], values[0], SHAPES)
  if verdict == SEEN and compare(*reversed(transfer), DIGITS) <= 0:
    verdict = PARTLY
  return verdict, (
    'On 3, 10, 30 and 100 % of the images, for the same number of steps, the ViT reaches '
    f'{percent(*values)} on test images of the same kind; few-shot on digits, the transfer '
    f'that the paper means, {percent(*transfer)} after the least and the most.'
  )


def compute_of_pre_training(seen: Seen):
  """exaFLOPs of Table 6, from our models."""
  wanted = {row.model for row in TABLE_6 if row.model.startswith('vit:')}
  off = [abs(row['ratio'] - 1) for row in paper_table.rows(wanted)]
  return SEEN if max(off) < 0.03 else NOT_SEEN, (
    f'For the {len(off)} ViTs and hybrids of the table, the exaFLOPs counted from the shapes '
    f'of our models differ from the printed ones by {100 * max(off):.1f} % at most. At full '
    'scale.'
  )
