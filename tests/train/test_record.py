"""The record of a run: rows, how they are shown and compared, and their copies elsewhere.

Fake modules stand in for wandb and MLflow; they were compared with wandb 0.31 (offline) and
MLflow 3.17 (SQLite) once, by hand.
"""

import contextlib
import importlib
import io
import json
import math
import re
import sys
import time
from unittest import mock

import numpy as np
import pytest

from tests.support import naming, runs
from vit_jax import terminal
from vit_jax.errors import UserError
from vit_jax.train import loggers, metrics, progress, schema

EVALS = {'test': {'type': 'classification'}, 'few': {'type': 'fewshot'}}


def opened(workdir, step=0, evals=None, best=None, **log) -> progress.Record:
  config = {
    'resolved': {'total_steps': 9},
    'data': {'batch_size': 1},
    'evals': evals or {},
  }
  config |= {'checkpoint': {'best': best}}
  config |= {'optim': {'lr': 0.1}, 'log': {'tensorboard': False, **log}}
  return progress.Record(config, workdir, step)


def test_numbers_are_shown_as_their_evaluators_declare(tmp_path):
  rows = [
    {'step': 9, 'train/loss': 0.5, 'train/lr': 0.1, 'time/images_per_s': 7.0},
    {'step': 9, 'test/top1': 0.98125, 'test/loss': 0.08125, 'test/examples': 50_000},
    {'step': 9, 'few/my_std_5shot': 0.5, 'few/my_std_5shot_std': 0.0125},
    {'step': 9, 'few/my_std_5shot_seed0': 0.4875, 'gone/top1': 0.5},
  ]
  text = progress.summary(rows, {'step': 9}, {'evals': EVALS}, tmp_path, seconds=1.0)
  table = text.partition('\nIn ')[0]
  assert dict(re.findall(r'^  (\S+) +(\S.*)$', table, re.MULTILINE)) == {
    'test/top1': '98.12%',
    'test/loss': '0.08125',
    'test/examples': '50,000',
    'few/my_std_5shot': '50.00% ± 1.25%',
    'gone/top1': '0.5',  # an evaluation that the config no longer has
    'train/loss': '0.5',
  }


@pytest.mark.parametrize(
  ('key', 'expected'),
  [
    ('test/top5', True),
    ('few/a_10shot_sweep', True),
    ('train/loss', False),
    ('test/tpo1', naming('test/tpo1', 'top1')),
    ('test/examples', naming('test/examples', 'top1')),
    ('few/a_10shot_std', naming('few/a_10shot_std')),
    ('tset/top1', naming('tset', 'test')),
  ],
)
def test_the_direction_of_a_number_is_declared(key, expected):
  if isinstance(expected, bool):
    assert metrics.larger_is_better(key, EVALS) is expected
  else:
    with pytest.raises(UserError, match=expected):
      metrics.larger_is_better(key, EVALS)


def test_rows_survive_a_kill_and_a_restart(tmp_path):
  record = opened(tmp_path)
  for step in (1, 2, 3):
    record.write(step, {'a': step / 2, 'b': np.float32(np.nan)})
  record.close()
  path = tmp_path / 'metrics.jsonl'
  with path.open('a') as file:
    file.write('{"step": 4, "a"')
  again = opened(tmp_path, step=2)
  again.write(3, {'a': 9})
  again.close()
  assert [json.loads(line) for line in path.read_text().splitlines()] == [
    {'step': 1, 'a': 0.5, 'b': None},  # JSON has no NaN
    {'step': 2, 'a': 1, 'b': None},
    {'step': 3, 'a': 9},
  ]
  assert math.isnan(again.rows[0]['b'])


