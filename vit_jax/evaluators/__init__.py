"""What a run measures: `run(predict, variables) -> {name: number}`.

`predict(variables, batch) -> {name: array}` has 'logits' [B, K] and named features; it is
pure and not jitted. An evaluator opens its data when it is built, so that mistakes end
the run before training, jits its own step once, and is exact: padding and broken
images are masked, sums and counts come back from the device, the host divides.

An evaluator may keep what the model answered for each example in its attribute
`predictions`, which a run writes to its folder: see the module `predictions`.

One that compares classes of its data with the model's takes these as a third argument,
`model`; what it did, in a sentence, is then its attribute `note`.

Its class declares how its numbers are read: METRICS, {regex of names: `Metric`}; and by
TASK the name of the one task whose `predict` it can read, where that is so.
"""

import inspect
from collections.abc import Callable

from jax.sharding import Mesh

from vit_jax.errors import UserError
from vit_jax.evaluators.class_match import Classes
from vit_jax.evaluators.metric import Metric, find
from vit_jax.registry import Registry

EVALUATORS = Registry(
  'evaluator type',
  {
    'classification': 'vit_jax.evaluators.classification:Classification',
    'coco': 'vit_jax.detection.evaluators.coco:Coco',
    'masked_patches': 'vit_jax.lab.masked.evaluator:MaskedPatches',
    'segmentation': 'vit_jax.detection.evaluators.segmentation:Segmentation',
    'fewshot': 'vit_jax.evaluators.fewshot:FewShot',
    'knn': 'vit_jax.evaluators.knn:KNN',
    'linear_probe': 'vit_jax.evaluators.linear_probe:LinearProbe',
  },
)

# What every task measures.
_TRAIN = {'loss': Metric(larger_is_better=False)}


def build(
  type: str,
  mesh: Mesh,
  check_stop: Callable[[], None] | None = None,
  model: Classes | None = None,
  **section,
):
  """Returns the evaluator of that type.

  Args:
    mesh: over which batches are spread.
    check_stop: called before every batch; raises to leave (`errors.Preempted`).
    model: the classes of the model, for evaluators that compare them with the data's.
    **section: the rest of its config section, without `every`.

  Raises:
    UserError: for an unknown type, option value, or data that is not there.
  """
  evaluator, given = EVALUATORS[type], [mesh, check_stop or (lambda: None)]
  if 'model' in inspect.signature(evaluator).parameters:
    given.append(model)
  return evaluator(*given, **section)


def check_task(name: str, type: str, task: str) -> None:
  """Raises UserError for an evaluator that does not read what a task predicts.

  Args:
    name: of the evaluation.
  """
  needed = getattr(EVALUATORS[type], 'TASK', task)
  if needed != task:
    fit = [key for key in EVALUATORS if getattr(EVALUATORS[key], 'TASK', task) == task]
    raise UserError(
      f'config.evals.{name}.type={type} is for config.task.name={needed}; with {task} '
      f'use one of {fit}.'
    )


def metrics(type: str) -> dict[str, Metric]:
  """Returns how the numbers of that type of evaluator are read, by regex of names."""
  return EVALUATORS[type].METRICS


def declarations(source: str, evals: dict) -> dict[str, Metric]:
  """Returns the metrics, by regex, of the numbers 'SOURCE/...'; {} of an unknown source.

  Args:
    source: the name of an evaluation, or 'train'.
    evals: the config's section.
  """
  if source in evals:
    return metrics(evals[source]['type'])
  return _TRAIN if source == 'train' else {}


def declared(key: str, evals: dict) -> Metric:
  """Returns how a number such as 'test/top1' is read; as a plain number by default."""
  source, _, name = key.partition('/')
  return find(declarations(source, evals), name)
