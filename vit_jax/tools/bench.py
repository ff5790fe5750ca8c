"""Measures images per second, step time, MFU, compile time and memory of a model.

  vit_jax bench vit:B/16
  vit_jax bench vit:S/16 --mode train --dtype bfloat16 --batch 128,256,512
  vit_jax bench vit:B/16 --tune method=lora --tune rank=8

`train` is the step of a run (AdamW, with its checks and counters); `forward` computes logits
as in evaluation. Both run on synthetic images that are already on the device, so that no
data is needed. MFU is the share of the device's peak, which is its rate in large matrix
products, measured in the same call. Training counts as 3 x forward FLOPs; work that `remat`
repeats is not counted.
"""

import functools
import itertools
import math
import os
import statistics
import sys
import time
from collections import deque

from vit_jax import cli, machine
from vit_jax.errors import OutOfMemory, UserError
from vit_jax.version import __version__

MODES, DTYPES = ('train', 'forward'), ('float32', 'bfloat16')
# AdamW as in pre-training; the values do not change the time of a step.
OPTIM = {'name': 'adamw', 'lr': 1e-3, 'wd': 0.1}
# Steps are timed in turns. A turn takes TURN seconds, so long that starting it and waiting for
# its end do not matter. A row takes SECONDS seconds or, if that is longer, FEWEST_TURNS turns.
TURN, SECONDS, FEWEST_TURNS = 0.2, 10.0, 5
# Sides of the square matrix products that measure the device's peak. A CPU reaches its peak at
# 2304, while the rate of an H100 still grows at 8192.
SIZES = (1280, 2304, 4096, 8192, 16384)


def main(argv: list[str]) -> int:
  """Prints the table, or its JSON."""
  args = _parse(argv)
  import jax

  cpu = jax.default_backend() == 'cpu'
  dtypes = args.dtype or ['float32' if cpu else 'bfloat16']
  batches = args.batch or [8 if cpu else 128]
  subjects = [
    Subject(args.model, dtype, args.resolution, args.set, args.tune) for dtype in dtypes
  ]
  rows = []
  for mode, subject, batch in itertools.product(args.mode, subjects, batches):
    rows.append(measure(subject, mode, batch, args.steps))
    print(_row(rows[-1]), file=sys.stderr, flush=True)
  peaks = {dtype: matrix_peak(dtype) for dtype in dtypes}
  for row in rows:
    rate = row.pop('flops_per_s', None)
    row['mfu'] = rate and rate / peaks[row['dtype']]['flops_per_s']
  record = {'machine': this_machine(), 'peak': peaks, 'rows': rows}
  return cli.show(args, record, _table(record))


class Subject:
  """A model to measure. It holds only shapes.

  Attributes:
    size: (H, W) of the images.
    section, tune: sections `model` and `tune` of a config.
    params: number of parameters, including those that tuning adds.
    flops: operations of the forward pass of one image, see `train.flops`.
  """

  def __init__(self, name: str, dtype: str, size, fields: dict, section: dict):
    import jax

    from vit_jax import models, tune
    from vit_jax.train import flops

    self.name, self.dtype, self.size = name, dtype, size
    family, variant, own = models.parse_name(name)
    self.section = {'name': family, 'variant': variant, 'num_classes': 1000}
    self.section |= {**own, **fields, 'dtype': dtype}
    self.tune = {'method': 'full', **section}
    model = models.build(**self.section)
    shape = (*size, 3)
    self._model, _ = tune.attach(model, model.family, shape, **self.tune)
    self.shapes = self._model.shapes(shape)
    self.params = sum(x.size for x in jax.tree.leaves(self.shapes['params']))
    image = jax.ShapeDtypeStruct((1, *shape), 'float32')
    self.flops = flops.count(self.logits, self.shapes, image)

  def logits(self, variables, images):
    return self._model.apply(variables, images)[0]

  def config(self) -> dict:
    """Returns the sections of a config that trains the model."""
    if self.section.get('num_classes') is None:
      raise UserError(f'{self.name} has no classes to train on: --set num_classes=K.')
    return {'model': self.section, 'tune': self.tune, 'optim': OPTIM, 'steps': 10**6}

  def spec(self, batch: int) -> dict:
    """Returns the shapes of a batch for training."""
    import jax

    return {
      'image': jax.ShapeDtypeStruct((batch, *self.size, 3), 'uint8'),
      'label': jax.ShapeDtypeStruct((batch,), 'int32'),
      'mask': jax.ShapeDtypeStruct((batch,), 'float32'),
    }


