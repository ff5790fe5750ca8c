"""Runs a config: trains and evaluates a model, and resumes where a run stopped.

`train` is the table of contents: data, `trainer.Trainer`, checkpoints, `loop`. `step` is
the mathematics of one step, `schema` the config.
"""

import contextlib
import os
from pathlib import Path

import jax
import numpy as np

from vit_jax import config as config_lib
from vit_jax import (
  distributed,
  kernels,
  losses,
  models,
  sharding,
  tasks,
  trees,
  weights,
)
from vit_jax.check import prefix_errors
from vit_jax.checkpoint import checkpoints
from vit_jax.data import pipeline
from vit_jax.errors import UserError
from vit_jax.evaluators import predictions
from vit_jax.kernels import verify
from vit_jax.tasks.distill import TEACHER
from vit_jax.train import (
  evaluations,
  loggers,
  metrics,
  progress,
  resume,
  runtime,
  schema,
  status,
  teacher,
)
from vit_jax.train import workdir as folder
from vit_jax.train.loop import Loop
from vit_jax.train.process import StopSignal
from vit_jax.train.trainer import Trainer
from vit_jax.weights import pipelines


def train(
  config: dict, workdir: str | os.PathLike, command: str | None = None
) -> tuple[dict, list[dict]]:
  """Runs a config in a folder. If the folder holds a run, continues it.

  Args:
    config: nested plain dicts, see `config.load`.
    workdir: a folder or gs://BUCKET/PATH, created if missing. It holds one run at a time.
    command: the command line, which is recorded.

  Returns:
    (status, rows): the values of status.json, with the step and the fingerprint of the
    final train state, and the rows of metrics.jsonl.

  Raises:
    RunError: its subclasses say why and carry the exit code.
  """
  config = schema.check(config)
  with contextlib.ExitStack() as stack:
    enter = stack.enter_context
    # Enter this first, so that a signal from here on does not leave an empty folder.
    stop = enter(StopSignal())
    workdir = enter(folder.session(workdir, stop))
    _check_files(workdir)
    enter(folder.noise_to_log(workdir))
    mesh = sharding.make_mesh(**config['mesh'])
    enter(jax.set_mesh(mesh))

    older = resume.read_older(workdir)
    config, header, notes = _complete(config, older)
    data = _open_data(config, workdir, mesh)
    config = teacher.complete(_resolve(config, data), older)
    saved = enter(_open_checkpoints(config, workdir))
    if older:
      resume.refuse_changes(config, older, workdir)
      if results := status.read_finished(workdir, config, saved):
        print(status.already_finished(workdir, config, results[0]), flush=True)
        return results
    evals = evaluations.build(config, workdir, mesh, stop)
    _print_data(data, evals, notes)

    trainer = Trainer(config, data.spec, mesh, data.finish_on_device)
    any_size = trainer.family.any_size(trainer.model.fields())
    evaluations.check_sizes(config, evals, any_size)
    abstract = trainer.abstract_state
    initial = _read_weights(header, trainer, config) | teacher.read(trainer, config)
    if older:
      saved.check_structure(abstract, initial)
    # Up to here, an error leaves the files of an older run as they were.
    enter(status.record_failure(workdir, saved))
    # Enter this again, so that `record_failure` records the error that the user sees.
    enter(folder.explain_errors(workdir))
    metrics.write_json(workdir / 'config.json', config)
    params = trainer.abstract_params
    print(progress.parameter_table(params, abstract.params), flush=True)
    fused = _choose_kernels(config, workdir if older else None, trainer)
    enter(kernels.using(*fused['used']))
    step = trainer.compile()
    if older:
      state, _ = saved.restore(abstract, initial)
      print(f'Resuming from step {int(state.step)}.', flush=True)
    else:
      state = trainer.init(initial)
    temp_bytes = runtime.memory(step)['temp_bytes']
    status.record_start(
      workdir, int(state.step), command, params, abstract.params, temp_bytes, fused
    )
    del header, initial  # The state has a copy of its own.
    mfu = trainer.utilisation()
    loop = Loop(config, workdir, state, trainer.task, saved, evals, stop, mfu)
    stack.callback(loop.record.close)
    batches = enter(contextlib.closing(data.iterate(loop.step)))
    return loop.run(step, sharding.prefetch(batches, mesh))


