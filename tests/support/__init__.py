"""Helpers of several tests: golden files, error patterns, small runs and fakes."""

import functools
import re
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / 'tests' / 'golden'


@functools.cache
def golden(name: str) -> dict:
  """Returns the arrays of a file of GOLDEN."""
  return dict(np.load(GOLDEN / f'{name}.npz'))


def classifiers() -> list[str]:
  """Returns the keys of MODELS whose models give logits [B, K]."""
  from vit_jax import models

  return [n for n in models.MODELS if models.family(n).outputs == 'classes']


def naming(*facts) -> str:
  """Returns a pattern of the texts that name every fact as a whole word, in any order.

  For `pytest.raises(match=...)`: the facts are what is wrong (a key, value, file,
  number) and what is suggested instead; the sentence around them is free to change.
  """

  def whole(fact):
    first, last = (r'\b' if re.match(r'\w', x) else '' for x in (fact[0], fact[-1]))
    return first + re.escape(fact) + last

  return r'(?s)\A' + ''.join(f'(?=.*{whole(str(fact))})' for fact in facts)
