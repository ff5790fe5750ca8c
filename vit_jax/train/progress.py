"""What a run shows a person: progress, values as they come, the end."""

import math
import os
import shutil
import sys
import time
from pathlib import Path

import jax

from vit_jax.data import bad_images
from vit_jax.evaluators import declared
from vit_jax.train.metrics import TIME
from vit_jax.train.rows import last_values


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


def shown(values: dict, evals: dict) -> str:
  """Returns 'test/top1 98.11%  test/examples 360' for a row's values.

  Args:
    evals: the config's section, which knows how its numbers are read.
  """
  return '  '.join(f'{k} {declared(k, evals).text(v)}' for k, v in values.items())


def summary(
  rows: list[dict], status: dict, evals: dict, workdir: Path, seconds: float
) -> str:
  """Returns the end of a run for a person: results, where they are, what is next."""
  values = last_values(rows)
  measured = [k for k in values if not k.startswith((TIME, 'train/'))]
  results = {
    k: metric
    for k in [*measured, 'train/loss']
    if k in values and not (metric := declared(k, evals)).detail
  }
  width = max(map(len, results), default=0)
  lines = [
    '',
    f'Done: {status["step"]:,} steps; this command took {seconds:.0f} s.',
    '',
  ]
  for key, metric in results.items():
    text = f'{metric.text(values[key]):>9}'
    if metric.std and key + metric.std in values:
      text += f' ± {metric.text(values[key + metric.std])}'
    lines.append(f'  {key:<{width}} {text}')
  python = _program('python')
  lines += [
    '',
    f'In {workdir}: metrics.jsonl, config.json, status.json, checkpoints/.',
    *_checkpoints(status),
    *(
      [f'Stopped early: {status["stopped_early"]}'] if 'stopped_early' in status else []
    ),
  ]
  bad = workdir / 'bad_images.jsonl'
  if bad.exists():
    lines.append(f'{len(bad_images.read_log(bad))} images could not be read: {bad}')
  lines += [
    'Next:',
    f'  {python} -m vit_jax.tools.predict {workdir} IMAGE_OR_FOLDER   # names',
    f'  {_program("tensorboard")} --logdir {workdir.parent}   # curves',
    f'  {python} -m vit_jax.main --config=configs/folder.py:data=FOLDER   # your images',
  ]
  return '\n'.join(lines)


def _checkpoints(status: dict) -> list[str]:
  steps = {'newest': status.get('last_good_step'), 'best': status.get('best_step')}
  named = [f'{name} step {step}' for name, step in steps.items() if step is not None]
  return [f'Checkpoints: {", ".join(named)}.'] if named else []


def _program(name: str) -> str:
  """Returns how to call a program of this environment from this folder."""
  ours = Path(sys.executable).with_name(name)
  activated = shutil.which(name) == str(ours) or not ours.exists()
  return name if activated else os.path.relpath(ours)


def parameter_table(params: dict, trained: dict) -> str:
  """Returns the number of parameters by top-level module, in all, and of those trained."""
  count = lambda tree: sum(math.prod(x.shape) for x in jax.tree.leaves(tree))
  rows = {key: count(subtree) for key, subtree in params.items()}
  rows |= {'total': count(params), 'trained': count(trained)}
  return '\n'.join(['Parameters:', *(f'  {k:<16} {n:>14,}' for k, n in rows.items())])
