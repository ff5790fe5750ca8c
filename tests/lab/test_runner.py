"""Grids of runs: their plan, errors before the first run, training and reading."""

import shutil

import pytest

from tests.support import commands, naming, stand_in
from vit_jax import config as config_lib
from vit_jax import errors
from vit_jax.errors import UserError
from vit_jax.lab import runner
from vit_jax.lab.runner import RunOf

DEBUG = config_lib.load('digits:debug')
CELLS = {'a': {'optim.lr': 0.5}, 'b': {'optim.lr': 0.25}}


def test_changes_make_another_config():
  config = {'epochs': 3, 'optim': {'lr': 1.0, 'wd': 0.1}, 'evals': {'a': {'type': 'x'}}}
  changes = {'optim.lr': 2.0, 'steps': 4, 'evals.a': None, 'model': {'name': 'vit'}}
  changes['model.patch_size'] = (4, 4)
  assert runner.change(config, changes) == {
    'steps': 4,
    'optim': {'lr': 2.0, 'wd': 0.1},
    'evals': {},
    'model': {'name': 'vit', 'patch_size': [4, 4]},
  }
  assert config['epochs'] == 3
  assert config['optim']['lr'] == 1.0


def test_runs_are_planned_seed_by_seed(tmp_path):
  weights = {'source': RunOf('a'), 'skip': ['head/.*']}
  cells = {**CELLS, 'c': {'weights': weights}}
  runs = runner.plan(DEBUG, cells, [3, 5], tmp_path)
  assert [run.name for run in runs] == [
    *('a-seed3', 'b-seed3', 'c-seed3', 'a-seed5', 'b-seed5', 'c-seed5')
  ]
  assert [run.config['seed'] for run in runs] == [3, 3, 3, 5, 5, 5]
  assert runs[1].folder == tmp_path / 'runs' / 'b-seed3'
  assert runs[1].config['optim']['lr'] == 0.25
  assert runs[5].config['weights']['source'] == f'{tmp_path}/runs/a-seed5'
  assert runner.needs(cells['c']) == {'a'}
  assert runner.needs(cells['a']) == set()


@pytest.mark.parametrize(
  ('changes', 'facts'),
  [
    ({'model.depht': 3}, ('depht', 'depth')),
    ({'model.posemb': 'nome'}, ("'nome'", 'none')),
    ({'model.patch_size': (32, 32)}, ('32x32', '16x16')),
    ({'model.num_heads': 5}, ('num_heads', 5)),
    ({'optim.schedule.warmup': 500}, ('warmup', 500)),
    ({'model': dict(name='bit', width=48)}, (48, 32)),
  ],
)
def test_a_run_that_cannot_be_is_refused_before_the_first(changes, facts, tmp_path):
  with pytest.raises(UserError, match=naming("cell 'wrong'", *facts)):
    runner.plan(DEBUG, {'fine': {}, 'wrong': changes}, [0], tmp_path)


def test_flags_of_train_are_named_as_those_of_a_grid():
  ours = pytest.raises(errors.DataError, match=r'^mine: another --out, or --set a=1$')
  with ours, runner.name_errors('mine'):
    raise errors.DataError('another --workdir, or --config.a=1')


# --- runs, whose folders a stand-in writes --------------------------------------------


@pytest.fixture
def ends(monkeypatch):
  """Replaces training; {name of a run: the exception that it ends with}."""
  ends = {'order': []}

  def rows(config, workdir):
    print('a line for the log')
    ends['order'].append(workdir.name)
    (workdir / 'checkpoints' / '4').mkdir(parents=True, exist_ok=True)
    top1 = stand_in.outcome(ends.get(workdir.name, config['optim']['lr']))
    return [
      {'step': 2, 'train/loss': 3.0, 'time/images_per_s': 64.0},
      {'step': 4, 'train/loss': 2.0, 'time/images_per_s': 128.0},
      {'step': 4, 'test/top1': top1, 'test/examples': 360},
    ]

  stand_in.replace_training(monkeypatch, rows)
  return ends


def run(out, cells=CELLS, seeds=(0,), discard=False, final=None):
  runs = runner.plan(DEBUG, cells, seeds, out)
  grid = runner.Grid('', 'digits:debug', runs, out, pick='test/top1', final=final)
  return runner.run(grid, 'vit_jax mine', lambda line: None, discard)


