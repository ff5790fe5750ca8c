"""Claims about position embeddings, by Table 8."""

from vit_jax.lab.paper.seen import Seen, rank_correlation
from vit_jax.lab.paper.verdicts import DIGITS, NOT_SEEN, PARTLY, SEEN, compare, percent


def positions_matter(seen: Seen):
  """Without positions, against the best kind; by 10 points, seen."""
  found = _posemb(seen)
  none, best = found['none'], max(found.values())
  verdict = (
    SEEN if best - none >= 0.1 else PARTLY if compare(best, none, DIGITS) else NOT_SEEN
  )
  worst = min(value for cell, value in found.items() if cell != 'none')
  return verdict, (
    f'{percent(none)} without position embeddings; {percent(worst)} to {percent(best)} '
    'with them. In the paper 61.4 and 64.2 % (ImageNet, 5-shot).'
  )


def kinds_are_alike(seen: Seen):
  """The paper's kinds against each other."""
  of_the_paper = lambda cell: cell not in ('none', 'rotary', 'sincos2d')
  found = {cell: x for cell, x in _posemb(seen).items() if of_the_paper(cell)}
  added = {cell: x for cell, x in found.items() if cell != 'relative'}
  low, high = (pick(added, key=added.get) for pick in (min, max))
  verdict = NOT_SEEN
  if compare(max(found.values()), min(found.values()), DIGITS) == 0:
    verdict = SEEN
  elif added[high] - added[low] < 0.05:
    verdict = PARTLY
  return verdict, (
    f'Those added to tokens reach {percent(added[low])} ({low}) to '
    f'{percent(added[high])} ({high}); in the paper all kinds are within 0.3 points. '
    f'Relative ones reach {percent(found["relative"])}: after 135 steps they have hardly '
    'begun to be learned; after 450 they are 3 points above a model without positions.'
  )


def few_shot_ranks(seen: Seen):
  """Rank correlation of few-shot and full accuracy over the kinds of positions."""
  cells = seen.cells('posemb')
  metric = next(k for k in cells['1d'] if '5shot' in k and 'digits' in k)
  full, few = (
    [seen.mean('posemb', cell, key) for cell in cells] for key in ('test/top1', metric)
  )
  value = rank_correlation(full, few)
  return SEEN if value > 0.7 else PARTLY if value > 0.3 else NOT_SEEN, (
    f'Over the {len(cells)} models of the position embedding experiment, the rank '
    f'correlation of 5-shot accuracy with the accuracy of the trained head is {value:.2f}. '
    'Both are on the classes that the model was trained on; in the paper few-shot stands in '
    'for fine-tuning on other data.'
  )


def _posemb(seen: Seen) -> dict[str, float]:
  return {cell: seen.mean('posemb', cell, 'test/top1') for cell in seen.cells('posemb')}
