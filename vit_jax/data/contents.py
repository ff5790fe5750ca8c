"""A description of a source in one line, and likely mistakes in its data."""

from collections.abc import Mapping

import numpy as np

from vit_jax.data.sources import listing

# A class of fewer training images can hardly be learned, and may be a mistake.
FEW = 5
# Below this, chance moves an accuracy by more than most changes to a model do: of 100
# images that are right with probability 0.5 to 0.9, by 3 to 5 % (one standard deviation).
FEW_TO_EVALUATE = 100
_NAMED = 5  # Classes or extensions in a line, at most.

_CONVERSIONS = {
  ('.heic', '.heif'): 'HEIC is read once pillow-heif is installed (pip install '
  "'vit_jax[heif]'); or convert the files: magick mogrify -format jpg *.heic",
  ('.svg', '.svgz'): 'SVG is a drawing, not pixels: magick mogrify -format png *.svg',
}


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
  if source.left_out:
    text += f'; left out: {files(source.left_out)}'
  if source.misplaced:
    text += f'; in no class: {files(source.misplaced)}'
  return f'{text}; {source.remarks}' if source.remarks else text


def warnings(source) -> list[str]:
  """Returns a line for each likely mistake in the data that a run trains on."""
  lines = []
  counts = _counts(source)
  if counts is not None and source.class_names and (counts < FEW).any():
    few = [
      f'{source.class_names[i]!r} ({counts[i]})' for i in np.where(counts < FEW)[0]
    ]
    lines.append(
      f'{source.name}: {"classes" if len(few) > 1 else "a class"} of under {FEW} images: '
      f'{_some(few)}.'
    )
  if hint := how_to_convert(source.left_out):
    endings = {e for group in _CONVERSIONS for e in group}
    there = {k: n for k, n in source.left_out.items() if k in endings}
    lines.append(f'{source.name}: {files(there)} left out.{hint}')
  pictures = {k: n for k, n in source.misplaced.items() if k in listing.extensions()}
  if pictures:
    lines.append(
      f'{source.name}: {files(pictures)} in no class: an image belongs in the folder of '
      'its class.'
    )
  return lines


def warnings_evaluated(source, split: str) -> list[str]:
  """Returns at most one line, if the split is too small or lacks classes."""
  notes = []
  if len(source) < FEW_TO_EVALUATE:
    each = f'one image is {1 / len(source):.1%} of an accuracy'
    notes.append(f'only {len(source)} images to evaluate on, {each}')
  counts = _counts(source)
  if counts is not None and source.class_names and not counts.all():
    lacks = [repr(source.class_names[i]) for i in np.flatnonzero(counts == 0)]
    notes.append(f'none of {_some(lacks)}')
  return [f'{source.name}, {split}: {"; ".join(notes)}.'] if notes else []


def how_to_convert(left_out: Mapping[str, int]) -> str:
  """Returns how to make some of these files readable, ' HEIC is read once ...', or ''.

  Args:
    left_out: {extension: files}, as `Source.left_out`.
  """
  return ''.join(
    f' {text}.'
    for endings, text in _CONVERSIONS.items()
    if any(e in left_out for e in endings)
  )


def only(left_out: Mapping[str, int]) -> str:
  """Returns ' (only 3 .heic)' for files in the place of images, or ''."""
  return f' (only {files(left_out)})' if left_out else ''


def files(counts: Mapping[str, int]) -> str:
  """Returns '12 .txt, 3 .heic' of {extension: number}, the most frequent first."""
  ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
  return _some([f'{n:,} {ending}' for ending, n in ordered], ' kinds')


def _some(names: list[str], noun: str = '') -> str:
  more = f' and {len(names) - _NAMED} more{noun}' if len(names) > _NAMED else ''
  return ', '.join(names[:_NAMED]) + more


def _counts(source) -> np.ndarray | None:
  if source.labels is None or source.num_classes is None or not len(source.labels):
    return None
  return np.bincount(source.labels, minlength=source.num_classes)
