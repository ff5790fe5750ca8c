"""Tasks: the objectives of recipes, which share one train loop. See `contracts.Task`."""

from vit_jax.models.base import OUTPUTS
from vit_jax.registry import Registry

TASKS = Registry(
  'task',
  {
    'classify': 'vit_jax.tasks.classify:Classify',
    'distill': 'vit_jax.tasks.distill:Distill',
    'distill_features': 'vit_jax.tasks.distill:DistillFeatures',
  },
)

DEFAULT = 'classify'

# The recipes for a user's own data, by the outputs of the model.
RECIPES = {
  'classes': 'finetune',
  'boxes': 'detect:task=detect',
  'regions': 'detect',
  'pixels': 'linear_seg',
}


def build(name: str, model, spec: dict, **options):
  """Builds the task with this name.

  Args:
    spec: {feature: ShapeDtypeStruct} of the batches, see `data.pipeline.Batches.spec`.
    **options: the other keys of the config's section.

  Raises:
    ValueError: if the batches or the model lack something that the task needs.
  """
  check_outputs(name, type(model.untuned).__name__, model.family)
  return TASKS[name](model, spec, **options)


def check_outputs(name: str, model: str, family) -> None:
  """Raises ValueError if the task `name` cannot train a model of this family.

  Args:
    model: the name of the model, for the message.
  """
  expected, outputs = TASKS[name].OUTPUTS, family.outputs
  if expected != outputs:
    recipe = f': --config={RECIPES[outputs]}' if outputs in RECIPES else ''
    raise ValueError(
      f'{name} trains models that give {OUTPUTS[expected]}; {model} gives '
      f'{OUTPUTS[outputs]}{recipe}'
    )


def class_of(config: dict) -> type:
  """Returns the class of a config's task, with the attributes of `contracts.Task`.

  A tool may not know a task that a config file registered. It then treats the run as that
  of a classifier.
  """
  name = config.get('task', {}).get('name', DEFAULT)
  return TASKS[name if name in TASKS else DEFAULT]
