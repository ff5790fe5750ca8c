"""Mixes several sources in fixed proportions.

Training positions are divided into blocks of M. In each block part k has a quota of about
M w_k positions. Quotas are rounded so that after any number of blocks, the number of
positions of a part differs by less than one from its exact share. A seeded permutation
spreads the quotas over the block, and each part goes through its own epochs. All of this is
computed from the position, so that a jump to any step costs nothing.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Annotated

import numpy as np

from vit_jax.check import INT32, Range, bind, prefix_errors
from vit_jax.data import sources
from vit_jax.data.features import LabelFeature
from vit_jax.data.sources import subset
from vit_jax.data.sources.base import Source, fingerprint

# Default and maximum number of examples in a block. A block holds a few batches. It is made
# larger if the smallest part would have no example in some blocks.
_BLOCK, _LARGEST = 2**10, 2**20


def build(parts: Sequence[dict], split: str) -> 'Mixture':
  """Returns the mixture that a config's list of parts describes.

  Args:
    parts: the keyword arguments of `_part` for each part. `weight` is the share of the part
      relative to the others; if no part has a weight, the weight is the number of its
      examples. `label_offset` is added to its labels. For the other arguments see
      `sources.build`.
    split: the split of parts that name none.
  """
  check_parts('config.data.source', parts)
  built, weights = [], []
  for part in parts:
    source = _part(**{'split': split, **part})
    built.append((source, part.get('label_offset', 0), 'label_offset' in part))
    # Convert the decimal digits, so that 0.1 is a tenth and not the float next to it.
    weights.append(Fraction(str(part.get('weight') or 0)))
  if not all(weights) and any(weights):
    raise ValueError(
      f'data.source[{weights.index(0)}] has no weight, but others have: give all parts '
      'one, or none'
    )
  if not any(weights):
    weights = [Fraction(len(source)) for source, *_ in built]
  return Mixture(built, weights)


def check_parts(where: str, source: str | list[dict], _=None) -> None:
  """Raises UserError for a malformed list of parts; a rule for `check`."""
  if isinstance(source, str):
    return
  with prefix_errors(where):
    if not source:
      raise ValueError('an empty list: expected one part or more')
  for i, part in enumerate(source):
    bind(f'{where}[{i}]', part, _part)


def _part(
  source: str,
  split: str | None = None,
  weight: Annotated[float, Range(0, 1e12, '(]')] | None = None,
  label_offset: Annotated[int, Range(-INT32, INT32)] = 0,
  options: Annotated[dict | None, sources.check_options] = None,
  classes: subset.Classes = None,
) -> Source:
  # The mixture itself uses these two.
  del weight, label_offset
  return sources.build(source, split, classes=classes, **(options or {}))


class Mixture(Source):
  """The examples of all parts, one part after the other; for training.

  Its length, which is also an epoch of the run, is the number of examples of all parts,
  whatever the weights. A part with a larger share goes through more epochs in that time.
  Images must be of one kind: encoded, or arrays of one shape. If one part has several
  labels per example, all parts have them in the mixture.
  """

  def __init__(
    self, parts: Sequence[tuple[Source, int, bool]], weights: Sequence[Fraction]
  ):
    """Builds the mixture.

    Args:
      parts: (source, label_offset, whether the user set label_offset) of each part.
      weights: the weight of each part.
    """
    self.name = f'mixture of {", ".join(source.name for source, *_ in parts)}'
    self._parts = [(source, offset) for source, offset, _ in parts]
    self._weights = weights
    self._starts = np.cumsum([0] + [len(source) for source, _ in self._parts])
    self.features = self._common_features()
    counts = [source.num_classes for source, _ in self._parts]
    if None not in counts:
      self.num_classes = max(source.num_classes + k for source, k in self._parts)
    self.class_names = self._names([explicit for *_, explicit in parts])
    self.fingerprint = fingerprint(
      (source.fingerprint, offset, weight)
      for (source, offset), weight in zip(self._parts, self._weights, strict=True)
    )

  def _common_features(self) -> dict:
    alike = [dict(source.features) for source, _ in self._parts]
    if not all('text' in features for features in alike):
      # Captions are optional, so they do not make a difference.
      alike = [{k: f for k, f in x.items() if k != 'text'} for x in alike]
    labels = [features.get('label') for features in alike]
    if all(isinstance(label, LabelFeature) for label in labels):
      several = LabelFeature(any(label.several for label in labels))
      alike = [{**features, 'label': several} for features in alike]
    for (source, _), features in zip(self._parts, alike, strict=True):
      if features != alike[0]:
        raise ValueError(
          f'the parts of a mixture must have the same features, but {source.name} has '
          f'{features}, and {self._parts[0][0].name} has {alike[0]}'
        )
    return alike[0]

  def _names(self, explicit: list[bool]) -> list[str] | None:
    """Returns the names of the classes; None if some classes have no name."""
    names: dict[int, str] = {}
    for (source, offset), is_explicit in zip(self._parts, explicit, strict=True):
      for label, name in enumerate(source.class_names or (), offset):
        if names.setdefault(label, name) != name and not is_explicit:
          raise ValueError(
            f'{self.name}: class {label} is {names[label]!r} in one part and {name!r} in '
            f"{source.name}. Give that part a 'label_offset' (0 if it is the same class)"
          )
    if sorted(names) == list(range(self.num_classes or 0)):
      return [names[label] for label in range(len(names))] or None
    return None

  def __len__(self) -> int:
    return int(self._starts[-1])

  def read(self, indices: np.ndarray) -> list[dict]:
    indices = np.asarray(indices)
    which, out = self._part_of(indices), [None] * len(indices)
    for k in np.unique(which):
      here = np.flatnonzero(which == k)
      examples = self._parts[k][0].read(indices[here] - self._starts[k])
      for i, example in zip(here, examples, strict=True):
        out[i] = self._align(k, example)
    return out

  def _part_of(self, indices):
    return np.searchsorted(self._starts, indices, 'right') - 1

  def _align(self, k, example):
    source, offset = self._parts[k]
    if 'error' in example or 'label' not in self.features:
      return example
    label = np.asarray(example['label'], np.int64) + offset
    if getattr(self.features['label'], 'several', False):
      label = np.atleast_1d(label)
    return {'exif': source.exif, **example, 'label': label}

  def name_of(self, index: int) -> str:
    k = int(self._part_of(index))
    return self._parts[k][0].name_of(int(index - self._starts[k]))

  def plan_training(self, seed: int, batch_size: int, host: int, hosts: int) -> tuple:
    orders = []
    for k, (source, _) in enumerate(self._parts):
      own = own_seed(seed, k)
      reading, order = source.plan_training(own, batch_size, host, hosts)
      if reading is not source:
        raise ValueError(f"{source.name}: a part of a mixture cannot have 'stream'")
      orders.append(order)
    return self, Interleaved(orders, self._starts[:-1], self._weights, seed)

  def plan_evaluation(self) -> tuple:
    raise ValueError(
      f'{self.name} is for training: evaluate each part (config.evals, one entry each)'
    )

  def parts(self) -> list[tuple[Source, int]]:
    return self._parts


def own_seed(seed: int, part: int) -> int:
  """Returns the seed of a part; parts of one size would otherwise have the same order."""
  bits = np.random.SeedSequence([seed, part, 1]).generate_state(1, np.uint64)
  return int(bits[0]) >> 1


class Interleaved:
  """The order of a mixture, which gives every part its quota in each block of positions."""

  def __init__(self, orders, starts, weights: Iterable[Fraction], seed: int):
    """Builds the order; `starts` are the indices of the parts' first examples."""
    weights = list(weights)
    total = sum(weights)
    self._shares = [weight / total for weight in weights]
    self._orders, self._starts, self._seed = orders, starts, seed
    self.block = _BLOCK
    # If the exact share of every part in a block is at least one, no quota is negative.
    while self.block * min(self._shares) < 1:
      self.block *= 2
      if self.block > _LARGEST:
        raise ValueError(
          f'a part of a mixture has the weight {float(min(weights)):g} of '
          f'{float(total):g}: the smallest share is 1 in {_LARGEST}'
        )
    self._block = functools.lru_cache(maxsize=8)(self._draw_block)

  def count_before(self, block: int) -> list[int]:
    """Returns how many positions each part has before a block."""
    # The running sum of shares is rounded, not each share, so that the counts add up.
    places, ends, so_far = block * self.block, [0], Fraction(0)
    for share in self._shares:
      so_far += share
      # `int` is the floor of a positive number.
      ends.append(int(places * so_far))
    return [end - start for start, end in itertools.pairwise(ends)]

  def _draw_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the part of each position, and the position in that part's order: int64 [M]."""
    before, after = self.count_before(block), self.count_before(block + 1)
    quotas = np.subtract(after, before)
    parts = np.repeat(np.arange(len(quotas)), quotas)
    bits = np.random.Philox([self._seed, block, 2])
    parts = np.random.Generator(bits).permutation(parts)
    turns = np.empty(self.block, np.int64)
    for k, first in enumerate(before):
      turns[parts == k] = first + np.arange(quotas[k])
    return parts, turns

  def turns(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Maps positions to (part, position in the part's own order), int64 [n] each."""
    blocks, places = np.divmod(np.asarray(positions, np.int64), self.block)
    out = np.empty((2, len(blocks)), np.int64)
    for block in np.unique(blocks):
      here = blocks == block
      out[:, here] = [x[places[here]] for x in self._block(int(block))]
    return out[0], out[1]

  def indices(self, positions: np.ndarray) -> np.ndarray:
    """Returns the examples' indices, int64 [n], at positions [n] >= 0."""
    parts, turns = self.turns(positions)
    out = np.empty(len(parts), np.int64)
    for k in np.unique(parts):
      here = parts == k
      out[here] = self._starts[k] + self._orders[k].indices(turns[here])
    return out