def _complete(
  config: dict, older: dict | None
) -> tuple[dict, weights.Header | None, list[str]]:
  """Fills in the model and the preprocessing that a config takes from its weights.

  Args:
    older: the config of the run that is resumed. It already has the model and the
      preprocessing of the weights, so the files of weights need not exist any more.

  Returns:
    (config, header of the weights that a new run starts from, lines on the preprocessing).
  """
  if older:
    return resume.complete(config, older), None, []
  if not config['weights']:
    config, _ = pipelines.fill(config, None)
    return config, None, []
  header = weights.from_section(**config['weights'])
  section = config['model'] if 'name' in config['model'] else {}
  if not section:
    with prefix_errors('config.weights.source'):
      family = models.family(header.family, **header.fields)
      tasks.check_outputs(config['task']['name'], header.source, family)
  inferred, task, tokens = weights.complete(section, header), config['task'], ''
  if 'text' in tasks.TASKS.signature(config['task']['name']).parameters:
    header = header.read()
  if getattr(header, 'text', None) is not None:
    # The head of an image tower is a projection, not a classifier.
    inferred = {'num_classes': header.fields.get('num_classes'), **inferred}
    with prefix_errors('config.weights.source'):
      task, tokens = weights.complete_task(task, header)
  config = schema.fill_model(config, inferred)
  config['resolved']['of_task'] = [key for key in task if key not in config['task']]
  config['task'] = task
  pixels = pipelines.find(header)
  pixels = '|'.join(filter(None, (pixels, tokens))) or None
  classifies = tasks.class_of(config).OUTPUTS == 'classes'
  config, notes = pipelines.fill(config, pixels, compare_crops=classifies)
  config['resolved']['pixels'] = pixels
  return config, header, notes


def _choose_kernels(config: dict, workdir: Path | None, trainer: Trainer) -> dict:
  """Returns the fused kernels to use and their record, see `status.record_start`.

  A run that resumes on devices of the same kind takes the kernels of its last start. A new
  choice by measured time may be another one, and would change the last bits of its numbers.
  """
  last = status.read_starts(workdir)[-1:] if workdir else []
  if config['kernels'] == 'auto' and last:
    device = jax.devices()[0].device_kind
    if last[0].get('device') == device and 'kernels' in last[0]:
      return last[0]['kernels']
  trace = lambda: jax.eval_shape(trainer.step, trainer.abstract_state, trainer.spec)
  used, verified = verify.choose(config['kernels'], trace)
  return {'used': list(used), 'verified': verified}


def _check_files(workdir: Path) -> None:
  """Raises UserError if a folder, pipe or device has the name of one of a run's files."""
  names = ('config.json', 'status.json', 'metrics.jsonl', 'bad_images.jsonl')
  names += (status.STARTS, predictions.FILE, loggers.IDS, folder.LOG_FILE)
  for name in (*names, 'checkpoints'):
    path = workdir / name
    right = path.is_dir() if name == 'checkpoints' else path.is_file()
    if path.exists() and not right:
      raise UserError(
        f'{path} is not what a run writes under this name: move it away, or use another '
        '--workdir.'
      )


def _open_data(config: dict, workdir: Path, mesh) -> pipeline.Batches:
  """Opens the training data, and checks that it is the same for all processes."""
  section, model = config['data'], config['model']
  schema.check_batch_size(config, mesh)
  classes = model.get('num_classes') if tasks.class_of(config).CLASSES else None
  data = pipeline.TrainBatches(
    **{'num_classes': classes, **section},
    seed=config['seed'],
    bad_log=workdir / 'bad_images.jsonl',
    **sharding.host_of_batch(mesh),
  )
  # If hosts had other files, or the same files in another order, each would take its share of
  # a different data set. Installed packages matter too: they decide which files are images.
  digits = int(data.fingerprint[:7], 16)
  if not distributed.agree(distributed.broadcast_first(digits) == digits):
    raise UserError(
      f'{data.source.name} is not the same for all processes: process '
      f'{jax.process_index()} has {data.num_examples:,} examples, fingerprint '
      f'{data.fingerprint}. Give all of them the same files and packages.'
    )
  return data


