"""Estimates how long a run still takes, from the pace of its steps and evaluations."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator

# The pace is the mean over the last 20 steps, or over those of the last 10 seconds if these
# are more: a mean over 20 steps of 5 ms would fluctuate.
_STEPS, _SECONDS = 20, 10.0
_FEW = 5


class TimeLeft:
  """Measures steps and evaluations.

  Attributes:
    step: the last one done.
    under_way: (evaluation, when it began), or None.
    took: {evaluation: seconds that it took when it was last made}.
  """

  def __init__(
    self,
    start: int,
    total: int,
    due: dict[str, Callable[[int], int]],
    clock: Callable[[], float] = time.perf_counter,
  ):
    """`due`: {evaluation: function from the step to how often it is still to be made}."""
    self.step, self.total = start, total
    self.under_way: tuple[str, float] | None = None
    self.took: dict[str, float] = {}
    self.clock = clock
    self._due = due
    self._paused = 0.0  # seconds that belong to no step
    self._times = deque([(start, clock())])  # (step, when it was done)
    self._starting = True

  def done(self, step: int) -> None:
    """Takes note of a step that is done."""
    self.step = step
    now = self.clock() - self._paused
    self._times.append((step, now))
    # The first step of a process waits for its first batch: it is left out once enough of
    # the next are seen (several may be looked at in one moment).
    if self._starting and (len(self._times) > _FEW or now - self._times[1][1] >= 1):
      self._starting = False
      self._times.popleft()
    while len(self._times) > _STEPS + 1 and now - self._times[1][1] >= _SECONDS:
      self._times.popleft()

  def pause(self, seconds: float) -> None:
    """Takes time spent outside of steps (evaluation, saving) out of their measure."""
    self._paused += seconds

  @contextlib.contextmanager
  def evaluating(self, name: str) -> Iterator[None]:
    """Measures an evaluation."""
    start = self.clock()
    self.under_way = name, start
    try:
      yield
      self.took[name] = self.clock() - start
    finally:
      self.under_way = None

  @property
  def per_step(self) -> float | None:
    """Seconds of a step; None before the first is done."""
    times = self._times  # another thread may ask
    (first, start), (last, end) = times[0], times[-1]
    return (end - start) / (last - first) if last > first else None

  @property
  def waited(self) -> float:
    """Seconds since the last step, or the evaluation under way."""
    if under_way := self.under_way:  # once: another thread asks
      return self.clock() - under_way[1]
    return self.clock() - self._paused - self._times[-1][1]

  def seconds(self) -> tuple[float | None, list[str]]:
    """Returns (seconds left, evaluations that are to come but were never measured).

    Counts down within a step or an evaluation. The seconds are None before the first step
    is done.
    """
    if (per_step := self.per_step) is None:
      return None, []
    times = {name: count(self.step) for name, count in self._due.items()}
    running = per_step
    if under_way := self.under_way:
      name, _ = under_way
      times[name] = times.get(name, 0) + 1
      running = self.took.get(name, 0)
    unknown = [name for name, n in times.items() if n and name not in self.took]
    left = per_step * (self.total - self.step)
    left += sum(n * self.took.get(name, 0) for name, n in times.items())
    return max(left - min(self.waited, running), 0), unknown


def text(seconds: float) -> str:
  """Returns '42 s', '3 min 20 s', '5 h 12 min' or '2 d 3 h'."""
  seconds = round(seconds)
  for unit, size, smaller, part in (
    ('d', 86_400, 'h', 3600),
    ('h', 3600, 'min', 60),
    ('min', 60, 's', 1),
  ):
    if seconds >= size:
      return f'{seconds // size} {unit} {seconds % size // part} {smaller}'
  return f'{seconds} s'
