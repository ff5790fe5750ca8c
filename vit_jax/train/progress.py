"""What a run shows a person: its parameters, values as they come, the end."""

import os
import shutil
import sys
from pathlib import Path

from vit_jax import tasks
from vit_jax.data import bad_images
from vit_jax.evaluators import declared
from vit_jax.train import environment
from vit_jax.train.folder import LOG_FILE
from vit_jax.train.metrics import TIME
from vit_jax.train.rows import last_values


def shown(values: dict, evals: dict) -> str:
  """Returns 'test/top1 98.11%  test/examples 360' for a row's values.

  Args:
    evals: the config's section, which knows how its numbers are read.
  """
  return '  '.join(f'{k} {declared(k, evals).text(v)}' for k, v in values.items())


def summary(
  rows: list[dict],
  status: dict,
  config: dict,
  workdir: Path,
  seconds: float,
  page: str | None = None,
) -> str:
  """Returns the end of a run for a person: results, where they are, what is next.

  Args:
    config: of the run.
    page: the address of the run's page, if one was written.
  """
  values, evals = last_values(rows), config.get('evals', {})
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
  ours, log = _program('vit_jax'), workdir / LOG_FILE
  lines += [
    '',
    f'In {workdir}: metrics.jsonl, config.json, status.json, checkpoints/.',
    *([f'What libraries had to say: {log}'] if log.exists() else []),
    *_checkpoints(status),
    *(
      [f'Stopped early: {status["stopped_early"]}'] if 'stopped_early' in status else []
    ),
  ]
  bad = workdir / 'bad_images.jsonl'
  if bad.exists():
    count = len(bad_images.read_log(bad))
    lines.append(f'{count} image{"s" * (count != 1)} could not be read: {bad}')
  lines += [
    'Next:',
    *(f'  {ours} {use}' for use in _uses(f'{workdir}{_best(status)}', config)),
    f'  {_program("tensorboard")} --logdir {workdir.parent}   # curves',
  ]
  if (
    config.get('data', {}).get('source') == 'digits'
  ):  # the first run, of those who have images of their own
    lines.append(f'  {ours} train --config=folder:data=FOLDER   # your images')
  if page:
    lines.append(f'The run on a page: {page}')
  return '\n'.join(lines)


def _uses(weights: str, config: dict) -> list[str]:
  """Returns the commands that do something with the weights of a run."""
  if not tasks.classifies(config):
    return [f'train --config=finetune:weights={weights},data=FOLDER   # a head']
  if tasks.outputs(config) != 'classes':
    return []
  return [f'predict {weights} IMAGE_OR_FOLDER   # names']


def _checkpoints(status: dict) -> list[str]:
  steps = {'newest': status.get('last_good_step'), 'best': status.get('best_step')}
  named = [f'{name} step {step}' for name, step in steps.items() if step is not None]
  return [f'Checkpoints: {", ".join(named)}.'] if named else []


def _best(status: dict) -> str:
  """Returns '@best' where that is another step than the newest."""
  best = status.get('best_step')
  return '@best' if best not in (None, status.get('last_good_step')) else ''


def _program(name: str) -> str:
  """Returns how to call a program of this environment from this folder."""
  ours = Path(sys.executable).with_name(name)
  if not ours.exists() and not shutil.which(name):  # vit_jax, run without an install
    return f'{_program("python")} -m {name}'
  activated = shutil.which(name) == str(ours) or not ours.exists()
  return name if activated else os.path.relpath(ours)


def parameter_table(params: dict, trained: dict) -> str:
  """Returns the number of parameters by top-level module, in all, and of those trained."""
  count = environment.count
  rows = {key: count(subtree) for key, subtree in params.items()}
  rows |= {'total': count(params), 'trained': count(trained)}
  return '\n'.join(['Parameters:', *(f'  {k:<16} {n:>14,}' for k, n in rows.items())])
