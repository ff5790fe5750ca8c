"""A run: from a config to a trained, evaluated, resumable model.

`train` is the table of contents; `step` is the mathematics of one step, `loop` what
happens around it, `schema` what the config may hold.
"""

import contextlib
import json
import os
from pathlib import Path

import jax

from vit_jax import config as config_lib
from vit_jax import evaluators, models, optim, pretrained, sharding, tasks, trees, tune
from vit_jax.checkpoint import checkpoints as checkpoint
from vit_jax.data import pipeline
from vit_jax.errors import Preempted, UserError
from vit_jax.train import metrics, progress, schema
from vit_jax.train.lock import lock
from vit_jax.train.loop import Loop, prefetch
from vit_jax.train.preemption import StopSignal
from vit_jax.train.runtime import compile_step, retain_freed_memory
from vit_jax.train.state import first_state, from_weights, init_state
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
      if results := _finished(workdir, config, checkpoints):
        return results
    evals = _build_evals(config, workdir, mesh, stop)
    source = None
    if config['weights'] and not resumes:  # a run that resumes has its own parameters
      config, source = _open_weights(config)
    model = models.build(**config['model'])
    task = tasks.build(model=model, spec=data.spec, **config['task'])
    optimizer = optim.build(
      **config['optim'],
      total_steps=config['resolved']['total_steps'],
      family=models.family(config['model']['name']),
    )
    init_key, step_key = jax.random.split(jax.random.key(config['seed']))
    rules = tune.build(**config['tune'])
    init = lambda key, given: init_state(task, optimizer, data.spec, key, given, rules)
    abstract = jax.eval_shape(init, init_key, {})
    abstract = sharding.abstract(abstract, mesh, config['sharding'])
    given = from_weights(source, model, config, abstract.frozen)
    # What was refused until here has left an older run's files as they were.
    stack.enter_context(_status_of_failure(workdir))
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


def _open_weights(config: dict) -> tuple[dict, pretrained.Source]:
  """Returns (config with the model that the weights are of, the weights)."""
  source = pretrained.from_section(**config['weights'])
  told = {} if 'name' in config['model'] else pretrained.complete({}, source)
  return schema.with_model(config, told), source


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


def _build_evals(config, workdir, mesh, stop) -> dict:
  """Returns {name: (evaluator, every, use_ema)}."""

  def check_stop():
    if stop.should_stop():
      raise Preempted('Stopped during an evaluation.')

  evals, num_classes = {}, config['model']['num_classes']
  image_shape = config['resolved']['image_shape']
  for name, section in config['evals'].items():
    section = dict(section)
    every, use_ema = section.pop('every', None), section.pop('use_ema', False)
    if 'data' in section:
      given = {'num_classes': num_classes, 'bad_log': workdir / 'bad_images.jsonl'}
      section['data'] = given | section['data']
    evaluator = evaluators.build(**section, mesh=mesh, check_stop=check_stop)
    if 'data' in section:
      ours, its = image_shape, list(evaluator.batches.spec['image'].shape[1:])
      if ours != its:
        raise UserError(
          f'config.evals.{name}.data.pp gives images {its}, config.data.pp {ours}: the '
          'model has positions for one size only.'
        )
    evals[name] = evaluator, every, use_ema
  return evals


def _finished(workdir: Path, config: dict, checkpoints) -> tuple | None:
  """Returns (status, rows) of a run with nothing left to do, else None."""
  total = config['resolved']['total_steps']
  path = workdir / 'status.json'
  if checkpoints.latest() != total or not path.exists():
    return None
  status = json.loads(path.read_text())
  rows = metrics.read_rows(workdir / 'metrics.jsonl')
  done = metrics.last_values([row for row in rows if row['step'] == total])
  done = {key.split('/')[0] for key in done}
  if status['state'] != 'finished' or not done.issuperset(config['evals']):
    return None
  return status, rows


@contextlib.contextmanager
def _status_of_failure(workdir: Path):
  """Leaves status.json behind when a run ends by an exception."""
  try:
    yield
  except Exception as error:
    path = workdir / 'status.json'
    status = json.loads(path.read_text()) if path.exists() else {'step': 0}
    code = getattr(error, 'exit_code', 1)
    state = 'preempted' if isinstance(error, Preempted) else 'failed'
    status |= {'state': state, 'exit': code, 'error': str(error)}
    metrics.write_json(path, status)
    raise
