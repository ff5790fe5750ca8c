"""The keys of a run's config, and the code that reads each."""

import inspect
import json
from typing import Annotated, Literal

from vit_jax import config as config_lib
from vit_jax import evaluators, kernels, models, optim, sharding, tasks, tune, weights
from vit_jax.check import (
  Count,
  Named,
  Period,
  Section,
  Seed,
  bind,
  check_json,
  check_keys,
  prefix_errors,
)
from vit_jax.checkpoint import checkpoints
from vit_jax.data import pipeline
from vit_jax.errors import UserError, choose, did_you_mean
from vit_jax.train import loggers, metrics
from vit_jax.weights import formats, zoo

# Rules for sections that name an entry of a table, for the checks below.
_MODEL = Named(models, variant=str | None)
_TASK = Named(tasks.TASKS)
_EVALUATION = Named(evaluators.EVALUATORS, 'type', every=Period | None, use_ema=bool)


def check_model(where: str, section: dict, config: dict) -> None:
  """Checks the fields of a model, and of the models within it.

  A section without a name takes that of the weights: published weights are in the zoo by
  their name; others are checked when they are open, with the name filled in.
  """
  entry = zoo.ENTRIES.get((config.get('weights') or {}).get('source', ''))
  named = {'name': entry.model} if entry else {}
  if 'name' in section or entry or not config.get('weights'):
    _MODEL(where, named | section, config)
  for key, value in section.items():
    if isinstance(value, dict):
      check_model(f'{where}.{key}', value, {})


def _check_task(where: str, section: dict, config: dict) -> None:
  _TASK(where, section, config)
  if name := config.get('model', {}).get('name'):
    with prefix_errors(where):
      tasks.check_outputs(section['name'], name, models.family(name))
  options = tasks.TASKS.signature(section['name']).parameters
  if 'parts' in options and config['optim'].get('accum', 1) > 1:
    accum = config['optim']['accum']
    raise UserError(
      f'config.optim.accum={accum}: the loss of {section["name"]} compares all examples of a '
      f'batch, and that of its parts is another one: set {where}.parts={accum} instead.'
    )
  classes = config.get('model', {}).get('num_classes')
  if classes is not None and not tasks.class_of(config).CLASSES:
    raise UserError(
      f'config.model.num_classes={classes}, but {where}.name={section["name"]} trains no '
      'head: leave it out.'
    )


def _check_weights(where: str, section: dict, config: dict) -> None:
  if section:
    bind(where, section, weights.from_section)


def _check_sharding(where: str, rules, config: dict) -> None:
  sharding.resolve_rules(rules)


def _check_evaluation(where: str, section: dict, evals: dict) -> None:
  # A misspelt name of an evaluation adds a new section, which has no type.
  if section.get('type') is None:
    name = where.rpartition('.')[2]
    others = sorted(evals.keys() - {name})
    raise UserError(
      f"{where} lacks 'type'. The other evaluations are {others}."
      f'{did_you_mean(name, others)}'
    )
  _EVALUATION(where, section, evals)


_CHECKPOINT = Section(
  checkpoints.Checkpoints, ('directory', 'larger_is_better'), patience=Count | None
)


def sections(
  *,
  data: Annotated[dict, pipeline.check_train],
  optim: Annotated[dict, Named(optim)],
  model: Annotated[dict, check_model] = {},
  weights: Annotated[dict, _check_weights] = {},
  tune: Annotated[dict, Named(tune.METHODS, 'method')] = {'method': 'full'},
  task: Annotated[dict, _check_task] = {'name': tasks.DEFAULT},
  mesh: Annotated[dict, Section(sharding.make_mesh, provided=('devices',))] = {},
  sharding: Annotated[
    str | list[tuple[str, object]], _check_sharding
  ] = sharding.DEFAULT,
  evals: dict[str, Annotated[dict, _check_evaluation]] = {},
  checkpoint: Annotated[dict, _CHECKPOINT] = {},
  log: Annotated[dict, Section(loggers.Log)] = {},
  kernels: Literal[kernels.MODES] = 'auto',
  seed: Seed = 0,
  max_bad_steps: Count = 10,
  resume_allow: str | list[str] = [],
  steps=None,
  epochs=None,
  examples=None,
) -> None:
  """The sections and keys of a config; each annotation names the code that reads it.

  Args:
    model, weights: without weights, the model is trained from scratch. A model without a name
      is that of the weights.
    mesh, sharding: by default the devices split the batch. Nothing else is split while
      mesh.fsdp is 1.
    kernels: 'auto' uses the fused kernels that are correct and faster on this device, see
      `kernels.verify`.
    max_bad_steps: non-finite steps in a row before the run gives up.
    resume_allow: config keys that may differ from those of the run that is resumed.
    steps, epochs, examples: see `config.total_steps`.
  """


SECTIONS = inspect.signature(sections).parameters
DEFAULTS = {
  k: p.default for k, p in SECTIONS.items() if p.default not in (p.empty, None)
}
# Keys that count steps, in `log`, `checkpoint` and each evaluation.
PERIODS = ('every', 'keep_every')


