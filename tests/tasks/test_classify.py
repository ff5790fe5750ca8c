"""The loss and metrics of the task, of a model whose logits are given."""

import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from vit_jax import tasks
from vit_jax.tasks.classify import Classify

RNG = np.random.default_rng(0)
SPEC = {'label': jax.ShapeDtypeStruct((4,), np.int32)}


def loss_of(logits, label, **options):
  """Returns (loss, metrics) of a batch of four, one of them masked."""
  apply = lambda variables, *_, **__: ((variables, {}), {})
  task = Classify(SimpleNamespace(num_classes=5, apply=apply), SPEC, **options)
  batch = {'image': None, 'label': label, 'weight': np.array([1, 1, 0, 1]) / 3}
  batch = task.prepare(batch, jax.random.key(0), None)
  loss, (metrics, stats) = task.loss(logits, batch, jax.random.key(0))
  assert (metrics['loss'], stats) == (loss, {})
  return loss, metrics


def test_sigmoids_are_summed_over_classes():
  logits = np.full((4, 5), -2.2, np.float32)
  loss, _ = loss_of(logits, np.arange(4), loss='sigmoid')
  # Four classes out, one in.
  expected = 4 * math.log1p(math.exp(-2.2)) + math.log1p(math.exp(2.2))
  assert loss == pytest.approx(expected, rel=1e-6)  # float32


def test_several_labels_share_the_target():
  logits = np.tile(np.float32([0, 0, 9, 0, 0]), (4, 1))
  logits[2] = [9, 0, 0, 0, 0]  # masked
  label = np.tile(np.float32([0, 0.5, 0.5, 0, 0]), (4, 1))
  loss, metrics = loss_of(logits, label)
  assert metrics['accuracy'] == pytest.approx(1.0)
  # Half of ln(sum exp) - 9 ~ 0, half of ln(sum exp) - 0 ~ 9.
  assert loss == pytest.approx(4.5, abs=1e-3)


@pytest.mark.parametrize('label_smoothing', [0.0, 0.1])
def test_weighted_losses_are_divided_by_the_weights_of_the_labels(label_smoothing):
  logits, label = RNG.normal(size=(4, 5)).astype(np.float32), np.array([0, 3, 1, 3])
  weights = [0.5, 1.0, 1.0, 4.0, 2.0]
  options = dict(class_weights=weights, label_smoothing=label_smoothing)
  loss, _ = loss_of(logits, label, **options)
  log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
  target = (1 - label_smoothing) * np.eye(5)[label] + label_smoothing / 5
  each = -(target * weights * log_p).sum(1)
  # The third example is masked.
  assert loss == pytest.approx(each[[0, 1, 3]].sum() / (0.5 + 4 + 4), rel=1e-5)


def test_class_weights_must_fit_the_model():
  for weights, fact in ([1.0, 2.0], '5 classes'), ('balanced', 'training data'):
    with pytest.raises(ValueError, match=fact):
      loss_of(np.zeros((4, 5)), np.arange(4), class_weights=weights)


def test_a_task_reads_a_config():
  assert tasks.class_of({'task': {'name': 'detect'}}).OUTPUTS == 'boxes'
  for config in ({}, {'task': {'name': 'mine'}}):  # registered by a config file
    assert tasks.class_of(config) is Classify
