"""When a run is evaluated, by what, and which of its parameters."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax import distributed, evaluators, files
from vit_jax.errors import Preempted, UserError
from vit_jax.evaluators import class_match, predictions
from vit_jax.train.state import State


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """One entry of the config's section `evals`."""

  evaluator: Any  # see vit_jax.evaluators
  every: int | None  # steps; None: at the end only
  use_ema: bool  # evaluates the average of the parameters

  def is_due(self, step: int, total_steps: int) -> bool:
    """Returns whether it follows this many steps."""
    at_period = bool(self.every) and step % self.every == 0
    return step > 0 and (step == total_steps or at_period)

  def times_due(self, total_steps: int, step: int) -> int:
    """Returns how many evaluations of a run are still to come after `step` steps."""
    if step >= total_steps:
      return 0
    if not self.every:
      return 1
    # The last step counts too, where it does not end a period.
    return -(-total_steps // self.every) - step // self.every

  def run(self, task, state: State) -> dict:
    """Returns {name: number}."""
    state = state.average() if self.use_ema else state
    return self.evaluator.run(task.predict, state.variables())


def build(config: dict, workdir: Path, mesh, stop) -> dict[str, Evaluation]:
  """Returns the evaluations of a config by name, their data open.

  Args:
    stop: asked before every batch, see `preemption.StopSignal`.
  """

  def check_stop():
    if stop.should_stop():
      raise Preempted('Stopped during an evaluation.')

  evaluations, num_classes = {}, config['model']['num_classes']
  model = None
  if num_classes is not None:
    model = class_match.Classes(class_names(config), num_classes)
  if num_classes is None:  # no head: it is the data's
    num_classes = config['data'].get('num_classes')
  for name, section in config['evals'].items():
    section = dict(section)
    every, use_ema = section.pop('every', None), section.pop('use_ema', False)
    if 'data' in section:
      given = {'model_classes': num_classes, 'bad_log': workdir / 'bad_images.jsonl'}
      section['data'] = given | section['data']
    evaluator = evaluators.build(
      **section, mesh=mesh, check_stop=check_stop, model=model
    )
    evaluations[name] = Evaluation(evaluator, every, use_ema)
    if hasattr(evaluator, 'batches'):
      print(f'  {name}:', *evaluator.batches.describe(), flush=True)
      if note := getattr(evaluator, 'note', ''):
        print(f'  {name}: {note}', flush=True)
  return evaluations


def class_names(config: dict) -> list[str] | None:
  """Returns the names of a run's classes, '' for those that its data does not have."""
  names = config['resolved']['class_names']
  if not names:
    return None
  return [*names, *[''] * (config['model']['num_classes'] - len(names))]


def check_sizes(config: dict, evaluations: dict[str, Evaluation], any_size: bool):
  """Refuses evaluations on images that the model does not take.

  Args:
    any_size: whether it takes those of another size than it is trained on.

  Raises:
    UserError: for images of another size, or another number of channels.
  """
  ours = config['resolved']['image_shape']
  for name in config['evals']:
    if 'data' not in config['evals'][name]:
      continue
    its = list(evaluations[name].evaluator.batches.spec['image'].shape[1:])
    if its != ours and not (any_size and its[-1] == ours[-1]):
      raise UserError(
        f'config.evals.{name}.data.pp gives images {its}, config.data.pp {ours}: this '
        'model takes one shape only.'
      )


def write_predictions(workdir: Path, name: str, step: int, found: dict | None) -> None:
  """Replaces an evaluation's part of predictions.npz; see `evaluators.predictions`.

  Of several processes only the first writes.

  Args:
    name: of the evaluation.
    step: the training step.
    found: its evaluator's `predictions`; None if it keeps none.

  Raises: OSError.
  """
  if found is None or not distributed.is_first():
    return
  try:
    known = predictions.read(workdir)
  except UserError:  # damaged: written anew
    known = {}
  known[name] = {'step': np.int64(step), **found}
  files.replace(workdir / predictions.FILE, predictions.pack(known))
