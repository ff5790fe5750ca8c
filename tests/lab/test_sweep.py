"""vit_jax sweep: values, their runs, ablations, and bad command lines."""

import json
import os
import re

import pytest

from tests.support import commands, stand_in
from vit_jax.lab import sweep
from vit_jax.train import program

CONFIG = '--config=digits:debug'


# --- values ---------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('assignment', 'values'),
  [
    ('optim.lr=0.001,3e-3', ['0.001', '3e-3']),
    ('model.patch_size=(4,4),(8,8)', ['(4,4)', '(8,8)']),
    ('evals.fewshot.shots=[1,5]', ['[1,5]']),
    (
      'tune={"train": ["a,b"]},{"method": "full"}',
      ['{"train": ["a,b"]}', '{"method": "full"}'],
    ),
    ('x={"a": {"b": [1]}}', ['{"a": {"b": [1]}}']),
    ('data.pp=resize(8)|value_range(-1, 1)', ['resize(8)|value_range(-1, 1)']),
    ('data.split="a,b",c', ['"a,b"', 'c']),
    ("data.source=folder:my cat's", ["folder:my cat's"]),
    ('log.profile', ['True']),
    ('resume_allow=optim.lr,steps', ['optim.lr,steps']),
    ('optim.ema=None,0.9', ['None', '0.9']),
  ],
)
def test_commas_separate_values_outside_of_brackets_and_quotes(assignment, values):
  assert sweep.parse_values([assignment]) == [(assignment.partition('=')[0], values)]


def test_the_name_of_a_value_is_stable_and_fit_for_a_folder():
  assert sweep.name_cell('optim.lr', 0.001) == 'optim.lr=0.001'
  assert sweep.name_cell('model.patch_size', [4, 4]) == 'model.patch_size=4x4'
  one, other = (sweep.name_cell('data.split', f'train[:{n}%]') for n in '12')
  assert re.fullmatch(r'data\.split=train_1-[0-9a-f]{6}', one)
  assert one != other
  assert sweep.name_cell('a', 'b|c') != sweep.name_cell('a', 'b/c')


def planned(tmp_path, *argv):
  return sweep.plan(sweep.parse([CONFIG, *argv]), tmp_path).runs


def test_the_runs_are_all_combinations(tmp_path):
  words = ['optim.lr=0.1,0.2', 'model.patch_size=(4,4),(8,8)', 'seed=3,5', 'epochs=7']
  plan = planned(tmp_path, '--set', *words)
  assert [run.name for run in plan] == [
    f'optim.lr={lr}-model.patch_size={patch}-seed{seed}'
    for seed in (3, 5)
    for lr in (0.1, 0.2)
    for patch in ('4x4', '8x8')
  ]
  last = plan[-1].config
  assert (last['optim']['lr'], last['model']['patch_size']) == (0.2, [8, 8])
  assert (last['seed'], last['epochs']) == (5, 7)
  # A duration replaces the config's own.
  assert 'epochs' not in planned(tmp_path, '--set', 'steps=9')[0].config
  assert [run.name for run in planned(tmp_path, '--set', 'seed=1,01')] == ['base-seed1']


def test_more_values_keep_the_folder():
  out = lambda *words: sweep.default_out(sweep.parse([CONFIG, '--set', *words]))
  assert out('optim.lr=1,2', 'steps=9') == 'runs/sweep-digits-debug-steps=9'
  assert out('optim.lr=1,2,3', 'steps=9', 'seed=0,1') == out('optim.lr=1,2', 'steps=9')


