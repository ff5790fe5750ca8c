"""Mean intersection over union of the predicted classes of pixels."""

from collections.abc import Callable
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from vit_jax.detection.tasks.segment import IGNORED
from vit_jax.errors import UserError
from vit_jax.evaluators.base import Metric, OneSplit
from vit_jax.evaluators.class_match import Classes

_PERCENT = Metric(percent=True, larger_is_better=True)
SHOWN = 6  # images for the page of a run


class Segmentation(OneSplit):
  """Mean IoU and the share of correct pixels, from the counts of a whole split.

  IoU of a class: the pixels both labelled and predicted as it, over those labelled or
  predicted as it, counted over all images together, as in PASCAL VOC. The mean is over the
  classes that occur in the labels or in the predictions.

  Attributes:
    predictions: for the page of a run, 'counts' int64 [K, K] as in `mean_iou`, and of the
      first images, 'index' [m] of the split, the classes of pixels 'truth' and 'answer'
      int16 [m, H, W].
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
    """Opens data of a source with 'segments'.

    Raises:
      UserError: for data without segments, or whose segments have classes that the model
        lacks or names otherwise.
    """
    super().__init__(mesh, check_stop, model, **options)
    name, spec = self.batches.source.name, self.batches.spec
    segments = spec.get('segments')
    if segments is None or segments.shape != spec['image'].shape[:3]:
      raise UserError(
        f'{name} with pp {options["data"]["pp"]!r} has no segments of the size of the '
        'images, the classes of pixels that the evaluator segmentation compares with.'
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
          f'Class {i} of {name} is {theirs!r}, and of the model {ours!r}: evaluate on data '
          'with the same classes in the same order.'
        )

  def run(self, predict: Callable, variables) -> dict[str, float]:
    """Returns mean_iou, pixel_accuracy, iou_0, iou_1, ... of classes that occur, examples.

    bad_images are those that could not be read, if there are any.

    Raises:
      UserError: for a label that is not one of the model's classes.
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
      f'{self.batches.source.name} has pixels of the class {label}, and the model has '
      f'{number} classes: set config.model.num_classes.'
    )

  def measure(self, predict, variables, batch):
    """Returns (counts [K, K], label by prediction; examples; a bad label or -1; rows)."""
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
    counts: int [K, K], pixels of the label of a row, predicted as the class of a column.
  """
  both = np.diag(counts).astype(np.float64)
  either = counts.sum(0) + counts.sum(1) - both
  iou = {f'iou_{k}': both[k] / n for k, n in enumerate(either) if n}
  if not iou:
    raise UserError('No pixel has a label: every one is ignored.')
  return {
    'mean_iou': float(np.mean(list(iou.values()))),
    'pixel_accuracy': float(both.sum() / counts.sum()),
    **iou,
  }
