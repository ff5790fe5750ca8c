"""vit_jax ablate: what it writes of its runs, and one grid for real."""

import csv
import json
import os
import re
import shutil
import signal
import sys

import pytest

from tests.support import commands, naming, runs, stand_in
from tests.support.figures import small_figures  # noqa: F401
from vit_jax import errors, explain
from vit_jax.lab.ablate import __main__ as ablate
from vit_jax.lab.ablate import arguments
from vit_jax.train import loop, program

# --- results, of which a stand-in trains ----------------------------------------------


@pytest.fixture
def trained(monkeypatch):
  """Replaces training; {(cell, seed): top-1, or the exception that it ends with}."""
  results = {}

  def train(config, workdir, command, spec):
    name, _, seed = workdir.name.rpartition('-seed')
    value = results[name, int(seed)]
    if isinstance(value, Exception):
      raise value
    row = {
      'step': 4,
      'test/top1': value,
      'test/top5': 1.0,
      'fewshot/digits_5shot': 0.25,
    }
    stand_in.write_run(workdir, config, row)

  monkeypatch.setattr(program, 'train', train)
  return results


ARGV = ['posemb', '--cells', 'none,1d', '--seeds', '0,1']


def test_the_table_and_the_figure(trained, tmp_path, capsys):
  trained |= {('none', 0): 0.7, ('none', 1): 0.8, ('1d', 0): 0.9, ('1d', 1): 0.95}
  out = tmp_path / 'out'
  assert commands.run(ablate.main, capsys, *ARGV, '--out', out)[0] == 0
  with (out / 'results.csv').open() as file:
    found = [
      (row['cell'], row['seed'], row['test/top1']) for row in csv.DictReader(file)
    ]
  assert found == [
    ('none', '0', '0.7'),
    ('none', '1', '0.8'),
    ('1d', '0', '0.9'),
    ('1d', '1', '0.95'),
  ]
  text = (out / 'table.md').read_text()
  assert 'digits:epochs=12, with ' in text  # and what its short runs change
  assert 'model.posemb_std=None' in text
  table = [
    [cell.strip() for cell in line.strip('|').split('|')]
    for line in text.splitlines()
    if line.startswith('|')
  ]
  assert [len(row) for row in table] == [len(table[0])] * 4
  of = lambda row, title: row[[title in head for head in table[0]].index(True)]
  assert of(table[2], 'test/top1 (%)') == '75.00 ± 7.07'
  assert of(table[3], 'test/top1 (%)') == '92.50 ± 3.54'
  assert of(table[3], 'more than none') == '+1,536'
  assert of(table[3], 'seeds') == '2'
  assert of(table[3], 'Table 8') == '64.21'
  assert 'test/top5' not in text
  with (out / 'posemb.csv').open() as file:
    drawn = [(row['cell'], row['mean'], row['std']) for row in csv.DictReader(file)]
  assert ('none', '75.00', '7.07') in drawn
  assert (out / 'posemb.png').stat().st_size > 1_000


def test_the_figure_over_amounts_of_data(trained, tmp_path, capsys):
  trained |= {('vit-3pct', 0): 0.6, ('resnet-3pct', 0): 0.8}
  argv = ['data_size', '--cells', 'vit-3pct,resnet-3pct', '--seeds', '0']
  assert commands.run(ablate.main, capsys, *argv, '--out', tmp_path)[0] == 0
  with (tmp_path / 'data_size.csv').open() as file:
    rows = list(csv.DictReader(file))
  found = {(row['model'], row['metric']): row['mean'] for row in rows}
  assert found['vit', 'test/top1 (%)'] == '60.00'
  assert found['resnet', 'test/top1 (%)'] == '80.00'
  assert (tmp_path / 'data_size.png').stat().st_size > 1_000


def test_json(trained, tmp_path, capsys):
  trained |= {('none', 0): 0.7, ('none', 1): 0.8, ('1d', 0): 0.9, ('1d', 1): 0.95}
  argv = [*ARGV, '--out', tmp_path, '--json', '--metric', 'test/top5']
  code, out, _ = commands.run(ablate.main, capsys, *argv)
  assert code == 0
  record = json.loads(out)
  assert len(record['runs']) == 4
  assert record['cells'][1]['metrics']['test/top1']['mean'] == pytest.approx(0.925)
  assert next(iter(record['cells'][0]['metrics'])) == 'test/top5'
  assert record['failed'] == {}
  for file in record['files']:
    assert os.path.exists(file)


def test_a_cell_that_fails(trained, tmp_path, capfd):
  diverged = errors.Diverged('The loss was not finite.')
  trained |= {('none', 0): 0.7, ('none', 1): 0.8, ('1d', 0): diverged, ('1d', 1): 0.9}
  code, _, error = commands.run(ablate.main, capfd, *ARGV, '--out', tmp_path)
  assert code == errors.Diverged.exit_code
  assert commands.one_line(error)
  assert re.search(naming('1d-seed0', 'not finite'), error)
  text = (tmp_path / 'table.md').read_text()
  assert re.search(r'\| 1d \|.* 90\.00 \|.*\| 1 \|', text)
  assert '1d-seed0 failed' in text


