"""Mean intersection over union of predicted pixel classes."""

from collections.abc import Callable
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from vit_jax.detection.tasks.segment import IGNORED
from vit_jax.errors import UserError
from vit_jax.evaluators.base import Metric, OneSplit
from vit_jax.evaluators.class_match import Classes

_PERCENT = Metric(percent=True, larger_is_better=True)
# Number of images on the page of a run.
SHOWN = 6


class Segmentation(OneSplit):
  """Mean IoU and the share of correct pixels, counted over a whole split.

  The IoU of a class divides the pixels that are labelled and predicted as this class by
  those that are labelled or predicted as it. Pixels are counted over all images together,
  as in PASCAL VOC. The mean is over the classes that occur in labels or predictions.

  Attributes:
    predictions: arrays for the page of a run: 'counts' int64 [K, K], see `mean_iou`; and for
      the first images 'index' [m], their positions in the split, 'truth' and 'answer' int16
      [m, H, W], the classes of their pixels.
  """

  TASKS = ('segment',)
  METRICS: ClassVar = {
    'mean_iou': _PERCENT,
    'pixel_accuracy': _PERCENT,
    r'iou_\d+': Metric(percent=True, larger_is_better=True, detail=True),
    'examples': Metric(),
    'bad_images': Metric(),
  }

  def __init__(self, mesh, check_stop, model: Classes | None = None, **options):
    """Opens the data of a source with 'segments'.

    Raises:
      UserError: the data has no segments, or has classes that the model lacks or names
        differently.
    """
    super().__init__(mesh, check_stop, model, **options)
    name, spec = self.batches.source.name, self.batches.spec
    segments = spec.get('segments')
    if segments is None or segments.shape != spec['image'].shape[:3]:
      raise UserError(
        f"{name} with pp {options['data']['pp']!r} has no segments of the images' size, "
        'which the evaluator segmentation needs.'
      )
    if model is None:
      return
    number, names = self.batches.classes_of('segments')
    if number > model.number:
      raise self._missing(model.number, model.number)
    pairs = zip(names or (), model.names or (), strict=False)
    for i, (theirs, ours) in enumerate(pairs):
      if ours and theirs != ours:
        raise UserError(
          f'Class {i} of {name} is {theirs!r}, but that of the model is {ours!r}: evaluate on '
          'data with the same classes in the same order.'
        )

  def run(self, predict: Callable, variables) -> dict[str, float]:
    """Returns mean_iou, pixel_accuracy, iou_K for each class K that occurs, and examples.

    If images could not be read, their number is bad_images.

    Raises:
      UserError: a label is not one of the model's classes.
    """
    total, examples, shown = 0, 0.0, None
    for counts, read, bad_label, rows in self.run_steps(predict, variables):
      shown = shown or rows
      if bad_label >= 0:
        raise self._missing(bad_label, len(counts))
      total, examples = total + counts.astype(np.int64), examples + float(read)
    metrics = self.add_counts({}, examples, examples)
    real = shown.pop('mask') > 0
    self.predictions = {key: value[real] for key, value in shown.items()}
    self.predictions['counts'] = total
    return mean_iou(total) | metrics

  def _missing(self, label: int, number: int) -> UserError:
    return UserError(
      f'{self.batches.source.name} has pixels of the class {label}, but the model has '
      f'{number} classes: set config.model.num_classes.'
    )

  def measure(self, predict, variables, batch):
    """Returns (counts [K, K] by label and prediction, examples, a bad label or -1, rows)."""
    batch = self.batches.finish_on_device(batch)
    logits = predict(variables, batch)['logits']
    segments = batch['segments'].astype(jnp.int32)
    real = batch['mask'] > 0
    counted = real[:, None, None] & (segments != IGNORED)
    K, answer = logits.shape[-1], logits.argmax(-1)
    valid = counted & (segments >= 0) & (segments < K)
    pair = jnp.where(valid, segments * K + answer, K * K)
    counts = jnp.bincount(pair.reshape(-1), length=K * K + 1)[:-1].reshape(K, K)
    bad_label = jnp.where(counted & ~valid, segments, -1).max()
    rows = {'index': batch['index'], 'mask': batch['mask']}
    rows |= {'truth': segments.astype(jnp.int16), 'answer': answer.astype(jnp.int16)}
    return counts, real.sum(), bad_label, {k: x[:SHOWN] for k, x in rows.items()}


def mean_iou(counts: np.ndarray) -> dict[str, float]:
  """Returns mean_iou, pixel_accuracy, and iou_K of every class that occurs.

  Args:
    counts: int [K, K], pixels by label (row) and predicted class (column).
  """
  both = np.diag(counts).astype(np.float64)
  either = counts.sum(0) + counts.sum(1) - both
  iou = {f'iou_{k}': both[k] / n for k, n in enumerate(either) if n}
  if not iou:
    raise UserError('No pixel has a label: all are ignored.')
  return {
    'mean_iou': float(np.mean(list(iou.values()))),
    'pixel_accuracy': float(both.sum() / counts.sum()),
    **iou,
  }
