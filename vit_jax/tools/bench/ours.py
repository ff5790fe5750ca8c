"""Our side of a benchmark: a compiled step on data that is already on the device."""

import functools
import math
import time
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import models, optim, sharding, tasks, trees, tune
from vit_jax.data import pipeline
from vit_jax.errors import OutOfMemory, UserError
from vit_jax.tools.inspect import flops
from vit_jax.train import runtime
from vit_jax.train.state import init_state
from vit_jax.train.step import make_step

# AdamW as in pre-training; what the numbers are does not change the time of a step.
OPTIM = {'name': 'adamw', 'lr': 1e-3, 'wd': 0.1}
# Besides, of what is compiled ahead: as recipes for accelerators have it.
OPTIM_AHEAD = {**OPTIM, 'clip': 1.0, 'moment_dtype': 'bfloat16'}
# Sides of the square products whose rate is the device's peak. A CPU reaches it at 2304
# (not at 2048: see benchmarks/NOTES.md on strides); an H100's rate still grows at 8192.
SIZES = (1280, 2304, 4096, 8192, 16384)
_LONG = 0.5  # seconds of one product after which a larger one tells nothing new


class Model:
  """What a benchmark asks about, before any batch size: shapes only.

  Attributes:
    module: the Linen module. name: 'vit:B/16'. size: (H, W). params: their number, those
      that tuning adds among them.
    flops: of one image forward, see `vit_jax.tools.inspect.flops`.
  """

  def __init__(
    self,
    name: str,
    dtype: str,
    size: tuple[int, int],
    fields: dict,
    section: dict | None = None,
  ):
    """Builds the module.

    Args:
      section: the config's `tune`, which says what is trained and added.

    Raises:
      UserError: for an unknown name, field or dtype, or a size the patches do not tile.
    """
    self.name, self.size = name, size
    self.module = models.build(name, dtype=dtype, **fields)
    family = models.family_of(self.module)
    tuning = tune.attach(self.module, family, (*size, 3), **section or {})
    self._tuned, self._rules = tuning
    self._trains_all = self._tuned is self.module
    made = models.shapes_of(self._tuned, (*size, 3))
    self.shapes = made.pop('params')
    self._others = jax.tree.map(lambda x: jnp.ones(x.shape), made)
    self.params = sum(x.size for x in jax.tree.leaves(self.shapes))
    image = jax.ShapeDtypeStruct((1, *size, 3), 'float32')
    self.flops = flops.count(self._logits, self.shapes, image)

  def _logits(self, params, images):
    return self._tuned.apply({'params': params, **self._others}, images)[0]

  def forward(self, batch_size: int):
    """Returns (step, init, spec): the forward pass in evaluation, as `train`'s step.

    The parameters pass through, so that both modes are compiled and run alike.
    """

    def step(params, batch):
      return params, self._logits(params, pipeline.scale_on_device(batch)['image'])

    return step, trees.unflatten, self._spec(batch_size, 'image')

  def train(self, batch_size: int, section: dict = OPTIM):
    """Returns (step, init, spec) of the step that `vit_jax.train.run` runs.

    Args:
      section: the optimizer's.

    Raises:
      UserError: for a model without a head.
    """
    classes = getattr(self.module, 'num_classes', None)
    if classes is None:
      raise UserError(f'{self.name} has no classes to train on: set num_classes.')
    spec = self._spec(batch_size, 'image', 'label', 'mask')
    task = tasks.build('classify', self._tuned, spec)
    family = models.family_of(self.module)
    optimizer = optim.build(**section, total_steps=10**6, family=family)
    key = jax.random.key(0)
    init = lambda given: init_state(task, optimizer, spec, key, given, self._rules)
    return make_step(task, optimizer, pipeline.scale_on_device, key), init, spec

  def passes(self, mode: str) -> int | None:
    """Returns how many forward passes a step is worth, see `flops.exa_training`.

    None: training of a part, which computes less by a share that is not counted here.
    """
    if mode == 'forward':
      return 1
    return 3 if self._trains_all else None

  def _spec(self, batch_size: int, *keys: str) -> dict:
    shapes = {'image': ((*self.size, 3), 'uint8'), 'label': ((), 'int32')}
    shapes['mask'] = ((), 'float32')
    spec = lambda shape, dtype: jax.ShapeDtypeStruct((batch_size, *shape), dtype)
    return {key: spec(*shapes[key]) for key in keys}


