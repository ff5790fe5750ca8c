"""COCO's average precision of boxes and masks, in pixels of the original images."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from vit_jax.data.ops import registry
from vit_jax.data.sources.base import opening
from vit_jax.detection import boxes
from vit_jax.detection.coco import average_precision, rle
from vit_jax.detection.coco.objects import Detections, Truth
from vit_jax.detection.data.objects import Objects
from vit_jax.detection.regions.masks import paste
from vit_jax.errors import UserError, did_you_mean
from vit_jax.evaluators import class_match
from vit_jax.evaluators.base import Metric, OneSplit
from vit_jax.evaluators.class_match import Classes

_SHARE = Metric(percent=True, larger_is_better=True)
# Number of images on the page of a run, and the minimum score of the boxes drawn on them.
SHOWN = 8
LEAST = 0.3
# Number of boxes drawn on an image that has none with this score.
BEST = 3


class Coco(OneSplit):
  """COCO's twelve numbers, computed by pycocotools; see `coco.average_precision`.

  The numbers of masks begin with 'mask_'. Each query of a DETR is one detection, see
  `boxes.postprocess`. The truth holds all objects and crowds of the source, even those that
  `pp` removes from examples. Classes are matched by name if both sides have names.

  Attributes:
    compared: (truth, detections) of the images that the last run could read.
    measured: {'bbox': results of `average_precision.measure`}, with masks also 'segm'.
    predictions: arrays for the page of a run. By category: 'names' [K], 'objects' [K],
      'of_class' [K, 3], 'precision' [2, 101]. For `SHOWN` images: 'index' [m], their
      positions in the split; 'truth' [t, 6], position in 'index', category, left, top,
      width, height; and 'boxes' [d, 7], the same with the score after the category.
  """

  TASKS = ('detect', 'rcnn')
  METRICS: ClassVar = {
    '(mask_)?ap(50|75)?': _SHARE,
    '(mask_)?(ap|ar)_.*': dataclasses.replace(_SHARE, detail=True),
    'examples': Metric(),
    'bad_images': Metric(),
  }

  def __init__(
    self,
    mesh,
    check_stop,
    model: Classes | None = None,
    *,
    masks: bool = False,
    **options,
  ):
    """Opens the data of a source with boxes; its `pp` must not crop or flip.

    Args:
      mesh, check_stop, model: as in `OneSplit`.
      masks: whether to compare masks as well as boxes. Both source and model need masks.
      **options: as in `OneSplit`.

    Raises:
      UserError: the data has no boxes, is cropped, or has classes that the model lacks.
    """
    super().__init__(mesh, check_stop, model, **options)
    source = self.batches.source
    _check_objects(source)
    registry.check_positions(options['data']['pp'])
    with opening():
      self._truth = source.truth(masks)
    self._masks = masks
    if self._truth.crowd.all():
      raise UserError(f'{source.name}, {self.batches.split}: no image has an object.')
    # The category of each class of the model; -1 for a class without a category.
    self._places = _match_by_name(self._truth, source, model)
    if self._places is None:
      self._places = np.arange(source.num_classes)
      if model and model.number != source.num_classes:
        raise UserError(
          f'{source.name} has {source.num_classes} classes, but the model has '
          f'{model.number}, and at least one of the two has no class names: choose other '
          'data, or give both the same num_classes.'
        )

  def run(self, predict: Callable, variables) -> dict[str, float]:
    """Returns ap, ap50, ..., examples, and bad_images if some could not be read.

    Numbers that no object contributes to are left out. Objects of images that could not be
    read do not count.
    """
    parts: list[dict] = []
    for rows in self.run_steps(predict, variables):
      read = rows.pop('mask') > 0
      part = {key: value[read] for key, value in rows.items()}
      sizes = self._truth.sizes[part['index']]
      scale = np.tile(sizes[:, None, ::-1], 2)
      part['boxes'] = part['boxes'].astype(np.float64) * scale
      # Encode masks step by step, because all their pixels would not fit into memory.
      if 'masks' in part:
        part['masks'] = _run_lengths(part, sizes)
      parts.append(part)
    rows = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    counts = self.add_counts({}, len(rows['index']), len(rows['index']))
    self.compared = self._collect(rows)
    kinds = {'bbox': '', 'segm': 'mask_'} if self._masks else {'bbox': ''}
    measure = average_precision.measure
    self.measured = {kind: measure(*self.compared, kind) for kind in kinds}
    self.predictions = self._sample_for_page(np.sort(rows['index']))
    return {
      prefix + name: value
      for kind, prefix in kinds.items()
      for name, value in self.measured[kind][0].items()
      if value >= 0
    } | counts

  def _sample_for_page(self, index: np.ndarray) -> dict[str, np.ndarray]:
    """Makes `predictions`; `index` are the images that were read, in order."""
    truth, answers = self.compared
    chosen = np.unique(np.linspace(0, len(index) - 1, SHOWN).round().astype(int))
    few = truth.select(chosen)
    drawn = answers.scores >= LEAST
    for i in chosen:
      places = np.flatnonzero(answers.image == i)
      if not drawn[places].any():
        best = np.argsort(-answers.scores[places], kind='stable')[:BEST]
        drawn[places[best]] = True
    keep = np.isin(answers.image, chosen) & drawn
    place = np.searchsorted(chosen, answers.image)
    boxes = np.column_stack([place, answers.category, answers.scores, answers.boxes])
    K = len(truth.class_names)
    return {
      'index': index[chosen],
      'names': np.array(truth.class_names, str),
      'objects': np.bincount(truth.category[~truth.crowd], minlength=K),
      'of_class': self.measured['bbox'][1],
      'precision': self.measured['bbox'][2],
      'truth': np.column_stack([few.image, few.category, few.boxes])[~few.crowd],
      'boxes': boxes[keep],
    }

  def _collect(self, rows: dict) -> tuple[Truth, Detections]:
    """Collects (truth, detections) of the images that were read."""
    order = np.argsort(rows['index'])
    rows = {key: value[order] for key, value in rows.items()}
    truth = self._truth.select(rows['index'])
    image = np.repeat(np.arange(len(rows['index'])), rows['scores'].shape[1])
    labels = rows['labels'].reshape(-1)
    category = self._places[labels]
    corners = rows['boxes'].reshape(-1, 4)
    sides = np.maximum(corners[:, 2:] - corners[:, :2], 0)
    keep = (category >= 0) & rows['valid'].reshape(-1)
    masks = rows['masks'].reshape(-1)[keep].tolist() if self._masks else None
    return truth, Detections(
      masks=masks,
      image=image[keep],
      category=category[keep],
      scores=rows['scores'].reshape(-1).astype(np.float64)[keep],
      boxes=np.concatenate([corners[:, :2], sides], 1)[keep],
    )

  def measure(self, predict, variables, batch) -> dict:
    """Returns the detections of a batch, and the images that they belong to."""
    batch = self.batches.finish_on_device(batch)
    rows = {key: batch[key] for key in ('index', 'mask')}
    detections = boxes.postprocess(predict(variables, batch))
    if self._masks and 'masks' not in detections:
      raise UserError('coco: masks=True, but the model gives boxes without masks.')
    names = detections.keys() - (set() if self._masks else {'masks', 'grow'})
    return {name: detections[name] for name in names} | rows


def _run_lengths(rows: dict, sizes: np.ndarray) -> np.ndarray:
  """Encodes the masks of valid detections as run lengths, in an array of objects [B, Q].

  Args:
    rows: 'masks' [B, Q, m, m], 'boxes' [B, Q, 4] in pixels, 'valid' [B, Q], and 'grow' if
      masks grow when they are drawn.
    sizes: [B, 2], heights and widths.
  """
  out = np.full(rows['valid'].shape, None)
  for place in zip(*np.nonzero(rows['valid']), strict=True):
    mask, box = rows['masks'][place], rows['boxes'][place]
    size = tuple(sizes[place[0]])
    (pixels,) = paste(mask[None], box[None], size, 'grow' in rows)
    out[place] = rle.encode(pixels)
  return out


def _check_objects(source) -> None:
  if not isinstance(source, Objects):
    raise UserError(
      f'{source.name} has no boxes: the evaluator coco takes coco:ROOT, digits_canvas or '
      'another source with boxes.'
    )


def _match_by_name(
  truth: Truth, source: Objects, model: Classes | None
) -> np.ndarray | None:
  """Matches the model's classes to categories by name; returns int [K], -1 for none.

  Returns None if names are missing or categories share a name. Classes are then compared
  by number.

  Raises:
    UserError: the model lacks a category, or has several classes of its name.
  """
  categories = truth.class_names
  if not source.class_names or model is None or not model.names:
    return None
  if len({*categories}) < len(categories):
    return None
  places = class_match.find_indices(categories, model.names)
  if None in places:
    name = categories[places.index(None)]
    raise UserError(
      f'{source.name} has the category {name!r}, but the model has no class, or several, of '
      f'that name.{did_you_mean(name, model.names)}'
    )
  out = np.full(model.number, -1)
  out[places] = np.arange(len(places))
  return out
