"""Precision, recall, F1, average precision and AUROC against scikit-learn."""

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import metrics

from tests.support import GOLDEN, naming
from vit_jax import evaluators, sharding
from vit_jax.errors import UserError
from vit_jax.evaluators import class_scores

REFERENCE = np.load(GOLDEN / 'metrics_classification.npz')


def run(path, logits, labels, **options):
  """Evaluates given logits in three batches, the last one padded."""
  # An image holds its index, and the model returns the logits of that row.
  images = np.arange(len(labels), dtype=np.uint8)[:, None, None, None]
  np.savez(path, images=np.broadcast_to(images, (len(labels), 2, 2, 1)), labels=labels)
  data = dict(source=f'arrays:{path}', split='train', batch_size=24)
  data['pp'] = 'value_range(0, 255)'
  evaluator = evaluators.build(
    'classification', sharding.make_mesh(), data=data, **options
  )

  def predict(table, batch):
    return {'logits': table[batch['image'][:, 0, 0, 0].astype(jnp.int32)]}

  return evaluator, evaluator.run(predict, jnp.float32(logits))


def agree(values, prefix, names):
  for name, key in names.items():
    # Float32 of the reference.
    assert values[name] == pytest.approx(REFERENCE[f'{prefix}_{key}'], abs=1e-6), name


def test_one_label(tmp_path):
  labels = REFERENCE['single_labels']
  logits = np.eye(5)[REFERENCE['single_prediction']]
  evaluator, values = run(tmp_path / 'a.npz', logits, labels, confusion=True)
  names = {f'macro_{name}': f'{name}_macro' for name in ('precision', 'recall', 'f1')}
  names |= {'balanced_accuracy': 'balanced_accuracy', 'top1': 'f1_micro'}
  agree(values, 'single', names)
  scores = {k: np.nan_to_num(x) for k, x in evaluator.score_classes().items()}
  agree(scores, 'single', {k: f'{k}_each' for k in ('precision', 'recall', 'f1')})


def test_ranking_of_one_label(tmp_path):
  logits, labels = REFERENCE['single_logits'], REFERENCE['single_labels']
  _, values = run(tmp_path / 'a.npz', logits, labels, ranking=True)
  # scikit-learn's AUROC leaves out the class that does not occur.
  p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
  occurring = np.unique(labels)
  auroc = [metrics.roc_auc_score(labels == k, p[:, k]) for k in occurring]
  assert values['auroc'] == pytest.approx(np.mean(auroc), abs=1e-6)
  precision = [metrics.average_precision_score(labels == k, p[:, k]) for k in occurring]
  assert values['mean_ap'] == pytest.approx(np.mean(precision), abs=1e-6)


def test_ranks_of_one_label():
  scores, labels = REFERENCE['single_scores_for_auroc'], REFERENCE['single_labels']
  classes = np.unique(labels)
  ranks = class_scores.rank(scores, labels[:, None] == classes)
  agree(ranks, 'single', {'auroc': 'auroc_each'})
  assert ranks['auroc'].mean() == pytest.approx(REFERENCE['single_auroc_ovr_macro'])


def test_several_labels(tmp_path):
  # Rounded to 0.01; the reference predicts probabilities of 1/2, too.
  logits, targets = REFERENCE['multi_scores'] - 0.499, REFERENCE['multi_targets']
  options = dict(loss='sigmoid', confusion=True, ranking=True)
  evaluator, values = run(tmp_path / 'a.npz', logits, targets, **options)
  names = {
    f'{mean}_{name}': f'{name}_{mean}'
    for mean in ('macro', 'micro')
    for name in ('precision', 'recall', 'f1')
  }
  names |= {'mean_ap': 'map_macro_present', 'auroc': 'auroc_macro_present'}
  agree(values, 'multi', names)
  by_class = evaluator.score_classes()
  each = {k: np.nan_to_num(by_class[k]) for k in ('precision', 'recall', 'f1')}
  agree(each, 'multi', {k: f'{k}_each' for k in each})
  present = {k: by_class[k][targets.any(0)] for k in ('average_precision', 'auroc')}
  names = {'average_precision': 'ap_each_present', 'auroc': 'auroc_each_present'}
  agree(present, 'multi', names)
  assert np.isnan(by_class['auroc'][~targets.any(0)]).all()


def test_logits_that_are_not_finite_rank_last(tmp_path):
  logits, targets = np.eye(4)[[0, 1, 2, 3, 3]], np.eye(4)[[0, 1, 2, 3, 3]]
  logits[4] = np.nan
  options = dict(loss='sigmoid', confusion=True, ranking=True)
  _, values = run(tmp_path / 'a.npz', logits, targets, **options)
  assert values['bad_logits'] == 1
  assert values['micro_recall'] == 0.8
  assert values['mean_ap'] == pytest.approx((3 + 0.5 + 0.5 * 2 / 5) / 4)


def test_too_many_scores_are_an_error():
  data = dict(source='synthetic', split='train', batch_size=8, pp='value_range')
  data['source_options'] = dict(num_classes=2000)
  options = dict(data=data, ranking=True)
  with pytest.raises(UserError, match=naming('ranking=True', '16,777,216')):
    evaluators.build('classification', sharding.make_mesh(), **options)
