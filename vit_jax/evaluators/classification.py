"""Top-1, top-5 and loss over every example of a split, exactly once."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import losses, sharding
from vit_jax.check import Choice
from vit_jax.data import pipeline
from vit_jax.errors import UserError
from vit_jax.evaluators import class_match, class_names, predictions
from vit_jax.evaluators.batches import open_batches
from vit_jax.evaluators.label_sets import LabelSets
from vit_jax.evaluators.metric import Metric


class Classification:
  """An example is right if the largest logit (of the five largest, one) is a label.

  With several labels per image each of them is right; images without any label are left
  out, of the numerators and the denominator (as ReaL, arXiv 2006.07159, section 3).
  """

  TASK = 'classify'
  METRICS: ClassVar = {
    'top1': Metric(percent=True, larger_is_better=True),
    'top5': Metric(percent=True, larger_is_better=True),
    'loss': Metric(larger_is_better=False),
    'examples': Metric(),
    'bad_images': Metric(),
  }

  def __init__(
    self,
    mesh: jax.sharding.Mesh,
    check_stop: Callable[[], None],
    model: class_match.Classes | None = None,
    *,
    data: Annotated[dict, pipeline.check_evaluate],
    loss: Annotated[str, Choice(losses.LOSSES)] = 'softmax',
    labels: str | None = None,
    class_map: Annotated[str | None, class_match.check] = None,
    among: Annotated[str | None, class_match.check_among] = None,
    confusion: bool = False,
  ):
    """Opens the data.

    Args:
      data: the arguments of `data.pipeline.evaluate`.
      loss: 'softmax', over several labels their mean, or 'sigmoid'.
      labels: a JSON file of label sets in place of the data's labels, see `LabelSets`. They
        number the model's classes, or those of data that has all of ImageNet's.
      class_map: how classes of the data are found among the model's: 'name', by WordNet
        id or name, 'known', likewise but that images of other classes are left out,
        'number', 'imagenet1k' or another list (by WordNet id, for a model
        that does not name its classes), or a FILE, {"class of the data": [classes of
        the model]}, or ObjectNet's folder `mappings`. None: what fits, see
        `class_match.match`; where nothing does, an error names the class.
      among: of which classes a prediction is one: 'data', those that the data has, 'all',
        the model's, or a list such as 'imagenet_a'. None: as test sets of ImageNet are
        published, 'data' where WordNet ids are matched, but 'all' for ObjectNet.
      confusion: count, in `self.confusion` [K, K], true classes by predicted ones; for
        one label per image.

    Raises:
      UserError: for an unknown loss, data or labels that cannot be read, or classes that
        the model does not have.
    """
    self.batches = open_batches(mesh, **_with_classes(data, model))
    source = self.batches.source
    self.match: class_match.Match | None = None
    self.note = ''  # a sentence on how classes are matched
    # Label sets number the model's classes, wherever their images lie, unless these lie in
    # folders of all of ImageNet's ids.
    if model is not None and (
      labels is None or class_map or class_names.are_listed(source.class_names)
    ):
      self.match, self.note = class_match.match(source, model, class_map, among)
    elif class_map or among:
      raise UserError(
        f'class_map={class_map!r}, among={among!r}: beside labels={labels!r} they need '
        "class_map, or data with all of ImageNet's classes."
      )
    self.loss, self.loss_fn = loss, losses.LOSSES[loss]
    self._mesh, self._check_stop = mesh, check_stop
    self._counts_confusion = confusion
    self.confusion: np.ndarray | None = None  # int64 [true, predicted] of the last run
    self.predictions: dict | None = None  # of the last run: see `predictions`
    self._label_sets = None
    if labels is not None:
      known = model.number if model else self.batches.num_classes
      known = len(self.match.right) if self.match else known
      in_order = source.name.partition(':')[0] not in ('folder', 'tfds')
      self._label_sets = LabelSets(labels, known, source.name_of, in_order)
    # `predict` is static: one compilation for all runs of one evaluator.
    self._step = jax.jit(
      self._measure, static_argnums=0, out_shardings=sharding.replicated(mesh)
    )

  def run(self, predict: Callable, variables) -> dict[str, float]:
    """Returns top1, top5 (if K > 5), loss, examples; bad_images if there are any.

    top1, top5 are fractions, the loss a mean in nats; examples is the number that they
    are over. bad_images could not be read and are not in it.
    """
    totals: dict[str, float] = {}
    answers = predictions.Collector(self.batches.num_examples)
    pending = None  # one batch behind, so that the host reads while the device works
    with contextlib.closing(self.batches.iterate()) as batches:
      for batch in self._labelled(batches):
        self._check_stop()
        done = self._step(predict, variables, sharding.global_batch(batch, self._mesh))
        _add(totals, answers, pending)
        pending = done
    _add(totals, answers, pending)

    self.confusion = totals.pop('confusion', None)
    examples = totals.pop('examples', 0)
    bad = self.batches.num_examples - totals.pop('read', 0)
    if not examples:
      raise UserError(
        f'Evaluation found no image with a label among {self.batches.num_examples}, '
        f'{bad:g} of which could not be read.'
      )
    self.predictions = answers.result()
    metrics = {name: total / examples for name, total in totals.items()}
    metrics['examples'] = examples
    return metrics | ({'bad_images': bad} if bad else {})

  def _labelled(self, batches: Iterator[dict]) -> Iterator[dict]:
    """Yields the batches, with labels from the file if there is one."""
    if self._label_sets is None:
      yield from batches
      return
    for batch in batches:
      real = batch['mask'] > 0  # padding has no name to look up
      label = np.zeros((len(real), self._label_sets.num_classes), np.float32)
      label[real] = self._label_sets.multi_hot(batch['index'][real])
      yield {**batch, 'label': label}

  def _measure(self, predict, variables, batch):
    """Returns (sums over a batch, what `predictions.of_batch` keeps of it)."""
    batch = self.batches.on_device(batch)
    logits = predict(variables, batch)['logits'].astype(jnp.float32)  # [B, K]
    targets = self._targets(batch['label'], logits.shape[-1])  # [B, K]
    if self.match is not None:
      logits = logits[:, self.match.columns]
    counted = (batch['mask'] > 0) & targets.any(-1)

    def total(x):  # `where`, since 0 x nan of a padded row would be nan
      return jnp.where(counted, x, 0).sum(dtype=jnp.float32)

    rows = predictions.of_batch(batch, logits, targets, counted, self.loss)
    top, right = rows['top'], rows['right']  # [B, 5]
    weights = targets.astype(jnp.float32)
    if self.loss == 'softmax':
      weights /= jnp.maximum(weights.sum(-1, keepdims=True), 1)
    sums = {
      'top1': total(right[:, 0]),
      'top5': total(right.any(-1)),
      'loss': total(self.loss_fn(logits, weights)),
      'examples': total(1),
      'read': (batch['mask'] > 0).sum(dtype=jnp.float32),
    }
    if self._counts_confusion:
      K = logits.shape[-1]
      true = jnp.where(counted, targets.argmax(-1), K)  # K is out of bounds: dropped
      sums['confusion'] = (
        jnp.zeros((K, K), jnp.int32).at[true, top[:, 0]].add(1, mode='drop')
      )
    if logits.shape[-1] <= 5:
      del sums['top5']  # always 1
    if self.match is not None:  # kept by the model's numbers
      columns = jnp.asarray(self.match.columns, jnp.int32)
      label = jnp.where(rows['label'] < 0, -1, columns[rows['label']])
      rows |= {'top': columns[top], 'label': label}
    return sums, rows

  def _targets(self, label, num_classes: int):
    """Returns bool [B, K] of a model's K classes, or of the columns that match."""
    targets = losses.targets_of(label, self.batches.num_classes)
    if self.match is not None:
      right = jnp.asarray(self.match.right, jnp.float32)
      return (targets[:, : len(right)] > 0).astype(jnp.float32) @ right > 0
    known = targets.shape[-1]
    if known > num_classes:
      raise UserError(
        f'The evaluation data has {known} classes, the model {num_classes}: choose '
        'other data, or give both the same num_classes.'
      )
    # A model may have more classes than the data, as one of i21k has.
    return jnp.pad(targets > 0, ((0, 0), (0, num_classes - known)))


def _with_classes(data: dict, model: class_match.Classes | None) -> dict:
  """Returns arguments of the data: the model's classes where the source tells none."""
  return data if model is None else {'model_classes': model.number, **data}


def _add(totals: dict, answers: predictions.Collector, done: tuple | None) -> None:
  if done is None:
    return
  sums, rows = jax.device_get(done)
  answers.add(rows)
  for name, value in sums.items():
    value = float(value) if value.ndim == 0 else value.astype(np.int64)
    totals[name] = totals.get(name, 0) + value
