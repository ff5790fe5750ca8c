"""Claims about the shape of the model."""

from vit_jax.lab.paper.seen import Missing, Seen, noise
from vit_jax.lab.paper.verdicts import (
  DIGITS,
  NOT_SEEN,
  PARTLY,
  SEEN,
  compare,
  if_better,
  percent,
)


def depth(seen: Seen):
  """What doubling depth gains, against width, MLP and patches."""
  base = _base(seen)
  larger = {line: _larger(seen, line) for line in ('depth', 'width', 'mlp', 'patch')}
  gain = {line: value - base for line, value in larger.items()}
  best = max(gain, key=gain.get)
  told = ', '.join(f'{line} {100 * value:+.1f}' for line, value in gain.items())
  beyond = compare(larger[best], base, DIGITS) > 0
  verdict = NOT_SEEN
  if best == 'depth' and beyond:
    verdict = SEEN
  elif gain['depth'] > gain['width'] and beyond:
    verdict = PARTLY
  return verdict, (
    f'Points gained over the {percent(base)} of the base by doubling the depth, the width '
    f'or the MLP, or halving the side of the patches: {told}; a difference counts from '
    f'{100 * noise((base, larger[best]), DIGITS):.1f} points on. So short a run shows what '
    'learns fastest, not what is best in the end.'
  )


def patches(seen: Seen):
  """Patches of half the side against the base."""
  base, half = _base(seen), _larger(seen, 'patch')
  return if_better(half, base, DIGITS), (
    f'{percent(base, half)} with the patches of the base and with patches of half their '
    'side, four times as many. In a short run on 1,437 images a model with more tokens '
    'learns more slowly.'
  )


def _base(seen: Seen) -> float:
  return seen.mean('shape', 'base', 'test/top1')


def _larger(seen: Seen, line: str) -> float:
  """Returns the accuracy of the cell of a line that takes the most compute."""
  cells = [cell for cell in seen.cells('shape') if cell.startswith(f'{line}-')]
  if not cells:
    raise Missing(f'shape has no cells of {line}')
  cell = max(cells, key=lambda cell: seen.mean('shape', cell, 'gflops'))
  return seen.mean('shape', cell, 'test/top1')


def heads(seen: Seen):
  """Class token against the better of two rates of pooling."""
  of = lambda cell: seen.mean('head', cell, 'test/top1')
  token, same, lower = of('token'), of('gap'), of('gap-lower-lr')
  alike = compare(max(same, lower), token, DIGITS) == 0
  return SEEN if alike else PARTLY, (
    f'{percent(token)} with a class token, {percent(same)} with the mean of the patches, '
    f'{percent(lower)} with the mean at 3/8 of the learning rate.'
  )


def rates(seen: Seen):
  """Pooling at a smaller rate against pooling at that of the class token."""
  of = lambda cell: seen.mean('head', cell, 'test/top1')
  same, lower = of('gap'), of('gap-lower-lr')
  return if_better(lower, same, DIGITS), (
    f'The mean reaches {percent(same)} at the learning rate of the class token, '
    f'{percent(lower)} at 3/8 of it (the ratio of the paper), '
    'in a run of 20 epochs.'
  )


def axial(seen: Seen):
  """Axial against full attention."""
  of = lambda cell, key='test/top1': seen.mean('axial', cell, key)
  full, along, deeper = of('full'), of('axial'), of('full-deeper')
  compute = of('axial', 'gflops') / of('full', 'gflops')
  return if_better(along, full, DIGITS), (
    f'{percent(full, along)} with full and with axial attention, which takes '
    f'{compute:.1f} times the compute; a difference counts from '
    f'{100 * noise((full, along), DIGITS):.1f} points on. A model of full attention with as '
    f'many blocks reaches {percent(deeper)}.'
  )
