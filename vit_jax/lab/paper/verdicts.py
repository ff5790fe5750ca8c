"""The verdicts on claims, and what they are made of.

A claim is seen only if the difference that it speaks of is larger than two standard
errors (`seen.noise`).
"""

from vit_jax.lab.paper.seen import noise

SEEN, PARTLY, NOT_SEEN = 'seen', 'seen in part', 'not seen'
LOOK, NOT_TESTED = 'to judge by eye', 'not tested'
VERDICTS = (SEEN, PARTLY, NOT_SEEN, LOOK, NOT_TESTED)

DIGITS, SHAPES = 360, 1000  # images of the test sets


def percent(*shares: float) -> str:
  """Returns '97.50 and 98.06 %', of three '96.11, 97.50 and 98.06 %'."""
  *first, last = (f'{100 * share:.2f}' for share in shares)
  return f'{", ".join(first)} and {last} %' if first else f'{last} %'


def points(share: float) -> str:
  """Returns the size of a difference: '1.2 points'."""
  return f'{abs(100 * share):.1f} points'


def compare(better: float, worse: float, examples: int) -> int:
  """Returns 1, 0 or -1: is the first accuracy the larger, beyond noise?"""
  if abs(better - worse) <= noise((better, worse), examples):
    return 0
  return 1 if better > worse else -1


def if_better(better: float, worse: float, examples: int) -> str:
  """Returns SEEN if the first accuracy is the larger beyond noise, else NOT_SEEN."""
  return SEEN if compare(better, worse, examples) > 0 else NOT_SEEN
