"""Top-1, top-5 and loss over a split, in which every example counts exactly once."""

from collections.abc import Callable, Iterator
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import losses
from vit_jax.check import parse_options
from vit_jax.data import pipeline
from vit_jax.errors import UserError
from vit_jax.evaluators import class_match, class_scores, predictions
from vit_jax.evaluators.base import Metric, OneSplit
from vit_jax.evaluators.labels import LabelSets

# Number of classes of the largest confusion matrix.
MOST_CLASSES = 5_000
# Number of scores, examples times classes, up to which they are kept to be ranked: 64 MB.
MOST_SCORES = 2**24


class Classification(OneSplit):
  """Top-1 and top-5 accuracy, and loss.

  An example is right if the largest logit, or one of the five largest, is a label. With
  several labels per image, each of them is right. Images without any label are left out of
  the numerators and the denominator (as in ReaL, arXiv 2006.07159, section 3).

  Attributes:
    match: the `class_match.Match` of the data and the model; None: classes are compared by
      number.
    note: a sentence on the match for the user, or ''.
    columns: the number of classes that may be predicted.
    has_confusion, has_counts: whether a run counts the confusion, or only the `counts`.
    confusion: int64 [true class, predicted class] of the last run, or None.
    counts: int64 [3, K] of the last run, or None: how many examples of each class are
      predicted as it, have it, and are predicted.
    predictions: the rows of the last run, see the module `predictions`.
  """

  TASKS = ('classify', 'distill')
  METRICS: ClassVar = {
    'top1': Metric(percent=True, larger_is_better=True, of_images=True),
    'top5': Metric(percent=True, larger_is_better=True, of_images=True),
    'balanced_accuracy': Metric(percent=True, larger_is_better=True),
    '(macro|micro)_(precision|recall|f1)': Metric(percent=True, larger_is_better=True),
    'mean_ap': Metric(percent=True, larger_is_better=True),
    'auroc': Metric(larger_is_better=True),
    'loss': Metric(larger_is_better=False),
    'examples': Metric(),
    'bad_images': Metric(),
    'bad_logits': Metric(),
  }

  def __init__(
    self,
    mesh,
    check_stop,
    model: class_match.Classes | None = None,
    *,
    data: Annotated[dict, pipeline.check_evaluate],
    loss: Annotated[str, losses.check_loss] = 'softmax',
    labels: str | None = None,
    class_map: Annotated[str | None, class_match.check_class_map] = None,
    among: Annotated[str | None, class_match.check_among] = None,
    confusion: bool = False,
    ranking: bool | None = False,
  ):
    """Opens the data, `data.pipeline.EvalBatches(**data)`.

    Args:
      loss: see `vit_jax.losses`; a run takes the loss of its task. With 'softmax' the
        losses of several labels are summed, as in big_vision.
      labels: a JSON file of label sets that replace the labels of the data, see `LabelSets`.
        It numbers classes as the model does, or as the data does if the data has all classes
        of ImageNet.
      class_map, among: how to match the classes of the data with the model's, and which
        classes may be predicted, see `class_match.match`.
      confusion: whether to count true by predicted classes in `self.confusion` [K, K], if
        the data has one label per image. The numbers then include `balanced_accuracy`, the
        mean recall of the classes, and their mean precision, recall and F1, `macro_f1`. If
        images have several labels and the loss is one of binary classes, all with a
        probability above 1/2 are predicted; `micro_f1` then counts all labels alike.
      ranking: whether to keep all scores, to measure `mean_ap`, the mean average precision
        of the classes, and `auroc`, their mean area under the ROC curve. Classes without
        examples are left out. None: if there are at most MOST_SCORES.
    """
    if model is not None:
      # Used for a source that does not know its number of classes.
      data = {'model_classes': model.number, **data}
    super().__init__(mesh, check_stop, data=data)
    self.batches.classes_of('label')
    source = self.batches.source
    self.match: class_match.Match | None = None
    # Label sets number classes as the model does, unless the images are in folders named by
    # all of ImageNet's ids: then they number classes as the data does.
    if model is not None and (
      labels is None or class_map or class_match.find_list(source.class_names or ())
    ):
      self.match, self.note = class_match.match(source, model, class_map, among)
    elif model is None and (class_map or among):
      raise UserError(
        f'{class_map=}, {among=}: without the classes of a model there is nothing to '
        'match: leave them out.'
      )
    elif among:
      raise UserError(
        f'{among=} with {labels=} needs class_map, which says how classes are matched.'
      )
    columns = model.number if model else self.batches.num_classes
    self.columns = columns = len(self.match.columns) if self.match else columns
    self.loss_fn = losses.build(loss, columns)
    name, _ = parse_options(loss)
    self._binary, self._exclusive = name in losses.BINARY, name in losses.EXCLUSIVE
    # The largest matrix is of 200 MB.
    self.has_confusion = (
      confusion and columns <= MOST_CLASSES and self._one_label(labels)
    )
    self.confusion: np.ndarray | None = None
    # Classes are independent, and images without a label count, too.
    self._several = (
      self._binary and labels is None and self.batches.spec['label'].ndim == 2
    )
    self.has_counts = confusion and self._several
    self.counts: np.ndarray | None = None
    scores = self.batches.num_examples * columns
    if ranking and scores > MOST_SCORES:
      raise UserError(
        f'{ranking=}: {scores:,} scores are too many to keep, more than {MOST_SCORES:,}: '
        'choose a part of the split, or leave it out.'
      )
    self._has_ranking = ranking or (ranking is None and scores <= MOST_SCORES)
    self._ranks: dict[str, np.ndarray] = {}
    self._label_sets = None
    if labels is not None:
      classes = model.number if model else self.batches.num_classes
      classes = len(self.match.right) if self.match else classes
      in_order = source.name.partition(':')[0] not in ('folder', 'tfds')
      self._label_sets = LabelSets(labels, classes, source.name_of, in_order)

  def run(self, predict: Callable, variables) -> dict[str, float]:
    """Returns top1 and top5 (if K > 5) as fractions, and the mean loss in nats.

    They are over `examples`. These do not include `bad_images`, which could not be read.
    They include `bad_logits`, examples with NaN or infinity in their logits, which count as
    wrong.
    """
    totals: dict[str, float] = {}
    rows = predictions.Collector(self.batches.num_examples)
    ranked: list[tuple] = []
    labelled = self._replace_labels(self.batches.iterate())
    for sums, batch_rows in self.run_steps(predict, variables, labelled):
      rows.add(batch_rows)
      if self._has_ranking:
        seen = batch_rows['seen']
        ranked.append((batch_rows['scores'][seen], batch_rows['targets'][seen]))
      for name, value in sums.items():
        value = float(value) if value.ndim == 0 else value.astype(np.int64)
        totals[name] = totals.get(name, 0) + value
    self.confusion = matrix = totals.pop('confusion', None)
    self.counts = totals.pop('counts', None)
    if matrix is not None:
      self.counts = np.stack([matrix.diagonal(), matrix.sum(1), matrix.sum(0)])
    examples, read = totals.pop('examples', 0), totals.pop('read', 0)
    bad = totals.pop('bad_logits', 0)
    means = {name: total / examples for name, total in totals.items() if examples}
    metrics = self.add_counts(means, examples, read)
    metrics |= {'bad_logits': bad} if bad else {}
    if self.counts is not None and self.counts.any():
      scores = class_scores.class_scores(*self.counts)
      metrics |= class_scores.means(scores, several=matrix is None)
      if matrix is None:
        micro = class_scores.class_scores(*self.counts.sum(1))
        metrics |= {f'micro_{k}': float(np.nan_to_num(x)) for k, x in micro.items()}
    if ranked:
      scores, targets = (np.concatenate(x) for x in zip(*ranked, strict=True))
      self._ranks = class_scores.rank(scores, targets)
      names = {'mean_ap': 'average_precision', 'auroc': 'auroc'}
      values = {name: self._ranks[key] for name, key in names.items()}
      metrics |= {
        k: float(np.nanmean(x)) for k, x in values.items() if np.isfinite(x).any()
      }
    self.predictions = rows.result()
    return metrics

  def score_classes(self) -> dict[str, np.ndarray]:
    """Returns the scores of each class in the last run."""
    return class_scores.class_scores(*self.counts) | self._ranks

  def _one_label(self, labels: str | None) -> bool:
    several = self.match is not None and self.match.right.sum(1).max() > 1
    return not (labels or several or self.batches.spec['label'].ndim == 2)

  def _replace_labels(self, batches: Iterator[dict]) -> Iterator[dict]:
    """Yields the batches, with labels from the file if there is one."""
    for batch in batches:
      if self._label_sets is not None:
        # Skip padding, which has no name to look up.
        real = batch['mask'] > 0
        label = np.zeros((len(real), self._label_sets.num_classes), np.float32)
        label[real] = self._label_sets.multi_hot(batch['index'][real])
        batch = {**batch, 'label': label}
      yield batch

  def measure(self, predict, variables, batch):
    """Returns (sums over a batch, its rows for `predictions`)."""
    batch = self.batches.finish_on_device(batch)
    logits = predict(variables, batch)['logits'].astype(jnp.float32)  # [B, K]
    weights = self._targets(batch['label'], logits.shape[-1])  # [B, K]
    targets = weights > 0
    if self.match is not None:
      logits = logits[:, self.match.columns]
    counted = (batch['mask'] > 0) & targets.any(-1)

    def total(x):
      # Use `where`, because 0 times the NaN of a padded row would be NaN.
      return jnp.where(counted, x, 0).sum(dtype=jnp.float32)

    rows = predictions.make_rows(batch, logits, targets, counted, self._binary)
    finite = jnp.isfinite(logits).all(-1)
    # Count rows with NaN as wrong, because their largest logit would be that of class 0.
    rows['right'] &= finite[:, None]
    top, right = rows['top'], rows['right']  # [B, 5]
    sums = {
      'top1': total(right[:, 0]),
      'top5': total(right.any(-1)),
      'loss': total(self.loss_fn(logits, weights)),
      'examples': total(1),
      'bad_logits': total(~finite),
      'read': (batch['mask'] > 0).sum(dtype=jnp.float32),
    }
    if self.has_confusion:
      K = logits.shape[-1]
      # K is out of bounds, so that `mode='drop'` leaves these examples out.
      true = jnp.where(counted & finite, targets.argmax(-1), K)
      zeros = jnp.zeros((K, K), jnp.int32)
      sums['confusion'] = zeros.at[true, top[:, 0]].add(1, mode='drop')
    seen = (batch['mask'] > 0) if self._several else counted
    if self.has_counts:
      predicted = (logits > 0) & finite[:, None]
      masks = jnp.stack([predicted & targets, targets, predicted]) & seen[:, None]
      sums['counts'] = masks.sum(1, dtype=jnp.int32)
    if self._has_ranking:
      # The order of probabilities, without ties of those near 1.
      scores = logits if self._binary else jax.nn.log_softmax(logits)
      scores = jnp.where(finite[:, None], scores, jnp.finfo(jnp.float32).min)
      rows |= {'scores': scores, 'targets': targets, 'seen': seen}
    if logits.shape[-1] <= 5:
      # Top-5 accuracy would always be 1.
      del sums['top5']
    if self.match is not None:
      # Rows contain the model's numbers of the classes.
      columns = jnp.asarray(self.match.columns, jnp.int32)
      label = jnp.where(rows['label'] < 0, -1, columns[rows['label']])
      rows |= {'top': columns[top], 'label': label}
    return sums, rows

  def _targets(self, label, num_classes: int):
    """Returns targets float32 [B, K], for the K classes of the model or the columns of `match`.

    Each label has the value 1. For exclusive classes, the columns that are right for it
    share the 1.
    """
    targets = losses.targets_of(label, self.batches.num_classes)
    if self.match is not None:
      right = jnp.asarray(self.match.right, jnp.float32)
      labels = (targets[:, : len(right)] > 0).astype(jnp.float32)
      if self._exclusive:
        right /= jnp.maximum(right.sum(-1, keepdims=True), 1)
        return jnp.matmul(labels, right, precision='highest')
      return (labels @ right > 0).astype(jnp.float32)
    if (K := targets.shape[-1]) > num_classes:
      raise UserError(
        f'The evaluation data has {K} classes, but the model has {num_classes}: choose '
        'other data or num_classes.'
      )
    # A model may have more classes than the data, such as all classes of i21k.
    binary = (targets > 0).astype(jnp.float32)
    return jnp.pad(binary, ((0, 0), (0, num_classes - K)))
