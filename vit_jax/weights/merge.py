"""Taking a model's parameters from a source, strictly."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from vit_jax import trees
from vit_jax.errors import UserError

_STATS = f'{trees.STATS}/'


class Merge(NamedTuple):
  """What became of every name in a strict merge."""

  taken: list[str]  # from the source
  reinitialized: list[str]  # parameters that keep their initial value, by a skip rule
  unused: list[str]  # of the source, by a skip rule
  notes: list[str]  # what was changed on the way


def merge(
  shapes: dict[str, tuple[int, ...]], source: dict[str, Any], skip: Iterable[str] = ()
) -> tuple[dict[str, Any], Merge]:
  """Takes every parameter from `source`, strictly: nothing missing, nothing left over.

  Args:
    shapes: name -> shape of every parameter wanted.
    source: name -> array.
    skip: regexes, matched in full: such parameters are not taken, on either side. A batch
      norm's statistics go by the names that parameters in their place would have.

  Raises:
    UserError: for names on one side only, or shapes that differ; the first few of each.
  """
  rules = [(regex, True) for regex in skip] + [('.*', False)]
  is_skipped = lambda name: trees.first_match(rules, name.removeprefix(_STATS))
  taken = {n: source[n] for n in shapes if n in source and not is_skipped(n)}
  missing = [n for n in shapes if n not in source and not is_skipped(n)]
  extra = [n for n in source if n not in shapes and not is_skipped(n)]
  differ = [
    f'{n} is {tuple(x.shape)} in the source, {tuple(shapes[n])} in the model'
    for n, x in taken.items()
    if tuple(x.shape) != tuple(shapes[n])
  ]
  problems = []
  for text, found in (
    ('parameters that the source lacks', missing),
    ('parameters of the source that the model does not have', extra),
    ('shapes that differ', differ),
  ):
    if found:
      more = f' and {len(found) - 3} more' if len(found) > 3 else ''
      problems.append(f'{text}: {", ".join(found[:3])}{more}')
  if problems:
    raise UserError(
      f'The weights do not fit the model: {"; ".join(problems)}. Change the model to '
      "what the weights are of, or leave parameters out with skip, such as ['head/.*']."
    )
  reinitialized = [n for n in shapes if is_skipped(n)]
  unused = [n for n in source if is_skipped(n)]
  return taken, Merge(list(taken), reinitialized, unused, [])
