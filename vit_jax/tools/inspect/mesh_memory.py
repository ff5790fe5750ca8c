"""What each device of a mesh holds while a model trains, without the devices.

The mesh is made of fake CPU devices, the train step is the real one, and it is compiled
for them, not run. Beside the compiler's numbers stand sums from shapes. Run as a program
it measures in a process of its own, since JAX counts its devices once and for all:

  python -m vit_jax.tools.inspect.mesh_memory < REQUEST.json     # see `measure`
"""

import dataclasses
import json
import math
import sys
import time

from vit_jax import cli
from vit_jax.data import pipeline
from vit_jax.errors import UserError
from vit_jax.tools.inspect import activations

POLICIES = ('none', 'dots', 'full')  # of nn.stack.REMAT, most memory first

# What the backward pass of one block works with, in units of what a scanned block keeps
# without remat: its own values, recomputed or read, and the gradients of the widest of
# them. Fitted to XLA for TPU v4 (libtpu 0.0.42), B/16 with 128 images a device: the
# estimate was 0.94 to 1.01 of what it allocates; 0.8 to 1.0 for G/14 whose images are
# split over every device.
_WORKING = 2.0


def check_batch(batch: int, mesh: dict[str, int], accum: int) -> int:
  """Returns the images of one device and micro-batch; UserError unless whole."""
  divisor = mesh['data'] * mesh['fsdp'] * accum
  if batch % divisor:
    raise UserError(
      f'The batch of {batch} must be a multiple of {divisor}: mesh data x fsdp x '
      f'optim.accum. Try {max(batch // divisor, 1) * divisor}.'
    )
  return batch // divisor


def measure(request: dict, devices=None) -> dict:
  """Returns what each device holds in a train step, in bytes.

  Args:
    request: what a config would say. model: its section, with num_classes; tune (may be
      missing), task and optim: theirs; mesh: {axis: size}; sharding; batch: global;
      image: [H, W, C], and features: {name: [shape, dtype]} of what an example has
      besides.
    devices: of the mesh; by default all.

  Returns:
    params: number of the model's. device: what a device holds, from the shardings'
    shapes: params, optimizer, ema, other (step and counters), gradients, batch. remat:
    {policy: row}, a row for each policy that the model knows; estimated: activations
    (residuals of `jax.vjp` for this device's images), working (space of the block that
    is differentiated) and estimate (all of it); of XLA's compiler for CPUs: arguments,
    temporaries and compiled, their sum. images: a device's, of one micro-batch. scan:
    whether the blocks were compiled as one. seconds: that all this took.

  Raises:
    UserError: for a model, optimizer, mesh or sharding that a run would refuse.
  """
  import jax

  from vit_jax import models, optim, sharding, tune
  from vit_jax.nn.stack import remat_policy
  from vit_jax.train import runtime

  start = time.perf_counter()
  section = dict(request['model'])
  known = models.signature(section['name'], section.get('variant')).parameters
  tuned = request.get('tune', {}).get('method', 'full')
  if 'scan' in known and not tune.METHODS[tuned].by_block:
    section = {
      'scan': True,
      **section,
    }  # equal blocks compile as one: seconds for minutes
  policies = ['none']
  if 'remat' in known:
    asked = section.get('remat', 'none')
    remat_policy(asked)
    policies = dict.fromkeys([*POLICIES, asked])
  family = models.family(**request['model'])
  optimizer = optim.build(**request['optim'], total_steps=10**9, family=family)
  mesh = sharding.make_mesh(**request['mesh'], devices=devices)
  images = check_batch(request['batch'], request['mesh'], optimizer.accum)

  rows, device = {}, {}
  with jax.set_mesh(mesh):
    for policy in policies:
      fields = {**section, 'remat': policy} if 'remat' in known else section
      step = TrainStep(models.build(**fields), optimizer, request, mesh)
      device = step.per_device()
      # LLVM's optimisations, half of the time, come after the memory is planned.
      options = runtime.options() | {'xla_backend_optimization_level': '0'}
      compiled = step.lower().compile(options).memory_analysis()
      new = compiled.output_size_in_bytes - compiled.alias_size_in_bytes
      rows[policy] = {
        'kept': step.kept(),
        'arguments': compiled.argument_size_in_bytes,
        'temporaries': compiled.temp_size_in_bytes + new,
      }
  _estimate(rows, device, images, step, request)
  return {
    'params': sum(x.size for x in jax.tree.leaves(step.params)),
    'device': device,
    'remat': rows,
    'images': images,
    'scan': bool(section.get('scan')),
    'seconds': time.perf_counter() - start,
  }