def test_the_numbers_of_a_run(ends, tmp_path, capsys):
  results = run(tmp_path)
  row = results.rows()[0]
  assert (row['cell'], row['optim.lr'], row['seed']) == ('a', '0.5', 0)
  assert (row['examples'], row['steps']) == (64, 4)
  assert (row['test/top1'], row['train/loss']) == (0.5, 2)
  assert row['seconds'] == 2 * 64 / 64 + 2 * 64 / 128
  # The model of configs/digits.py.
  N, D, F, L, K = 16, 96, 192, 3, 10
  block = 4 * (D * D + D) + (D * F + F) + (F * D + D) + 4 * D
  assert row['parameters'] == (17 * D) + N * D + L * block + 2 * D + (D * K + K)
  products = N * 16 * D + L * (4 * N * D * D + 2 * N * N * D + 2 * N * D * F) + D * K
  assert row['gflops'] == pytest.approx(2 * products / 1e9)
  lines = commands.results(tmp_path)
  assert [*lines[0]][:3] == ['cell', 'optim.lr', 'seed']
  assert [line['cell'] for line in lines] == ['a', 'b']
  assert capsys.readouterr().out == ''  # a run prints to a file of its own
  assert 'a line' in (tmp_path / 'logs' / 'a-seed0.txt').read_text()


def test_a_run_that_fails_is_left_out_with_those_that_start_from_it(ends, tmp_path):
  ends['a-seed0'] = errors.Diverged('not finite')
  cells = {**CELLS, 'c': {'weights': {'source': RunOf('a')}}}
  results = run(tmp_path, cells, seeds=[0, 1])
  failed = {name: str(error) for name, error in results.errors.items()}
  assert set(failed) == {'a-seed0', 'c-seed0'}
  assert failed['a-seed0'] == 'not finite'
  assert len(results.rows()) == 4
  assert results.best == 'b'  # though seed 1 of a is better
  ends['order'].clear()
  assert len(run(tmp_path, cells, seeds=[0, 1]).errors) == 2
  assert ends['order'] == []  # it would diverge again


@pytest.mark.parametrize(
  'error', [UserError('wrong'), errors.Preempted('stopped'), errors.DiskFull('full')]
)
def test_some_errors_end_all_runs(error, ends, tmp_path):
  ends['a-seed0'] = error
  with pytest.raises(type(error), match=f'a-seed0: {error}'):
    run(tmp_path)
  assert ends['order'] == ['a-seed0']
  del ends['a-seed0']  # The same call goes on from there.
  assert [row['cell'] for row in run(tmp_path).rows()] == ['a', 'b']


def test_a_finished_run_is_only_read(ends, tmp_path):
  first = run(tmp_path)
  ends['order'].clear()
  assert run(tmp_path, seeds=[0, 1]).rows()[0] == first.rows()[0]
  assert ends['order'] == ['a-seed1', 'b-seed1']
  # One without a whole record is opened again.
  (tmp_path / 'runs' / 'a-seed0' / runner.RESULT).write_text('[')
  ends['order'].clear()
  run(tmp_path)
  assert ends['order'] == ['a-seed0']


def test_discarded_runs_of_another_config_are_not_overwritten(ends, tmp_path):
  checkpoints = tmp_path / 'runs' / 'a-seed0' / 'checkpoints'
  cells = {'a': CELLS['a'], 'c': {'weights': {'source': RunOf('a')}}}
  run(tmp_path, cells, discard=True)
  assert checkpoints.exists()  # others start from this run
  run(tmp_path, {'a': CELLS['a']}, discard=True)
  assert not checkpoints.exists()
  other = {'a': {'optim.lr': 0.75}}
  with pytest.raises(UserError, match=naming('a-seed0', 'another config', '--out')):
    run(tmp_path, other)
  shutil.rmtree(checkpoints.parent)
  assert run(tmp_path, other).rows()[0]['test/top1'] == 0.75


def test_the_best_cell_is_run_again(ends, tmp_path):
  def final(cell):
    changes = {f'final-{cell}': {**CELLS[cell], 'data.split': 'train+test'}}
    return runner.plan(DEBUG, changes, [7, 8], tmp_path)

  results = run(tmp_path, final=final)
  assert results.best == 'a'
  seeds = [row['seed'] for row in results.rows() if row['cell'] == 'final-a']
  assert seeds == [7, 8]
  text = (tmp_path / 'table.md').read_text()
  assert '| a | 50.00 | 1 | best |' in text
  assert '| final-a | 50.00 ± 0.00 | 2 |  |' in text
