"""Early stopping: a run ends when its best evaluation has not improved for long enough."""

import math
import re
import shutil

import pytest

from tests.support import naming, runs
from vit_jax import errors
from vit_jax.train import progress, schema
from vit_jax.train.evaluations import Patience

pytestmark = pytest.mark.usefixtures('one_device')


def early(workdir, *changes):
  # Nothing is learned at that rate: the first evaluation stays the best.
  evals = {'test': {**runs.EVALS['test'], 'every': 2}}
  evals['last'] = {**runs.EVALS['test'], 'every': None}
  changes = ['checkpoint.every=2', 'checkpoint.patience=2', *changes]
  changes = ['optim.lr=1e-30', 'checkpoint.best=test/loss', *changes]
  return runs.run(workdir, *changes, evals=evals)


def test_early_stopping(tmp_path, capsys):
  status, rows = early(tmp_path / 'a')
  assert (status['state'], status['exit'], status['step']) == ('finished', 0, 6)
  assert re.search(
    naming('test/loss', 'step 2', '2 evaluations'), status['stopped_early']
  )
  assert status['last_good_step'] == 6
  assert [row['step'] for row in rows if 'test/top1' in row] == [2, 4, 6]
  assert [row['step'] for row in rows if 'last/top1' in row] == [6]
  text = progress.summary(rows, status, {}, tmp_path, seconds=1.0)
  assert f'Stopped early: {status["stopped_early"]}' in text
  # At its end it tells its results again.
  capsys.readouterr()
  assert early(tmp_path / 'a')[0] == status
  out = capsys.readouterr().out
  assert re.search(naming('step 6', '--config.checkpoint.patience=4'), out)
  assert 'compiled' not in out


def test_more_patience_goes_on(tmp_path):
  # From an earlier step, as after a kill, it has the same rows to the bit, by which it
  # stops; with more patience it goes on.
  early(tmp_path / 'a')
  again = shutil.copytree(tmp_path / 'a', tmp_path / 'b')
  shutil.rmtree(again / 'checkpoints' / '6')
  more, _ = early(again, 'checkpoint.patience=3')
  assert (more['step'], 'stopped_early' in more) == (8, True)
  whole = runs.rows(tmp_path / 'a')
  assert runs.rows(again)[: len(whole) - 1] == [
    r for r in whole if 'last/top1' not in r
  ]


@pytest.mark.parametrize(
  ('values', 'spent'),
  [
    ([0.5, 0.6, 0.6], False),
    ([0.5, 0.6, 0.6, 0.4], True),
    ([0.5, 0.4, 0.6, 0.5], False),
    ([math.nan, math.nan], True),
    ([math.nan, 0.1, math.nan], False),
  ],
)
def test_patience_is_a_function_of_the_rows(values, spent):
  rows = [{'step': i, 'test/top1': value} for i, value in enumerate(values)]
  assert (
    bool(Patience('test/top1', True, 2).spent([{'step': 0, 'x': 1}, *rows])) is spent
  )
  rows = [{'step': i, 'test/loss': -value} for i, value in enumerate(values)]
  assert bool(Patience('test/loss', False, 2).spent(rows)) is spent
  assert Patience('test/loss', False, None).spent(rows) == ''


@pytest.mark.parametrize(
  ('changes', 'facts'),
  [
    (['checkpoint.best=None'], ('checkpoint.patience', 'checkpoint.best')),
    (['checkpoint.best=train/loss'], ('checkpoint.patience', 'train/loss')),
    (['evals.test.every=None'], ('test/top1', 'config.evals.test.every')),
    (['checkpoint.patience=0'], ('config.checkpoint.patience=0', 1)),
  ],
)
def test_a_patience_that_nothing_spends(changes, facts):
  with pytest.raises(errors.UserError, match=naming(*facts)):
    schema.check(runs.small('checkpoint.patience=2', *changes))