@pytest.mark.parametrize('clu', [True, False])
def test_tensorboard_shows_each_step_once(tmp_path, monkeypatch, clu):
  if not clu:  # nor TensorFlow
    monkeypatch.setitem(sys.modules, 'clu.metric_writers', None)
  from tensorboard.backend.event_processing import plugin_event_accumulator
  from tensorboard.util import tensor_util

  for start, steps in ((0, range(1, 7)), (3, range(4, 9))):  # killed after step 6
    time.sleep(1.1 * (start > 0))  # the names of event files hold seconds
    record = opened(tmp_path, start, tensorboard=True)
    for step in steps:
      record.write(step, {'train/loss': step / 8})
    record.close()
  shown = plugin_event_accumulator.EventAccumulator(str(tmp_path)).Reload()
  events = shown.Tensors('train/loss')
  assert [event.step for event in events] == [*range(1, 9)]
  assert [tensor_util.make_ndarray(event.tensor_proto) for event in events] == [
    step / 8 for step in range(1, 9)
  ]


# -- Weights & Biases and MLflow ---------------------------------------------------------

WANDB = """
calls = []
Settings = dict
class Run:
  def __init__(self, **options): calls.append(('init', options))
  def log(self, values, step): calls.append(('log', step, values))
  def finish(self, exit_code): calls.append(('finish', exit_code))
init = Run
"""
MLFLOW = """
from types import SimpleNamespace as Record
calls, runs = [], {}
class MlflowClient:
  def get_experiment_by_name(self, name): return None
  def create_experiment(self, name): return '7'
  def create_run(self, experiment, run_name):
    runs['r1'] = {}
    return Record(info=Record(run_id='r1'))
  def log_param(self, run, key, value): calls.append(('param', key, value))
  def update_run(self, run, status): calls.append(('status', status))
  def get_run(self, run): return Record(data=Record(metrics=runs[run]))
  def get_metric_history(self, run, key): return runs[run][key]
  def log_metric(self, run, key, value, step):
    runs[run].setdefault(key, []).append(Record(step=step, value=value))
  def set_terminated(self, run, status): calls.append(('status', status))
"""
SERVICES = {'wandb': 'p', 'mlflow': 'e'}


@pytest.fixture
def fakes(tmp_path, monkeypatch):
  """Returns fresh fakes of (wandb, mlflow)."""
  folder = tmp_path / 'packages'
  folder.mkdir()
  monkeypatch.syspath_prepend(folder)
  modules = []
  for name, code in (('wandb', WANDB), ('mlflow', MLFLOW)):
    (folder / f'{name}.py').write_text(code)
    monkeypatch.delitem(sys.modules, name, raising=False)
    modules.append(importlib.import_module(name))
  yield modules
  for name in SERVICES:
    sys.modules.pop(name, None)


def test_a_run_and_its_continuation_are_one_run(fakes, tmp_path):
  wandb, mlflow = fakes
  first = opened(tmp_path, **SERVICES)
  first.write(1, {'train/loss': 3.0})
  first.write(2, {'train/loss': 2.0})
  ids = json.loads((tmp_path / 'loggers.json').read_text())
  (_, options), *logs = wandb.calls
  used = options['project'], options['id'], options['resume']
  assert used == ('p', ids['wandb'], 'allow')
  assert logs == [('log', step, {'train/loss': 4 - step}) for step in (1, 2)]
  assert ('param', 'optim.lr', '0.1') in mlflow.calls
  # Killed; step 2 is done again.
  wandb.calls.clear()
  second = opened(tmp_path, step=1, **SERVICES)
  second.write(2, {'train/loss': 2.0})
  second.write(3, {'train/loss': 1.0})
  second.close()
  assert wandb.calls[0][1]['id'] == ids['wandb']
  assert wandb.calls[-1] == ('finish', 0)
  assert json.loads((tmp_path / 'loggers.json').read_text()) == ids
  assert [m.step for m in mlflow.runs['r1']['train/loss']] == [1, 2, 3]
  assert mlflow.calls[-1] == ('status', 'FINISHED')
  # The services learn that a run failed. Lost ids begin a new one.
  (tmp_path / 'loggers.json').write_bytes(b'{"wandb": 3}')
  with pytest.raises(KeyError), contextlib.closing(opened(tmp_path, **SERVICES)):
    raise KeyError
  assert wandb.calls[-1] == ('finish', 1)
  assert mlflow.calls[-1] == ('status', 'KILLED')


