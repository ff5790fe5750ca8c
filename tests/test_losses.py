"""Losses against closed forms in float64."""

import numpy as np

from vit_jax import losses

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(4, 6)) * 5
HOT = np.eye(6)[[0, 5, 2, 2]]


def test_softmax():
  p = np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True)
  expected = -(HOT * np.log(p)).sum(1)
  found = losses.softmax_cross_entropy(LOGITS.astype(np.float32), HOT)
  np.testing.assert_allclose(found, expected, rtol=1e-5)  # float32 exp and log


def test_sigmoid_is_summed_over_classes():
  p = 1 / (1 + np.exp(-LOGITS))
  expected = -(HOT * np.log(p) + (1 - HOT) * np.log(1 - p)).sum(1)
  found = losses.sigmoid_cross_entropy(LOGITS.astype(np.float32), HOT)
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_smoothing():
  np.testing.assert_allclose(
    losses.smooth(HOT[:1], 0.3, 'softmax')[0], [0.75] + [0.05] * 5, rtol=1e-6
  )
  np.testing.assert_allclose(
    losses.smooth(HOT[:1], 1e-4, 'sigmoid')[0], [0.9999] + [0.0001] * 5, rtol=1e-6
  )
