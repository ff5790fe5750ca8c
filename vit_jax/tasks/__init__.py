"""What a run optimises: the seam at which recipes differ, under one train loop.

A task is made of a model and the spec of the batches, {feature: ShapeDtypeStruct}. It
has `init(rng, spec) -> variables`, `prepare(batch, rng) -> batch` for what concerns the
whole batch (mixing), `loss(variables, batch, rng) -> (scalar, (metrics, batch
statistics))` and `predict(variables, batch) -> {name: array}`. Variables are {'params':
...}, and 'batch_stats' where the model has batch norms. `batch['weight']` [B] sums to 1
over the global batch; losses and metrics are weighted sums, so that they add up over
micro-batches and masked examples count nothing. Its class names the feature of the data
whose CLASSES the model has a head for, or None, and says what the model's OUTPUTS are,
see `models.family.Family`; OWN is the name below which parameters of the task's own stand
beside the model's, or None.
"""

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models.family import OUTPUTS
from vit_jax.registry import Registry

TASKS = Registry(
  'task',
  {
    'classify': 'vit_jax.tasks.classify:Classify',
    'detect': 'vit_jax.detection.tasks.detect:Detect',
    'masked_patches': 'vit_jax.lab.masked.masked_patches:MaskedPatches',
    'segment': 'vit_jax.detection.tasks.segment:Segment',
  },
)

DEFAULT = 'classify'


def build(name: str, model, spec: dict, **options):
  """Returns the task of that name.

  Args:
    model: a Linen module.
    spec: of the batches, see `data.pipeline.Batches.spec`.
    **options: the rest of the config's section.

  Raises:
    UserError: for an unknown name, a bad option, or batches or a model that lack what
      the task needs.
  """
  check_outputs(name, type(models.core(model)).__name__, models.family_of(model))
  return TASKS[name](model, spec, **options)


def check_outputs(name: str, model: str, family) -> None:
  """Raises UserError for a model that does not give what a task trains.

  Args:
    model: how it is called in the message.
    family: its `models.family.Family`.
  """
  wanted = TASKS[name].OUTPUTS
  if wanted != family.outputs:
    raise UserError(
      f'config.task.name={name} trains models that give {OUTPUTS[wanted]}; {model} gives '
      f'{OUTPUTS[family.outputs]}.'
    )


def classifies(config: dict) -> bool:
  """Returns whether a config's task needs a model with a head for the data's classes."""
  return classes(config) is not None


def classes(config: dict) -> str | None:
  """Returns the feature of the data whose classes a config's model has a head for."""
  return TASKS[_name(config)].CLASSES


def outputs(config: dict) -> str:
  """Returns what the model of a config's task returns, see `models.family.Family`."""
  return TASKS[_name(config)].OUTPUTS


def own(config: dict) -> str | None:
  """Returns the name below which parameters are the task's own; None: there are none."""
  return TASKS[_name(config)].OWN


def _name(config: dict) -> str:
  return config.get('task', {}).get('name', DEFAULT)