def check(config: dict) -> dict:
  """Checks every key of a config against the code that reads it; returns it with defaults.

  Opens nothing. A model that the weights will name is left to `check_model`.
  """
  check_keys('config', config, SECTIONS)
  check_json('config', config)
  config_lib.total_steps(config, num_examples=1, batch_size=1)
  config = DEFAULTS | config
  bind('config', config, sections)
  if isinstance(rate := config['optim']['lr'], config_lib.ByMethod):
    rate = rate.others.get(config['tune']['method'], float(rate))
    config['optim'] = {**config['optim'], 'lr': rate}
  evals = config['evals'] = dict(config['evals'])
  for name, section in evals.items():
    where = f'config.evals.{name}'
    evals[name] = _fill_from_training(where, section, config)
    _check_reads(where, section['type'], config['task']['name'])
    if section.get('use_ema') and not optim.keeps_average(config['optim']):
      raise UserError(f'{where}.use_ema needs config.optim.ema or config.optim.swa.')
  if config['data'].get('sampling') and config['task'].get('class_weights'):
    raise UserError(
      'config.data.sampling and config.task.class_weights both make rare classes count more: '
      'keep one.'
    )
  if best := config['checkpoint'].get('best'):
    metrics.larger_is_better(best, evals)
  name = (best or '').partition('/')[0]
  patience = config['checkpoint'].get('patience')
  if patience is not None and evals.get(name, {}).get('every') is None:
    raise UserError(
      'config.checkpoint.patience counts the evaluations of config.checkpoint.best='
      f'{best!r}, which needs config.evals.{name or "NAME"}.every.'
    )
  if isinstance(config['resume_allow'], str):
    config['resume_allow'] = config['resume_allow'].split(',')
  for name in config['resume_allow']:
    choose(f'key config.resume_allow={name}:', name.partition('.')[0], list(SECTIONS))
  return config


def _check_reads(where: str, type: str, task: str) -> None:
  """Raises UserError for an evaluation that cannot read a task's predictions.

  It can read them if the task has the same labels, outputs and parameters as its own task.
  """
  kind = lambda name: (t := tasks.TASKS[name]) and (t.CLASSES, t.OUTPUTS, t.OWN)
  tasks_of = lambda type: evaluators.EVALUATORS[type].TASKS or (task,)
  reads = lambda type: kind(task) in map(kind, tasks_of(type))
  if not reads(type):
    raise UserError(
      f'{where}.type={type} is for config.task.name={" or ".join(tasks_of(type))}; with '
      f'{task} use one of {list(filter(reads, evaluators.EVALUATORS))}.'
    )


def _fill_from_training(where: str, section: dict, config: dict) -> dict:
  """Fills an evaluation's section with the task's loss, unless it sets its own.

  If its data has the same source as training, it also takes `classes` from there.
  """
  task = config['task']
  of_task = tasks.TASKS.signature(task['name']).parameters
  of_evaluator = evaluators.EVALUATORS.signature(section['type']).parameters
  if 'loss' in of_task and 'loss' in of_evaluator:
    section = {'loss': task.get('loss', of_task['loss'].default), **section}
  data, trained = section.get('data', {}), config['data']
  if data.get('source') != trained['source']:
    return section
  ours, theirs = trained.get('classes'), data.get('classes')
  if 'classes' in data and theirs != ours and tasks.class_of(config).CLASSES:
    raise UserError(
      f'{where}.data.classes={theirs} differs from config.data.classes={ours} on the same '
      'source: labels would mean other classes than in training. Leave it out.'
    )
  return {**section, 'data': {'classes': ours, **data}} if ours else section


def fill_model(config: dict, inferred: dict) -> dict:
  """Fills `config['model']` from the weights. Keys that the user set win.

  A part that the user switched off (None), such as `representation_size`, is left out if the
  weights' family has no such field.
  """
  own = config['model']
  if 'name' in inferred:
    fields = models.signature(inferred['name']).parameters
    own = {k: value for k, value in own.items() if value is not None or k in fields}
  model = formats.merge_fields(own, inferred)
  check_model('config.model', model, {})
  new = [key for key, value in model.items() if key not in own or own[key] != value]
  resolved = {**config.get('resolved', {}), 'inferred': new}
  return {**config, 'model': model, 'resolved': resolved}


def write_defaults(config: dict) -> dict:
  """Writes out the defaults of some sections, so that configs can be compared; as JSON."""
  signatures = {
    'optim': optim.signature(config['optim']['name']),
    'task': tasks.TASKS.signature(config['task']['name']),
    'tune': tune.METHODS.signature(config['tune']['method']),
    'data': inspect.signature(pipeline.TrainBatches),
  }
  sections = {
    key: {
      k: p.default for k, p in signature.parameters.items() if p.default is not p.empty
    }
    | config[key]
    for key, signature in signatures.items()
  }
  return json.loads(json.dumps({**config, **sections}))


def check_batch_size(config: dict, mesh) -> None:
  """Raises UserError if the devices cannot share a batch, or a micro-batch, evenly."""
  size = config['data']['batch_size']
  divisor = sharding.batch_divisor(mesh) * config['optim'].get('accum', 1)
  if size % divisor:
    raise UserError(
      f'config.data.batch_size={size} must be a multiple of {divisor}, the product of '
      'mesh.data, mesh.fsdp and optim.accum.'
    )


def convert_periods(config: dict, total_steps: int) -> dict:
  """Converts periods that are fractions of the run to steps."""

  def in_steps(section):
    periods = {k: section[k] for k in PERIODS if type(section.get(k)) is float}
    return section | {k: max(1, round(v * total_steps)) for k, v in periods.items()}

  evals = {key: in_steps(section) for key, section in config['evals'].items()}
  log, checkpoint = in_steps(config['log']), in_steps(config['checkpoint'])
  return {**config, 'log': log, 'checkpoint': checkpoint, 'evals': evals}
