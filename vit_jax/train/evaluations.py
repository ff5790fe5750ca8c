"""When a run is evaluated, on which data, and when it stops early."""

import dataclasses
import math
from pathlib import Path

import numpy as np

from vit_jax import contracts, distributed, evaluators, files, tasks
from vit_jax.check import prefix_errors
from vit_jax.errors import Preempted, UserError
from vit_jax.evaluators import class_match, predictions
from vit_jax.train import metrics
from vit_jax.train.step import State


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """One entry of the config's section `evals`."""

  evaluator: contracts.Evaluator
  every: int | None  # period in steps; None: only at the end
  use_ema: bool  # whether to evaluate the average of the parameters

  def is_due(self, step: int, total_steps: int) -> bool:
    """Whether the evaluation runs after this many steps."""
    at_period = bool(self.every) and step % self.every == 0
    return step > 0 and (step == total_steps or at_period)

  def run(self, task, state: State) -> dict:
    """Evaluates a state; returns {name of a metric: number}."""
    state = state.average() if self.use_ema else state
    return self.evaluator.run(task.predict, state.variables())


def build(config: dict, workdir: Path, mesh, stop) -> dict[str, Evaluation]:
  """Returns {name: evaluation} of a config, and opens the data of each.

  Args:
    stop: a `process.StopSignal`, which is polled before every batch.
  """

  def check_stop():
    if stop.should_stop():
      raise Preempted('Stopped during an evaluation.')

  evaluations, num_classes, model = {}, config['model']['num_classes'], None
  # Without a classifier, take the number of classes of the data.
  if not tasks.class_of(config).CLASSES:
    num_classes = config['data'].get('num_classes')
  else:
    model = class_match.Classes(class_names(config), num_classes)
  for name, section in config['evals'].items():
    section = dict(section)
    every, use_ema = section.pop('every', None), section.pop('use_ema', False)
    if 'data' in section:
      provided = {'model_classes': num_classes, 'bad_log': workdir / 'bad_images.jsonl'}
      section['data'] = provided | section['data']
    with prefix_errors(f'config.evals.{name}'):
      evaluator = evaluators.build(
        **section, mesh=mesh, check_stop=check_stop, model=model
      )
    evaluations[name] = Evaluation(evaluator, every, use_ema)
  return evaluations


def describe(evaluations: dict[str, Evaluation]) -> list[str]:
  """Returns a line on the data of each evaluation that has one split, and the notes."""
  lines = []
  for name, evaluation in evaluations.items():
    evaluator = evaluation.evaluator
    if evaluator.batches is not None:
      lines.append(f'{name}: {" ".join(evaluator.batches.describe())}')
    if evaluator.note:
      lines.append(f'{name}: {evaluator.note}')
  return lines


def class_names(config: dict) -> list[str] | None:
  """Returns the names of a run's classes, '' for those that its data does not have."""
  names = config['resolved']['class_names']
  if not names:
    return None
  return [*names, *[''] * (config['model']['num_classes'] - len(names))]


def check_sizes(config: dict, evaluations: dict[str, Evaluation], any_size: bool):
  """Raises UserError if an evaluation's images have another shape than in training.

  Another size is allowed if the model takes images of any size.
  """
  trained = config['resolved']['image_shape']
  for name, evaluation in evaluations.items():
    batches = evaluation.evaluator.batches
    if batches is None:
      continue
    shape = list(batches.spec['image'].shape[1:])
    if shape != trained and not (any_size and shape[-1] == trained[-1]):
      raise UserError(
        f'config.evals.{name}.data.pp gives images {shape}, but config.data.pp gives '
        f'{trained}: this model takes only one shape.'
      )


def write_predictions(workdir: Path, name: str, step: int, answers: dict | None):
  """Replaces an evaluation's part of predictions.npz. Only the first process writes.

  Args:
    answers: the evaluator's `predictions`; None if the evaluator does not store them.
  """
  if answers is None or not distributed.is_first():
    return
  try:
    parts = predictions.read(workdir)
  except UserError:  # A damaged file is written anew.
    parts = {}
  parts[name] = {'step': np.int64(step), **answers}
  files.replace(workdir / predictions.FILE, predictions.pack(parts))


def stop_reason(config: dict, rows: list[dict]) -> str:
  """Returns why a run with these rows stops early, or '' if it goes on.

  The decision at a step depends only on the rows up to that step, so that an interrupted run
  stops at the same step as one without interruption.
  """
  key, patience = (config['checkpoint'].get(k) for k in ('best', 'patience'))
  if patience is None:
    return ''
  sign = 1 if metrics.larger_is_better(key, config['evals']) else -1
  best, at, since = -math.inf, None, 0
  for row in rows:
    if key not in row:
      continue
    if sign * row[key] > best:  # false for NaN
      best, at, since = sign * row[key], row['step'], 0
    else:
      since += 1
  if since < patience:
    return ''
  where = 'was never a number' if at is None else f'was best at step {at}'
  return f'{key} {where}; {since} evaluations since were no better.'
