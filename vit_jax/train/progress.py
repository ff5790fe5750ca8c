"""The record of a run as it goes, on disk and on the screen: rows, a bar, a summary."""

import os
import shutil
import sys
import time
from pathlib import Path

import tqdm

from vit_jax import distributed, tasks
from vit_jax.data import bad_images
from vit_jax.evaluators import declared
from vit_jax.train import loggers, metrics
from vit_jax.train.metrics import TIME, last_values
from vit_jax.train.status import count
from vit_jax.train.workdir import LOG_FILE


class Record(metrics.Metrics):
  """Writes and shows the numbers of a run: a bar on a terminal, else plain lines.

  Attributes:
    log: the config's section `log`.
  """

  def __init__(self, config: dict, workdir: Path, step: int):
    self._total = config['resolved']['total_steps']
    self._batch_size, self._evals = config['data']['batch_size'], config['evals']
    self.log = metrics.Log(**config['log'])
    sections = {'wandb': self.log.wandb, 'mlflow': self.log.mlflow}
    services = loggers.Loggers(sections, workdir, config)
    super().__init__(workdir, step, self.log.tensorboard, services)
    if step >= self.log.every and not self.rows:
      distributed.say(f'{workdir}/metrics.jsonl holds no rows up to step {step}.')
    self._row = step, time.perf_counter()  # the newest one: its step, and when
    self._bar = tqdm.tqdm(
      total=self._total,
      initial=step,
      unit='step',
      leave=False,
      dynamic_ncols=True,
      disable=None,  # where standard error is not a terminal
    )

  def close(self) -> None:
    self._bar.close()
    super().close()

  def pause(self, seconds: float) -> None:
    """Excludes time spent outside of steps from `time/images_per_s`."""
    self._row = self._row[0], self._row[1] + seconds

  def train(self, step: int, values: dict) -> None:
    """Records the metrics of a train step, if it is one that `config.log` asks for."""
    self._bar.update(step - self._bar.n)
    if step % self.log.every and step != self._total:
      return
    row = {f'train/{key}': float(value) for key, value in values.items()}
    before, start = self._row
    per_step = max(time.perf_counter() - start, 1e-9) / max(step - before, 1)
    speed = self._batch_size / per_step
    self.write(step, {**row, f'{TIME}images_per_s': speed})
    self._row = step, time.perf_counter()  # not the time of writing
    text = f'loss {row["train/loss"]:.4f}  {speed:,.0f} images/s'
    self._bar.set_postfix_str(text, refresh=False)
    if self._bar.disable:
      left = tqdm.tqdm.format_interval(per_step * (self._total - step))
      print(f'step {step}/{self._total}  {text}  {left} left', flush=True)

  def evaluation(self, step: int, name: str, values: dict) -> None:
    """Records the numbers of an evaluation."""
    row = {f'{name}/{key}': value for key, value in values.items()}
    self.write(step, row)
    tqdm.tqdm.write(f'step {step}  {shown(row, self._evals)}')
    sys.stdout.flush()

  def lacks(self, step: int, name: str) -> bool:
    """Whether no numbers of an evaluation are recorded for a step."""
    return not any(key.startswith(f'{name}/') for key in self.at(step))

  def at(self, step: int) -> dict[str, float]:
    """Returns all numbers of a step."""
    return last_values([row for row in self.rows if row['step'] == step])


def shown(values: dict, evals: dict) -> str:
  """Returns 'test/top1 98.11%  test/examples 360' for a row, by the config's `evals`."""
  return '  '.join(f'{k} {declared(k, evals).text(v)}' for k, v in values.items())


def parameter_table(params: dict, trained: dict) -> str:
  """Returns the number of parameters by top-level module, in all, and trained."""
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
) -> str:
  """Returns the end of a run as text: results, where they are, next commands.

  Args:
    page: the address of the run's page, if one was written.
  """
  values, evals = last_values(rows), config.get('evals', {})
  measured = [k for k in values if not k.startswith((TIME, 'train/'))]
  measured += ['train/loss'] * ('train/loss' in values)
  results = {k: m for k in measured if not (m := declared(k, evals)).detail}
  width = max(map(len, results), default=0)
  lines = ['', f'Done: {status["step"]:,} steps in {seconds:.0f} s.', '']
  for key, metric in results.items():
    text = f'{metric.text(values[key]):>9}'
    if metric.std and key + metric.std in values:
      text += f' ± {metric.text(values[key + metric.std])}'
    lines.append(f'  {key:<{width}} {text}')
  lines += ['', f'In {workdir}: metrics.jsonl, config.json, status.json, checkpoints/.']
  if (log := workdir / LOG_FILE).exists():
    lines.append(f'Messages of libraries: {log}')
  newest, best = status.get('last_good_step'), status.get('best_step')
  if newest is not None:
    text = f', best step {best}' if best is not None else ''
    lines.append(f'Checkpoints: newest step {newest}{text}.')
  if 'stopped_early' in status:
    lines.append(f'Stopped early: {status["stopped_early"]}')
  if (bad := workdir / 'bad_images.jsonl').exists():
    lines.append(
      f'Images that could not be read: {len(bad_images.read_log(bad))}, {bad}'
    )
  weights = f'{workdir}@best' if best not in (None, newest) else f'{workdir}'
  ours, uses = _program('vit_jax'), []
  if not tasks.classifies(config):
    uses = [f'train --config=finetune:weights={weights},data=FOLDER   # a head']
  elif tasks.outputs(config) == 'classes':
    uses = [f'predict {weights} IMAGE_OR_FOLDER   # names']
  if config.get('data', {}).get('source') == 'digits':  # a first run, of our own data
    uses.append('train --config=folder:data=FOLDER   # your images')
  lines += ['Next:', *(f'  {ours} {use}' for use in uses)]
  lines.append(f'  {_program("tensorboard")} --logdir {workdir.parent}   # curves')
  if page:
    lines.append(f'The run on a page: {page}')
  return '\n'.join(lines)


def _program(name: str) -> str:
  """Returns how to call a program of this environment from this folder."""
  ours = Path(sys.executable).with_name(name)
  if not ours.exists() and not shutil.which(name):  # vit_jax, run without an install
    return f'{_program("python")} -m {name}'
  activated = shutil.which(name) == str(ours) or not ours.exists()
  return name if activated else os.path.relpath(ours)
