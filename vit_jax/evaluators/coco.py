"""COCO's average precision of a detector's boxes, in the pixels of the original images."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import boxes, sharding
from vit_jax.coco import average_precision
from vit_jax.coco.objects import Detections, Truth
from vit_jax.data import pipeline
from vit_jax.data.ops import registry
from vit_jax.data.sources.objects import Objects
from vit_jax.errors import UserError
from vit_jax.evaluators.batches import open_batches
from vit_jax.evaluators.class_match import Classes, check_alike
from vit_jax.evaluators.metric import Metric

_SHARE = Metric(percent=True, larger_is_better=True)


class Coco:
  """The twelve numbers, as pycocotools has them; see `coco.average_precision`.

  Each query is one detection: the likeliest class other than "no object", by its
  probability. The truth is that of the source, of all objects and crowds, whatever `pp`
  keeps of them.
  """

  TASK = 'detect'
  METRICS: ClassVar = {
    'ap': _SHARE,
    'ap50': _SHARE,
    'ap75': _SHARE,
    '(ap|ar)_.*': dataclasses.replace(_SHARE, detail=True),
    'ap/.*': dataclasses.replace(_SHARE, detail=True),
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
    per_class: bool = False,
  ):
    """Opens the data.

    Args:
      data: the arguments of `data.pipeline.evaluate`: a source with boxes, and a `pp` that
        neither crops nor flips.
      per_class: also give the AP of each class that has objects, as 'ap/NAME'.
      model: the classes of the model.

    Raises:
      UserError: for data that cannot be read, or has no boxes, or other classes than the
        model, or is cropped.
    """
    self.batches = open_batches(mesh, **data)
    source = self.batches.source
    if not isinstance(source, Objects):
      raise UserError(
        f'{source.name} has no boxes: evals of type coco take coco:ROOT, digits_canvas or '
        'another source with boxes.'
      )
    for op in registry.parse(data['pp']):
      if 'image' in op.maps and not op.keeps_positions:
        raise UserError(
          f'pp {data["pp"]!r}: {op.text} moves pixels; detections are compared with the '
          'boxes of whole images: leave it out.'
        )
    self._truth = source.truth()
    check_alike(source.name, source.class_names, model)
    # A model may have more classes than the data: predictions of those are not detections.
    self._places = np.append(source.places, -1)
    if self._truth.crowd.all():
      raise UserError(
        f'{source.name}, {self.batches.split}: no image has an object to find.'
      )
    self._per_class = per_class
    self._mesh, self._check_stop = mesh, check_stop
    # `predict` is static: one compilation for all runs of one evaluator.
    self._step = jax.jit(
      self._detect, static_argnums=0, out_shardings=sharding.replicated(mesh)
    )

  def run(self, predict: Callable, params) -> dict[str, float]:
    """Returns ap, ap50, ...; examples; bad_images, if any could not be read.

    A number that no object counts for is left out; so are objects of images that could
    not be read.
    """
    parts: list[dict] = []
    pending = None  # one batch behind, so that the host reads while the device works
    with contextlib.closing(self.batches.iterate()) as batches:
      for batch in batches:
        self._check_stop()
        done = self._step(predict, params, sharding.global_batch(batch, self._mesh))
        _add(parts, pending)
        pending = done
    _add(parts, pending)
    rows = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    if not len(rows['index']):
      raise UserError(
        f'Evaluation could read none of {self.batches.num_examples:,} images.'
      )
    measured = average_precision.measure(*self._compared(rows))
    numbers = measured.numbers()
    if self._per_class:
      for k, name in enumerate(self._truth.class_names):
        numbers[f'ap/{name}'] = measured.of_category(k)['ap']
    numbers = {name: value for name, value in numbers.items() if value >= 0}
    bad = self.batches.num_examples - len(rows['index'])
    numbers['examples'] = len(rows['index'])
    return numbers | ({'bad_images': bad} if bad else {})

  def _compared(self, rows: dict) -> tuple[Truth, Detections]:
    """Returns the truth of the images that were read, and what was found in them."""
    order = np.argsort(rows['index'])
    truth = self._truth.of_images(rows['index'][order])
    image = np.repeat(np.arange(len(order)), rows['scores'].shape[1])
    labels = rows['labels'][order].reshape(-1)
    category = self._places[np.minimum(labels, len(self._places) - 1)]
    height, width = truth.sizes[image].T
    scale = np.stack([width, height, width, height], 1)
    corners = rows['boxes'][order].reshape(-1, 4).astype(np.float64) * scale
    sides = np.maximum(corners[:, 2:] - corners[:, :2], 0)
    known = category >= 0
    found = Detections(
      image=image[known],
      category=category[known],
      scores=rows['scores'][order].reshape(-1).astype(np.float64)[known],
      boxes=np.concatenate([corners[:, :2], sides], 1)[known],
    )
    return truth, found

  def _detect(self, predict, params, batch) -> dict:
    """Returns one detection for each query, boxes by corners from 0 to 1 of the image."""
    batch = self.batches.on_device(batch)
    out = predict(params, batch)
    number = out['logits'].shape[-1] - 1
    if number < self.batches.num_classes:
      raise UserError(
        f'The evaluation data has {self.batches.num_classes} classes, the model {number}: '
        'choose other data, or give both the same num_classes.'
      )
    return {
      # From 0 to 1: float32 would not hold pixels exactly.
      **boxes.postprocess(out, jnp.ones((len(batch['index']), 2))),
      'index': batch['index'],
      'mask': batch['mask'],
    }


def _add(parts: list, done: dict | None) -> None:
  if done is None:
    return
  rows = jax.device_get(done)
  read = rows.pop('mask') > 0
  parts.append({key: value[read] for key, value in rows.items()})
