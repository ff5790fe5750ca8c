"""Orders of training in which images of rare classes come more often.

Images that are to be drawn equally often form a group. Each group has its share of the
positions and goes through its own epochs, as the parts of a mixture do. An order is therefore
arithmetic, see `order`: it does not depend on restarts and on the number of hosts.
"""

from fractions import Fraction
from typing import Annotated

import numpy as np

from vit_jax.check import Call, Range, parse_options, prefix_errors
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.mixture import Interleaved, own_seed
from vit_jax.data.sources.order import Shuffled
from vit_jax.registry import Registry


def balanced(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Draws each class that occurs equally often; for one label per image."""
  if labels.ndim == 2:
    raise ValueError('images have several labels: use repeat')
  classes, group = np.unique(labels, return_inverse=True)
  return group, np.ones(len(classes))


def repeat(
  labels: np.ndarray, *, t: Annotated[float, Range(0, 1, '(]')] = 0.001
) -> tuple[np.ndarray, np.ndarray]:
  """Draws an image max(1, sqrt(t / f)) times as often (LVIS, arXiv 1908.03195).

  f is the share of the images that have a class; of several classes the rarest counts.
  """
  several = labels.ndim == 2
  counts = (labels > 0).sum(0) if several else np.bincount(labels)
  factors = np.sqrt(np.maximum(1, t * len(labels) / np.maximum(counts, 1)))
  factors = np.where(labels > 0, factors, 1).max(1) if several else factors[labels]
  values, group, counts = np.unique(factors, return_inverse=True, return_counts=True)
  return group, values * counts


# A sampling maps labels, int [N] or multi-hot [N, K], to the group of each example, int [N],
# and the relative share of each group.
SAMPLINGS = Registry('sampling', {'balanced': balanced, 'repeat': repeat})
check_sampling = Call(SAMPLINGS)


def order(text: str, source: Source, seed: int) -> Interleaved:
  """Returns the order of a source by a sampling, 'balanced' or 'repeat(t=0.001)'."""
  labels = source.multi_hot if source.labels is None else source.labels
  with prefix_errors(f'{source.name}: sampling={text!r}'):
    if labels is None:
      raise ValueError('its labels are not known without reading images')
    name, options = parse_options(text)
    group, shares = SAMPLINGS[name](labels, **options)
  ends = np.cumsum(np.bincount(group))[:-1]
  members = np.split(np.argsort(group, kind='stable'), ends)
  orders = [_Members(rows, own_seed(seed, k)) for k, rows in enumerate(members)]
  return Interleaved(orders, np.zeros(len(orders), int), map(Fraction, shares), seed)


class _Members(Shuffled):
  """The order of the examples of a group."""

  def __init__(self, rows: np.ndarray, seed: int):
    super().__init__(len(rows), seed)
    self._rows = rows

  def _look_up(self, offsets, permutation):
    return self._rows[permutation[offsets]]
