"""wandb and MLflow copy metrics.jsonl: the same numbers, one run, and no harm when they fail.

Fake modules stand in for the packages; they were compared with wandb 0.31 (offline) and
MLflow 3.17 (SQLite) once, by hand.
"""

import contextlib
import json
import sys
from unittest import mock

import pytest

from tests.support import naming, runs
from vit_jax.errors import UserError
from vit_jax.train import loggers, schema

SHORT = ('steps=4', 'checkpoint.every=2', 'optim.schedule.warmup=2', 'log.every=1')
LOG = ('log.wandb={"project": "p"}', 'log.mlflow={"experiment": "e"}')

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
  def __init__(self, uri): calls.append(('client', uri))
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


@pytest.fixture
def fakes(tmp_path, monkeypatch):
  """Returns fresh fakes of (wandb, mlflow)."""
  folder = tmp_path / 'packages'
  folder.mkdir()
  (folder / 'wandb.py').write_text(WANDB)
  (folder / 'mlflow.py').write_text(MLFLOW)
  for name in ('wandb', 'mlflow'):
    monkeypatch.delitem(sys.modules, name, raising=False)
  monkeypatch.syspath_prepend(folder)
  import mlflow
  import wandb

  yield wandb, mlflow
  for name in ('wandb', 'mlflow'):
    sys.modules.pop(name, None)


def opened(workdir) -> loggers.Loggers:
  sections = {'wandb': {'project': 'p'}, 'mlflow': {'experiment': 'e'}}
  return loggers.Loggers(sections, workdir, {'optim': {'lr': 0.1}})


def test_a_run_and_its_continuation_are_one_run(fakes, tmp_path):
  wandb, mlflow = fakes
  first = opened(tmp_path)
  first.write(1, {'train/loss': 3.0})
  first.write(2, {'train/loss': 2.0})
  ids = json.loads((tmp_path / 'loggers.json').read_text())
  (_, options), *logs = wandb.calls
  assert (options['project'], options['id'], options['resume']) == (
    *('p', ids['wandb'], 'allow'),
  )
  assert logs == [('log', step, {'train/loss': 4.0 - step}) for step in (1, 2)]
  assert ('param', 'optim.lr', '0.1') in mlflow.calls
  # Killed; step 2 is done again.
  wandb.calls.clear()
  second = opened(tmp_path)
  second.write(2, {'train/loss': 2.0})
  second.write(3, {'train/loss': 1.0})
  second.close()
  assert wandb.calls[0][1]['id'] == ids['wandb']
  assert wandb.calls[-1] == ('finish', 0)
  assert json.loads((tmp_path / 'loggers.json').read_text()) == ids
  assert [m.step for m in mlflow.runs['r1']['train/loss']] == [1, 2, 3]
  assert mlflow.calls[-1] == ('status', 'FINISHED')


def test_a_run_that_fails_is_said_to(fakes, tmp_path):
  wandb, mlflow = fakes
  with pytest.raises(KeyError), contextlib.closing(opened(tmp_path)):
    raise KeyError
  assert wandb.calls[-1] == ('finish', 1)
  assert mlflow.calls[-1] == ('status', 'KILLED')


def test_a_logger_that_fails_is_off_and_the_run_goes_on(
  fakes, tmp_path, monkeypatch, capfd
):
  wandb, mlflow = fakes
  runs.on_one_device(monkeypatch)
  fails = mock.Mock(side_effect=ConnectionError('no route\nto host'))
  monkeypatch.setattr(wandb.Run, 'log', fails)
  status, rows = runs.run(tmp_path / 'run', *SHORT, *LOG)
  assert status['state'] == 'finished'
  error = capfd.readouterr().err
  assert error.count('\n') == 1
  assert 'log.wandb is off' in error
  assert 'no route to host' in error
  assert fails.call_count == 1
  logged = {(m.step, k): m.value for k, ms in mlflow.runs['r1'].items() for m in ms}
  assert logged == {
    (row['step'], k): value for row in rows for k, value in row.items() if k != 'step'
  }


def test_only_the_first_process_opens_any(fakes, tmp_path, monkeypatch):
  wandb, mlflow = fakes
  monkeypatch.setattr(loggers.distributed, 'is_first', lambda: False)
  services = opened(tmp_path)
  services.write(1, {'train/loss': 1.0})
  services.close()
  assert (wandb.calls, mlflow.calls) == ([], [])
  assert not (tmp_path / 'loggers.json').exists()


@pytest.mark.parametrize('damage', [b'', b'[1]', b'{"wandb": 3}', b'\xff'])
def test_lost_ids_are_a_new_run(fakes, tmp_path, damage):
  wandb, _ = fakes
  (tmp_path / 'loggers.json').write_bytes(damage)
  opened(tmp_path)
  assert len(wandb.calls[0][1]['id']) == 8


@pytest.mark.parametrize(
  ('assignment', 'facts'),
  [
    ('log.wandb={"projekt": "p"}', ('config.log.wandb.projekt', 'project')),
    ('log.wandb={}', ('config.log.wandb', 'project')),
    ('log.wandb={"project": "p", "mode": "of"}', ('mode', 'offline')),
    ('log.mlflow={"experiment": 3}', ('config.log.mlflow.experiment=3', 'str')),
    ('log.mlflow=yes', ('config.log.mlflow', 'dict')),
  ],
)
def test_what_a_config_may_say(fakes, assignment, facts):
  with pytest.raises(UserError, match=naming(*facts)):
    schema.check(runs.small(assignment))


def test_a_package_that_is_not_installed_is_named_by_its_extra(monkeypatch):
  monkeypatch.setattr(loggers.importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(UserError, match=naming('vit_jax[wandb]', 'config.log.wandb')):
    schema.check(runs.small(LOG[0]))