class Step:
  """A compiled step with its state and batch, on the first device.

  Attributes:
    compile_s: seconds of tracing and compilation. batch_size.
  """

  def __init__(self, model: Model, mode: str, batch_size: int):
    """Compiles and places everything.

    Args:
      mode: 'train' or 'forward'.

    Raises:
      OutOfMemory: where the device cannot hold it.
    """
    self.batch_size = batch_size
    step, init, spec = getattr(model, mode)(batch_size)
    self._device = jax.local_devices()[0]
    self._peak_before = self._peak() or 0
    mesh = sharding.make_mesh(1, devices=[self._device])
    with jax.set_mesh(mesh), runtime.out_of_memory():
      given = trees.flatten(model.shapes)
      abstract = sharding.abstract(jax.eval_shape(init, given), mesh)
      start = time.perf_counter()
      self._step = runtime.compile_step(step, abstract, spec, mesh)
      self.compile_s = time.perf_counter() - start
      values = {name: initial_values(name, x) for name, x in given.items()}
      self._state = runtime.run_once(init, abstract, values)
      batch = jax.tree.map(_random, spec)
      self._batch = jax.device_put(batch, sharding.batch_sharding(mesh))

  def turn(self, steps: int) -> float:
    """Returns the seconds that so many steps took, the device idle before and after.

    As in a run the host goes MAX_IN_FLIGHT steps ahead of the device.
    """
    pending: deque = deque()
    start = time.perf_counter()
    with runtime.out_of_memory():
      for _ in range(steps):
        self._state, out = self._step(self._state, self._batch)
        pending.append(out)
        if len(pending) > runtime.MAX_IN_FLIGHT:
          jax.block_until_ready(pending.popleft())
      jax.block_until_ready((self._state, pending))
    return time.perf_counter() - start

  def memory(self) -> tuple[int, str]:
    """Returns (bytes at the peak, who says so), once steps have run.

    'device': its allocator's high-water mark; of the whole process, so that it counts
    only where this step raised it. 'compiler': what it planned for the step.
    """
    peak = self._peak()
    if peak is not None and peak > self._peak_before:
      return peak, 'device'
    return runtime.memory(self._step)['bytes'], 'compiler'

  def _peak(self) -> int | None:
    return (self._device.memory_stats() or {}).get('peak_bytes_in_use')


def initial_values(name: str, shape: jax.ShapeDtypeStruct) -> np.ndarray:
  """Returns parameters that keep activations in range.

  From NumPy: to compile the initialisers of a ViT-B takes as long as its step.
  """
  if name.endswith('scale'):
    return np.ones(shape.shape, shape.dtype)
  values = _rng().standard_normal(shape.shape, np.float32)
  return (values * np.float32(0.02)).astype(shape.dtype)


def _random(spec: jax.ShapeDtypeStruct) -> np.ndarray:
  """Returns images of noise, labels 0, a mask that leaves no image out."""
  if spec.dtype == np.uint8:
    return _rng().integers(0, 256, spec.shape, np.uint8)
  return np.full(spec.shape, spec.dtype == np.float32, spec.dtype)


@functools.cache
def _rng() -> np.random.Generator:
  return np.random.default_rng(0)


def matrix_peak(dtype: str) -> dict:
  """Returns the device's rate in the square products in which it is fastest.

  The yardstick of MFU: measured here and now, at JAX's default precision for the dtype
  (TF32 for float32 on recent GPUs), so that it holds for a device that no table knows
  and that others may be using.

  Returns:
    {'flops_per_s': multiply-adds as two, 'size': side of the matrices}.
  """
  best = {'flops_per_s': 0.0, 'size': 0}
  device = jax.local_devices()[0]
  for size in SIZES:
    if 4 * size**2 * jnp.dtype(dtype).itemsize > runtime.device_memory(device):
      break
    try:
      seconds = _product_seconds(size, dtype)
    except OutOfMemory:
      break
    rate = 2 * size**3 / seconds
    if rate > best['flops_per_s']:
      best = {'flops_per_s': rate, 'size': size}
    if seconds > _LONG:
      break
  return best


def _product_seconds(size: int, dtype: str, repeats: int = 5) -> float:
  shape = jax.ShapeDtypeStruct((size, size), dtype)
  with runtime.out_of_memory():
    product = jax.jit(jnp.matmul).lower(shape, shape).compile(runtime.options())
    a = jnp.asarray(_rng().standard_normal((size, size), np.float32), dtype)
    product(a, a).block_until_ready()
    seconds = math.inf
    for _ in range(repeats):
      start = time.perf_counter()
      product(a, a).block_until_ready()
      seconds = min(seconds, time.perf_counter() - start)
  return seconds
