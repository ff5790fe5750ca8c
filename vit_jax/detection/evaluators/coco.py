"""COCO's average precision of a detector's boxes, in the pixels of the original images."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from vit_jax.data.ops import registry
from vit_jax.detection import boxes
from vit_jax.detection.coco import average_precision
from vit_jax.detection.coco.objects import Detections, Truth
from vit_jax.detection.data.objects import Objects
from vit_jax.errors import UserError, did_you_mean
from vit_jax.evaluators import class_match
from vit_jax.evaluators.base import Metric, OneSplit
from vit_jax.evaluators.class_match import Classes

_SHARE = Metric(percent=True, larger_is_better=True)
SHOWN = 8  # images for the page of a run
LEAST = 0.3  # the lowest score of their boxes


class Coco(OneSplit):
  """The twelve numbers, as pycocotools has them; see `coco.average_precision`.

  Each query is one detection: the likeliest class other than "no object", by its
  probability. The truth holds all objects and crowds of the source, whatever `pp`
  leaves of them. Classes are matched by name where both sides have names.

  Attributes:
    compared: (the truth, the detections) of the images that the last run could read.
    measured: `average_precision.measure` of these.
    predictions: for the page of a run, the numbers of each category: 'names' [K], 'objects'
      [K], 'of_class' [K, 3], 'precision' [2, 101]; and the boxes of `SHOWN` images, which
      are 'index' [m] of the split: 'truth' [t, 6], place in 'index', category, left, top,
      width, height; 'boxes' [d, 7], likewise with the score before the left.
  """

  TASK = 'detect'
  METRICS: ClassVar = {
    'ap': _SHARE,
    'ap50': _SHARE,
    'ap75': _SHARE,
    '(ap|ar)_.*': dataclasses.replace(_SHARE, detail=True),
    'examples': Metric(),
    'bad_images': Metric(),
  }

  def __init__(self, mesh, check_stop, model: Classes | None = None, **options):
    """Opens data of a source with boxes, and a `pp` that neither crops nor flips.

    Raises:
      UserError: for data without boxes or that is cropped, or classes that the model does
        not have.
    """
    super().__init__(mesh, check_stop, model, **options)
    source = self.batches.source
    _check_objects(source)
    registry.check_positions(options['data']['pp'])
    self._truth = source.truth()
    if self._truth.crowd.all():
      raise UserError(f'{source.name}, {self.batches.split}: no image has an object.')
    # The category of each class of the model, -1 for others.
    self._places = _by_name(self._truth, source, model)
    if self._places is None:
      self._places = np.arange(source.num_classes)
      if model and model.number != source.num_classes:
        raise UserError(
          f'{source.name} has {source.num_classes} classes, the model {model.number}, and '
          'not both name them: choose other data, or give both the same num_classes.'
        )

  def run(self, predict: Callable, variables) -> dict[str, float]:
    """Returns ap, ap50, ...; examples; bad_images, if any could not be read.

    A number that no object counts for is left out; so are objects of images that could
    not be read.
    """
    parts: list[dict] = []
    for rows in self.stepped(predict, variables):
      read = rows.pop('mask') > 0
      parts.append({key: value[read] for key, value in rows.items()})
    rows = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    counts = self.with_counts({}, len(rows['index']), len(rows['index']))
    self.compared = self._compared(rows)
    self.measured = average_precision.measure(*self.compared)
    numbers, *_ = self.measured
    self.predictions = self._shown(np.sort(rows['index']))
    return {name: value for name, value in numbers.items() if value >= 0} | counts

  def _shown(self, index: np.ndarray) -> dict[str, np.ndarray]:
    """Returns `predictions`; `index` are the images that were read."""
    truth, answers = self.compared
    chosen = np.unique(np.linspace(0, len(index) - 1, SHOWN).round().astype(int))
    few = truth.of_images(chosen)
    keep = np.isin(answers.image, chosen) & (answers.scores >= LEAST)
    place = np.searchsorted(chosen, answers.image)
    boxes = np.column_stack([place, answers.category, answers.scores, answers.boxes])
    K = len(truth.class_names)
    return {
      'index': index[chosen],
      'names': np.array(truth.class_names, str),
      'objects': np.bincount(truth.category[~truth.crowd], minlength=K),
      'of_class': self.measured[1],
      'precision': self.measured[2],
      'truth': np.column_stack([few.image, few.category, few.boxes])[~few.crowd],
      'boxes': boxes[keep],
    }

  def _compared(self, rows: dict) -> tuple[Truth, Detections]:
    """Returns the truth of the images that were read, and their detections."""
    order = np.argsort(rows['index'])
    rows = {key: value[order] for key, value in rows.items()}
    truth = self._truth.of_images(rows['index'])
    image = np.repeat(np.arange(len(rows['index'])), rows['scores'].shape[1])
    labels = rows['labels'].reshape(-1)
    category = self._places[labels]
    height, width = truth.sizes[image].T
    scale = np.stack([width, height, width, height], 1)
    corners = rows['boxes'].reshape(-1, 4).astype(np.float64) * scale
    sides = np.maximum(corners[:, 2:] - corners[:, :2], 0)
    keep = category >= 0
    return truth, Detections(
      image=image[keep],
      category=category[keep],
      scores=rows['scores'].reshape(-1).astype(np.float64)[keep],
      boxes=np.concatenate([corners[:, :2], sides], 1)[keep],
    )

  def measure(self, predict, variables, batch) -> dict:
    """Returns one detection for each query, boxes by corners from 0 to 1 of the image."""
    batch = self.batches.on_device(batch)
    rows = {key: batch[key] for key in ('index', 'mask')}
    return boxes.postprocess(predict(variables, batch)) | rows


def _check_objects(source) -> None:
  if not isinstance(source, Objects):
    raise UserError(
      f'{source.name} has no boxes: the evaluator coco takes coco:ROOT, digits_canvas or '
      'another source with boxes.'
    )


def _by_name(truth: Truth, source: Objects, model: Classes | None) -> np.ndarray | None:
  """Returns int [K], the category of each class of the model by its name, or -1.

  None where names are missing, or categories share one: classes are then compared by
  number.

  Raises:
    UserError: for a category that the model does not have.
  """
  categories = truth.class_names
  if not source.class_names or model is None or not model.names:
    return None
  if len({*categories}) < len(categories):
    return None
  places = class_match.find(categories, model.names)
  if None in places:
    name = categories[places.index(None)]
    raise UserError(
      f'{source.name} has the category {name!r}, the model has not one class of that name.'
      f'{did_you_mean(name, model.names)}'
    )
  out = np.full(model.number, -1)
  out[places] = np.arange(len(places))
  return out
