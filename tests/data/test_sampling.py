"""Orders that show rare classes more often: exact shares, the same for any restart and hosts."""

import numpy as np
import pytest

from tests.support import GOLDEN, naming
from vit_jax.data import pipeline
from vit_jax.data.sources import sampling
from vit_jax.data.sources.base import ArraySource
from vit_jax.errors import UserError

REFERENCE = np.load(GOLDEN / 'losses_classification.npz')
COUNTS = REFERENCE['counts']
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(len(COUNTS)), COUNTS))


def source(labels):
  made = ArraySource('made', np.zeros((len(labels), 2, 2, 1), np.uint8), labels)
  made.num_classes = labels.shape[1] if labels.ndim == 2 else labels.max() + 1
  return made


def test_balanced_classes_have_equal_shares():
  order = sampling.order('balanced', source(LABELS), seed=3)
  indices = order.indices(np.arange(order.block * 10))
  shares = np.bincount(LABELS[indices]) / len(indices)
  expected = REFERENCE['sampling_probability_per_class_balanced']
  # Exact up to one position.
  np.testing.assert_allclose(shares, expected, atol=1 / len(indices))
  # Within a class, all images come equally often.
  times = np.bincount(indices, minlength=len(LABELS))
  for label in range(len(COUNTS)):
    own = times[label == LABELS]
    assert own.max() - own.min() <= 1


@pytest.mark.parametrize('several', [False, True])
def test_images_are_repeated_by_their_rarest_class(several):
  labels = np.eye(5, dtype=np.float32)[LABELS] if several else LABELS
  factors = REFERENCE['repeat_factors_t0_1'][LABELS]
  if several:
    # All images have the most frequent class, too, and some have nothing else.
    labels[:, 0] = 1
    factors = np.where(labels[:, 1:].any(1), factors, 1)
  order = sampling.order('repeat(t=0.1)', source(labels), seed=3)
  indices = order.indices(np.arange(order.block * 10))
  expected = factors / factors.sum() * len(indices)
  times = np.bincount(indices, minlength=len(labels))
  assert np.abs(times - expected).max() < 2


def test_an_order_is_arithmetic():
  order = sampling.order('balanced', source(LABELS), seed=3)
  positions = np.arange(5000)
  whole = order.indices(positions)
  again = sampling.order('balanced', source(LABELS), seed=3)
  np.testing.assert_array_equal(again.indices(positions[4000:]), whole[4000:])
  np.testing.assert_array_equal(again.indices(positions[1::2]), whole[1::2])
  other = sampling.order('balanced', source(LABELS), seed=4)
  assert (other.indices(positions) != whole).mean() > 0.5


def test_batches_of_a_sampling_resume_on_any_hosts():
  args = 'digits', 'train[:100]', 'value_range', 12
  make = lambda **more: pipeline.TrainBatches(*args, sampling='balanced', **more)
  indices = lambda batches, step: next(batches.iterate(step))['index']
  whole = indices(make(), 3)
  parts = [indices(make(host=h, hosts=2), 3) for h in range(2)]
  np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize(
  ('text', 'known', 'facts'),
  [('balanced', True, ('several labels', 'repeat')), ('repeat', False, ('labels',))],
)
def test_impossible_samplings(text, known, facts):
  made = source(np.eye(3)[[0, 1, 2]])
  made.multi_hot = made.multi_hot if known else None
  with pytest.raises(UserError, match=naming('made', f'sampling={text!r}', *facts)):
    sampling.order(text, made, seed=0)


@pytest.mark.parametrize(
  ('text', 'facts'),
  [
    ('balancd', ("'balancd'", 'balanced')),
    ('repeat(t=2)', ('t=2', '(0, 1]')),
    ('repeat(0.1)', ('repeat(option=value)',)),
  ],
)
def test_wrong_samplings(text, facts):
  with pytest.raises(UserError, match=naming('data.sampling', *facts)):
    sampling.check_sampling('data.sampling', text, {})
