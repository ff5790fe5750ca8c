"""Grids of runs: what is planned, what is refused before the first run, what is left."""

import os
import shutil
import signal

import pytest

from tests.support import naming, stand_in
from vit_jax import config as config_lib
from vit_jax import errors
from vit_jax.errors import UserError
from vit_jax.lab.grid import cells, kept, rows, runs
from vit_jax.lab.grid.cells import Cell, RunOf
from vit_jax.train import program
from vit_jax.train.workdir import lock

DEBUG = config_lib.load('digits:debug')


def test_changes_make_another_config():
  config = {'epochs': 3, 'optim': {'lr': 1.0, 'wd': 0.1}, 'evals': {'a': {'type': 'x'}}}
  changes = {'optim.lr': 2.0, 'steps': 4, 'evals.a': None, 'model': {'name': 'vit'}}
  changes['model.patch_size'] = (4, 4)
  assert cells.changed(config, changes) == {
    'steps': 4,
    'optim': {'lr': 2.0, 'wd': 0.1},
    'evals': {},
    'model': {'name': 'vit', 'patch_size': [4, 4]},
  }
  assert config['epochs'] == 3
  assert config['optim']['lr'] == 1.0


def test_runs_are_planned_seed_by_seed(tmp_path):
  grid = [Cell('a', {'optim.lr': 0.1}), Cell('b', {'optim.lr': 0.2})]
  planned = cells.plan(DEBUG, grid, [3, 5], tmp_path)
  assert [run.name for run in planned] == ['a-seed3', 'b-seed3', 'a-seed5', 'b-seed5']
  assert [run.config['seed'] for run in planned] == [3, 3, 5, 5]
  assert planned[1].folder == tmp_path / 'runs' / 'b-seed3'
  assert planned[1].config['optim']['lr'] == 0.2
  assert planned[0].config['log']['report'] is False


def test_a_cell_can_start_from_the_run_of_another(tmp_path):
  weights = {'source': RunOf('first'), 'skip': ['head/.*']}
  grid = [Cell('first', {}), Cell('second', {'weights': weights})]
  *_, second = cells.plan(DEBUG, grid, [0, 7], tmp_path)
  assert second.config['weights']['source'] == f'{tmp_path}/runs/first-seed7'
  assert cells.needs(grid[1]) == ['first']
  assert cells.needs(grid[0]) == []


REFUSED = {
  'a key': ({'model.depht': 3}, ('depht', 'depth')),
  'a value': ({'model.posemb': 'nome'}, ("'nome'", 'none')),
  'patches that do not tile': ({'model.patch_size': (3, 3)}, ('3x3', '16x16')),
  'heads': ({'model.num_heads': 5}, ('num_heads', 5)),
  'a longer warmup': ({'optim.schedule.warmup': 500}, ('warmup', 500)),
  'channels of GroupNorm': ({'model': dict(name='bit', width=48)}, (48, 32)),
}


@pytest.mark.parametrize('name', REFUSED)
def test_what_a_run_would_refuse_is_refused_before_the_first(name, tmp_path):
  changes, facts = REFUSED[name]
  grid = [Cell('fine', {}), Cell('wrong', changes)]
  with pytest.raises(UserError, match=naming("cell 'wrong'", *facts)):
    cells.plan(DEBUG, grid, [0], tmp_path)


def test_flags_of_train_are_named_as_those_of_a_grid():
  theirs = 'another --workdir, or --config.a=1'
  ours = pytest.raises(UserError, match=r'^mine: another --out, or --set a=1$')
  with ours, cells.named('mine'):
    raise UserError(theirs)


# --- runs, of which a stand-in writes the folder --------------------------------------


@pytest.fixture
def trained(monkeypatch):
  """Replaces training; {name of a run: the exception that it ends with} is returned."""
  ends = {}

  def train(config, workdir, command, spec):
    print('a line for the log')
    if workdir.name in ends:
      raise ends[workdir.name]
    stand_in.write_run(
      workdir,
      config,
      {'step': 2, 'train/loss': 3.0, 'time/images_per_s': 64.0},
      {'step': 4, 'train/loss': 2.0, 'time/images_per_s': 128.0},
      {'step': 4, 'test/top1': config['optim']['lr'], 'test/examples': 360},
    )

  monkeypatch.setattr(program, 'train', train)
  return ends


GRID = [Cell('a', {'optim.lr': 0.5}), Cell('b', {'optim.lr': 0.25})]


def train(grid, out, seeds=(0,)):
  done = []
  planned = cells.plan(DEBUG, grid, seeds, out)
  assert runs.train(planned, 'vit_jax mine', 'digits:debug', done.append) == done
  return done


@pytest.mark.slow
def test_the_numbers_of_a_run(trained, tmp_path, capsys):
  first, second = train(GRID, tmp_path)
  assert (first.error, second.error) == (None, None)
  row = first.row
  assert {key: row[key] for key in ('cell', 'optim.lr', 'seed')} == {
    'cell': 'a',
    'optim.lr': '0.5',
    'seed': 0,
  }
  assert (row['examples'], row['steps']) == (64, 4)
  assert row['test/top1'] == 0.5
  assert row['train/loss'] == 2
  assert row['seconds'] == 2 * 64 / 64 + 2 * 64 / 128
  # Of configs/digits.py: docs/guides/models.md counts the same.
  N, D, F, L, K = 16, 96, 192, 3, 10
  block = 4 * (D * D + D) + (D * F + F) + (F * D + D) + 4 * D
  assert row['parameters'] == (17 * D) + N * D + L * block + 2 * D + (D * K + K)
  products = N * 16 * D + L * (4 * N * D * D + 2 * N * N * D + 2 * N * D * F) + D * K
  assert row['gflops'] == pytest.approx(2 * products / 1e9)
  header, *table = rows.table([first.row, second.row])
  assert header[:3] == ['cell', 'optim.lr', 'seed']
  assert header[-1] == 'seconds'
  assert [line[0] for line in table] == ['a', 'b']
  # What a run prints is in a file of its own.
  assert capsys.readouterr().out == ''
  assert 'a line' in (tmp_path / 'logs' / 'a-seed0.txt').read_text()


