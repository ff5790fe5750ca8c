"""A training step on TPUs that are not there, ours beside big_vision's, by two rulers.

  .venv-tpu/bin/python benchmarks/rulers.py vit:B/16 --set depth=3 --set classifier=gap \
    --batch 64 --tpu v3,v5e [--big_vision CHECKOUT]

XLA estimates the cycles of its own fusions, but not those of Pallas kernels. So there are
two counts, in cycles of one device:

- estimate: XLA's `estimated_cycles`, and the schedule of Pallas kernels. It compares two
  measures wherever one side has kernels and the other has none.
- common: for every operation the largest of its schedule, its off-chip bytes at the
  memory's rate, and the operations of its products at the matrix units' rate.

A schedule is the bundles of instructions that libtpu wrote for an operation, one a cycle,
times the trips of its loops; on v4 and v5p, whose two cores share a parallel grid, these
trips are those of one core. Memory is exact. Neither count knows the host or collectives.
"""

import inspect
import itertools
import os
import pathlib
import re
import shutil
import sys
import tempfile

import hlo

from vit_jax import cli
from vit_jax.tools import bench
from vit_jax.tools.inspect import tpu

# As in the recipes for accelerators.
OPTIM = {**bench.OPTIM, 'clip': 1.0, 'moment_dtype': 'bfloat16'}
_FILE = re.compile(r'\d+-(.+)-\d+-final_bundles\.txt')
_BUNDLE = re.compile(r'^ *0x[0-9a-f]+ +(?:[A-Z]+)? *: ?((?:> ?)*)')
_EMPTY = re.compile(_BUNDLE.pattern + r' *\{ *\}')
_EXIT = re.compile(r'scmp\.ge\.s32\.totalorder [^,]+, (\d+) /\* loop exit test')
_DELAY = re.compile(r'\bvdelay (\d+)')  # cycles until the result of a unit is there


def record_schedules() -> pathlib.Path:
  """Has libtpu write its schedules to a folder; to be called before it is loaded."""
  folder = pathlib.Path(tempfile.mkdtemp(prefix='schedules_'))
  os.environ['LIBTPU_INIT_ARGS'] = (
    f'{os.environ.get("LIBTPU_INIT_ARGS", "")} --xla_jf_dump_to={folder} '
    '--xla_jf_dump_llo_text=true '
    '--xla_jf_dump_llo_pass_label_regex=.*final_bundles.*'
  )
  return folder


def cycles_of(schedule: str) -> int:
  """Returns the cycles of one schedule: bundles and delays, times the trips of loops.

  A loop whose trips are not a constant counts once.
  """
  lines = [line for line in schedule.splitlines() if _BUNDLE.match(line)]
  depths = [_BUNDLE.match(line)[1].count('>') for line in lines]
  # libtpu prints empty bundles without the marks of their loops: they are in the loops that
  # the bundles before and after share.
  full = [at for at, line in enumerate(lines) if not _EMPTY.match(line)]
  for before, after in itertools.pairwise(full):
    for at in range(before + 1, after):
      depths[at] = min(depths[before], depths[after])
  # Cycles and trip count per enclosing loop, the outermost first.
  totals, trips = [0], [1]
  for line, depth in zip(lines, depths, strict=True):
    while len(totals) <= depth:
      totals.append(0)
      trips.append(1)
    while len(totals) > depth + 1:
      inside = totals.pop() * trips.pop()
      totals[-1] += inside
    totals[-1] += 1 + sum(int(n) for n in _DELAY.findall(line))
    if depth and (test := _EXIT.search(line)):
      trips[-1] = max(int(test[1]), 1)
  while len(totals) > 1:
    inside = totals.pop() * trips.pop()
    totals[-1] += inside
  return totals[0]


def take_schedules(folder: pathlib.Path) -> dict[str, int]:
  """Returns {operation: cycles} of the program compiled last, and removes its files."""
  cycles = {}
  for path in sorted(folder.iterdir()):  # in the order of time
    match = _FILE.fullmatch(path.name)
    if match and 'schedule-analysis' not in path.name:
      cycles[match[1]] = cycles_of(path.read_text())
    path.unlink()
  return cycles


