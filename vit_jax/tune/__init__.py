"""Which parameters a run trains: the config's `tune` section.

A method gives path rules (regex, whether it trains), the first match wins (see
`vit_jax.trees`). What does not train is frozen: it has no gradient, no moments and no
average, and checkpoints do not hold it, because it can be read again from the weights
that the run started from.
"""

import inspect
from collections.abc import Sequence

from vit_jax import trees
from vit_jax.errors import UserError, choose, did_you_mean

Rules = list[tuple[str, bool]]

_HEAD = ('head/.*', True)
_REST = ('.*', False)


def full() -> Rules:
  """Every parameter: fine-tuning, or training from scratch."""
  return [('.*', True)]


def linear() -> Rules:
  """The head only: a linear probe."""
  return [_HEAD, _REST]


def bias() -> Rules:
  """The head and every bias (BitFit, arXiv 2106.10199)."""
  return [_HEAD, ('(?:.*/)?bias', True), _REST]


def rules(*, train: Sequence[str]) -> Rules:
  """What one of the regexes `train` matches in full, such as 'head/.*'."""
  return [*((regex, True) for regex in train), _REST]


METHODS = {'full': full, 'linear': linear, 'bias': bias, 'rules': rules}


def build(method: str = 'full', **options) -> Rules:
  """Returns the rules of the config's `tune` section; see METHODS for the options."""
  return choose('method of config.tune', method, METHODS)(**options)


def signature(method: str) -> inspect.Signature:
  """Returns the keys that the `tune` section may hold besides `method`."""
  return inspect.signature(choose('method of config.tune', method, METHODS))


def partition(params: dict, rules: Rules) -> tuple[dict, dict]:
  """Returns (trained, frozen), see `trees.partition`.

  Raises:
    UserError: for a rule that trains none of the parameters.
  """
  names = list(trees.flatten(params))
  for regex, trains in rules:
    if trains and not any(trees.matches(regex, name) for name in names):
      raise UserError(
        f'config.tune trains {regex!r}, which none of the {len(names)} parameters '
        f'matches in full; the last are {names[-3:]}.{did_you_mean(regex, names)}'
      )
  return trees.partition(params, rules)
