"""Early stopping: a run ends when its best evaluation has not improved for long enough."""

import math
import re
import shutil

import pytest

from tests.support import naming, runs
from vit_jax import errors
from vit_jax.train import schema
from vit_jax.train.evaluations import stop_reason

pytestmark = pytest.mark.usefixtures('one_device')


def early(workdir, *changes):
  # The model does not change at that rate: the first evaluation stays the best.
  evals = {'test': {**runs.EVALS['test'], 'every': 2}}
  evals['last'] = {**runs.EVALS['test'], 'every': None}
  changes = ['checkpoint.every=2', 'checkpoint.patience=2', *changes]
  changes = ['optim.lr=1e-30', 'checkpoint.best=test/loss', *changes]
  return runs.run(workdir, *changes, evals=evals)


def test_early_stopping_and_more_patience(tmp_path, capsys):
  status, rows = early(tmp_path / 'a')
  assert (status['state'], status['exit'], status['step']) == ('finished', 0, 6)
  assert re.search(
    naming('test/loss', 'step 2', '2 evaluations'), status['stopped_early']
  )
  assert status['last_good_step'] == 6
  assert [row['step'] for row in rows if 'test/top1' in row] == [2, 4, 6]
  assert [row['step'] for row in rows if 'last/top1' in row] == [6]
  # At its end it prints its results again.
  capsys.readouterr()
  assert early(tmp_path / 'a')[0] == status
  out = capsys.readouterr().out
  assert re.search(naming('step 6', '--config.checkpoint.patience=4'), out)
  assert 'compiled' not in out

  # From an earlier step, as after a kill, it has the same rows to the bit, by which it
  # stops; with more patience it goes on.
  again = tmp_path / 'a'
  whole = runs.rows(again)
  shutil.rmtree(again / 'checkpoints' / '6')
  more, _ = early(again, 'checkpoint.patience=3')
  assert (more['step'], 'stopped_early' in more) == (8, True)
  assert runs.rows(again)[: len(whole) - 1] == [
    r for r in whole if 'last/top1' not in r
  ]


@pytest.mark.parametrize(
  ('values', 'stops'),
  [
    ([0.5, 0.6, 0.6], False),
    ([0.5, 0.6, 0.6, 0.4], True),
    ([0.5, 0.4, 0.6, 0.5], False),
    ([math.nan, math.nan], True),
    ([math.nan, 0.1, math.nan], False),
  ],
)
def test_the_end_is_a_function_of_the_rows(values, stops):
  for key, sign in (('test/top1', 1), ('test/loss', -1)):
    rows = [{'step': i, key: sign * value} for i, value in enumerate(values)]
    section = {'best': key, 'patience': 2}
    c = {'checkpoint': section, 'evals': {'test': {'type': 'classification'}}}
    assert bool(stop_reason(c, [{'step': 0, 'x': 1}, *rows])) is stops
    assert stop_reason(c | {'checkpoint': {'best': key}}, rows) == ''


@pytest.mark.parametrize(
  ('changes', 'facts'),
  [
    (['checkpoint.best=None'], ('checkpoint.patience', 'checkpoint.best')),
    (['evals.test.every=None'], ('test/top1', 'config.evals.test.every')),
  ],
)
def test_a_patience_that_nothing_spends(changes, facts):
  with pytest.raises(errors.UserError, match=naming(*facts)):
    schema.check(runs.small('checkpoint.patience=2', *changes))
