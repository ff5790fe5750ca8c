"""The progress line, from the first step on, and its estimate of the time left."""

import functools
import re
import sys
import time

import pytest

from vit_jax.train import progress_line, time_left
from vit_jax.train.evaluations import Evaluation
from vit_jax.train.progress_line import ProgressLine
from vit_jax.train.time_left import TimeLeft


class Clock:
  def __init__(self):
    self.now = 100.0

  def __call__(self):
    return self.now


def of(total, clock, **every):
  evals = {k: Evaluation(None, n, False) for k, n in every.items()}
  due = {k: functools.partial(e.times_due, total) for k, e in evals.items()}
  return TimeLeft(0, total, due, clock)


@pytest.mark.parametrize(
  ('total', 'every'), [(10, 3), (10, 5), (7, 7), (3, 5), (4, None)]
)
def test_evaluations_to_come_are_those_of_the_loop(total, every):
  one = Evaluation(None, every, False)
  for step in range(total + 1):
    later = range(step + 1, total + 1)
    assert one.times_due(total, step) == sum(one.is_due(s, total) for s in later)


def test_time_left_is_of_steps_and_evaluations():
  clock = Clock()
  times = of(10, clock, test=4, last=None)
  assert times.seconds() == (None, [])
  for step in (1, 2, 3, 4):
    clock.now += 2
    times.done(step)
  assert times.per_step == 2
  assert times.seconds() == (12, ['test', 'last'])
  clock.now += 1.5  # within a step it counts down, to its end and no further
  assert times.seconds()[0] == 10.5
  clock.now += 100
  assert times.seconds()[0] == 10
  clock.now -= 101.5
  with times.evaluating('test'):
    clock.now += 5
    assert (times.waited, times.under_way[0]) == (5, 'test')
    assert times.seconds()[0] == 12  # no one knows yet how long it takes
  times.pause(5)
  assert times.per_step == 2
  assert times.seconds() == (12 + 2 * 5, ['last'])  # at 8 and 10
  with times.evaluating('test'):
    clock.now += 4
    assert times.seconds()[0] == 12 + 2 * 5 + 5 - 4


def test_a_pace_that_changes_is_followed():
  clock = Clock()
  times = of(1000, clock)
  clock.now += 500  # the first step's
  times.done(1)
  for step in range(2, 40):
    clock.now += 1
    times.done(step)
  assert times.per_step == 1


def test_the_first_step_of_a_process_is_left_out_of_the_pace():
  # As when a run resumes: it waits until the first images are read.
  clock = Clock()
  times = TimeLeft(500, 1000, {}, clock)
  for step, seconds in ((501, 30), (502, 1), (503, 1)):
    clock.now += seconds
    times.done(step)
  assert times.per_step == 1
  assert times.seconds() == (497, [])


def test_steps_that_are_looked_at_together_are_not_taken_for_fast_ones():
  clock = Clock()
  times = TimeLeft(0, 1000, {}, clock)
  for step, seconds in ((1, 0.1), (2, 0), (3, 0.2), (4, 0), (5, 0.2), (6, 0), (7, 0.2)):
    clock.now += seconds
    times.done(step)
    assert 0.05 - 1e-6 <= times.per_step <= 0.1 + 1e-6, step


def test_short_steps_are_averaged_over_seconds():
  clock = Clock()
  times = of(100_000, clock)
  shown = []
  for step in range(1, 8001):  # of 5 ms; every hundredth has 20 of 25 ms after it
    clock.now += 0.025 if step % 100 < 20 else 0.005
    times.done(step)
    if step > 2000:
      shown.append(times.per_step)
  mean = 0.2 * 0.025 + 0.8 * 0.005
  assert all(0.95 * mean < x < 1.05 * mean for x in shown)


def test_durations():
  said = [time_left.text(s) for s in (0, 59.4, 60, 200, 3600, 18_720, 183_600)]
  expected = '0 s|59 s|1 min 0 s|3 min 20 s|1 h 0 min|5 h 12 min|2 d 3 h'
  assert said == expected.split('|')


def test_a_bar_on_a_terminal(capsys, monkeypatch):
  monkeypatch.setattr(sys.stderr, 'isatty', lambda: True)
  clock = Clock()
  times = of(10, clock, test=5)
  line = ProgressLine(times, 8)
  for step in (1, 2):
    clock.now += 0.5
    times.done(step)
    line.step(lambda step=step: step / 2)
  line.say('step 2  test/top1 0.5')
  line.close()
  out, error = capsys.readouterr()
  assert 'step 0/10, first step: 0 s' in error
  assert re.search(r'step 1/10, loss 0\.5000  16 images/s  4 s and test left', error)
  assert 'loss 1.0000' not in error  # half a second after: the loss is not read again
  assert out == 'step 2  test/top1 0.5\n'


def test_a_bar_moves_while_a_step_takes_long(capsys, monkeypatch):
  monkeypatch.setattr(sys.stderr, 'isatty', lambda: True)
  monkeypatch.setattr(progress_line, '_EVERY', 0.02)
  clock = Clock()
  times = of(10, clock)
  line = ProgressLine(times, 8)
  for expected in ('first step: 7 s', 'test: 3 s'):
    if expected[0] == 't':
      context = times.evaluating('test')
      context.__enter__()
    clock.now += int(expected[-3])
    seen = ''
    for _ in range(200):
      time.sleep(0.02)
      if expected in (seen := seen + capsys.readouterr().err):
        break
    assert expected in seen
  line.close()


def test_plain_lines_are_the_first_and_one_a_minute(capsys):
  clock = Clock()
  times = of(1000, clock)
  line = ProgressLine(times, 8)
  asked = []
  for step in range(1, 101):
    clock.now += 3
    times.done(step)
    line.step(lambda step=step: asked.append(step) or 1.0)
    if step == 50:
      line.row(0.5)
  lines = capsys.readouterr().out.splitlines()
  steps = [
    int(re.match(r'step (\d+)/1000  loss [\d.]+  3 images/s', x)[1]) for x in lines
  ]
  assert steps == [1, 21, 41, 50, 70, 90]
  assert asked == [1, 21, 41, 70, 90]
  assert lines[0].endswith('49 min 57 s left')