def test_a_logger_that_fails_is_off_and_the_others_go_on(fakes, tmp_path, capfd):
  wandb, mlflow = fakes
  fails = mock.Mock(side_effect=ConnectionError('no route\nto host'))
  record = opened(tmp_path, **SERVICES)
  with mock.patch.object(wandb.Run, 'log', fails):
    for step in (1, 2):
      record.write(step, {'train/loss': 1.0})
  error = capfd.readouterr().err
  assert error.count('\n') == 1
  assert re.search(naming('log.wandb is off', 'no route to host'), error)
  assert fails.call_count == 1
  assert [m.step for m in mlflow.runs['r1']['train/loss']] == [1, 2]


def test_only_the_first_process_writes(fakes, tmp_path, monkeypatch):
  monkeypatch.setattr(loggers.distributed, 'is_first', lambda: False)
  record = opened(tmp_path, **SERVICES)
  record.write(1, {'train/loss': 1.0})
  record.close()
  assert [fake.calls for fake in fakes] == [[], []]
  assert [path.name for path in tmp_path.iterdir()] == ['packages']


def test_a_package_that_is_not_installed_is_named_by_its_extra(monkeypatch):
  monkeypatch.setattr(loggers.importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(UserError, match=naming('vit_jax[wandb]', 'config.log.wandb')):
    schema.check(runs.small('log.wandb=p'))


def test_rows_have_columns_and_the_best_is_bold(tmp_path, monkeypatch):
  record, lines = opened(tmp_path, evals=EVALS, best='test/top1'), []
  monkeypatch.setattr(terminal, 'bold', lambda text: f'<{text}>')
  monkeypatch.setattr(progress.tqdm.tqdm, 'write', lines.append)
  few = {'a_1shot': 0.5, 'a_1shot_std': 0.01, 'a_1shot_seed0': 0.5}
  record.evaluation(9, 'few', few)
  for top1 in (0.875, 1.0, 0.5):
    record.evaluation(9, 'test', {'top1': top1, 'loss': 0.5, 'examples': 8})
  assert lines == [
    'step 9  few/a_1shot  50.00% ± 1.00%',
    '<step 9  test/top1  87.50%  test/loss     0.5>',
    '<step 9  test/top1 100.00%  test/loss     0.5>',
    'step 9  test/top1  50.00%  test/loss     0.5',
  ]


@pytest.mark.parametrize('task', ['detect', 'segment', 'classify'])
def test_the_next_steps_are_those_of_the_task(task, tmp_path):
  config = {'task': {'name': task}, 'log': {'tensorboard': False}}
  options = [], {'step': 9}, config, tmp_path, 1.0
  text = progress.summary(*options, imports=' --import a.py').partition('Next:')[2]
  assert re.search(r'predict .* --import a.py', text)
  assert ('--draw' in text) == (task != 'classify')
  assert 'tensorboard' not in text


def test_the_time_left_is_visible_at_80_columns(tmp_path, monkeypatch):
  screen = io.StringIO()
  screen.isatty = lambda: True
  monkeypatch.setattr(sys, 'stderr', screen)
  monkeypatch.setenv('COLUMNS', '80')
  record = opened(tmp_path, every=1)
  record.train(1, {'loss': 1.1589})
  time.sleep(0.11)  # The bar is drawn ten times a second, at most.
  record.train(2, {'loss': 1.1589})
  record.close()
  shown = [line for line in re.split(r'[\r\n]', screen.getvalue()) if '2/9' in line]
  assert shown
  assert re.search(r'<\d\d:\d\d', shown[-1])
  assert max(map(len, shown)) <= 80
