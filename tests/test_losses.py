"""Losses against closed forms in float64."""

import jax
import numpy as np
import pytest

from tests.support import GOLDEN, naming
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
  with pytest.raises(UserError, match=naming("'focl'", 'focal', '--import')):
    losses.build('focl', 6)


# --- against other people's code ---------------------------------------------------------

REFERENCE = np.load(GOLDEN / 'losses_classification.npz')
ONE_HOT = np.eye(7, dtype=np.float32)[REFERENCE['labels']]
MULTI, SOFT, WEIGHTS = (REFERENCE[key] for key in ('multi', 'soft', 'class_weights'))
SMOOTH = losses.smooth(ONE_HOT, 0.1, losses.softmax_cross_entropy)
# torch divides by the sum of the weights of the labels, if these are numbers.
WEIGHED = WEIGHTS / WEIGHTS[REFERENCE['labels']].mean()


@pytest.mark.parametrize(
  ('name', 'loss', 'targets', 'divisor'),
  [
    ('focal_sigmoid_alpha-1_gamma2_mean', 'sigmoid_focal(alpha=None)', MULTI, 7),
    ('focal_sigmoid_alpha0.25_gamma2_mean', 'sigmoid_focal', MULTI, 7),
    ('focal_sigmoid_alpha0.25_gamma0_mean', 'sigmoid_focal(gamma=0)', MULTI, 7),
    (
      *('focal_sigmoid_alpha-1_gamma1.5_mean', 'sigmoid_focal(gamma=1.5, alpha=None)'),
      *(MULTI, 7),
    ),
    ('focal_softmax_gamma2_mean', 'focal', ONE_HOT, 1),
    ('focal_softmax_gamma2_weighted_mean', 'focal(gamma=2)', ONE_HOT * WEIGHTS, 1),
    ('asl_multi_4_1_0.05_batchmean', 'asymmetric', MULTI, 1),
    (
      *(
        'asl_multi_4_1_0.05_stop_batchmean',
        'asymmetric(stop_gradient=True)',
        MULTI,
        1,
      ),
    ),
    (
      *(
        'asl_multi_2_0_noclip_batchmean',
        'asymmetric(gamma_neg=2, gamma_pos=0, clip=0)',
      ),
      *(MULTI, 1),
    ),
    ('ce_weighted_mean', 'softmax', ONE_HOT * WEIGHED, 1),
    ('ce_weighted_smooth0.1_mean', 'softmax', SMOOTH * WEIGHED, 1),
    ('ce_weighted_soft_mean', 'softmax', SOFT * WEIGHTS, 1),
    ('ce_smooth0.1_mean', 'softmax', SMOOTH, 1),
    ('bce_soft_threshold0.2_mean', 'sigmoid(threshold=0.2)', SOFT, 7),
    ('bce_soft_threshold0_mean', 'sigmoid(threshold=0)', SOFT, 7),
    ('bce_soft_sum_classes', 'sigmoid', SOFT, 1),
    (*('bce_labels_smooth0.1_threshold0.2_mean', 'sigmoid(threshold=0.2)', SMOOTH, 7),),
  ],
)
def test_losses_and_gradients_agree_with_torch(name, loss, targets, divisor):
  mean = lambda logits: losses.build(loss, 7)(logits, targets).mean() / divisor
  value, grad = jax.value_and_grad(mean)(REFERENCE['logits'])
  # Float32 in another order; logits of +-30 saturate.
  np.testing.assert_allclose(value, REFERENCE[f'{name}/loss'], rtol=1e-5)
  np.testing.assert_allclose(grad, REFERENCE[f'{name}/grad'], atol=1e-5)


@pytest.mark.parametrize('loss', ['focal(gamma=0.5)', 'sigmoid_focal(gamma=0.5)'])
def test_gradients_of_saturated_logits_are_finite(loss):
  total = lambda logits: losses.build(loss, 7)(logits, ONE_HOT).sum()
  # torchvision's focal loss gives NaN here.
  assert np.isfinite(jax.grad(total)(10 * REFERENCE['logits'])).all()


@pytest.mark.parametrize(
  ('text', 'name'),
  [
    ('balanced', 'balanced_weights'),
    ('effective(beta=0.99)', 'effective_number_weights_0_99'),
  ],
)
def test_class_weights(text, name):
  # A class without examples has the weight 1.
  counts = np.append(REFERENCE['counts'], 0)
  expected = [*REFERENCE[name], 1]
  np.testing.assert_allclose(losses.class_weights(text, counts), expected, rtol=1e-6)
