"""What a run tells: metrics.jsonl (the truth), TensorBoard (a mirror), progress.

Rows of metrics.jsonl are functions of the run's state alone, so that a resumed run
writes what an uninterrupted one would have; only keys under `time/` are measurements.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import sys
import time
from pathlib import Path

import jax

from vit_jax import distributed

TIME = 'time/'


@dataclasses.dataclass(frozen=True)
class Log:
  """The config's `log` section."""

  every: int = 50  # steps between rows
  tensorboard: bool = True
  profile: bool = False  # write a profile of a few steps to WORKDIR/profile


def write_json(path: Path, value) -> None:
  """Writes a JSON file so that a reader sees the old or the new one, never a half.

  Of several processes the first does.
  """
  if not distributed.is_first():
    return
  temporary = path.with_suffix('.tmp')
  temporary.write_text(json.dumps(value, indent=1) + '\n')
  temporary.replace(path)


def read_rows(path: Path) -> list[dict]:
  """Returns the rows of a metrics.jsonl; a half last line, of a kill, is left out."""
  rows = []
  for line in path.read_text().splitlines() if path.exists() else ():
    try:
      row = json.loads(line)
      rows.append({k: math.nan if v is None else v for k, v in row.items()})
    except json.JSONDecodeError:
      break
  return rows


class Metrics:
  """Appends rows `{"step": n, name: number}`, each with one write of a whole line."""

  def __init__(self, workdir: Path, keep_to: int, tensorboard: bool = True):
    """Opens `workdir`/metrics.jsonl, without the rows past step `keep_to`.

    Of several processes the first writes, the others keep the rows.
    """
    self.path = workdir / 'metrics.jsonl'
    self.rows = [row for row in read_rows(self.path) if row['step'] <= keep_to]
    self._file = self._events = None
    self._early = [] if tensorboard and distributed.is_first() else None
    if not distributed.is_first():
      return
    temporary = self.path.with_suffix('.tmp')
    temporary.write_text(''.join(map(_line, self.rows)))
    temporary.replace(self.path)
    self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)

  def write(self, step: int, values: dict) -> None:
    """Adds the row of `values` (numbers) at `step`."""
    row = {'step': step, **{k: _number(v) for k, v in values.items()}}
    self.rows.append(row)
    if self._file is not None:
      os.write(self._file, _line(row).encode())
    if self._early is not None:
      self._early.append(row)
    else:
      self._write_event(row)

  def open_events(self) -> float:
    """Opens the TensorBoard file, if there is to be one, with the rows written so far.

    Apart from the rest because it imports Keras, for two seconds: to be called once the
    first step has run. Returns the seconds that it took.
    """
    start = time.perf_counter()
    if self._early is not None:
      rows, self._early = self._early, None
      self._events = _tensorboard(self.path.parent)
      for row in rows:
        self._write_event(row)
    return time.perf_counter() - start

  def _write_event(self, row: dict) -> None:
    if self._events:
      values = {k: v for k, v in row.items() if k != 'step'}
      self._events.write_scalars(row['step'], values)

  def has(self, step: int, prefix: str) -> bool:
    """Whether a row at `step` holds a value whose name starts with `prefix`."""
    return any(
      row['step'] == step and any(k.startswith(prefix) for k in row)
      for row in self.rows
    )

  def close(self) -> None:
    if self._file is not None:
      os.close(self._file)
    if self._early:
      self.open_events()
    if self._events:
      self._events.close()


def _line(row: dict) -> str:
  # JSON knows no NaN: it is written as null, and so are infinities.
  finite = {k: v if math.isfinite(v) else None for k, v in row.items()}
  return json.dumps(finite, allow_nan=False) + '\n'


def _number(value):
  value = float(value)
  return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _tensorboard(workdir):
  try:
    from clu import metric_writers
  except ImportError as error:
    print(f'TensorBoard events are off ({error}): pip install "vit_jax[tf]".')
    return None
  return metric_writers.SummaryWriter(str(workdir))


class Progress:
  """Step, loss, images per second, time left: a bar on a terminal, else plain lines."""

  def __init__(self, start: int, total: int, batch_size: int):
    self.total, self.batch_size = total, batch_size
    self._step, self._time = start, time.perf_counter()
    self._bar = None
    if sys.stderr.isatty():
      import tqdm

      self._bar = tqdm.tqdm(total=total, initial=start, unit='step', leave=False)

  def measure(self, step: int) -> dict[str, float]:
    """Returns the `time/` values of the steps since the last call, and restarts."""
    now = time.perf_counter()
    per_step = (now - self._time) / max(step - self._step, 1)
    self._step, self._time = step, now
    return {
      f'{TIME}images_per_s': self.batch_size / max(per_step, 1e-9),
      f'{TIME}seconds_left': per_step * (self.total - step),
    }

  def pause(self, seconds: float) -> None:
    """Takes time spent outside of steps (evaluation, saving) out of the measure."""
    self._time += seconds

  def show(self, step: int, row: dict) -> None:
    """Shows a train row."""
    text = (
      f'loss {row["train/loss"]:.4f}  {row[f"{TIME}images_per_s"]:,.0f} images/s  '
      f'{row[f"{TIME}seconds_left"]:,.0f} s left'
    )
    if self._bar is not None:
      self._bar.n = step
      self._bar.set_postfix_str(text, refresh=True)
    else:
      print(f'step {step}/{self.total}  {text}', flush=True)

  def say(self, text: str) -> None:
    """Prints a line without breaking the bar."""
    if self._bar is not None:
      self._bar.write(text)
    else:
      print(text, flush=True)

  def close(self) -> None:
    if self._bar is not None:
      self._bar.close()


