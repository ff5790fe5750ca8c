"""Objectives: where recipes differ, under one train loop. See `contracts.Task`."""

from vit_jax.models.base import OUTPUTS
from vit_jax.registry import Registry

TASKS = Registry(
  'task',
  {
    'classify': 'vit_jax.tasks.classify:Classify',
  },
)

DEFAULT = 'classify'


def build(name: str, model, spec: dict, **options):
  """Returns the task of that name.

  Args:
    model: a Linen module.
    spec: {feature: ShapeDtypeStruct} of the batches, see `data.pipeline.Batches.spec`.
    **options: the rest of the config's section.

  Raises:
    ValueError: for batches or a model that lack something that the task needs.
  """
  check_outputs(name, type(model.untuned).__name__, model.family)
  return TASKS[name](model, spec, **options)


def check_outputs(name: str, model: str, family) -> None:
  """Raises ValueError for a model whose outputs a task does not train.

  Args:
    model: its name in the message.
    family: its `models.base.Family`.
  """
  expected = TASKS[name].OUTPUTS
  if expected != family.outputs:
    raise ValueError(
      f'{name} trains models that give {OUTPUTS[expected]}; {model} gives '
      f'{OUTPUTS[family.outputs]}'
    )


def class_of(config: dict) -> type:
  """Returns the task's class, whose attributes are those of `contracts.Task`.

  A tool may not know a task that a config file registered: it reads its run as that of a
  classifier.
  """
  name = config.get('task', {}).get('name', DEFAULT)
  return TASKS[name if name in TASKS else DEFAULT]
