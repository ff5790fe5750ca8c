"""The line that shows a run move: step, loss, images per second, time left."""

import sys
import threading
from collections.abc import Callable

from vit_jax.train import time_left
from vit_jax.train.time_left import TimeLeft

_EVERY = 1.0  # seconds after which the line of a terminal is drawn anew
_PLAIN_EVERY = 60.0  # and those after which a line is printed elsewhere


class ProgressLine:
  """A bar on a terminal, moving also within a step; else plain lines, one a minute."""

  def __init__(self, clock: TimeLeft, batch_size: int):
    self._time, self._batch_size = clock, batch_size
    self._loss: float | None = None
    self._looked: float | None = None  # when the loss was last read
    self._bar = None
    self._ended = threading.Event()
    if sys.stderr.isatty():
      import tqdm

      self._bar = tqdm.tqdm(
        total=clock.total,
        initial=clock.step,
        leave=False,
        bar_format='{percentage:3.0f}%|{bar:20}| step {n_fmt}/{total_fmt}{postfix}',
        dynamic_ncols=True,
      )
      self._draw()
      threading.Thread(target=self._redraw, name='progress', daemon=True).start()

  def step(self, loss: Callable[[], float]) -> None:
    """Shows a step that is done, if the last that was shown is old enough.

    Args:
      loss: returns its loss; called only if it is shown, as that waits for the device.
    """
    now = self._time.clock()
    every = _PLAIN_EVERY if self._bar is None else _EVERY
    if self._looked is None or now - self._looked >= every:
      self._show(loss(), now)

  def row(self, loss: float) -> None:
    """Shows a step whose row was written."""
    self._show(loss, self._time.clock())

  def say(self, text: str) -> None:
    """Prints a line without breaking the bar."""
    if self._bar is not None:
      self._bar.write(text)
    else:
      print(text, flush=True)

  def close(self) -> None:
    self._ended.set()
    if self._bar is not None:
      self._bar.close()

  def text(self) -> str:
    """Returns what the line says beside the step."""
    words = [] if self._loss is None else [f'loss {self._loss:.4f}']
    if per_step := self._time.per_step:
      words.append(f'{self._batch_size / per_step:,.0f} images/s')
    if under_way := self._time.under_way:
      name, _ = under_way
      words.append(f'{name}: {time_left.text(self._time.waited)}')
    seconds, unknown = self._time.seconds()
    if seconds is None:
      words.append(f'first step: {time_left.text(self._time.waited)}')
    else:
      more = f' and {", ".join(unknown)}' if unknown else ''
      words.append(f'{time_left.text(seconds)}{more} left')
    return '  '.join(words)

  def _show(self, loss: float, now: float) -> None:
    self._loss, self._looked = loss, now
    if self._bar is not None:
      self._draw()
    else:
      print(f'step {self._time.step}/{self._time.total}  {self.text()}', flush=True)

  def _redraw(self) -> None:
    while not self._ended.wait(_EVERY):
      self._draw()

  def _draw(self) -> None:
    self._bar.n = self._time.step
    self._bar.set_postfix_str(self.text(), refresh=True)