class Step:
  """A compiled step with its state and batch on the first device.

  Attributes:
    compile_s: seconds for tracing and compilation.
    memory: bytes of the device's memory that the compiler planned.
  """

  def __init__(self, subject: Subject, mode: str, batch: int):
    import jax

    from vit_jax import sharding, trees
    from vit_jax.data import pipeline
    from vit_jax.train import runtime
    from vit_jax.train.trainer import Trainer

    mesh = sharding.make_mesh(1, devices=jax.local_devices()[:1])
    params = trees.flatten(subject.shapes['params'])
    spec = subject.spec(batch)
    with jax.set_mesh(mesh), runtime.report_out_of_memory():
      start = time.perf_counter()
      values = {name: _initial(name, x) for name, x in params.items()}
      if mode == 'train':
        trainer = Trainer(subject.config(), spec, mesh, pipeline.scale_on_device)
        lowered = trainer.lower()
        place = lambda: trainer.init(values)
      else:
        others = {k: x for k, x in subject.shapes.items() if k != 'params'}
        state = {**jax.tree.map(_random, others), 'params': trees.unflatten(values)}
        place = lambda: jax.device_put(state, sharding.replicated_sharding(mesh))
        spec = {'image': spec['image']}
        shapes = sharding.abstract(jax.eval_shape(lambda: state), mesh)

        def forward(variables, batch):
          # Return the variables too, as a training step returns its state.
          images = pipeline.scale_on_device(batch)['image']
          return variables, subject.logits(variables, images)

        lowered = runtime.trace_step(forward, shapes, spec, mesh).lower()
      self._program = lowered.compile(sharding.compiler_options())
      self.compile_s = time.perf_counter() - start
      self.memory = runtime.memory(self._program)['bytes']
      self._state = place()
      self._batch = jax.device_put(
        jax.tree.map(_random, spec), sharding.batch_sharding(mesh)
      )

  def turn(self, steps: int) -> float:
    """Runs some steps and returns the seconds; the device is idle before and after.

    As in a run, the host goes MAX_IN_FLIGHT steps ahead of the device.
    """
    import jax

    from vit_jax.train import runtime

    pending: deque = deque()
    start = time.perf_counter()
    with runtime.report_out_of_memory():
      for _ in range(steps):
        self._state, out = self._program(self._state, self._batch)
        pending.append(out)
        if len(pending) > runtime.MAX_IN_FLIGHT:
          jax.block_until_ready(pending.popleft())
      jax.block_until_ready((self._state, pending))
    return time.perf_counter() - start


def this_machine() -> dict:
  """Returns the device, cores, load and versions with which numbers are measured."""
  import jax

  return {
    'device': jax.local_devices()[0].device_kind,
    'cores': machine.cores(),
    'load': round(os.getloadavg()[0], 2) if hasattr(os, 'getloadavg') else None,
    'versions': {'vit_jax': __version__, 'jax': jax.__version__},
  }


def measure(subject: Subject, mode: str, batch: int, steps: int | None) -> dict:
  """Measures one mode, dtype and batch size.

  Returns:
    A row of the table. Its flops_per_s is None if tuning trains only a part of the model. If
    the device has too little memory, the row has `error` instead of results.
  """
  row = {'model': subject.name, 'mode': mode, 'dtype': subject.dtype, 'batch': batch}
  row |= {'params': subject.params, 'gflops': subject.flops / 1e9}
  try:
    step = Step(subject, mode, batch)
    step.turn(1)
    each = step.turn(2) / 2
    per_turn = math.ceil(TURN / each)
    turns = max(math.ceil(SECONDS / (per_turn * each)), FEWEST_TURNS)
    if steps:
      per_turn = min(per_turn, steps)
      turns = steps // per_turn
    seconds = [step.turn(per_turn) / per_turn for _ in range(turns)]
  except OutOfMemory as error:
    return row | {'error': f'out of memory: {str(error).partition(" Try ")[0]}'}
  median = statistics.median(seconds)
  passes = 1 if mode == 'forward' else 3 if subject.tune['method'] == 'full' else None
  return row | {
    'images_per_s': batch / median,
    'step_s': {'median': median, 'min': min(seconds), 'max': max(seconds)},
    'compile_s': step.compile_s,
    'memory_bytes': step.memory,
    'flops_per_s': passes and passes * subject.flops * batch / median,
  }


