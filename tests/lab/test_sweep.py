"""vit_jax sweep: its runs, of which a stand-in writes the folder, and their table."""

import csv
import json
import re

import pytest

from tests.support import commands, naming, stand_in
from vit_jax import errors
from vit_jax.lab.sweep import __main__ as sweep
from vit_jax.train import program
from vit_jax.train.workdir import lock

CONFIG = '--config=digits:debug'


@pytest.fixture
def trained(monkeypatch):
  """Replaces training; {name of a run: top-1, or an exception}, others get their rate."""
  results = {}

  def train(config, workdir, command, spec):
    results.setdefault('order', []).append(workdir.name)
    value = results.get(workdir.name, config['optim']['lr'])
    if isinstance(value, Exception):
      workdir.mkdir(parents=True, exist_ok=True)
      raise value
    row = {'step': 4, 'test/top1': value, 'test/loss': 1 - value}
    if other := results.get('metrics', {}).get(workdir.name):
      row = {'step': 4, other: value}
    with lock(workdir):
      stand_in.write_run(workdir, config, row)
      trains = {'full': 100, 'linear': 7}[config.get('tune', {}).get('method', 'full')]
      status = {'step': 4, 'state': 'finished', 'trained_parameters': trains}
      (workdir / 'status.json').write_text(json.dumps(status))

  monkeypatch.setattr(program, 'train', train)
  monkeypatch.delenv('SLURM_ARRAY_TASK_ID', raising=False)
  return results


GRID = ['--set', 'optim.lr=0.25,0.5,0.75', 'seed=0,1', '--pick', 'test/top1']


def run(capsys, out, *argv):
  """Returns (exit code, stdout, stderr)."""
  return commands.run(sweep.main, capsys, CONFIG, '--out', out, *argv)


def cells_of(out):
  """Returns {cell: [(seed, top-1), ...]} of results.csv."""
  found = {}
  with (out / 'results.csv').open() as file:
    for row in csv.DictReader(file):
      found.setdefault(row['cell'], []).append((row['seed'], row['test/top1']))
  return found


def rows_of(text):
  return [
    [cell.strip() for cell in line.strip('|').split('|')]
    for line in text.splitlines()
    if line.startswith('| ') and '---' not in line
  ]


@pytest.mark.slow
def test_the_table_and_the_best_run_again(trained, tmp_path, capsys):
  trained |= {'optim.lr=0.5-seed0': 0.9, 'optim.lr=0.5-seed1': 0.8}
  final = ['--final', 'data.split=train+test', 'seed=7,8,9']
  code, printed, _ = run(capsys, tmp_path, *GRID, *final)
  assert code == 0
  found = cells_of(tmp_path)
  assert found['optim.lr=0.25'] == [('0', '0.25'), ('1', '0.25')]
  assert [seed for seed, _ in found['final-optim.lr=0.5']] == ['7', '8', '9']
  text = (tmp_path / 'table.md').read_text()
  assert text in printed
  head, *rows, head_again, again = rows_of(text)
  assert head == ['optim.lr', 'test/top1 (%)', 'seeds', '']
  assert [row[0] for row in rows] == ['0.25', '0.5', '0.75']
  assert rows[1] == ['0.5', '85.00 ± 7.07', '2', 'best']
  assert [row[-1] for row in rows].count('best') == 1
  assert (head_again[0], again[0], again[-1]) == ('cell', 'optim.lr=0.5', '3')
  assert 'data.split=train+test' in text
  config = tmp_path / 'runs' / 'final-optim.lr=0.5-seed8' / 'config.json'
  config = json.loads(config.read_text())
  assert (config['data']['split'], config['seed']) == ('train+test', 8)
  assert config['optim']['lr'] == 0.5


def test_sizes_are_in_the_table_where_they_differ(trained, tmp_path, capsys):
  argv = ['--set', 'tune.method=full,linear', 'model.depth=1,2']
  assert run(capsys, tmp_path, *argv)[0] == 0
  head, *rows = rows_of((tmp_path / 'table.md').read_text())
  assert head[:5] == ['tune.method', 'model.depth', 'parameters', 'GFLOPs', 'trained']
  assert [row[4] for row in rows] == ['100', '100', '7', '7']
  assert int(rows[1][2].replace(',', '')) > int(rows[0][2].replace(',', ''))


