"""A run: from a config to a trained, evaluated, resumable model.

`train` is the table of contents; `vit_jax.step` is the mathematics of one step.
"""

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from vit_jax import (
  checkpoint,
  evaluators,
  fingerprint,
  models,
  optim,
  preemption,
  report,
  sharding,
  tasks,
)
from vit_jax import config as config_lib
from vit_jax.data import pipeline, registry
from vit_jax.errors import (
  OutOfMemory,
  Preempted,
  TooManyBadSteps,
  UserError,
  did_you_mean,
)
from vit_jax.step import init_state, make_step

DEFAULTS = {
  'task': {'name': 'classify'},
  'mesh': {},  # data=-1: all devices
  'sharding': 'fsdp',  # see sharding.PRESETS; nothing is split while mesh.fsdp is 1
  'evals': {},
  'checkpoint': {},
  'log': {},
  'seed': 0,
  'max_bad_steps': 10,  # non-finite steps in a row before the run gives up
  'resume_allow': [],  # config keys that may differ from those of the run resumed
}
REQUIRED = ('model', 'data', 'optim')
PLAIN = {  # the keys above that are no sections
  'sharding': str | list[tuple[str, object]],
  'seed': int,
  'max_bad_steps': int,
  'resume_allow': str | list[str],
}

# Sections and keys that do not change what a step computes: they may differ between
# a run and its continuation. Devices change results in the last digits only.
NEUTRAL = ('log', 'checkpoint', 'evals', 'mesh', 'sharding', 'max_bad_steps')
NEUTRAL += ('resume_allow', 'resolved')
NEUTRAL += ('data.workers', 'data.prefetch', 'data.max_bad_fraction', 'model.remat')
# Parameters of data pipelines that the run gives.
PROVIDED = ('seed', 'num_classes', 'bad_log', 'host', 'hosts')

# Steps that the host may run ahead of the device: enough to keep it busy, few enough
# that a run of bad steps is noticed at once.
AHEAD = 2


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
  config = check(config)
  with contextlib.ExitStack() as stack:
    workdir = stack.enter_context(preemption.lock(workdir))
    stop = stack.enter_context(preemption.StopSignal())
    mesh = sharding.make_mesh(**config['mesh'])
    stack.enter_context(jax.set_mesh(mesh))

    data = _open_data(config, workdir, mesh)
    config = _resolve(config, data)
    checkpoints = stack.enter_context(
      contextlib.closing(
        checkpoint.Checkpoints(workdir / 'checkpoints', **config['checkpoint'])
      )
    )
    _refuse_drift(workdir, config, resumes=checkpoints.latest() is not None)
    if results := _finished(workdir, config, checkpoints):
      return results
    model = models.build(**config['model'])
    task = tasks.build(
      model=model, num_classes=config['model']['num_classes'], **config['task']
    )
    optimizer = optim.build(
      **config['optim'], total_steps=config['resolved']['total_steps']
    )
    evals = _build_evals(config, mesh, stop)

    init_key, step_key = jax.random.split(jax.random.key(config['seed']))
    init = lambda key: init_state(task, optimizer, data.spec, key)
    abstract = jax.eval_shape(init, init_key)
    shardings = sharding.state_shardings(abstract, mesh, config['sharding'])
    abstract = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      abstract,
      shardings,
    )
    # What was refused until here has left an older run's files as they were.
    stack.enter_context(_status_of_failure(workdir))
    report.write_json(workdir / 'config.json', config)
    print(report.parameter_table(abstract.params), flush=True)
    step = make_step(task, optimizer, data.on_device, step_key)
    step = _compile(step, abstract, shardings, data.spec, mesh)
    restored = checkpoints.restore(abstract)
    if restored is None:
      state = jax.jit(init, out_shardings=shardings)(init_key)
    else:
      state, _ = restored
      print(f'Resuming from step {int(state.step)}.', flush=True)
    run = _Run(config, workdir, state, task, checkpoints, evals, stop)
    stack.callback(run.close)
    batches = stack.enter_context(contextlib.closing(data.iterate(run.step)))
    return run.loop(step, _prefetch(batches, mesh))


