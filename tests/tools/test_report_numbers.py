"""The mathematics of a run's page, against closed forms and NumPy."""

import base64
import io
import math
import statistics
import types

import numpy as np
import pytest
from PIL import Image

from vit_jax.errors import UserError
from vit_jax.tools.report import curves, numbers, pictures
from vit_jax.tools.report.folder import Run


def a_run(name='a', rows=(), **config):
  config = {'resolved': {}, 'evals': {'test': {'type': 'classification'}}} | config
  return Run(None, name, config, {}, list(rows), [], [], {}, [])


def test_downsampling_keeps_extremes_ends_and_gaps():
  n = 100_000
  y = np.random.default_rng(0).normal(size=n)
  y[[31_337, 77_777]] = 50, -50
  y[60_000] = math.nan
  x, kept = curves.downsample(range(1, n + 1), y, 1200)
  assert len(x) <= 1200
  assert x == sorted(set(x))
  assert (x[0], x[-1]) == (1, n)
  points = dict(zip(x, kept, strict=True))
  assert (points[31_338], points[77_778]) == (50, -50)
  assert math.isnan(points[60_001])
  assert all(points[i] == y[i - 1] for i in x if i != 60_001)
  assert curves.downsample([1, 2], [3, 4]) == ([1, 2], [3, 4])


def test_curves_that_belong_together_share_a_chart():
  rows = [
    {'step': 1, 'train/loss': 2.0, 'train/lr': 0.1, 'train/skipped': 0},
    {'step': 2, 'train/loss': math.nan, 'test/loss': 1.5, 'test/top1': 0.5},
    {'step': 2, 'test/examples': 10, 'other/number': 7, 'time/seconds_left': 3},
  ]
  charts = {chart['title']: chart for chart in curves.charts([a_run(rows=rows)])}
  assert list(charts) == ['Loss', 'Accuracy', 'Learning rate', 'other/number']
  loss = {curve['name']: curve for curve in charts['Loss']['curves']}
  assert loss['train/loss']['y'] == [2.0, None]
  assert loss['test/loss']['x'] == [2]
  assert charts['Accuracy']['percent']
  assert not charts['Loss']['percent']


def test_ece_of_a_planted_case():
  # 15 bins: 0.9 is in the 14th, where 60 of 100 are right; 0.5 in the 8th, 30 of 50.
  confidence = [0.9] * 100 + [0.5] * 50 + [math.nan]
  right = [True] * 60 + [False] * 40 + [True] * 30 + [False] * 20 + [True]
  found = numbers.calibrate(confidence, right)
  assert found.ece == pytest.approx((100 * 0.3 + 50 * 0.1) / 150)
  assert found.counts[[13, 7]].tolist() == [100, 50]
  assert found.counts.sum() == 150
  assert found.mean_confidence == pytest.approx(115 / 150)
  assert found.mean_accuracy == pytest.approx(90 / 150)
  assert numbers.calibrate([1.0, 1.0], [True, True]).ece == 0
  assert numbers.calibrate([math.nan], [True]) is None


def test_confusion_counts_as_a_dense_matrix_does():
  rng = np.random.default_rng(1)
  label, answer = rng.integers(0, 7, (2, 500))
  dense = np.zeros((7, 7), int)
  np.add.at(dense, (label, answer), 1)
  some = np.append(label, -1), np.append(answer, 3)  # -1: several labels
  found = numbers.confuse(*some, 7)
  again = np.zeros((7, 7), int)
  again[found.cells[:, 0], found.cells[:, 1]] = found.cells[:, 2]
  np.testing.assert_array_equal(again, dense)
  np.testing.assert_array_equal(found.counts, dense.sum(1))
  np.testing.assert_array_equal(found.predicted, dense.sum(0))
  np.testing.assert_array_equal(found.right, dense.diagonal())
  off = dense - np.diag(dense.diagonal())
  largest = found.largest(5)
  assert largest[:, 2].tolist() == sorted(off.ravel(), reverse=True)[:5]
  assert all(true != predicted for true, predicted, _ in largest)
  accuracy = dense.diagonal() / dense.sum(1)
  assert found.worst(1)[0] == accuracy.argmin()
  assert numbers.confuse([-1], [0], 7) is None


def test_the_most_confident_mistakes_come_first():
  found = {
    'right': np.array([[True], [False], [False], [False], [False]]),
    'probability': np.array([[0.99], [0.4], [np.nan], [0.8], [0.6]]),
  }
  assert pictures.most_confident(found, 2).tolist() == [3, 4]


class Unprepared:
  """Examples whose pipeline does not work on single images."""

  source = types.SimpleNamespace(name_of='image {}'.format)

  def read(self, indices):
    return [(i, np.zeros((8, 8, 3), np.uint8)) for i in indices]

  def preprocessed(self, image):
    raise UserError('no_twin has no NumPy version')


def test_why_mistakes_have_no_pictures_is_said():
  found = {
    'index': np.array([3]),
    'label': np.array([1]),
    'top': np.array([[0]]),
    'right': np.array([[False]]),
    'probability': np.array([[0.9]]),
  }
  run = a_run()._replace(predictions={'test': found})
  (one,), why = pictures.mistakes(run, 'test', Unprepared(), 5, attention=False)
  assert (one.name, one.picture, one.attention) == ('image 3', None, None)
  assert 'no_twin' in why


@pytest.mark.parametrize(('k', 'n'), [(10, 20), (357, 360), (1, 7)])
def test_wilson_intervals_end_where_the_share_is_just_not_refused(k, n):
  z = statistics.NormalDist().inv_cdf(0.975)
  low, high = numbers.wilson(k / n, n)
  assert low < k / n < high
  for bound in (low, high):  # of a normal test of the bound against the share
    score = abs(k / n - bound) / math.sqrt(bound * (1 - bound) / n)
    assert score == pytest.approx(z, rel=1e-6)
  assert numbers.wilson(0.0, n)[0] == pytest.approx(0, abs=1e-12)
  assert numbers.wilson(1.0, n)[1] == pytest.approx(1)


def test_spread_over_seeds():
  rows = lambda top1: [{'step': 1, 'test/top1': top1, 'test/examples': 100}]
  runs = [a_run(str(i), rows(x), seed=i) for i, x in enumerate((0.5, 0.6, 0.7))]
  other = a_run('other', rows(0.1), seed=0, optim={'lr': 1})
  (group,) = numbers.repeats([*runs, other])
  assert [run.name for run in group] == ['0', '1', '2']
  assert numbers.over_seeds(group)['test/top1'] == '60.00% ± 10.00%'
  assert numbers.differences([runs[1], other]) == {
    'seed': ['1', '0'],
    'optim.lr': ['—', '1'],
  }
  value, interval = numbers.results(runs[0])['test/top1']
  assert (value, interval) == ('50.00%', '40.4% to 59.6%')


def test_what_has_attention_is_clear_and_the_rest_dark():
  url = pictures.overlay(np.array([[0.0, 0.5], [1.0, 0.25]]))
  image = Image.open(io.BytesIO(base64.b64decode(url.partition(',')[2])))
  alpha = np.asarray(image)[..., 3]
  assert alpha.tolist() == [[215, 107], [0, 161]]
