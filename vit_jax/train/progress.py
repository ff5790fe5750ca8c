"""Records the progress of a run on disk and on the screen: rows, a bar and a summary."""

import os
import shutil
import sys
import time
from pathlib import Path

import tqdm

from vit_jax import distributed, files, tasks, terminal
from vit_jax.data import bad_images
from vit_jax.evaluators import find_metric
from vit_jax.train import loggers, metrics
from vit_jax.train.metrics import TIME, last_values
from vit_jax.train.status import count
from vit_jax.train.workdir import LOG_FILE

# Seconds between two writes in a bucket, where every write replaces the whole object.
_BUCKET_SECONDS = 10.0


class Record:
  """Records the rows of a run in metrics.jsonl, in its loggers and on the screen.

  Each row is written as one whole line. On a terminal a bar shows the progress; elsewhere a
  line is printed for each row. Only the first of several processes writes; the others hold
  the rows in memory.

  Attributes:
    log: the config's section `log`.
    rows: all rows of the file, including those from before the run was resumed.
  """

  def __init__(self, config: dict, workdir: Path, step: int, mfu: float | None = None):
    """Opens the record of a run at `step`, and drops rows and events past it.

    Args:
      mfu: the MFU at one image per second, see `Trainer.utilisation`; None if unknown.
    """
    self._mfu = mfu
    self._total = config['resolved']['total_steps']
    self._batch_size, self._evals = config['data']['batch_size'], config['evals']
    self._best = config.get('checkpoint', {}).get('best')
    self.log = loggers.Log(**config['log'])
    self._loggers = loggers.Loggers(self.log, workdir, config, step)
    self._path = workdir / 'metrics.jsonl'
    rows, damaged = metrics.read_rows(self._path)
    self.rows = [row for row in rows if row['step'] <= step]
    if damaged:
      distributed.say(f'{self._path}: {damaged} damaged lines are left out.')
    if step >= self.log.every and not self.rows:
      distributed.say(f'{self._path} holds no rows up to step {step}.')
    self._file = None
    self.flush()
    if distributed.is_first() and not files.is_url(workdir):
      self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
    self._opened = time.perf_counter()
    # The step and the time of the newest row.
    self._row = step, self._opened
    self._bar = tqdm.tqdm(
      total=self._total,
      initial=step,
      unit='step',
      leave=False,
      dynamic_ncols=True,
      # None disables the bar if standard error is not a terminal.
      disable=None,
    )

  def write(self, step: int, values: dict) -> None:
    """Adds a row of numbers at `step`."""
    values = {name: _number(value) for name, value in values.items()}
    self.rows.append({'step': step, **values})
    if self._file is not None:
      data = metrics.line(self.rows[-1])
      # A write may be partial without an error, so write until nothing is left.
      while data:
        data = data[os.write(self._file, data) :]
    elif time.monotonic() - self._flushed >= _BUCKET_SECONDS:
      self.flush()
    self._loggers.write(step, values)

  def flush(self) -> None:
    """Writes the rows and events that are not yet in a bucket."""
    if self._file is None and distributed.is_first():
      files.replace(self._path, b''.join(map(metrics.line, self.rows)))
      self._loggers.flush()
    self._flushed = time.monotonic()

  def close(self) -> None:
    """Writes the last rows, and closes the bar and the loggers."""
    self._bar.close()
    self._loggers.close()
    self.flush()
    if self._file is not None:
      os.close(self._file)

  def pause(self, seconds: float) -> None:
    """Excludes time spent outside of steps from `time/images_per_s`."""
    self._row = self._row[0], self._row[1] + seconds

  def train(self, step: int, values: dict) -> None:
    """Records the metrics of a train step, if `config.log.every` selects the step."""
    self._bar.update(step - self._bar.n)
    if step % self.log.every and step != self._total:
      return
    row = {f'train/{key}': float(value) for key, value in values.items()}
    before, start = self._row
    per_step = max(time.perf_counter() - start, 1e-9) / max(step - before, 1)
    speed = self._batch_size / per_step
    row[f'{TIME}images_per_s'] = speed
    if self._mfu:
      row[f'{TIME}mfu'] = speed * self._mfu
    self.write(step, row | self._clock())
    # Read the clock again, so that the time of writing does not count.
    self._row = step, time.perf_counter()
    text = f'loss {row["train/loss"]:.4f}  {speed:,.0f} images/s'
    self._bar.set_postfix_str(text, refresh=False)
    if self._bar.disable:
      left = tqdm.tqdm.format_interval(per_step * (self._total - step))
      print(f'step {step}/{self._total}  {text}  {left} left', flush=True)

  def evaluation(self, step: int, name: str, values: dict) -> None:
    """Records the numbers of an evaluation."""
    row = {f'{name}/{key}': value for key, value in values.items()}
    self.write(step, row | self._clock())
    text = f'step {step:<{len(str(self._total))}}  {format_numbers(row, self._evals)}'
    if (value := row.get(self._best)) is not None:
      larger = metrics.larger_is_better(self._best, self._evals)
      every = [row[self._best] for row in self.rows if self._best in row]
      if value == (max if larger else min)(every):
        text = terminal.bold(text)
    tqdm.tqdm.write(text)
    sys.stdout.flush()

  def _clock(self) -> dict[str, float]:
    return {f'{TIME}seconds': round(time.perf_counter() - self._opened, 3)}

  def numbers_at(self, step: int) -> dict[str, float]:
    """Returns all numbers of a step."""
    return last_values([row for row in self.rows if row['step'] == step])