def test_means_over_seeds():
  found = rows.mean([{'m': 0.5}, {'m': 0.7}, {'m': float('nan')}, {}], 'm')
  assert (found.number, found.text()) == (2, '60.00 ± 14.14')
  assert rows.mean([{'m': 0.5}], 'm').text() == '50.00'
  assert rows.mean([{'m': 2.5}], 'm').text(percent=False) == '2.5000'
  assert rows.mean([{}], 'm') is None


@pytest.mark.slow
def test_a_run_that_fails_is_left_out_with_those_that_start_from_it(trained, tmp_path):
  grid = [*GRID, Cell('c', {'weights': {'source': RunOf('a')}})]
  trained['a-seed0'] = errors.Diverged('not finite')
  done = train(grid, tmp_path, seeds=[0, 1])
  failed = {x.run.name: str(x.error) for x in done if x.error}
  assert set(failed) == {'a-seed0', 'c-seed0'}
  assert failed['a-seed0'] == 'not finite'
  assert 'a' in failed['c-seed0']
  assert all((x.row is None) == (x.run.name in failed) for x in done)


@pytest.mark.parametrize(
  'error', [UserError('wrong'), errors.Preempted('stopped'), errors.DiskFull('full')]
)
def test_what_ends_all_runs(error, trained, tmp_path):
  trained['a-seed0'] = error
  with pytest.raises(type(error), match=str(error)):
    train(GRID, tmp_path)
  assert not (tmp_path / 'runs' / 'b-seed0').exists()


@pytest.mark.parametrize(
  'number', [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_between_two_runs(number, trained, tmp_path, capfd, traces_kept):
  def after(outcome):
    os.kill(os.getpid(), number)

  planned = cells.plan(DEBUG, GRID, [0], tmp_path)
  before = traces_kept.call_count
  with pytest.raises(errors.Preempted, match=naming('1 of 2', 'same command')):
    runs.train(planned, 'vit_jax mine', 'digits:debug', after)
  assert traces_kept.call_count == before + 1  # or hundreds of runs would fill memory
  assert signal.Signals(number).name in capfd.readouterr().err
  assert not (tmp_path / 'runs' / 'b-seed0').exists()


def never(*_):
  raise AssertionError('a run was opened')


def test_what_has_ended_is_not_opened_again(trained, tmp_path, monkeypatch):
  trained['b-seed0'] = errors.Diverged('not finite')
  (tmp_path / 'runs' / 'b-seed0').mkdir(parents=True)
  first = train(GRID, tmp_path)
  with monkeypatch.context() as patch:
    patch.setattr(program, 'train', never)
    again = train(GRID, tmp_path)
  assert [x.row for x in again] == [first[0].row, None]
  assert isinstance(again[1].error, errors.Diverged)
  assert str(again[1].error) == 'not finite'
  # One that was trained in since, and one without the record, are.
  with (tmp_path / 'runs' / 'a-seed0' / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 5}\n')
  (tmp_path / 'runs' / 'b-seed0' / kept.FILE).write_text('[')
  del trained['b-seed0']
  assert [x.error for x in train(GRID, tmp_path)] == [None, None]


def test_without_checkpoints_a_run_of_another_config_is_not_overwritten(
  trained, tmp_path
):
  planned = cells.plan(DEBUG, GRID[:1], [0], tmp_path)
  (planned[0].folder / 'checkpoints' / '4').mkdir(parents=True)
  discarding = lambda: runs.train(
    planned, 'vit_jax mine', 'digits:debug', lambda _: None, discard=True
  )
  with lock(planned[0].folder):  # of a process that reads them
    assert discarding()[0].row
    assert (planned[0].folder / 'checkpoints').exists()
  discarding()
  assert not (planned[0].folder / 'checkpoints').exists()
  other = [Cell('a', {'optim.lr': 0.75})]
  with pytest.raises(UserError, match=naming('a-seed0', 'another config', '--out')):
    train(other, tmp_path)
  shutil.rmtree(planned[0].folder)
  assert train(other, tmp_path)[0].row['test/top1'] == 0.75


def test_runs_that_another_process_holds_are_put_off(trained, tmp_path, monkeypatch):
  grid = [*GRID, Cell('c', {'weights': {'source': RunOf('a')}})]
  folder = tmp_path / 'runs' / 'a-seed0'
  stand_in_for_training = program.train

  def locked(config, workdir, command, spec):
    with lock(workdir):
      stand_in_for_training(config, workdir, command, spec)

  monkeypatch.setattr(program, 'train', locked)
  with lock(folder):
    done = train(grid, tmp_path)
  assert [x.run.cell.name for x in done if x.held] == ['a', 'c']
  assert [x.run.cell.name for x in done if x.row] == ['b']
  assert runs.exit_code(done) == 75
  # One that is let go in the meantime is made in the end.
  shutil.rmtree(tmp_path)
  holder = lock(folder)
  holder.__enter__()
  order, planned = [], cells.plan(DEBUG, grid, [0], tmp_path)

  def after(outcome):
    if not order:
      holder.__exit__(None, None, None)
    order.append((outcome.run.cell.name, outcome.held))

  found = runs.train(planned, 'vit_jax mine', 'digits:debug', after)
  assert order == [('b', False), ('a', False), ('c', False)]
  assert runs.exit_code(found) == 0
