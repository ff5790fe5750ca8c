"""The source `shapes`: any number of generated images of coloured shapes."""

import bisect
import itertools
from typing import Annotated

import numpy as np

from vit_jax.check import Count, Range
from vit_jax.data.features import ImageFeature, LabelFeature, TextFeature
from vit_jax.data.sources import splits
from vit_jax.data.sources.base import Source, fingerprint
from vit_jax.errors import choose
from vit_jax.lab.data import scenes

# Number of examples of 'validation' and of 'test'. The standard error of an accuracy is
# then at most 0.7 points.
_HELD_OUT = 5_000
# Up to this number of labels are held in memory. Computing them draws no images.
_LABELS = 2**20


class Shapes(Source):
  """Images uint8 [size, size, 3] of coloured shapes on noise; grey shapes only distract.

  'shapes:TASK' chooses the label; 'shapes' means 'shapes:class':
    class: kind and colour of the shape; 6 kinds in 6 colours are 36 classes.
    count: the number of shapes, 1 to 8, which do not touch; 8 classes.
    position: the cell of a 4 x 4 grid that has the shape's centre; 16 classes.
    distance: the distance between the centres of two shapes, from 0.24 to 0.72 of the
      image's side in steps of 0.08; 6 classes.
  Cropping and flipping change the labels of the last three tasks, so leave these ops out of
  `pp`, as configs/shapes.py does. Examples of the task 'class' have five captions.

  An example depends only on (seed, task, split, number), and is the same on every machine.
  A larger `num_examples` adds examples to 'train' and changes nothing else, so that sizes of
  training data can be compared. 'validation' and 'test' have 5,000 examples each.

  Args:
    target: TASK, or ''.
    split: a split expression, see `splits`; 'val' means 'validation'.
    size: side of the images, in pixels.
    num_examples: number of training examples, below 2**31.
    seed: seed of the whole data set, below 2**32.
  """

  def __init__(
    self,
    target: str,
    split: str,
    *,
    size: Annotated[int, Range(8, 8000)] = 32,
    num_examples: Count = 100_000,
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0,
  ):
    self._task = choose("task of 'shapes'", target or 'class', list(scenes.TASKS))
    self.name = f'shapes:{self._task}'
    self._size, self._seed = size, seed
    canonical = '+'.join(
      f'{splits.canonical(name)}[{low}:{high}]'
      for name, low, high in splits.parse(split)
    )
    sizes = dict.fromkeys(scenes.SPLITS, _HELD_OUT) | {'train': num_examples}
    self._parts = splits.ranges(canonical, sizes, self.name)
    lengths = (high - low for _, low, high in self._parts)
    self._bounds = [0, *itertools.accumulate(lengths)]
    self.features = {'image': ImageFeature((size, size, 3)), 'label': LabelFeature()}
    if self._task == 'class':
      self.features['text'] = TextFeature()
    self.class_names = list(scenes.TASKS[self._task].names)
    self.num_classes = len(self.class_names)
    if len(self) <= _LABELS:
      self.labels = np.concatenate(
        [
          scenes.labels(self._task, seed, name, np.arange(low, high))
          for name, low, high in self._parts
        ]
      )
    self.fingerprint = fingerprint(('shapes 1', self._task, size, seed, *self._parts))

  def __len__(self) -> int:
    return self._bounds[-1]

  def read(self, indices: np.ndarray) -> list[dict]:
    places = [self._place(int(i)) for i in indices]
    out: list = [None] * len(places)
    for split in {split for split, _ in places}:
      at = [i for i, place in enumerate(places) if place[0] == split]
      rows = np.array([places[i][1] for i in at])
      for i, example in zip(at, self._draw(split, rows), strict=True):
        out[i] = example
    return out

  def name_of(self, index: int) -> str:
    split, row = self._place(index)
    return f'{self.name}/{split}#{row}'

  def _place(self, index: int) -> tuple[str, int]:
    """Returns (split, number within that split) of an example."""
    part = bisect.bisect_right(self._bounds, index) - 1
    split, low, _ = self._parts[part]
    return split, index - self._bounds[part] + low

  def _draw(self, split: str, rows: np.ndarray) -> list[dict]:
    shown = scenes.scenes(self._task, self._seed, split, rows)
    noise = np.stack([self._noise(split, row) for row in rows.tolist()])
    images = scenes.draw(shown, self._size, noise)
    examples = [
      {'image': image, 'label': int(label)}
      for image, label in zip(images, shown.label, strict=True)
    ]
    if 'text' in self.features:
      for example, texts in zip(examples, scenes.captions(shown), strict=True):
        example['text'] = texts
    return examples

  def _noise(self, split: str, row: int) -> np.ndarray:
    """Draws the noise of one image by NumPy's Philox, which is faster than `data.philox`."""
    task = list(scenes.TASKS).index(self._task)
    key = [self._seed, 4 * task + scenes.SPLITS.index(split)]
    bits = np.random.Philox(key=key, counter=[0, 0, row, 0])
    shape = (self._size, self._size, 3)
    count = self._size**2 * 3
    words = bits.random_raw(-(-count // 8)).astype('<u8', copy=False)
    return words.view(np.uint8)[:count].reshape(shape)
