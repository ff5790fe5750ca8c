"""Turns a config into a model, a task, an optimizer and the step that trains them.

A run, a benchmark, an inspection of memory and a notebook all start here:

  trainer = Trainer(config, spec, sharding.make_mesh())
  state, step = trainer.init(), trainer.compile()
  state, metrics = step(state, batch)
"""

import contextlib
import time
from collections.abc import Callable

import jax

from vit_jax import models, optim, sharding, tasks, trees, tune
from vit_jax.check import prefix_errors
from vit_jax.errors import OutOfMemory
from vit_jax.tasks.distill import TEACHER
from vit_jax.train import flops, runtime
from vit_jax.train.step import State, init_state, make_step


class Trainer:
  """The model, task, optimizer and step of a config. It holds only shapes until `init`.

  Attributes:
    model: the Linen module that `config.model` describes.
    family: its `models.base.Family`.
    task: the objective, for the model with the parameters that `config.tune` adds.
    optimizer: see `optim.build`.
    spec, mesh: the arguments.
    abstract_state: a `State` of `jax.ShapeDtypeStruct` with shardings on the mesh.
    step: `(state, batch) -> (state, metrics)`, to be jitted; see `step.make_step`.
  """

  def __init__(
    self, config: dict, spec: dict, mesh, on_device: Callable = lambda batch: batch
  ):
    """Builds everything that the config describes.

    Args:
      config: has the sections `model` and `optim`, and maybe `tune`, `task`, `sharding` and
        `seed`. The number of steps is `resolved.total_steps` or, without that, `steps`.
      spec: {feature: `jax.ShapeDtypeStruct`} of a global batch.
      mesh: see `sharding.make_mesh`.
      on_device: the part of preprocessing that is left to the device, batch -> batch.
    """
    self._config, self.spec, self.mesh = config, spec, mesh
    self.model = models.build(**config['model'])
    self.family = self.model.family
    image_shape = spec['image'].shape[-3:]
    section = config.get('tune', {})
    tuned, rules = tune.attach(self.model, self.family, image_shape, **section)
    rules = [(f'{TEACHER}/.*', False), *rules]
    with prefix_errors('config.task'):
      self.task = tasks.build(
        model=tuned, spec=spec, **{'name': tasks.DEFAULT, **config.get('task', {})}
      )
    total = config.get('resolved', {}).get('total_steps') or config['steps']
    with prefix_errors('config.optim'):
      self.optimizer = optim.build(
        **config['optim'], total_steps=total, family=self.family
      )
    self._init_key, key = jax.random.split(jax.random.key(config.get('seed', 0)))

    # Jitted, so that `eval_shape` below and the method `init` share one trace.
    @jax.jit
    def init(key, initial):
      return init_state(self.task, self.optimizer, spec, key, initial, rules)

    self._init = init
    state = jax.eval_shape(init, self._init_key, {})
    self.abstract_state: State = sharding.abstract(
      state, mesh, config.get('sharding', sharding.DEFAULT)
    )
    self.step = make_step(self.task, self.optimizer, on_device, key)

  @property
  def abstract_params(self) -> dict:
    """Shapes of all parameters, trained and frozen."""
    return trees.combine(self.abstract_state.params, self.abstract_state.frozen)

  def init(self, initial: dict | None = None) -> State:
    """Returns the state at step 0, on its devices.

    On CPUs it is compiled without LLVM's optimizations, which take longer than they save.

    Args:
      initial: {name: array}, variables that replace fresh ones, see
        `trees.flatten_variables`.
    """
    places = trees.flatten_variables(self.abstract_state.variables())
    initial = {
      name: jax.device_put(x, places[name].sharding)
      for name, x in (initial or {}).items()
    }
    cpu = jax.default_backend() == 'cpu'
    options = {'xla_backend_optimization_level': 0} if cpu else {}
    placed = jax.tree.map(lambda x: x.sharding, self.abstract_state)
    lowered = jax.jit(self._init, out_shardings=placed).lower(self._init_key, initial)
    return lowered.compile(options)(self._init_key, initial)

  def lower(self):
    """Lowers the step, see `runtime.trace_step`."""
    return self._trace().lower()

  def _trace(self):
    return runtime.trace_step(self.step, self.abstract_state, self.spec, self.mesh)

  def utilisation(self) -> float | None:
    """Returns the MFU at one image per second: the products' share of the devices' peak.

    None if the peak or the products are unknown. Products that `model.remat` repeats do not
    count. The backward pass of fused attention repeats one of its five products, which
    counts.
    """
    if (peak := runtime.peak(self.mesh.devices.flat[0])) is None:
      return None
    with contextlib.suppress(NotImplementedError):
      plain, batch = self, self.spec['image'].shape[0]
      if self._config['model'].get('remat', 'none') != 'none':
        model = {**self._config['model'], 'remat': 'none'}
        plain = Trainer({**self._config, 'model': model}, self.spec, self.mesh)
      operations = flops.count_jaxpr(plain._trace().jaxpr.jaxpr)
      return operations / batch / (peak * self.mesh.size)
    return None

  def compile(self):
    """Compiles the step, prints its memory, and raises OutOfMemory if it does not fit."""
    start = time.perf_counter()
    with runtime.report_out_of_memory():
      program = self.lower().compile(sharding.compiler_options(self.mesh))
    needs = runtime.memory(program)['bytes'] / 2**30
    has = runtime.device_memory(self.mesh.local_devices[0]) / 2**30
    print(
      f'Step compiled in {time.perf_counter() - start:.1f} s; it needs {needs:.2f} GiB '
      f'per device of {has:.1f} GiB.',
      flush=True,
    )
    if needs > has:
      raise OutOfMemory(
        f'A step needs {needs:.1f} GiB per device, which has {has:.1f} GiB. '
        f'{runtime.SMALLER}'
      )
    return program