def matrix_peak(dtype: str) -> dict:
  """Measures the device's peak: the rate of the fastest square matrix product.

  It is measured here and now, at JAX's default precision for the dtype, so that MFU is known
  for devices that no table lists.

  Returns:
    flops_per_s, a multiply-add as two, and size, the side of the matrices.
  """
  import jax
  import jax.numpy as jnp

  from vit_jax import sharding
  from vit_jax.train import runtime

  best = {'flops_per_s': 0.0, 'size': 0}
  memory = runtime.device_memory(jax.local_devices()[0])
  for size in SIZES:
    if 4 * size**2 * jnp.dtype(dtype).itemsize > memory:
      break
    a = jnp.asarray(_rng().standard_normal((size, size), 'float32'), dtype)
    product = jax.jit(jnp.matmul).lower(a, a).compile(sharding.compiler_options())
    seconds = math.inf
    for _ in range(6):
      start = time.perf_counter()
      product(a, a).block_until_ready()
      seconds = min(seconds, time.perf_counter() - start)
    if (rate := 2 * size**3 / seconds) > best['flops_per_s']:
      best = {'flops_per_s': rate, 'size': size}
    if seconds > 0.5:
      break
  return best


def _initial(name: str, shape):
  """Makes parameters that keep activations in range.

  They come from NumPy, because compiling the initialisers of a ViT-B takes as long as
  compiling its step.
  """
  import numpy as np

  if name.endswith('scale'):
    return np.ones(shape.shape, shape.dtype)
  values = 0.02 * _rng().standard_normal(shape.shape, np.float32)
  return values.astype(shape.dtype)


def _random(shape):
  """Makes images of noise, labels 0, and ones for masks and statistics."""
  import numpy as np

  if shape.dtype == np.uint8:
    return _rng().integers(0, 256, shape.shape, np.uint8)
  return np.full(shape.shape, shape.dtype == np.float32, shape.dtype)


@functools.cache
def _rng():
  import numpy as np

  return np.random.default_rng(0)


def _table(record: dict) -> str:
  first, where = record['rows'][0], record['machine']
  lines = [
    f'{first["model"]}: {first["params"]:,} parameters, {first["gflops"]:.3g} GFLOPs',
    f'{where["device"]}, {where["cores"]} cores, load {where["load"]}',
  ]
  for dtype, peak in record['peak'].items():
    rate = peak['flops_per_s'] / 1e12
    lines.append(f'peak in {dtype}: {rate:.3g} TFLOP/s at {peak["size"]}')
  head = f'{"mode":8}{"dtype":10}{"batch":>6}{"images/s":>11}{"step (min-max) ms":>27}'
  lines += ['', f'{head}{"compile":>10}{"memory":>11}{"MFU":>8}']
  return '\n'.join([*lines, *map(_row, record['rows'])])


def _row(row: dict) -> str:
  start = f'{row["mode"]:8}{row["dtype"]:10}{row["batch"]:6}'
  if 'error' in row:
    return f'{start}  {row["error"]}'
  median, low, high = (1e3 * row['step_s'][key] for key in ('median', 'min', 'max'))
  # Leave out an MFU of more than 100 %: the machine was busy while its peak was measured.
  share = f'{row["mfu"]:8.1%}' if 0 < (row.get('mfu') or 0) <= 1 else ''
  return (
    f'{start}{row["images_per_s"]:11,.1f}{f"{median:.4g} ({low:.4g}-{high:.4g})":>27}'
    f'{row["compile_s"]:8.1f} s{row["memory_bytes"] / 2**30:7.2f} GiB{share}'
  )


def _parse(argv: list[str]):
  parser = cli.Parser('vit_jax bench', description=__doc__.split('\n')[0])
  add = parser.add_argument
  add('model', metavar='MODEL', help="'vit:B/16', or a name such as mixer_b16_224")
  add('--mode', type=cli.words(MODES), default=list(MODES), help='train,forward')
  add('--dtype', type=cli.words(DTYPES), help='float32 (default on CPUs) or bfloat16')
  batches = lambda text: [cli.positive(word) for word in text.split(',')]
  batch = 'images of a step; default 8 on CPUs, 128 elsewhere'
  add('--batch', type=batches, metavar='N[,N...]', help=batch)
  add('--resolution', type=cli.resolution, default=(224, 224), help='224, or 224x160')
  add('--steps', type=cli.positive, help='of a row; default: as many as take 10 s')
  add('--set', action=cli.Fields, help='a field of the model, such as --set remat=full')
  add('--tune', action=cli.Fields, help='a key of config.tune: --tune method=lora')
  args = parser.parse_args(argv)
  if args.tune and 'method' not in args.tune:
    parser.error('--tune KEY=VALUE belongs to a method: --tune method=NAME')
  return args


if __name__ == '__main__':
  sys.exit(cli.run(main))