def count(text: str, schedules: dict[str, int], generation: tpu.Generation) -> dict:
  """Returns the cycles of a program's text by both rulers.

  Args:
    schedules: of `take_schedules`. libtpu writes one of several operations that are
      alike, under the name of any.
  """
  bodies, _ = hlo.computations(text)
  runs = [run for run in hlo.instructions(text) if not hlo.is_free(run)]
  shapes = hlo.shapes(bodies)
  alike = {}
  for run in runs:
    if run.name in schedules:
      alike.setdefault(_kind(run, bodies), schedules[run.name])
  estimate = common = unscheduled = 0
  for run in runs:
    schedule = schedules.get(run.name, alike.get(_kind(run, bodies)))
    off_chip = hlo.moved_bytes(run, shapes, bodies, off_chip=True)
    off_chip /= generation.bytes_per_cycle
    estimated = re.search(r'"estimated_cycles":"(\d+)"', run.text)
    own = int(estimated[1]) if estimated else max(schedule or 0, off_chip)
    unscheduled += run.times * own * (schedule is None)
    estimate += run.times * own
    products = hlo.operations(run, shapes, bodies) / generation.ops_per_cycle
    least = max(off_chip, products)
    common += run.times * max(own if schedule is None else schedule, least)
  return {'estimate': estimate, 'common': common, 'unscheduled': unscheduled}


def _kind(run: hlo.Instruction, bodies: dict[str, list[str]]) -> tuple:
  """Returns a key that operations share if they do the same on the same shapes."""
  plain = lambda text: re.sub(
    r'metadata=\{[^}]*\}|backend_config=.*|%[\w.\-]+|frontend_attributes=.*', '', text
  )
  called = re.search(r'calls=%?([\w.\-]+)', run.text)
  body = tuple(map(plain, bodies.get(called[1], ()))) if called else ()
  grid = re.search(r'kernel_metadata=\{[^}]*\}', run.text)
  operation = re.search(r'op_name="([^"]*)"', run.text) if grid else None
  tail = tuple(operation[1].split('/')[-2:]) if operation else ()
  return run.opcode, run.shape, body, grid and grid[0], tail


def ours(subject: bench.Subject, batch: int, devices):
  """Lowers the step of a run for one device."""
  import jax

  from vit_jax import kernels, sharding
  from vit_jax.data import pipeline
  from vit_jax.train.trainer import Trainer

  mesh = sharding.make_mesh(1, devices=devices)
  config = subject.config() | {'optim': OPTIM}
  trainer = Trainer(config, subject.spec(batch), mesh, pipeline.scale_on_device)
  with jax.set_mesh(mesh), kernels.using(*kernels.KERNELS):
    return trainer.lower()


def main(argv: list[str]) -> int:
  parser = cli.Parser('rulers.py', description=__doc__.split('\n')[0])
  parser.add_argument('model', metavar='MODEL')
  parser.add_argument('--set', action=cli.Fields, help='a field of the model')
  parser.add_argument('--dtype', choices=bench.DTYPES, default='bfloat16')
  parser.add_argument('--batch', type=cli.positive, default=64)
  parser.add_argument('--resolution', type=cli.resolution, default=(224, 224))
  parser.add_argument('--tpu', type=cli.words(list(tpu.GENERATIONS)), default=['v5e'])
  parser.add_argument('--big_vision', metavar='CHECKOUT', help='compile its ViT, too')
  args = parser.parse_args(argv)
  tpu.prepare()
  folder = record_schedules()
  sides = {'ours': ours}
  if args.big_vision:
    import big_vision_vit

    sides['big_vision'] = big_vision_vit.load(args.big_vision, OPTIM)
  from vit_jax.train import runtime

  subject = bench.Subject(args.model, args.dtype, args.resolution, args.set, {})
  read = lambda program: {
    'text': program.as_text(),
    'memory': runtime.memory(program),
    'schedules': take_schedules(folder),
  }
  rows = []
  try:
    for name in args.tpu:
      generation = tpu.GENERATIONS[name]
      for side, lower in sides.items():
        lowered = lower(subject, args.batch, tpu.devices(name)[:1])
        program = tpu.compiled(lowered, name, read, more=inspect.getsource(cycles_of))
        cycles = count(program['text'], program['schedules'], generation)
        rows.append({'tpu': name, 'side': side, **cycles, **program['memory']})
        if not args.json:
          print(_text(rows[-1]), flush=True)
  finally:
    shutil.rmtree(folder, ignore_errors=True)
  if args.json:
    cli.print_json({'model': args.model, 'set': args.set, 'rows': rows})
  else:
    print('\n'.join(_ratios(rows)))
  return 0


def _text(row: dict) -> str:
  millions = ', '.join(
    f'{key} {row[key] / 1e6:.2f}' for key in ('estimate', 'common', 'unscheduled')
  )
  memory = f'{row["temp_bytes"] / 2**30:.2f} GiB of temporaries'
  return f'{row["tpu"]:4} {row["side"]:11} M cycles: {millions}; {memory}'


def _ratios(rows: list[dict]):
  for mine, other in zip(rows[::2], rows[1::2], strict=False):
    if mine['side'] != other['side']:
      keys = ('estimate', 'common', 'temp_bytes')
      parts = (f'{key} {mine[key] / max(other[key], 1):.2f}' for key in keys)
      yield f'{mine["tpu"]:4} ours / big_vision: {", ".join(parts)}'


if __name__ == '__main__':
  sys.exit(cli.run(main))
