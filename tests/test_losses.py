"""Losses against closed forms in float64."""

import numpy as np
import pytest

from tests.support import naming
from vit_jax import losses
from vit_jax.errors import UserError

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(4, 6)) * 5
HOT = np.eye(6)[[0, 5, 2, 2]]


def test_softmax():
  p = np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True)
  expected = -(HOT * np.log(p)).sum(1)
  result = losses.softmax_cross_entropy(LOGITS.astype(np.float32), HOT)
  np.testing.assert_allclose(result, expected, rtol=1e-5)  # float32 exp and log


def test_sigmoid_is_summed_over_classes():
  p = 1 / (1 + np.exp(-LOGITS))
  expected = -(HOT * np.log(p) + (1 - HOT) * np.log(1 - p)).sum(1)
  result = losses.sigmoid_cross_entropy(LOGITS.astype(np.float32), HOT)
  np.testing.assert_allclose(result, expected, rtol=1e-5)


@pytest.mark.parametrize(
  ('loss', 'amount', 'expected'),
  [
    (losses.softmax_cross_entropy, 0.3, [0.75] + [0.05] * 5),
    (losses.sigmoid_cross_entropy, 1e-4, [0.9999] + [0.0001] * 5),
    (lambda logits, targets: None, 0.3, [0.75] + [0.05] * 5),  # a user's
  ],
)
def test_smoothing_is_that_of_the_loss(loss, amount, expected):
  np.testing.assert_allclose(losses.smooth(HOT[0], amount, loss), expected, rtol=1e-6)


def test_a_loss_has_options_and_returns_one_number_per_example(monkeypatch):
  scaled = lambda logits, targets, *, scale=1.0: scale * (logits * targets).sum(-1)
  scaled.smooth = losses.smooth_binary
  table = {'scaled': scaled, 'mean': lambda logits, targets: logits.mean()}
  monkeypatch.setattr(losses.LOSSES, 'data', losses.LOSSES.data | table)
  loss = losses.build('scaled(scale=2)', 6)
  np.testing.assert_allclose(loss(LOGITS, HOT), 2 * scaled(LOGITS, HOT))
  assert losses.smooth(HOT, 0.1, loss)[0, 0] == 0.9
  with pytest.raises(ValueError, match=naming("'mean'", (), (2,))):
    losses.build('mean', 6)
  with pytest.raises(UserError, match=naming("'focal'", 'sigmoid', '--import')):
    losses.build('focal', 6)