def test_without_matplotlib_the_table_is_there(trained, tmp_path, capsys, monkeypatch):
  monkeypatch.setitem(sys.modules, 'vit_jax.explain.plots', None)
  monkeypatch.delattr(explain, 'plots', raising=False)
  trained |= {('none', 0): 0.7, ('none', 1): 0.8, ('1d', 0): 0.9, ('1d', 1): 0.95}
  code, out, _ = commands.run(ablate.main, capsys, *ARGV, '--out', tmp_path)
  assert code == 0
  assert 'vit_jax[plots]' in out
  assert (tmp_path / 'table.md').exists()
  assert not (tmp_path / 'posemb.png').exists()


# --- real runs ------------------------------------------------------------------------

TINY = [word for word in (*runs.SMALL, *runs.SHORT) if not word.startswith('optim.ema')]
TINY += [f'evals={runs.EVALS}']


def results(out):
  """Returns the rows of results.csv, without what was measured by a clock."""
  with (out / 'results.csv').open() as file:
    rows = list(csv.DictReader(file))
  assert all(float(row.pop('seconds')) > 0 for row in rows)
  return rows


@pytest.mark.slow
@pytest.mark.usefixtures('one_device')
def test_stopped_and_repeated_it_ends_with_the_same_results(
  tmp_path, capsys, monkeypatch
):
  argv = ['head', '--config', 'digits:debug', '--cells', 'token,gap', '--set', *TINY]
  assert commands.run(ablate.main, capsys, *argv, '--out', tmp_path / 'a')[0] == 0
  whole = results(tmp_path / 'a')
  assert [row['cell'] for row in whole] == ['token', 'gap']

  at = loop.Loop._at

  def stopping(self, step):
    at(self, step)
    if self.workdir.name == 'gap-seed0' and step == 3:
      os.kill(os.getpid(), signal.SIGTERM)

  argv += ['--out', tmp_path / 'b']
  first = next((tmp_path / 'a').rglob('token-seed0'))  # is not trained again
  shutil.copytree(first, tmp_path / 'b' / first.relative_to(tmp_path / 'a'))
  with monkeypatch.context() as patch:
    patch.setattr(loop.Loop, '_at', stopping)
    code, _, error = commands.run(ablate.main, capsys, *argv)
  assert code == 75
  assert re.search(naming('gap-seed0', 'step 3', 'same command'), error)
  assert [row['cell'] for row in results(tmp_path / 'b')] == ['token']
  assert '| token |' in (tmp_path / 'b' / 'table.md').read_text()
  assert commands.run(ablate.main, capsys, *argv)[0] == 0
  assert results(tmp_path / 'b') == whole
  # What is finished is only read; another config is refused, with this command's words.
  before = [path.stat().st_mtime_ns for path in (tmp_path / 'b').rglob('*.jsonl')]
  assert commands.run(ablate.main, capsys, *argv)[0] == 0
  after = [path.stat().st_mtime_ns for path in (tmp_path / 'b').rglob('*.jsonl')]
  assert before == after
  code, _, error = commands.run(ablate.main, capsys, *argv, '--set', 'optim.wd=0.5')
  assert code == 2
  assert re.search(naming('token-seed0', 'optim.wd', '--out', '--set'), error)


# As small as their data let them be: compiling is most of what they take.
SHORT = ['steps=2', 'optim.schedule.warmup=1', 'data.batch_size=8']
STARTED = {
  'masked': ('scratch', ['steps=2', 'optim.schedule.warmup=1', 'model.depth=1']),
  'posemb': ('1d-shared', [*SHORT, 'model.depth=1']),
  'axial': ('axial', [*SHORT, 'model.depth=1']),
  'tune': ('pretrain', ['epochs=0.4', 'optim.schedule.warmup=1', 'model.depth=1']),
  'shape': ('patch-8', SHORT),
  'optimizer': ('sgd', [*SHORT, 'evals.test.data.split=test[:8]']),
  'families': ('mixer', [*SHORT, 'evals.test.data.split=test[:8]']),
  'data_size': ('resnet-3pct', [*SHORT, 'evals.test.data.split=test[:8]']),
}


@pytest.mark.slow
@pytest.mark.usefixtures('one_device')
@pytest.mark.parametrize('name', [n for n in arguments.NAMES if n != 'head'])
def test_each_starts_on_its_own_data(name, tmp_path, capsys):
  cell, words = STARTED[name]
  argv = [name, '--cells', cell, '--seeds', '0', '--set', *words, '--out', tmp_path]
  code, _, error = commands.run(ablate.main, capsys, *argv)
  assert (code, [x for x in error.splitlines() if 'warning' not in x]) == (0, [])
  (row,) = results(tmp_path)
  assert row['steps'] == '2'
  assert any(re.search(r'_\d+shot$|top1$', key) for key in row)
  assert (tmp_path / f'{name}.png').exists()
