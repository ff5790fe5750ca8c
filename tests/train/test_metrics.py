"""The metrics of a run: how they are shown, compared and stored."""

import importlib.util
import json
import math
import re
import sys
import time

import numpy as np
import pytest

from tests.support import naming
from vit_jax import errors
from vit_jax.train import metrics, progress


def test_numbers_are_shown_as_their_evaluators_declare(tmp_path):
  evals = {'test': {'type': 'classification'}, 'few': {'type': 'fewshot'}}
  rows = [
    {'step': 9, 'train/loss': 0.5, 'train/lr': 0.1, 'time/images_per_s': 7.0},
    {'step': 9, 'test/top1': 0.98125, 'test/loss': 0.08125, 'test/examples': 50_000},
    {'step': 9, 'few/my_std_5shot': 0.5, 'few/my_std_5shot_std': 0.0125},
    {'step': 9, 'few/my_std_5shot_seed0': 0.4875, 'gone/top1': 0.5},
  ]
  text = progress.summary(rows, {'step': 9}, {'evals': evals}, tmp_path, seconds=1.0)
  table = text.partition('\nIn ')[0]
  table = dict(re.findall(r'^  (\S+) +(\S.*)$', table, re.MULTILINE))
  assert table == {
    'test/top1': '98.12%',
    'test/loss': '0.08125',
    'test/examples': '50,000',
    'few/my_std_5shot': '50.00% ± 1.25%',
    'gone/top1': '0.5',  # an evaluation that the config no longer has
    'train/loss': '0.5',
  }
  line = progress.shown({'test/top1': 0.98125, 'test/examples': 50_000}, evals)
  assert line == 'test/top1 98.12%  test/examples 50,000'


@pytest.mark.parametrize(
  ('key', 'expected'),
  [
    ('test/top5', True),
    ('test/loss', False),
    ('few/a_10shot_sweep', True),
    ('train/loss', False),
    ('test/tpo1', naming('test/tpo1', 'top1')),
    ('test/examples', naming('test/examples', 'top1')),
    ('few/a_10shot_std', naming('few/a_10shot_std')),
    ('train/lr', naming('train/lr', 'loss')),
    ('tset/top1', naming('tset', 'test')),
  ],
)
def test_the_direction_of_a_number_is_declared(key, expected):
  evals = {'test': {'type': 'classification'}, 'few': {'type': 'fewshot'}}
  if isinstance(expected, bool):
    assert metrics.larger_is_better(key, evals) is expected
  else:
    with pytest.raises(errors.UserError, match=expected):
      metrics.larger_is_better(key, evals)


def test_metrics_survive_a_kill_and_a_restart(tmp_path):
  record = metrics.Metrics(tmp_path, 0, tensorboard=False)
  for step in (1, 2, 3):
    record.write(step, {'a': step / 2, 'b': np.float32(np.nan)})
  record.close()
  path = tmp_path / 'metrics.jsonl'
  with path.open('a') as file:
    file.write('{"step": 4, "a"')
  refuse = lambda constant: pytest.fail(f'{constant} is not JSON')
  for line in path.read_text().splitlines()[:3]:
    json.loads(line, parse_constant=refuse)
  again = metrics.Metrics(tmp_path, 2, tensorboard=False)
  again.write(3, {'a': 9})
  again.close()
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  assert lines == [
    {'step': 1, 'a': 0.5, 'b': None},
    {'step': 2, 'a': 1, 'b': None},
    {'step': 3, 'a': 9},
  ]
  assert math.isnan(again.rows[0]['b'])


@pytest.mark.parametrize('clu', [True, False])
def test_tensorboard_shows_each_step_once(tmp_path, monkeypatch, clu):
  if not clu:  # nor TensorFlow
    monkeypatch.setitem(sys.modules, 'clu.metric_writers', None)
  elif not importlib.util.find_spec('clu'):
    pytest.skip('clu comes with the extra tf')
  from tensorboard.backend.event_processing import plugin_event_accumulator
  from tensorboard.util import tensor_util

  for start, steps in ((0, range(1, 7)), (3, range(4, 9))):  # killed after step 6
    record = metrics.Metrics(tmp_path, start, tensorboard=True)
    for step in steps:
      record.write(step, {'train/loss': step / 8})
    record.close()
    time.sleep(1.1)  # the names of event files hold seconds
  shown = plugin_event_accumulator.EventAccumulator(str(tmp_path)).Reload()
  events = shown.Tensors('train/loss')
  assert [event.step for event in events] == [*range(1, 9)]
  assert [tensor_util.make_ndarray(event.tensor_proto) for event in events] == [
    step / 8 for step in range(1, 9)
  ]