def check(config: dict) -> dict:
  """Returns the config over its defaults, every key bound to the code that reads it.

  Raises:
    UserError: for unknown, missing or ill-typed keys; nothing was started.
  """
  sections = [*REQUIRED, *DEFAULTS, *config_lib.DURATIONS]
  config_lib.known_sections(config, sections)
  for section in REQUIRED:
    if section not in config:
      raise UserError(f'config lacks the section {section!r}.')
  config = DEFAULTS | config

  def named(section, key='name'):
    value = config_lib.section(config, section).get(key)
    if value is None:
      raise UserError(f'config.{section} lacks {key!r}.')
    config_lib.check_type(f'config.{section}.{key}', value, str)
    return value

  for key, kind in PLAIN.items():
    config_lib.check_type(f'config.{key}', config[key], kind)
  bind = config_lib.bind
  model = config['model']
  bind('model', model, models.signature(named('model')), extra=('name', 'variant'))
  config_lib.check_type('config.model.variant', model.get('variant'), str | None)
  bind('data', config['data'], pipeline.train, provided=PROVIDED)
  registry.parse(config['data']['pp'])
  bind('task', config['task'], tasks.signature(named('task')), extra=('name',))
  bind('optim', config['optim'], optim.signature(named('optim')), ('total_steps',))
  bind('mesh', config['mesh'], sharding.make_mesh, provided=('devices',))
  sharding.resolve_rules(config['sharding'])
  bind('checkpoint', config['checkpoint'], checkpoint.Checkpoints, ('directory',))
  bind('log', config['log'], report.Log)
  for name, section in config_lib.section(config, 'evals').items():
    where = f'evals.{name}'
    extra = ('type', 'every', 'use_ema')
    bind(where, section, evaluators.signature(named(where, 'type')), extra=extra)
    if 'data' in section:
      bind(f'{where}.data', section['data'], pipeline.evaluate, provided=('bad_log',))
      registry.parse(section['data']['pp'])
    every, use_ema = section.get('every'), section.get('use_ema', False)
    config_lib.check_type(f'config.{where}.every', every, int | None)
    config_lib.check_type(f'config.{where}.use_ema', use_ema, bool)
    _at_least_one(f'{where}.every', every)
    if use_ema and not config['optim'].get('ema'):
      raise UserError(f'config.{where}.use_ema needs config.optim.ema, a decay.')
  _at_least_one('log.every', config['log'].get('every'))
  _at_least_one('max_bad_steps', config['max_bad_steps'])
  best, known = config['checkpoint'].get('best'), [*config['evals'], 'train']
  if best and best.split('/')[0] not in known:
    raise UserError(
      f'config.checkpoint.best={best!r}: expected the name of a metric, which starts '
      f'with one of {[f"{n}/" for n in known]}.{did_you_mean(best.split("/")[0], known)}'
    )
  if isinstance(config['resume_allow'], str):
    config['resume_allow'] = config['resume_allow'].split(',')
  return config


def _at_least_one(key: str, value: int | None) -> None:
  if value is not None and value < 1:
    raise UserError(f'config.{key}={value}: expected 1 or more.')


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
    **config,
    'model': {**config['model'], 'num_classes': num_classes},
    'resolved': {
      'total_steps': total,
      'num_examples': data.num_examples,
      'fingerprint': data.fingerprint,
      'class_names': data.class_names,
      'image_shape': list(data.spec['image'].shape[1:]),
    },
  }


def _build_evals(config, mesh, stop) -> dict:
  """Returns {name: (evaluator, every, use_ema)}."""

  def check_stop():
    if stop.requested:
      raise Preempted('Stopped during an evaluation.')

  evals, num_classes = {}, config['model']['num_classes']
  for name, section in config['evals'].items():
    section = dict(section)
    every, use_ema = section.pop('every', None), section.pop('use_ema', False)
    if 'data' in section:
      section['data'] = {'num_classes': num_classes, **section['data']}
    evaluator = evaluators.build(**section, mesh=mesh, check_stop=check_stop)
    evals[name] = evaluator, every, use_ema
  return evals