def _number(value):
  value = float(value)
  return int(value) if value.is_integer() and abs(value) < 2**53 else value


def format_numbers(values: dict, evals: dict) -> str:
  """Formats the main numbers of a row: 'test/top1  98.11%  test/loss  0.0813'.

  Leaves out counts and single seeds. Rows of one evaluation have aligned columns.
  """
  every = {k: find_metric(k, evals) for k in values}
  judged = [k for k, m in every.items() if not (m.detail or m.larger_is_better is None)]
  return '  '.join(
    f'{k} {every[k].format_with_std(values, k, 7)}' for k in judged or every
  )


def parameter_table(params: dict, trained: dict) -> str:
  """Returns a table of the number of parameters: by module, in total, and trained."""
  rows = {key: count(subtree) for key, subtree in params.items()}
  rows |= {'total': count(params), 'trained': count(trained)}
  return '\n'.join(['Parameters:', *(f'  {k:<16} {n:>14,}' for k, n in rows.items())])


def summary(
  rows: list[dict],
  status: dict,
  config: dict,
  workdir: Path,
  seconds: float,
  page: str | None = None,
  imports: str = '',
) -> str:
  """Returns the text at the end of a run: results, where they are, and next commands.

  Args:
    page: the address of the run's report, if one was written.
    imports: the option of commands that read the run, ' --import FILE.py', or ''.
  """
  values, evals = last_values(rows), config.get('evals', {})
  measured = [k for k in values if not k.startswith((TIME, 'train/'))]
  measured += ['train/loss'] * ('train/loss' in values)
  results = {k: m for k in measured if not (m := find_metric(k, evals)).detail}
  width = max(map(len, results), default=0)
  lines = ['', f'Done: {status["step"]:,} steps in {seconds:.0f} s.', '']
  for key, metric in results.items():
    lines.append(f'  {key:<{width}}   {metric.format_with_std(values, key, 7)}')
  lines += ['', f'In {workdir}: metrics.jsonl, config.json, status.json, checkpoints/.']
  if (log := workdir / LOG_FILE).exists():
    lines.append(f'Messages of libraries: {log}')
  newest, best = status.get('last_good_step'), status.get('best_step')
  if newest is not None:
    text = f', best step {best}' if best is not None else ''
    lines.append(f'Checkpoints: newest step {newest}{text}.')
  if 'stopped_early' in status:
    lines.append(f'Stopped early: {status["stopped_early"]}')
  if bad := bad_images.read_log(path := workdir / 'bad_images.jsonl'):
    lines.append(f'Images that could not be read: {len(bad)}, {path}')
  weights = f'{workdir}@best' if best not in (None, newest) else f'{workdir}'
  ours = _program('vit_jax')
  lines.append('Next:')
  task = tasks.class_of(config)
  predict = f'  {ours} predict {weights} IMAGE_OR_FOLDER{imports}'
  if 'text' in config.get('task', {}):
    lines.append(f"{predict} --labels 'a cat,a dog'   # by texts")
  elif not task.CLASSES:
    lines.append(
      f'  {ours} train --config=finetune:weights={weights},data=FOLDER   # a head'
    )
  elif task.OUTPUTS == 'classes':
    lines.append(f'{predict}   # names')
  elif task.OUTPUTS == 'pixels':
    lines.append(f'{predict} --draw DIR   # masks')
  elif task.OUTPUTS in ('boxes', 'regions'):
    lines.append(f'{predict} --draw DIR   # objects')
    lines.append(
      f'  {ours} evaluate {weights} --out DIR{imports}   # precision of each class'
    )
  # This is probably a first run, on bundled data.
  if config.get('data', {}).get('source') == 'digits':
    lines.append(f'  {ours} train --config=folder:data=FOLDER   # your images')
  if config.get('log', {}).get('tensorboard', True):
    lines.append(f'  {_program("tensorboard")} --logdir {workdir.parent}   # curves')
  if page:
    lines.append(f'The run on a page: {page}')
  return '\n'.join(lines)


def _program(name: str) -> str:
  """Returns the command that calls a program of this environment from this folder."""
  ours = Path(sys.executable).with_name(name)
  # A vit_jax that runs without being installed has no such program.
  if not ours.exists() and not shutil.which(name):
    return f'{_program("python")} -m {name}'
  activated = shutil.which(name) == str(ours) or not ours.exists()
  return name if activated else os.path.relpath(ours)
