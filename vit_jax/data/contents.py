"""A description of a source in one line, and likely mistakes in its data."""

import numpy as np

from vit_jax.data.sources.listing import some

# A class of fewer training images can hardly be learned, and may be a mistake.
FEW = 5
# Below this, chance moves an accuracy by more than most changes to a model do: of 100
# images that are right with probability 0.5 to 0.9, by 3 to 5 % (one standard deviation).
FEW_TO_EVALUATE = 100


def describe(source, split: str) -> str:
  """Returns 'folder:photos, train: 1,200 images, 10 classes of 37 to 160; ...'.

  Args:
    split: as the config names it; '' for a part of a mixture.
  """
  text = f'{source.name}, {split}'.removesuffix(', ') + f': {len(source):,} images'
  if (classes := source.num_classes) is not None:
    text += f', {classes:,} {"class" if classes == 1 else "classes"}'
  if (counts := _counts(source)) is not None:
    low, high = counts.min(), counts.max()
    text += f' of {low:,}' if low == high else f' of {low:,} to {high:,}'
  return f'{text}; {source.remarks}' if source.remarks else text


def warnings(source) -> list[str]:
  """Returns at most one line, if a class has too few images to train on."""
  counts = _counts(source)
  if counts is None or not source.class_names or counts.min() >= FEW:
    return []
  few = [f'{source.class_names[i]!r} ({counts[i]})' for i in np.where(counts < FEW)[0]]
  return [f'{source.name}: classes of under {FEW} images: {some(few)}.']


def warnings_evaluated(source, split: str) -> list[str]:
  """Returns at most one line, if the split is too small or lacks classes."""
  notes = []
  if len(source) < FEW_TO_EVALUATE:
    each = f'one image is {1 / len(source):.1%} of an accuracy'
    notes.append(f'only {len(source)} images to evaluate on, {each}')
  counts = _counts(source)
  if counts is not None and source.class_names and not counts.all():
    lacks = [repr(source.class_names[i]) for i in np.flatnonzero(counts == 0)]
    notes.append(f'none of {some(lacks)}')
  return [f'{source.name}, {split}: {"; ".join(notes)}.'] if notes else []


def _counts(source) -> np.ndarray | None:
  if source.labels is None or source.num_classes is None or not len(source.labels):
    return None
  return np.bincount(source.labels, minlength=source.num_classes)
