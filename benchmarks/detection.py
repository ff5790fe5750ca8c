"""A training step of DETR beside transformers' PyTorch, and the matcher's share of it.

  python benchmarks/detection.py --torch-python PYTHON [--variant R50] [--batch 1]
    [--size 800 1066] [--objects 7] [--steps 1] [--rounds 3]

PYTHON is the interpreter of an environment with torch, transformers and scipy. Both sides
take images of noise with some boxes each, compute the paper's losses of all decoder layers,
their gradients and an update by AdamW with clipped gradients, in float32 with dropout, in
turns. The stem and the first stage of the backbone are trained on neither side. Ours
matches on the device, with places for 100 boxes an image as in `configs/detr_coco.py`;
transformers asks SciPy on the host.
"""

import contextlib
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import cli, models, optim, sharding, tasks, trees, tune
from vit_jax.data import pipeline
from vit_jax.detection.tasks import matching
from vit_jax.machine import cores
from vit_jax.tools.bench import ours as bench_ours
from vit_jax.tools.bench import peer as bench_peer
from vit_jax.tools.bench import record as bench_record
from vit_jax.train import runtime
from vit_jax.train.state import init_state
from vit_jax.train.step import make_step

SCRIPT = pathlib.Path(__file__).with_name('detection_torch.py')
OPTIM = {'name': 'adamw', 'lr': 1e-4, 'wd': 1e-4, 'clip': 0.1}
TUNE = {'method': 'rules', 'train': [r'(?!backbone/(stem|stage1_)).*']}
PLACES = 100  # for boxes of an image
LAYERS, QUERIES = 6, 100
CLASSES = 91
FIELDS = {'num_classes': CLASSES, 'dropout': 0.1, 'attention_dropout': 0.1}


def batch_of(batch: int, size: tuple[int, int], objects: int, places: int) -> dict:
  """Returns images [B, H, W, 3] of noise with `objects` boxes each."""
  rng = np.random.default_rng(0)
  start = rng.uniform(0, 0.6, (batch, places, 2))
  corners = np.concatenate([start, start + rng.uniform(0.1, 0.4, start.shape)], -1)
  valid = np.broadcast_to(np.arange(places) < objects, (batch, places))
  return {
    'image': rng.integers(0, 256, (batch, *size, 3), np.uint8),
    'image_mask': np.ones((batch, *size), np.uint8),
    'boxes': (corners * valid[..., None]).astype(np.float32),
    'boxes_mask': valid.astype(np.float32),
    'label': (rng.integers(0, CLASSES, valid.shape) * valid).astype(np.int32),
    'mask': np.ones(batch, np.float32),
  }


class Ours:
  """Our step, compiled, with its state and batch.

  Attributes:
    params: their number.
  """

  def __init__(self, variant: str, batch: dict):
    """Compiles it.

    Raises:
      UserError: for an unknown variant.
    """
    model = models.build('detr', variant, **FIELDS)
    family = models.family_of(model)
    shape = batch['image'].shape[1:]
    tuned, rules = tune.attach(model, family, shape, **TUNE)
    spec = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in batch.items()}
    task = tasks.build('detect', tuned, spec)
    optimizer = optim.build(**OPTIM, total_steps=10**6, family=family)
    key = jax.random.key(0)
    init = lambda given: init_state(task, optimizer, spec, key, given, rules)
    step = make_step(task, optimizer, pipeline.scale_on_device, key)
    shapes = models.shapes_of(model, shape)['params']
    self.params = sum(x.size for x in jax.tree.leaves(shapes))
    mesh = sharding.make_mesh(1, devices=jax.local_devices()[:1])
    with jax.set_mesh(mesh):
      given = trees.flatten(shapes)
      abstract = sharding.abstract(jax.eval_shape(init, given), mesh)
      self._step = runtime.compile_step(step, abstract, spec, mesh)
      values = {name: bench_ours.initial_values(name, x) for name, x in given.items()}
      self._state = runtime.run_once(init, abstract, values)
      self._batch = jax.device_put(batch, sharding.batch_sharding(mesh))

  def turn(self, steps: int) -> dict:
    """Runs so many steps; returns 'wall' and 'cpu' seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
      self._state, out = self._step(self._state, self._batch)
    jax.block_until_ready((self._state, out))
    return {'wall': time.perf_counter() - wall, 'cpu': time.process_time() - cpu}


def match_seconds(batch: int, objects: int) -> float:
  """Returns the median seconds of matching all layers of a batch, of random costs."""
  rng = np.random.default_rng(0)
  cost = jnp.asarray(rng.normal(size=(batch, LAYERS, QUERIES, PLACES)), jnp.float32)
  valid = jnp.broadcast_to(jnp.arange(PLACES) < objects, (batch, LAYERS, PLACES))
  function = jax.jit(matching.match).lower(cost, valid).compile()
  times = []
  for _ in range(20):
    start = time.perf_counter()
    jax.block_until_ready(function(cost, valid))
    times.append(time.perf_counter() - start)
  return statistics.median(times)


def main(argv: list[str]) -> int:
  parser = cli.Parser(prog='detection.py', description=__doc__.split('\n')[0])
  parser.add_argument('--torch-python', required=True, metavar='PYTHON')
  parser.add_argument('--variant', default='R50', choices=['R50', 'R101'])
  parser.add_argument('--batch', type=cli.positive, default=1)
  parser.add_argument('--size', type=cli.positive, nargs=2, default=(800, 1066))
  parser.add_argument('--objects', type=cli.positive, default=7, help='of an image')
  parser.add_argument('--steps', type=cli.positive, default=1, help='in a turn')
  parser.add_argument('--rounds', type=cli.positive, default=3)
  args = parser.parse_args(argv)
  if args.objects > PLACES:
    parser.error(f'--objects {args.objects}: expected {PLACES} or fewer')
  with contextlib.closing(bench_peer.Process(args.torch_python, SCRIPT)) as worker:
    versions = bench_record.versions() | worker.ask(check=None)
    machine = bench_record.machine()
    print(f'{machine["device"]}, {machine["cores"]} cores, load {machine["load"]}')
    print(', '.join(f'{name} {version}' for name, version in versions.items()))
    spec = {
      **{'variant': args.variant, 'batch': args.batch, 'size': list(args.size)},
      **{'objects': args.objects, 'classes': CLASSES, 'threads': cores()},
    }
    about = worker.ask(build=spec)
    ours = Ours(args.variant, batch_of(args.batch, args.size, args.objects, PLACES))
    if ours.params != about['params']:
      print(f'note: {ours.params:,} parameters here, {about["params"]:,} there')
    sides = lambda: ours.turn(args.steps), lambda: worker.ask(turn=args.steps)
    for side in sides:  # warm up
      side()
    us, them = bench_peer.alternate(*sides, args.rounds)
  seconds = [
    statistics.median(t['wall'] for t in side) / args.steps for side in (us, them)
  ]
  found = bench_peer.ratios(us, them)
  match = match_seconds(args.batch, args.objects)
  print(
    f'a step of {args.variant}, {args.batch} x {args.size[0]} x {args.size[1]}: '
    f'{seconds[0]:.2f} s, transformers {seconds[1]:.2f} s, ratio {found["ratio"]:.2f} '
    f'({found["ratio_min"]:.2f}-{found["ratio_max"]:.2f}), by CPU time '
    f'{found["cpu_ratio"]:.2f}; matching {1e3 * match:.2f} ms, '
    f'{100 * match / seconds[0]:.2f} % of our step'
  )
  return 0


if __name__ == '__main__':
  sys.exit(cli.run(main))