def _resolve(config: dict, data: pipeline.Batches) -> dict:
  """Returns the config with the classes, steps and image shape that the data determines."""
  # Without classes there is no head, or a projection.
  num_classes, names = config['model'].get('num_classes'), data.class_names
  feature, task = tasks.class_of(config).CLASSES, config['task']
  # A teacher gives its classes to images without labels.
  if feature and ('teacher' not in task or feature in data.source.features):
    of_data, names = data.classes_of(feature)
    num_classes = config['model'].get('num_classes', of_data)
    if num_classes is None:
      raise UserError(
        f'Set config.model.num_classes, which {config["data"]["source"]!r} does not give.'
      )
    if num_classes < of_data:
      raise UserError(
        f'config.model.num_classes={num_classes} is less than the {of_data} classes of '
        f'the data (feature {feature!r}, config.data.num_classes).'
      )
  if isinstance(how := task.get('class_weights'), str):
    if data.source.labels is None:
      raise UserError(
        f'config.task.class_weights={how!r} needs one label per image, known without '
        f'reading images: {data.source.name} has none.'
      )
    counts = np.bincount(data.source.labels, minlength=num_classes)
    task = {**task, 'class_weights': losses.class_weights(how, counts)}
  total = config_lib.total_steps(config, data.num_examples, data.batch_size)
  return {
    **schema.convert_periods(config, total),
    'task': task,
    'model': {**config['model'], 'num_classes': num_classes},
    'resolved': {
      **config.get('resolved', {}),
      'total_steps': total,
      'num_examples': data.num_examples,
      'fingerprint': data.fingerprint,
      'class_names': names,
      'image_shape': list(data.spec['image'].shape[-3:]),
    },
  }


def _print_data(data: pipeline.Batches, evals: dict, notes: list[str]) -> None:
  lines = [f'train: {line}' for line in data.describe()]
  lines += [*evaluations.describe(evals), *notes]
  print('Data:', *lines, sep='\n  ', flush=True)


def _open_checkpoints(config: dict, workdir: Path) -> checkpoints.Checkpoints:
  """Opens the checkpoints of a run's folder with the options of `config.checkpoint`."""
  section, options = config['checkpoint'], {}
  if best := section.get('best'):
    options['larger_is_better'] = metrics.larger_is_better(best, config['evals'])
  section = {k: v for k, v in section.items() if k != 'patience'}
  return checkpoints.Checkpoints(workdir / 'checkpoints', **section, **options)


def _read_weights(header, trainer, config) -> dict:
  """Returns {name: array} of the variables that a run takes from its weights.

  Args:
    header: the header of the weights that the run starts from; None if it starts from
      none, or if it resumes. A resumed run opens its weights again if some parameters are
      frozen, because checkpoints do not hold these.

  Raises:
    UserError: for frozen parameters that the weights do not provide.
  """
  frozen = trees.flatten(trainer.abstract_state.frozen)
  names = [name for name in frozen if not name.startswith(TEACHER)]
  if names and header is None and config['weights']:
    with prefix_errors('config.weights.source'):
      header = weights.from_section(**config['weights'])
  initial = {}
  if header:
    *size, channels = config['resolved']['image_shape']
    if channels != header.channels:
      raise UserError(
        f'{header.source} takes {header.channels}-channel images, but config.data.pp '
        f"gives {channels}: begin it with 'decode({header.channels})', or add "
        f'channels={header.channels} to a recipe that has this argument.'
      )
    params = trees.flatten(trainer.abstract_params)
    own = {
      name: x.shape
      for name, x in params.items()
      if name.partition('/')[0] == trainer.task.OWN and not name.startswith(TEACHER)
    }
    initial, report = weights.fit_section(
      header, config['weights'], trainer.model, tuple(size), own
    )
    print(report, flush=True)
  if missing := [name for name in names if name not in initial]:
    raise UserError(
      f'config.tune freezes {missing[0]} (one of {len(missing)}), for which there are no '
      'weights: train it, or set config.weights.source to weights that have it.'
    )
  return initial