def test_of_equal_cells_the_first_is_the_best_and_the_least_loss(
  trained, tmp_path, capsys
):
  trained |= {f'optim.lr={lr}-seed{n}': 0.5 for lr in (0.25, 0.75) for n in (0, 1)}
  code, out, _ = run(capsys, tmp_path, *GRID, '--json')
  assert code == 0
  record = json.loads(out)
  assert record['best']['cell'] == 'optim.lr=0.25'
  assert record['best']['changes'] == {'optim.lr': 0.25}
  assert record['best']['test/top1'] == 0.5
  assert (record['missing'], record['held'], record['failed']) == (0, [], {})
  assert [cell['seeds'] for cell in record['cells']] == [2, 2, 2]
  _, out, _ = run(capsys, tmp_path, *GRID[:-1], 'test/loss', '--json')
  assert json.loads(out)['best']['cell'] == 'optim.lr=0.25'
  trained['optim.lr=0.9-seed0'] = 0.9
  argv = ['--set', 'optim.lr=0.25,0.9', '--pick', 'test/loss', '--json']
  _, out, _ = run(capsys, tmp_path, *argv)
  assert json.loads(out)['best']['cell'] == 'optim.lr=0.9'


def test_a_cell_that_diverged_is_not_chosen_and_not_tried_again(
  trained, tmp_path, capfd
):
  diverged = errors.Diverged('The loss was not finite.')
  trained |= {'optim.lr=0.75-seed1': diverged, 'optim.lr=0.75-seed0': 0.99}
  final = ['--final', 'seed=5']
  for attempt in range(2):
    code, printed, error = run(capfd, tmp_path, *GRID, *final)
    assert code == errors.Diverged.exit_code
    assert re.search(naming('optim.lr=0.75-seed1', 'not finite'), error)
    assert ('final-optim.lr=0.5-seed5' in trained['order']) == (attempt == 0)
    trained['order'].clear()
    assert re.search(r'\| 0\.5 \|.*\| best \|', printed)
    assert 'optim.lr=0.75-seed1 failed and is left out' in printed


def test_the_final_may_be_measured_otherwise(trained, tmp_path, capsys):
  data = dict(
    source='digits', split='test', batch_size=8, pp='resize(16)|value_range(-1, 1)'
  )
  evals = dict(other=dict(type='classification', data=data))
  trained['metrics'] = {'final-optim.lr=0.75-seed0': 'other/top1'}
  argv = [*GRID, '--final', f'evals={evals}', 'seed=0']
  code, printed, _ = run(capsys, tmp_path, *argv)
  assert code == 0
  assert rows_of(printed)[-2:] == [
    ['cell', 'other/top1 (%)', 'seeds'],
    ['optim.lr=0.75', '75.00', '1'],
  ]


def test_shares_meet_at_the_final(trained, tmp_path, capfd):
  final = ['--final', 'seed=5']
  code, printed, error = run(capfd, tmp_path, *GRID, *final, '--task', '1/2')
  assert code == 0
  assert 'Missing: 3 of 6 runs' in printed
  assert '--final' in error
  assert trained['order'] == [
    f'optim.lr={lr}' for lr in ('0.25-seed0', '0.75-seed0', '0.5-seed1')
  ]
  assert len(rows_of((tmp_path / 'table.md').read_text())) == 4
  run(capfd, tmp_path, *GRID, *final, '--task', '2/2')
  assert len(trained['order']) == 7
  assert trained['order'][-1] == 'final-optim.lr=0.75-seed5'
  text = (tmp_path / 'table.md').read_text()
  assert 'Missing' not in text
  assert [row[-2] for row in rows_of(text)[1:4]] == ['2', '2', '2']


def test_a_slurm_array_is_a_share_and_is_said(trained, tmp_path, capsys, monkeypatch):
  for key, value in dict(ID=3, COUNT=3, MIN=1, STEP=1).items():
    monkeypatch.setenv(f'SLURM_ARRAY_TASK_{key}', str(value))
  code, printed, _ = run(capsys, tmp_path, *GRID)
  assert code == 0
  assert re.search(naming('--task 3/3', 'SLURM'), printed)
  assert trained['order'] == ['optim.lr=0.75-seed0', 'optim.lr=0.75-seed1']


def test_a_run_of_another_process_is_skipped_and_counted(trained, tmp_path, capfd):
  folder = tmp_path / 'runs' / 'optim.lr=0.5-seed0'
  with lock(folder):
    code, out, error = run(capfd, tmp_path, *GRID, '--json')
  record = json.loads(out)
  assert (code, record['held'], record['missing']) == (75, [folder.name], 1)
  assert record['best'] is None
  assert re.search(naming(folder.name, 'skipped'), error)
  code, out, _ = run(capfd, tmp_path, *GRID, '--json')
  assert (code, json.loads(out)['best']['cell']) == (0, 'optim.lr=0.75')


def test_a_dry_run_lists_the_runs(trained, tmp_path, capsys):
  code, printed, _ = run(capsys, tmp_path / 'out', *GRID, '--dry_run', '--task', '1/3')
  assert code == 0
  assert re.findall(r'^  (\S+)', printed, re.M) == [
    'optim.lr=0.25-seed0',
    'optim.lr=0.25-seed1',
  ]
  assert 'order' not in trained
  assert not (tmp_path / 'out').exists()