def _refuse_drift(workdir: Path, config: dict, resumes: bool) -> None:
  """Refuses to continue a run under a config of other mathematics."""
  path = workdir / 'config.json'
  if not resumes or not path.exists():
    return
  old = json.loads(path.read_text())
  changed = config_lib.differences(old, json.loads(json.dumps(config)))
  for key in ('fingerprint', 'num_examples'):
    pair = old['resolved'].get(key), config['resolved'][key]
    if pair[0] != pair[1]:
      changed[f'data.{key}'] = pair
  allowed = config['resume_allow']
  refused = {
    key: pair
    for key, pair in changed.items()
    if not any(key == n or key.startswith(f'{n}.') for n in NEUTRAL)
    and not any(key == n or key.endswith(f'.{n}') for n in allowed)
  }
  if refused:
    rows = [('key', 'in the folder', 'now')]
    rows += [(key, str(old), str(new)) for key, (old, new) in refused.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    table = '\n'.join(
      '  ' + '  '.join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
      for row in rows
    )
    raise UserError(
      f'{workdir} holds a run of another config:\n{table}\nUse another --workdir, or '
      f'allow the change by name: --config.resume_allow={",".join(refused)}'
    )


def _finished(workdir: Path, config: dict, checkpoints) -> tuple | None:
  """Returns (status, rows) of a run with nothing left to do, else None."""
  total = config['resolved']['total_steps']
  path = workdir / 'status.json'
  if checkpoints.latest() != total or not path.exists():
    return None
  status = json.loads(path.read_text())
  rows = report.read_rows(workdir / 'metrics.jsonl')
  done = report.last_values([row for row in rows if row['step'] == total])
  done = {key.split('/')[0] for key in done}
  if status['state'] != 'finished' or not done.issuperset(config['evals']):
    return None
  return status, rows


def _compile(step, abstract, shardings, spec, mesh):
  """Returns the compiled step; says what memory it needs and refuses what cannot fit."""
  batch = {
    key: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding.batch_sharding(mesh))
    for key, s in spec.items()
  }
  start = time.perf_counter()
  with _out_of_memory():
    jitted = jax.jit(
      step, donate_argnums=0, out_shardings=(shardings, sharding.replicated(mesh))
    )
    compiled = jitted.lower(abstract, batch).compile()
  m = compiled.memory_analysis()
  needs = m.argument_size_in_bytes + m.temp_size_in_bytes
  needs += m.output_size_in_bytes - m.alias_size_in_bytes
  has = report.device_memory(mesh.devices.flat[0])
  print(
    f'Step compiled in {time.perf_counter() - start:.1f} s; it needs '
    f'{needs / 2**30:.2f} GiB per device of {has / 2**30:.1f} GiB.',
    flush=True,
  )
  if needs > has:
    raise OutOfMemory(
      f'A step needs {needs / 2**30:.1f} GiB per device, which has {has / 2**30:.1f} '
      f'GiB. {_SMALLER}'
    )
  return compiled


_SMALLER = (
  'Try a smaller config.data.batch_size, config.optim.accum=2 or more, '
  "config.model.remat='full', config.model.dtype='bfloat16', or more devices with "
  'config.mesh.fsdp.'
)


@contextlib.contextmanager
def _out_of_memory():
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    first = str(error).splitlines()[0]
    raise OutOfMemory(f'Out of memory: {first} {_SMALLER}') from error


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
    report.write_json(path, status)
    raise


def _prefetch(batches: Iterator[dict], mesh) -> Iterator[dict]:
  """Yields global batches, the next one already on its way to the devices."""
  ahead = deque()
  for batch in batches:
    ahead.append(sharding.global_batch(batch, mesh))
    if len(ahead) == 2:
      yield ahead.popleft()


