"""Two sides in turns, so that a load on the machine hits both."""

import statistics
import time
from collections.abc import Callable


def timed(work: Callable[[], object], cpu: Callable[[], float] = time.process_time):
  """Returns a function that does `work` and returns its 'wall' and 'cpu' seconds."""

  def turn() -> dict[str, float]:
    wall, used = time.perf_counter(), cpu()
    work()
    return {'wall': time.perf_counter() - wall, 'cpu': cpu() - used}

  return turn


def compare(ours: Callable, theirs: Callable, rounds: int) -> dict[str, float]:
  """Runs two functions made by `timed` in turns, after one call of each to warm up.

  The side that begins changes from round to round.

  Returns:
    ours, theirs: median seconds of a turn. ratio, low, high: times that ours is as fast,
    median and extremes of the rounds. cpu_ratio: the median by processor time, which
    counts no waiting for others.
  """
  sides, turns = (ours, theirs), ([], [])
  for side in sides:
    side()
  for i in range(rounds):
    for place in (0, 1) if i % 2 == 0 else (1, 0):
      turns[place].append(sides[place]())
  pairs = list(zip(*turns, strict=True))
  wall = [their['wall'] / our['wall'] for our, their in pairs]
  median = lambda side: statistics.median(turn['wall'] for turn in turns[side])
  return {
    'ours': median(0),
    'theirs': median(1),
    'ratio': statistics.median(wall),
    'low': min(wall),
    'high': max(wall),
    'cpu_ratio': statistics.median(t['cpu'] / max(o['cpu'], 1e-9) for o, t in pairs),
  }


def text(timing: dict[str, float]) -> str:
  """Returns the ratios as text."""
  return (
    f'ratio {timing["ratio"]:.2f} ({timing["low"]:.2f}-{timing["high"]:.2f}), by CPU time '
    f'{timing["cpu_ratio"]:.2f}'
  )
