"""The loop of a run, with a step and an evaluation of one line each: when it ends, and how."""

import dataclasses
import math
import re
import shutil
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import naming, runs, states
from vit_jax import errors
from vit_jax.checkpoint import checkpoints
from vit_jax.train import schema, status
from vit_jax.train.evaluations import Evaluation, stop_reason
from vit_jax.train.loop import Loop


def step(bad=(), poisoned=False):
  """Returns a step that is bad at these numbers; the state of a poisoned one has NaNs."""

  def step(state, batch):
    number = int(state.step) + 1
    row = int(state.counters['skipped_in_a_row']) + 1 if number in bad else 0
    params = {'w': state.params['w'] + (np.nan if poisoned else 1)}
    counters = {'skipped_in_a_row': jnp.int32(row)}
    new = dict(step=jnp.int32(number), params=params, counters=counters)
    return dataclasses.replace(state, **new), {'loss': 1.0, **counters}

  return step


def run(workdir, step, start=0, bad=0, evaluated=True, **section):
  """Runs a loop of 10 steps from a state at `start`; returns (status, rows, config)."""
  section = {'best': 'test/loss' if evaluated else None, **section}
  # An evaluation never improves on its first number.
  number = {'loss': 1.0}
  evaluator = SimpleNamespace(run=lambda *_: number, predictions=None)
  evals = {'test': Evaluation(evaluator, 2, False)}
  evals['last'] = Evaluation(evaluator, None, False)
  evals = evals if evaluated else {}
  config = {
    'resolved': {'total_steps': 10},
    'data': {'batch_size': 1},
    'evals': {name: {'type': 'classification'} for name in evals},
    'log': {'every': 1, 'tensorboard': False},
    'checkpoint': section,
    'max_bad_steps': 3,
  }
  state = states.make_state(start, ema=False)
  counters = {'skipped_in_a_row': jnp.int32(bad)}
  state = dataclasses.replace(
    state, params={'w': jnp.zeros(3)}, opt_state=(), counters=counters
  )
  options = dict(every=3)
  if evaluated:
    options = dict(every=2, best='test/loss', larger_is_better=False)
  stop, task = SimpleNamespace(should_stop=lambda: False), SimpleNamespace(predict=None)
  with checkpoints.Checkpoints(workdir / 'checkpoints', **options) as saved:
    loop = Loop(config, workdir, state, task, saved, evals, stop)
    try:
      ended, rows = loop.run(step, iter([None] * 10))
    finally:
      loop.record.close()
    assert status.read_finished(workdir, config, saved) == (ended, rows)
  return ended, rows, config


def test_the_last_steps_are_recorded_though_nothing_is_due_there(tmp_path):
  _, rows, _ = run(tmp_path, step(), evaluated=False)
  assert [row['step'] for row in rows if 'train/loss' in row] == [*range(1, 11)]


def test_early_stopping_and_more_patience(tmp_path):
  ended, rows, config = run(tmp_path, step(), patience=2)
  assert (ended['state'], ended['exit'], ended['step']) == ('finished', 0, 6)
  facts = naming('test/loss', 'step 2', '2 evaluations')
  assert re.search(facts, ended['stopped_early'])
  assert ended['last_good_step'] == 6
  at = lambda name: [row['step'] for row in rows if name in row]
  assert (at('test/loss'), at('last/loss')) == ([2, 4, 6], [6])
  more = status.already_finished(tmp_path, config, ended)
  assert re.search(naming('step 6', '--config.checkpoint.patience=4'), more)
  # From an earlier step, as after a kill, it has the same rows to the bit, by which it
  # stops; with more patience it goes on.
  whole = runs.rows(tmp_path)
  shutil.rmtree(tmp_path / 'checkpoints' / '6')
  later, *_ = run(tmp_path, step(), start=4, patience=3)
  assert (later['step'], 'stopped_early' in later) == (8, True)
  again = runs.rows(tmp_path)
  assert again[: len(whole) - 1] == [r for r in whole if 'last/loss' not in r]


@pytest.mark.parametrize(
  ('step', 'state', 'facts'),
  [
    (
      step(bad=(2, 4, 5, 6)),
      {},
      ('3 steps', 'step 6', 'checkpoint: 4', 'config.optim.lr'),
    ),
    (step(bad=(9, 10)), {}, ('The last 2', 'of 10 steps', 'checkpoint: 10')),
    # A restart at such an end fails, too.
    (None, dict(start=10, bad=2), ('The last 2', 'of 10 steps')),
    (step(poisoned=True), {}, ('not finite after step 2', 'checkpoint: None')),
  ],
)
def test_a_run_that_diverges_fails(step, state, facts, tmp_path):
  with pytest.raises(errors.Diverged, match=naming(*facts)) as error:
    run(tmp_path, step, **state)
  assert '\n' not in str(error.value)


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
