"""How well the classes of pixels are predicted: the mean of intersections over unions."""

import contextlib
from collections.abc import Callable
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import sharding
from vit_jax.check import INT32, Range
from vit_jax.data import pipeline
from vit_jax.errors import UserError
from vit_jax.evaluators.batches import open_batches
from vit_jax.evaluators.class_match import Classes
from vit_jax.evaluators.metric import Metric

_PERCENT = Metric(percent=True, larger_is_better=True)


class Segmentation:
  """Mean IoU and the share of correct pixels, from the counts of a whole split.

  IoU of a class: the pixels both labelled and predicted as it, over those labelled or
  predicted as it, counted over all images together, as in PASCAL VOC. The mean is over the
  classes that occur in the labels or in the predictions.
  """

  TASK = 'segment'
  METRICS: ClassVar = {
    'mean_iou': _PERCENT,
    'pixel_accuracy': _PERCENT,
    r'iou_\d+': Metric(percent=True, larger_is_better=True, detail=True),
    'examples': Metric(),
    'bad_images': Metric(),
  }

  def __init__(
    self,
    mesh: jax.sharding.Mesh,
    check_stop: Callable[[], None],
    model: Classes | None = None,
    *,
    data: Annotated[dict, pipeline.check_evaluate],
    ignore: Annotated[int, Range(0, INT32)] = 255,
  ):
    """Opens the data.

    Args:
      data: the arguments of `data.pipeline.evaluate`, of a source with 'segments'.
      ignore: label of pixels that do not count.
      model: the classes of the model.

    Raises:
      UserError: for data that cannot be read, or without segments, or whose segments have
        classes that the model lacks or names otherwise.
    """
    self.batches = open_batches(mesh, **data)
    segments = self.batches.spec.get('segments')
    if segments is None or segments.shape != self.batches.spec['image'].shape[:3]:
      raise UserError(
        f'{self.batches.source.name} with pp {data["pp"]!r} has no segments of the size of '
        'the images, the classes of pixels that the evaluator segmentation compares with.'
      )
    self._mesh, self._check_stop, self._ignore = mesh, check_stop, ignore
    known, names = self.batches.classes_of('segments')
    if model and (lacks := set(range(model.number, known)) - {ignore}):
      raise self._unknown(min(lacks), model.number)
    _check_names(self.batches.source.name, names, model)
    # `predict` is static: one compilation for all runs of one evaluator.
    self._step = jax.jit(
      self._count, static_argnums=0, out_shardings=sharding.replicated(mesh)
    )

  def run(self, predict: Callable, variables) -> dict[str, float]:
    """Returns mean_iou, pixel_accuracy, iou_0, iou_1, ... of classes that occur, examples.

    bad_images, if there are any, could not be read and are not in it.

    Raises:
      UserError: for no image that could be read, or a label that is not one of the model's
        classes.
    """
    totals = 0, 0
    pending = None  # one batch behind, so that the host reads while the device works
    with contextlib.closing(self.batches.iterate()) as batches:
      for batch in batches:
        self._check_stop()
        done = self._step(predict, variables, sharding.global_batch(batch, self._mesh))
        totals = self._added(totals, pending)
        pending = done
    counts, examples = self._added(totals, pending)
    if not examples:
      raise UserError(
        f'Evaluation could read none of {self.batches.num_examples} images.'
      )
    bad = self.batches.num_examples - examples
    metrics = {**of_counts(counts), 'examples': float(examples)}
    return metrics | ({'bad_images': float(bad)} if bad else {})

  def _added(self, totals, found):
    """Returns (counts, examples) with those of a batch, which may be None."""
    if found is None:
      return totals
    counts, examples, unknown = jax.device_get(found)
    if unknown >= 0:
      raise self._unknown(unknown, len(counts))
    return totals[0] + counts.astype(np.int64), totals[1] + int(examples)

  def _unknown(self, label: int, number: int) -> UserError:
    return UserError(
      f'{self.batches.source.name} has pixels of the class {label}, and the model has '
      f'{number} classes: set config.model.num_classes, or ignore={label}.'
    )

  def _count(self, predict, variables, batch):
    """Returns (counts [K, K], label by prediction, examples, an unknown label or -1)."""
    batch = self.batches.on_device(batch)
    logits = predict(variables, batch)['logits']
    segments = batch['segments'].astype(jnp.int32)
    real = batch['mask'] > 0
    counted = real[:, None, None] & (segments != self._ignore)
    K = logits.shape[-1]
    known = counted & (segments >= 0) & (segments < K)
    at = jnp.where(known, segments * K + logits.argmax(-1), K * K)
    counts = jnp.bincount(at.reshape(-1), length=K * K + 1)[:-1].reshape(K, K)
    unknown = jnp.where(counted & ~known, segments, -1).max()
    return counts, real.sum(), unknown


def of_counts(counts: np.ndarray) -> dict[str, float]:
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


def _check_names(source: str, names: list[str] | None, model: Classes | None) -> None:
  """Raises UserError where a model names a class otherwise than the segments do."""
  if not names or not model or not model.names:
    return
  for i, (name, other) in enumerate(zip(names, model.names, strict=False)):
    if other and name != other:
      raise UserError(
        f'Class {i} of {source} is {name!r}, and of the model {other!r}: evaluate on data '
        'with the same classes, numbered alike.'
      )