def shown(values: dict) -> str:
  """Returns 'a 0.9811  b 3' for a row's values."""
  numbers = {k: _number(v) for k, v in values.items()}
  return '  '.join(
    f'{k} {v:,}' if isinstance(v, int) else f'{k} {v:.4f}' for k, v in numbers.items()
  )


def last_values(rows: list[dict]) -> dict[str, float]:
  """Returns the last value of every name in rows."""
  values: dict[str, float] = {}
  for row in rows:
    values |= {k: v for k, v in row.items() if k != 'step'}
  return values


def summary(rows: list[dict], status: dict, workdir: Path, seconds: float) -> str:
  """Returns the end of a run for a person: results, where they are, what is next."""
  values = last_values(rows)
  spread = {k for k in values if k.endswith('_std') or '_seed' in k}
  results = {
    k: v
    for k, v in values.items()
    if not k.startswith((TIME, 'train/')) and k not in spread
  }
  results |= {k: values[k] for k in ('train/loss',) if k in values}
  width = max(map(len, results), default=0)
  lines = [
    '',
    f'Done: {status["step"]:,} steps; this command took {seconds:.0f} s.',
    '',
  ]
  for key, value in results.items():
    if not re.search(r'/(top\d+|\w+shot(_sweep)?)$', key):
      text = f'{value:9,.4g}'
    else:
      text = f'{value:9.2%}'
      if f'{key}_std' in values:
        text += f' ± {values[key + "_std"]:.2%}'
    lines.append(f'  {key:<{width}} {text}')
  python = _program('python')
  lines += [
    '',
    f'In {workdir}: metrics.jsonl, config.json, status.json, checkpoints/.',
  ]
  bad = workdir / 'bad_images.jsonl'
  if bad.exists():
    lines.append(f'{len(read_rows(bad))} images could not be read: {bad}')
  lines += [
    'Next:',
    f'  {python} -m vit_jax.tools.predict {workdir} IMAGE_OR_FOLDER   # names',
    f'  {_program("tensorboard")} --logdir {workdir.parent}   # curves',
    f'  {python} -m vit_jax.main --config=configs/folder.py:data=FOLDER   # your images',
  ]
  return '\n'.join(lines)


def _program(name: str) -> str:
  """Returns how to call a program of this environment from this folder."""
  ours = Path(sys.executable).with_name(name)
  activated = shutil.which(name) == str(ours) or not ours.exists()
  return name if activated else os.path.relpath(ours)


def parameter_table(params) -> str:
  """Returns the number of parameters, by top-level module, and in all."""
  counts: dict[str, int] = {}
  for key, subtree in params.items():
    counts[key] = sum(math.prod(x.shape) for x in jax.tree.leaves(subtree))
  lines = [f'  {key:<16} {n:>14,}' for key, n in counts.items()]
  return '\n'.join(
    ['Parameters:', *lines, f'  {"total":<16} {sum(counts.values()):>14,}']
  )


def device_memory(device) -> int:
  """Returns the bytes that one device may use; on CPU its share of the machine's."""
  stats = device.memory_stats() or {}
  if 'bytes_limit' in stats:
    return stats['bytes_limit']
  memory = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
  return memory // max(jax.local_device_count(), 1)


PROFILED = (3, 8)  # the steps after start that a profile holds: compiled, warmed up


@contextlib.contextmanager
def profiler(enabled: bool, workdir: Path):
  """Gives `at(step)`, which profiles steps PROFILED after the first one seen."""
  first, active = None, False
  options = jax.profiler.ProfileOptions()
  # Python's calls, thousands per step, would be most of the profile and of its cost.
  options.python_tracer_level = 0

  def at(step: int) -> None:
    nonlocal first, active
    first = step if first is None else first
    if enabled and step - first == PROFILED[0]:
      jax.profiler.start_trace(str(workdir / 'profile'), profiler_options=options)
      active = True
    elif active and step - first == PROFILED[1]:
      jax.profiler.stop_trace()
      active = False

  try:
    yield at
  finally:
    if active:
      jax.profiler.stop_trace()