@pytest.mark.parametrize(
  ('argv', 'facts'),
  [
    (['--set', 'optim.lrr=1,2'], ('lrr', 'lr')),
    (['--set', 'optim.lr=a,b'], ('optim.lr=a', 'float')),
    (['--set', 'model.patch_size=4,4'], ('(4,4)', 'twice')),
    (['--set', 'steps=1', 'steps=2'], ('steps', 'twice')),
    (['--set', 'data.split="a,b'], ('"a,b', 'quotes')),
    (['--set', 'optim.lr=1,,2'], ('optim.lr', 'KEY=VALUE')),
    (['--set', 'steps=1,2', 'epochs=3'], ('steps', 'epochs')),
    (['--set', 'seed=a'], ('seed=a', '0,1,2')),
    (['--set', 'log.report=True'], ('log.report', 'report')),
    (['--pick', 'test/top9'], ('--pick', 'test/top9', 'top5')),
    (['--ablation', 'posenb'], ("'posenb'", 'posemb')),
    (['--ablation', 'posemb', '--cells', 'none,3d'], ("'3d'", '2d')),
    (['--ablation', 'posemb', '--set', 'model.posemb=none'], ('model.posemb', 'cells')),
    (['--ablation', 'shape', '--config', 'bit_i21k:debug'], ('shape', 'bit')),
    (['--ablation', 'optimizer', '--set', 'optim.name=lion'], ('adamw', 'lion')),
    (['--ablation', 'data_size', '--config', 'vit_i1k'], ('data_size', 'train[:99%]')),
    (['--ablation', 'data_size', '--set', 'epochs=1'], ('data_size', 'steps=N')),
    (['--ablation', 'tune', '--set', 'optim.wd=0,1'], ('tune', '--set')),
  ],
  ids=lambda value: ' '.join(value) if isinstance(value, list) else '',
)
def test_refused_before_any_run(argv, facts, tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(program, 'train', None)
  argv = [CONFIG, '--out', tmp_path / 'out', *argv]
  commands.assert_refused(sweep.main, capsys, argv, facts)
  assert not (tmp_path / 'out').exists()


# --- runs, whose folders a stand-in writes --------------------------------------------


@pytest.fixture
def trained(monkeypatch):
  """Replaces training; {name of a run: top-1, or an exception}, others get their rate."""
  results = {}

  def rows(config, workdir):
    top1 = stand_in.outcome(results.get(workdir.name, config['optim']['lr']))
    trains = {'full': 100, 'linear': 7}[config.get('tune', {}).get('method', 'full')]
    status = {'step': 4, 'state': 'finished', 'trained_parameters': trains}
    workdir.mkdir(parents=True)
    (workdir / 'status.json').write_text(json.dumps(status))
    return [{'step': 4, 'test/top1': top1, 'test/loss': 1 - top1}]

  stand_in.replace_training(monkeypatch, rows)
  return results


GRID = ['--set', 'optim.lr=0.25,0.5,0.75', 'seed=0,1', '--pick', 'test/top1']


def run(capsys, out, *argv):
  """Returns (exit code, stdout, stderr)."""
  return commands.run(sweep.main, capsys, '--out', out, *argv)


def lines_of(text):
  return [
    [cell.strip() for cell in line.strip('|').split('|')]
    for line in text.splitlines()
    if line.startswith('| ') and '---' not in line
  ]


def test_the_table_and_the_best_cell(trained, tmp_path, capsys):
  trained |= {'optim.lr=0.5-seed0': 0.9, 'optim.lr=0.5-seed1': 0.8}
  code, printed, _ = run(capsys, tmp_path, CONFIG, *GRID)
  assert code == 0
  rows = commands.results(tmp_path)
  rows = [(row['cell'], row['seed'], row['test/top1']) for row in rows]
  assert rows[:2] == [('optim.lr=0.25', '0', '0.25'), ('optim.lr=0.25', '1', '0.25')]
  text = (tmp_path / 'table.md').read_text()
  assert text in printed
  head, *lines = lines_of(text)
  assert head == ['cell', 'test/top1 (%)', 'seeds', '']
  assert lines[1] == ['optim.lr=0.5', '85.00 ± 7.07', '2', 'best']
  assert [line[-1] for line in lines].count('best') == 1


def test_sizes_are_in_the_table_where_they_differ(trained, tmp_path, capsys):
  argv = [CONFIG, '--set', 'tune.method=full,linear', 'model.depth=1,2']
  assert run(capsys, tmp_path, *argv)[0] == 0
  head, *lines = lines_of((tmp_path / 'table.md').read_text())
  assert head[:4] == ['cell', 'parameters', 'GFLOPs', 'trained']
  assert [line[3] for line in lines] == ['100', '100', '7', '7']
  assert int(lines[1][1].replace(',', '')) > int(lines[0][1].replace(',', ''))


def test_the_best_is_the_first_of_equal_cells_or_has_the_least_loss(
  trained, tmp_path, capsys
):
  trained |= {f'optim.lr={lr}-seed{n}': 0.5 for lr in (0.25, 0.75) for n in (0, 1)}
  code, out, _ = run(capsys, tmp_path, CONFIG, *GRID, '--json')
  assert code == 0
  record = json.loads(out)
  assert (record['best'], record['failed']) == ('optim.lr=0.25', {})
  assert record['cells'][0]['metrics']['test/top1']['mean'] == 0.5
  assert all(map(os.path.exists, record['files']))
  trained['optim.lr=0.9-seed0'] = 0.9
  argv = [CONFIG, '--set', 'optim.lr=0.25,0.9', '--pick', 'test/loss', '--json']
  assert json.loads(run(capsys, tmp_path, *argv)[1])['best'] == 'optim.lr=0.9'


def test_an_ablation_is_a_sweep_with_the_papers_numbers(trained, tmp_path, capsys):
  trained |= {'none-seed0': 0.7, 'none-seed1': 0.8, '1d-seed0': 0.9, '1d-seed1': 0.95}
  argv = ['--ablation', 'posemb', '--cells', 'none,1d', '--set', 'seed=0,1']
  assert run(capsys, tmp_path, *argv)[0] == 0
  text = (tmp_path / 'table.md').read_text()
  assert 'digits:epochs=12' in text
  assert 'model.posemb_std=None' in text  # a change for its short runs
  head, none, learned = lines_of(text)
  assert dict(zip(head, learned, strict=True))['test/top1 (%)'] == '92.50 ± 3.54'
  assert 'Table 8' in head[-1]
  assert (none[-1], learned[-1]) == ('61.38', '64.21')
  # Several values multiply its cells.
  argv = ['--ablation', 'head', '--cells', 'gap-optim.wd=0.5', '--dry_run']
  _, printed, _ = run(capsys, tmp_path / 'b', *argv, '--set', 'optim.wd=0,0.5')
  assert re.findall(r'^  (\S+)', printed, re.M) == ['gap-optim.wd=0.5-seed0']
  assert not (tmp_path / 'b').exists()
