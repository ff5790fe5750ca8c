"""A run: from a config to a trained, evaluated, resumable model.

`train` is the table of contents; `step` is the mathematics of one step, `loop` what
happens around it, `schema` what the config may hold.
"""

import contextlib
import os

import jax

from vit_jax import config as config_lib
from vit_jax import models, optim, pretrained, sharding, tasks, trees, tune
from vit_jax.checkpoint import checkpoints as checkpoint
from vit_jax.data import pipeline
from vit_jax.errors import UserError
from vit_jax.train import evaluations, metrics, progress, schema, status
from vit_jax.train.lock import lock
from vit_jax.train.loop import Loop, prefetch
from vit_jax.train.preemption import StopSignal
from vit_jax.train.runtime import compile_step, retain_freed_memory
from vit_jax.train.start import first_state, from_weights, open_weights
from vit_jax.train.state import init_state
from vit_jax.train.step import make_step


class DataError(UserError):
  """The training data cannot be opened; `main` knows what to try without them."""


def train(config: dict, workdir: str | os.PathLike) -> tuple[dict, list[dict]]:
  """Runs a config in a folder, from where the folder's last run stopped.

  Args:
    config: nested plain dicts, see `config.load`.
    workdir: created if missing; one run at a time.

  Returns:
    (status, rows): what status.json holds, with the step and the fingerprint of the
    final train state, and the rows of metrics.jsonl.

  Raises:
    RunError: its subclasses say why and carry the exit code.
  """
  config = schema.check(config)
  with contextlib.ExitStack() as stack:
    workdir = stack.enter_context(lock(workdir))
    stop = stack.enter_context(StopSignal())
    mesh = sharding.make_mesh(**config['mesh'])
    retain_freed_memory()
    stack.enter_context(jax.set_mesh(mesh))

    data = _open_data(config, workdir, mesh)
    config = _resolve(config, data)
    checkpoints = _open_checkpoints(config, workdir)
    stack.enter_context(contextlib.closing(checkpoints))
    resumes = checkpoints.latest() is not None
    if resumes:
      config = schema.resumed(config, workdir)
      if results := status.of_finished(workdir, config, checkpoints):
        return results
    evals = evaluations.build(config, workdir, mesh, stop)
    source = None
    if config['weights'] and not resumes:  # a run that resumes has its own parameters
      config, source = open_weights(config)
    model = models.build(**config['model'])
    family = models.family(config['model']['name'])
    any_size = family.any_size(pretrained.fields_of(model))
    evaluations.check_sizes(config, evals, any_size)
    task = tasks.build(model=model, spec=data.spec, **config['task'])
    total = config['resolved']['total_steps']
    optimizer = optim.build(**config['optim'], total_steps=total, family=family)
    init_key, step_key = jax.random.split(jax.random.key(config['seed']))
    rules = tune.build(**config['tune'])
    init = lambda key, given: init_state(task, optimizer, data.spec, key, given, rules)
    abstract = jax.eval_shape(init, init_key, {})
    abstract = sharding.abstract(abstract, mesh, config['sharding'])
    given = from_weights(source, model, config, abstract.frozen)
    # What was refused until here has left an older run's files as they were.
    stack.enter_context(status.on_failure(workdir))
    metrics.write_json(workdir / 'config.json', config)
    params = trees.combine(abstract.params, abstract.frozen)
    print(progress.parameter_table(params, abstract.params), flush=True)
    step = make_step(task, optimizer, data.on_device, step_key)
    step = compile_step(step, abstract, data.spec, mesh)
    restored = checkpoints.restore(abstract, given)
    if restored is None:
      state = first_state(init, init_key, abstract, given)
    else:
      state, _ = restored
      print(f'Resuming from step {int(state.step)}.', flush=True)
    del source, given  # the run has its own now
    loop = Loop(config, workdir, state, task, checkpoints, evals, stop)
    stack.callback(loop.close)
    batches = stack.enter_context(contextlib.closing(data.iterate(loop.step)))
    return loop.run(step, prefetch(batches, mesh))


def _open_data(config, workdir, mesh):
  section = config['data']
  # That accum is at least 1 is checked by its consumer.
  divisor = sharding.batch_divisor(mesh) * max(config['optim'].get('accum', 1), 1)
  if section['batch_size'] % divisor:
    raise UserError(
      f'config.data.batch_size={section["batch_size"]} must be a multiple of {divisor}: '
      'mesh data x fsdp x optim.accum.'
    )
  try:
    return pipeline.train(
      **section,
      seed=config['seed'],
      num_classes=config['model'].get('num_classes'),
      bad_log=workdir / 'bad_images.jsonl',
      **sharding.host_of_batch(mesh),
    )
  except UserError as error:
    raise DataError(str(error)) from error


def _resolve(config, data) -> dict:
  """Returns the config with what the data determines."""
  num_classes = config['model'].get('num_classes', data.num_classes)
  if num_classes is None:
    raise UserError(
      f'config.model.num_classes is not set and {config["data"]["source"]!r} does not '
      'tell its number of classes; set it.'
    )
  total = config_lib.total_steps(config, data.num_examples, data.batch_size)
  return {
    **schema.in_steps(config, total),
    'model': {**config['model'], 'num_classes': num_classes},
    'resolved': {
      'format': config_lib.FORMAT,
      'total_steps': total,
      'num_examples': data.num_examples,
      'fingerprint': data.fingerprint,
      'class_names': data.class_names,
      'image_shape': list(data.spec['image'].shape[1:]),
    },
  }


def _open_checkpoints(config, workdir):
  best, options = config['checkpoint'].get('best'), {}
  if best:
    options['larger_is_better'] = metrics.larger_is_better(best, config['evals'])
  folder = workdir / 'checkpoints'
  return checkpoint.Checkpoints(folder, **config['checkpoint'], **options)