class TrainStep:
  """The train step of a model on a mesh, of shapes only.

  Attributes:
    state, batch: trees of `jax.ShapeDtypeStruct` with their shardings.
    params: all of the model's, whether trained or frozen.
  """

  def __init__(self, model, optimizer, request, mesh):
    import jax

    from vit_jax import models, sharding, tasks, trees, tune
    from vit_jax.train.state import init_state

    self.model, self.optimizer, self.mesh = model, optimizer, mesh
    shapes = {
      'image': (request['image'], 'uint8'),
      'mask': ([], 'float32'),
      **request['features'],
    }
    self.batch = {
      key: jax.ShapeDtypeStruct(
        (request['batch'], *shape), dtype, sharding=sharding.batch_sharding(mesh)
      )
      for key, (shape, dtype) in shapes.items()
    }
    section = request.get('tune', {})
    family = models.family_of(model)
    tuned, rules = tune.attach(model, family, tuple(request['image']), **section)
    self.task = tasks.build(model=tuned, spec=self.batch, **request['task'])
    self._key = jax.random.key(0)
    state = jax.eval_shape(
      lambda: init_state(self.task, optimizer, self.batch, self._key, {}, rules)
    )
    self.state = sharding.abstract(state, mesh, request['sharding'])
    self.params = trees.combine(self.state.params, self.state.frozen)

  def per_device(self) -> dict[str, int]:
    """Returns the bytes on each device, see `measure`."""
    import jax

    def held(tree):
      return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
      )

    state = self.state
    return {
      'params': held((state.params, state.frozen)),
      'optimizer': held(state.opt_state),
      'ema': held(state.ema),
      'other': held((state.step, state.counters, state.batch_stats)),
      # Those of a micro-batch and their sum, where a batch is cut.
      'gradients': held(state.params) * (1 if self.optimizer.accum == 1 else 2),
      'batch': held(self.batch),
    }

  def lower(self):
    """Lowers as `train` does."""
    from vit_jax.train import runtime
    from vit_jax.train.step import make_step

    step = make_step(self.task, self.optimizer, pipeline.scale_on_device, self._key)
    return runtime.lowered(step, self.state, self.batch, self.mesh)

  def kept(self) -> tuple[int, int]:
    """Returns what backward keeps, as `activations.per_image`."""
    import jax
    import jax.numpy as jnp

    from vit_jax import trees

    stats = activations.zeros(self.state.batch_stats)
    state = dataclasses.replace(self.state, batch_stats=stats)
    others = {k: x for k, x in self.batch.items() if k not in ('image', 'mask')}
    frozen = trees.flatten(self.state.frozen)
    hold = lambda name, x: jax.lax.stop_gradient(x) if name in frozen else x

    def loss(params, images):
      batch = pipeline.scale_on_device(
        {
          'image': images,
          **{
            name: jnp.zeros((len(images), *x.shape[1:]), x.dtype)
            for name, x in others.items()
          },
          'weight': jnp.ones(len(images)),
        }
      )
      key = jax.random.key(0)
      params = trees.map_named(hold, params)
      variables = state.variables() | {'params': params}
      return self.task.loss(variables, self.task.prepare(batch, key), key)[0]

    image = self.batch['image']
    image = jax.ShapeDtypeStruct(image.shape[1:], image.dtype)
    return activations.per_image(loss, self.params, image)


def _estimate(rows, device, images, step, request) -> None:
  """Adds the estimates to the rows, which have `kept`, in place."""
  import jax

  sizes = [x.size for x in jax.tree.leaves(step.params)]
  blocks = _blocks(step.model)
  each, _ = rows['none']['kept']
  least = rows['full']['kept'][0] if 'full' in rows else 0
  working = _WORKING * (each - least) * images / blocks
  if request['mesh']['fsdp'] > 1 and request['sharding'] != 'replicate':
    # A block's kernels, gathered, and their gradient before it is scattered.
    working += 2 * 4 * sum(sizes) / blocks
  # As if all of it were split by the rules for tensor, which leave the stream whole.
  tensor = request['mesh']['tensor'] if request['sharding'] == 'fsdp_tensor' else 1
  for row in rows.values():
    each, constant = row.pop('kept')
    row['activations'] = round((each * images + constant) / tensor)
    row['working'] = round(working / tensor)
    row['estimate'] = sum(device.values()) + row['activations'] + row['working']
    row['compiled'] = row['arguments'] + row['temporaries']


def _blocks(model) -> int:
  """Returns the number of residual blocks, of a ResNet's or hybrid's stages too."""
  units = [*(getattr(model, 'blocks', None) or ())]
  units += getattr(model, 'stem_blocks', None) or ()
  return max(getattr(model, 'depth', 0) + sum(units), 1)


def main(argv: list[str]) -> int:
  """Prints what `measure` returns for the request on standard input; returns 0."""
  cli.Parser(
    prog='python -m vit_jax.tools.inspect.mesh_memory',
    description=__doc__.split('\n')[0],
  ).parse_args(argv)
  cli.print_json(measure(json.load(sys.stdin)))
  return 0


if __name__ == '__main__':
  sys.exit(cli.run(main))
