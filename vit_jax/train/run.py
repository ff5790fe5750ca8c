"""A run: from a config to a trained, evaluated, resumable model.

`train` is the table of contents; `step` is the mathematics of one step, `loop` what
happens around it, `schema` what the config may hold.
"""

import contextlib
import os

import jax

from vit_jax import models, optim, sharding, tasks, trees, tune
from vit_jax.train import (
  environment,
  evaluations,
  folder,
  metrics,
  progress,
  resume,
  schema,
  start,
  status,
)
from vit_jax.train.disk import full_raises_disk_full
from vit_jax.train.heap import retain_freed_memory, return_freed_memory
from vit_jax.train.lock import lock
from vit_jax.train.loop import Loop
from vit_jax.train.preemption import StopSignal
from vit_jax.train.runtime import compile_step, memory
from vit_jax.train.state import init_state
from vit_jax.train.step import make_step


def train(
  config: dict, workdir: str | os.PathLike, command: str | None = None
) -> tuple[dict, list[dict]]:
  """Runs a config in a folder, from where the folder's last run stopped.

  Args:
    config: nested plain dicts, see `config.load`.
    workdir: created if missing; one run at a time. A folder, or gs://BUCKET/PATH.
    command: the command line that asked for it, to be recorded.

  Returns:
    (status, rows): what status.json holds, with the step and the fingerprint of the
    final train state, and the rows of metrics.jsonl.

  Raises:
    RunError: its subclasses say why and carry the exit code.
  """
  config = schema.check(config)
  with contextlib.ExitStack() as stack:
    stack.enter_context(full_raises_disk_full(workdir))
    made = folder.missing(workdir)
    stop = stack.enter_context(StopSignal())  # before there is a folder to leave behind
    workdir, stop.check, recorded = stack.enter_context(lock(workdir))
    stack.enter_context(folder.left_as_it_was(made, stop))
    start.check_files(workdir)
    stack.enter_context(folder.noise_to_log(workdir))
    retain_freed_memory()
    return_freed_memory()  # what compiling takes, until the first step
    mesh = sharding.make_mesh(**config['mesh'])
    stack.enter_context(jax.set_mesh(mesh))

    data = start.open_data(config, workdir, mesh)
    config = start.resolve(config, data)
    checkpoints = start.open_checkpoints(config, workdir)
    stack.enter_context(checkpoints)
    resumes = checkpoints.latest() is not None
    if resumes:
      config = resume.resumed(config, workdir, checkpoints)
      if results := status.of_finished(workdir, config, checkpoints):
        print(status.already_finished(workdir, config, results[0]), flush=True)
        return results
    else:
      resume.check_names(config)
    evals = evaluations.build(config, workdir, mesh, stop)
    start.warn(data, evals)
    data.prepare()
    source = None
    if config['weights'] and not resumes:  # a run that resumes has its own parameters
      config, source = start.open_weights(config)
    model = models.build(**config['model'])
    family = models.family_of(model)
    evaluations.check_sizes(config, evals, family.any_size(models.fields_of(model)))
    shape = tuple(config['resolved']['image_shape'])
    tuned, rules = tune.attach(model, family, shape, **config['tune'])
    task = tasks.build(model=tuned, spec=data.spec, **config['task'])
    total = config['resolved']['total_steps']
    optimizer = optim.build(**config['optim'], total_steps=total, family=family)
    init_key, step_key = jax.random.split(jax.random.key(config['seed']))
    # Jitted, so that its shapes and its values come from one trace.
    init = jax.jit(
      lambda key, given: init_state(task, optimizer, data.spec, key, given, rules)
    )
    abstract = jax.eval_shape(init, init_key, {})
    abstract = sharding.abstract(abstract, mesh, config['sharding'])
    given = start.from_weights(source, model, config, abstract.frozen)
    if resumes:
      checkpoints.check(abstract, given)
    # What was refused until here has left an older run's files as they were.
    stack.enter_context(status.on_failure(workdir, checkpoints, recorded))
    stack.enter_context(full_raises_disk_full(workdir))  # before status.json says why
    metrics.write_json(workdir / 'config.json', config)
    params = trees.combine(abstract.params, abstract.frozen)
    print(progress.parameter_table(params, abstract.params), flush=True)
    if not resumes:
      first_state = start.prepare_first_state(init, init_key, abstract, given)
    step = make_step(task, optimizer, data.on_device, step_key)
    step = compile_step(step, abstract, data.spec, mesh)
    if resumes:
      state, _ = checkpoints.restore(abstract, given)
      print(f'Resuming from step {int(state.step)}.', flush=True)
    else:
      state = first_state()
      del first_state
    temp_bytes = memory(step)['temp_bytes']
    environment.record(
      workdir, int(state.step), command, params, abstract.params, temp_bytes
    )
    del source, given  # the run has its own now
    loop = Loop(config, workdir, state, task, checkpoints, evals, stop)
    stack.callback(loop.record.close)
    batches = stack.enter_context(contextlib.closing(data.iterate(loop.step)))
    return loop.run(step, sharding.prefetch(batches, mesh))