class _Run:
  """The loop and what it keeps: state, rows, checkpoints."""

  def __init__(self, config, workdir, state, task, checkpoints, evals, stop):
    self.config, self.workdir, self.state = config, workdir, state
    self.task, self.checkpoints, self.evals, self.stop = task, checkpoints, evals, stop
    self.step = int(state.step)
    self.total = config['resolved']['total_steps']
    self.log = report.Log(**config['log'])
    self.metrics = report.Metrics(workdir, self.step, self.log.tensorboard)
    self.progress = report.Progress(self.step, self.total, config['data']['batch_size'])
    self.pending: deque = deque()  # (step, metrics) not yet looked at

  def close(self):
    self.metrics.close()
    self.progress.close()

  def loop(self, step_fn, batches) -> tuple[dict, list[dict]]:
    """Steps to the end, evaluating, saving and stopping when due."""
    self._write_status('running')
    with _out_of_memory(), report.profiler(self.log.profile, self.workdir) as profile:
      try:
        # An evaluation that the stop cut off is still due at the restored step.
        self._evaluate()
        while self.step < self.total:
          if self.stop.should_stop(self.step):
            raise Preempted('Stopped.')
          profile(self.step)
          self.state, metrics = step_fn(self.state, next(batches))
          self.step += 1
          self.pending.append((self.step, metrics))
          self._observe(AHEAD)
          self._pause()
      except Preempted:
        self._observe(0)
        self._save()
        self.checkpoints.wait()
        status = self._write_status('preempted', exit=Preempted.exit_code)
        raise Preempted(
          f'Stopped at step {status["step"]} of {self.total}; the state is saved. '
          'Run the same command again to go on.'
        ) from None
    self._save()
    self.checkpoints.wait()
    digest = fingerprint.digest(fingerprint.fingerprints(self.state))
    status = self._write_status('finished', fingerprint=digest, exit=0)
    return status, self.metrics.rows

  def _pause(self) -> None:
    """Evaluates and saves, if due; the steps' clock stands still meanwhile."""
    due = self.step % self.checkpoints.every == 0
    if due or self.step == self.total or self._due_evals():
      self._observe(0)  # rows up to here are written before the state is
      start = time.perf_counter()
      self._evaluate()
      if due:
        self._save()
        self._write_status('running')
      self.progress.pause(time.perf_counter() - start)

  def _observe(self, leave: int) -> None:
    """Looks at finished steps' metrics, all but the last `leave`."""
    while len(self.pending) > leave:
      step, values = self.pending.popleft()
      if step % self.log.every and step != self.total:
        bad = int(values['skipped_in_a_row'])
      else:
        values = jax.tree.map(np.asarray, values)
        bad = int(values['skipped_in_a_row'])
        row = {f'train/{key}': value for key, value in values.items()}
        row |= self.progress.measure(step)
        self.metrics.write(step, row)
        self.progress.show(step, row)
      if bad and bad >= self.config['max_bad_steps']:
        self.checkpoints.wait()
        raise TooManyBadSteps(
          f'{bad} steps in a row, up to step {step}, had a loss or gradient that is not '
          f'finite. Newest checkpoint: {self.checkpoints.latest()}. Lower '
          'config.optim.lr, set config.optim.clip, or lengthen the warmup.'
        )

  def _due_evals(self) -> list[str]:
    """Returns the names of evaluations that this step calls for and lacks."""
    return [
      name
      for name, (_, every, _) in self.evals.items()
      if (self.step == self.total or (every and self.step % every == 0))
      and self.step > 0
      and not self.metrics.has(self.step, f'{name}/')
    ]

  def _evaluate(self) -> None:
    for name in self._due_evals():
      evaluator, _, use_ema = self.evals[name]
      params = self.state.ema if use_ema else self.state.params
      values = evaluator.run(self.task.predict, params)
      row = {f'{name}/{key}': value for key, value in values.items()}
      self.metrics.write(self.step, row)
      self.progress.say(f'step {self.step}  {report.shown(row)}')

  def _save(self) -> None:
    values = report.last_values(
      [row for row in self.metrics.rows if row['step'] == self.step]
    )
    self.checkpoints.save(self.state, {'config': self.config}, values)

  def _write_status(self, state: str, **values) -> dict:
    status = {'step': self.step, 'state': state, **values}
    report.write_json(self.workdir / 'status.json', status)
    return status
