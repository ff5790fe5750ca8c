"""`vit_jax inspect --config C --tpu v3:16x16`: a recipe compiled for a slice of TPUs.

libtpu compiles for TPUs that are not there. Memory is exact: the bytes that the compiler
allocates. Cycles are XLA's own estimates, `estimated_cycles` of each fusion. An operation
without one (a Pallas kernel, a copy) counts as the larger of its declared work and its
bytes, at the device's rates. Left out: the host, and collectives, which are listed.
"""

import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from vit_jax.errors import UserError, choose

_GIB = 2**30
# Without these libtpu asks a metadata server for its machine, and locks out a second process.
_ENVIRONMENT = {
  'JAX_PLATFORMS': 'cpu',
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_ACCELERATOR_TYPE': 'v5litepod-4',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  'TPU_STDERR_LOG_LEVEL': '3',
}


class Generation(NamedTuple):
  """A generation of TPUs; a device is a core of v2, v3 and 7x, else a chip.

  Attributes:
    tflops: the vendor's peak of a device in bfloat16, in 1e12 operations a second
      (cloud.google.com/tpu/docs, 2026-11).
    ops_per_cycle: operations a cycle of its matrix units.
    bytes_per_cycle: of memory, by XLA's cost model.
    hbm: bytes of memory.
    devices: on a chip. cores: of a device.
    slice: the smallest that can be compiled for. axes, chips: of the largest.
  """

  tflops: float
  ops_per_cycle: int
  bytes_per_cycle: float
  hbm: int
  devices: int
  cores: int
  slice: str
  axes: int
  chips: int

  @property
  def clock(self) -> float:
    """Cycles a second at which the units reach the vendor's peak."""
    return self.tflops * 1e12 / self.ops_per_cycle


_UNIT, _WIDE = 2 * 128 * 128, 2 * 256 * 256  # operations a cycle of a matrix unit
GENERATIONS = {
  'v2': Generation(22.5, 1 * _UNIT, 446, 8 * _GIB, 2, 1, '2x2x1', 2, 256),
  'v3': Generation(61.5, 2 * _UNIT, 448, 16 * _GIB, 2, 1, '2x2x1', 2, 1024),
  'v4': Generation(275, 8 * _UNIT, 897, 32 * _GIB, 1, 2, '2x2x1', 3, 4096),
  'v5e': Generation(197, 4 * _UNIT, 438, 16 * _GIB, 1, 1, '2x2', 2, 256),
  'v5p': Generation(459, 8 * _UNIT, 1125, 95 * _GIB, 1, 2, '2x2x1', 3, 8960),
  'v6e': Generation(918, 4 * _WIDE, 756, 32 * _GIB, 1, 1, '2x2', 2, 256),
  '7x': Generation(1153.5, 4 * _WIDE, 1265, 96 * _GIB, 2, 1, '2x2x1', 3, 9216),
}


def parse(text: str) -> tuple[str, str]:
  """Returns 'v3:4x4' as ('v3', '4x4'); 'v3' alone is its smallest slice.

  Raises:
    UserError: for an unknown generation, or a shape that there is not: libtpu takes such
      shapes, or aborts the process.
  """
  name, _, shape = text.lower().removeprefix('tpu').partition(':')
  also = ', with chips along each axis as in v3:4x4 (v3-32)'
  generation = choose('TPU generation', name, GENERATIONS, also)
  shape = shape or generation.slice
  known = re.fullmatch(r'\d+(x\d+)*', shape)
  sizes = [int(n) for n in shape.split('x')] if known else []
  beyond = any(n > 1 for n in sizes[generation.axes :])
  if not sizes or beyond or math.prod(sizes) > generation.chips:
    raise UserError(
      f'{text!r}: slices of {name} have chips along {generation.axes} axes, up to '
      f'{generation.chips:,} of them, as in {name}:{generation.slice}.'
    )
  return name, shape


def prepare() -> None:
  """Readies this process to compile for TPUs; to be called before JAX is first used."""
  if importlib.util.find_spec('libtpu') is None:
    raise UserError(
      'Compiling for TPUs needs libtpu, in an environment of its own (beside it JAX looks '
      'for TPUs whenever it starts): run `make .venv-tpu`, then .venv-tpu/bin/python.'
    )
  os.environ.update(_ENVIRONMENT)


def devices(text: str) -> list:
  """Returns the described devices of 'v3:4x4' or 'v5e'."""
  import jax
  from jax.experimental import topologies

  name, shape = parse(text)
  # As on Cloud TPU VMs: both cores of a chip as one device.
  megacore = {'chip_config_name': 'megacore'} if name == 'v4' else {}
  platform = f'tpu{name}' if name == '7x' else name
  try:
    described = topologies.get_topology_desc(
      platform='tpu', topology_name=f'{platform}:{shape}', **megacore
    )
  except jax.errors.JaxRuntimeError as error:
    raise UserError(
      f'--tpu {text}: not a shape of {name}; the smallest is {GENERATIONS[name].slice}, the '
      f'first two axes are even. libtpu: {str(error).splitlines()[0]}'
    ) from None
  return list(described.devices)


def inspect(config: dict, record: dict, text: str) -> dict:
  """Compiles a recipe's step for a slice, 'v3:16x16'.

  Args:
    config: checked. record: its `recipe.describe`.

  Returns:
    tpu, devices, mesh, hbm; bytes, temp_bytes and argument_bytes of a device; cycles and
    collectives, see `cycles`; step_s, by the clock of the vendor's peak; images_per_s of
    the slice; mfu; hours and chip_hours of the whole run.

  Raises:
    UserError: for a program that does not fit.
  """
  import jax

  from vit_jax import kernels, sharding
  from vit_jax.tools.inspect import recipe
  from vit_jax.train import runtime

  name, shape = parse(text)
  generation, described = GENERATIONS[name], devices(text)
  count = len(described)
  mesh = sharding.make_mesh(**config['mesh'], devices=described)
  too_large = lambda why: UserError(
    f'--tpu {name}:{shape}: the step does not fit {generation.hbm / _GIB:g} GiB on each of '
    f'{count} devices: {why} Try --config.model.remat=full, --config.mesh.fsdp={count}, '
    '--config.optim.accum=2 or a larger slice.'
  )
  print(f'Compiling for {name}:{shape}: minutes.', file=sys.stderr, flush=True)
  trainer = recipe.trainer(config, record, mesh)
  # The mesh's devices cannot run anything, nor verify a kernel: all kernels are used.
  used = kernels.using(*kernels.KERNELS)
  with jax.set_mesh(mesh), used, runtime.out_of_memory(too_large):
    program = trainer.lower().compile()
  memory = runtime.memory(program)
  if memory['bytes'] > generation.hbm:  # libtpu lets some programs pass
    raise too_large(f'it takes {memory["bytes"] / _GIB:.2f}.')
  work = cycles(program.as_text(), generation)
  seconds = work['cycles'] / generation.clock
  hours = seconds * record['steps'] / 3600
  operations = 3 * record['gflops'] * 1e9 * record['batch_size']
  return {
    'tpu': f'{name}:{shape}',
    'devices': count,
    'mesh': dict(mesh.shape),
    'hbm': generation.hbm,
    **memory,
    **work,
    'step_s': seconds,
    'images_per_s': record['batch_size'] / seconds,
    'mfu': operations / (generation.ops_per_cycle * work['cycles'] * count),
    'hours': hours,
    'chip_hours': hours * count / generation.devices,
  }


def render(record: dict) -> str:
  """Returns the record of `inspect` as text."""
  axes = ', '.join(f'{k}={v}' for k, v in record['mesh'].items() if v > 1) or 'one'
  rows = [
    ('slice', f'{record["tpu"]}, {record["devices"]:,} devices ({axes})'),
    (
      'memory of a device',
      f'{record["bytes"] / _GIB:.2f} GiB of {record["hbm"] / _GIB:g}: fits '
      f'(temporaries {record["temp_bytes"] / _GIB:.2f})',
    ),
    (
      'a step',
      f'{record["cycles"] / 1e6:,.1f} M cycles, {1e3 * record["step_s"]:,.1f} ms',
    ),
    ('images/s', f'{record["images_per_s"]:,.0f} (MFU {record["mfu"]:.1%})'),
    (
      'whole run',
      f'{record["hours"]:.3g} hours, {record["chip_hours"]:.3g} chip-hours',
    ),
  ]
  for opcode, row in record['collectives'].items():
    rows.append(
      (opcode, f'{row["bytes"] / 1e9:.3f} GB in {row["times"]:,} calls a step')
    )
  lines = [f'  {label:<22}{value}' for label, value in rows]
  lines += [
    '',
    "  Memory is exact. Time is XLA's estimate at the clock of the vendor's peak, without",
    '  input, host and interconnect.',
  ]
  return '\n'.join(lines)


# --- the text of a compiled program ----------------------------------------------------

_HEAD = re.compile(r'^(ENTRY )?%?([\w.\-]+) .*\{\s*$')
_INSTRUCTION = re.compile(
  r'^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$'
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_UNTIL = re.compile(r'ROOT .* compare\(%[\w.\-]+, %([\w.\-]+)\), direction=LT')
_CALLED = re.compile(
  r'(?:to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)'
)
_SHAPE = re.compile(r'([a-z]\w*)\[([\d,]*)\](?:\{([\d,]*)(:[^}]*)?\})?')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_ESTIMATE = re.compile(r'"cost_estimate":(\{[^}]*\})')
_COLLECTIVES = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all')
_COLLECTIVES += ('collective-permute', 'collective-broadcast')
# Operations that move nothing, or whose time is that of what they call or wait for.
FREE = {
  'parameter',
  'constant',
  'tuple',
  'get-tuple-element',
  'bitcast',
  'while',
  'call',
}
FREE |= {'conditional', 'after-all', 'partition-id', 'replica-id', 'domain', 'infeed'}
FREE |= {'opt-barrier', 'add-dependency', 'outfeed', 'rng-get-and-update-state'}
_FREE_CALLS = ('AllocateBuffer', 'AssumeGatherIndicesInBound', 'Sharding', 'Bitcast')
_TRANSCENDENTALS = 1024  # a cycle: one for each lane of a vector register


class Instruction(NamedTuple):
  """One instruction of a compiled program.

  Attributes:
    times: runs in one call of the program. text: its line.
  """

  name: str
  shape: str
  opcode: str
  operands: tuple[str, ...]
  text: str
  times: int


def instructions(text: str) -> Iterator[Instruction]:
  """Yields the instructions of ENTRY and of what it calls, without the inside of fusions.

  A loop's body runs as often as the program says, once if it does not.
  """
  bodies, entry = computations(text)

  def walk(name, times):
    for line in bodies.get(name, ()):
      if not (match := _INSTRUCTION.match(line)):
        continue
      operands = tuple(re.findall(r'%([\w.\-]+)', match[4].split('), ')[0]))
      yield Instruction(match[1], match[2], match[3], operands, line, times)
      if match[3] == 'while':
        for body in re.findall(r'body=%?([\w.\-]+)', line):
          yield from walk(body, times * _trips(line, bodies))
      elif match[3] in ('call', 'conditional', 'async-start'):
        branches = re.search(r'branch_computations=\{([^}]*)\}', line)
        names = re.findall(r'[\w.\-]+', branches[1]) if branches else []
        for other in [*_CALLED.findall(line), *names]:
          yield from walk(other, times)

  yield from walk(entry, 1)


def _trips(line: str, bodies: dict[str, list[str]]) -> int:
  if known := _TRIPS.search(line):
    return int(known[1])
  # A counter from 0 that is compared with a constant.
  condition = re.search(r'condition=%?([\w.\-]+)', line)
  lines = bodies.get(condition[1], []) if condition else []
  for until in filter(None, map(_UNTIL.search, lines)):
    value = re.compile(rf'%?{re.escape(until[1])} = [su]32\S* constant\((\d+)\)')
    for constant in filter(None, map(value.search, lines)):
      return int(constant[1])
  return 1


def computations(text: str) -> tuple[dict[str, list[str]], str]:
  """Returns ({name: lines}, name of ENTRY)."""
  bodies, entry, lines = {}, '', None
  # A kernel's metadata is printed on lines of its own.
  text = re.sub(r'kernel_metadata=\{\n(.*)\n\}', r'kernel_metadata={\1}', text)
  for line in text.splitlines():
    if not line.startswith((' ', '}')) and (head := _HEAD.match(line)):
      lines = bodies[head[2]] = []
      entry = head[2] if head[1] else entry
    elif line.startswith('}'):
      lines = None
    elif lines is not None:
      lines.append(line)
  return bodies, entry


def padded_bytes(shape: str, off_chip: bool = False) -> int:
  """Returns the bytes of 'bf16[64,197,768]{2,1,0:T(8,128)(2,1)}' as it lies in memory.

  The axes that vary fastest are padded to the tile, (8, 128) here. A tuple is the sum of
  its parts.

  Args:
    off_chip: leaves out arrays that lie on the chip, `S(1)`.
  """
  total = 0
  for dtype, dims, order, tiling in _SHAPE.findall(shape):
    if off_chip and 'S(' in tiling:
      continue
    sizes = [int(n) for n in dims.split(',')] if dims else []
    minor = [int(n) for n in order.split(',')] if order else []
    if (tile := re.match(r':T\(([\d,]+)\)', tiling)) and minor:
      units = [int(n) for n in tile[1].split(',')]
      for axis, unit in zip(minor, reversed(units), strict=False):
        sizes[axis] = -(-sizes[axis] // unit) * unit
    digits = re.search(r'\d+', dtype)
    bits = {'s4': 4, 'u4': 4, 'token': 0}.get(dtype, int(digits[0]) if digits else 8)
    total += math.prod(sizes) * bits // 8
  return total


def moved_bytes(
  run: Instruction, shapes: dict[str, str], off_chip: bool = False
) -> int:
  """Returns the bytes that an instruction reads and writes; an operand counts once."""
  operands = (shapes.get(name, '') for name in dict.fromkeys(run.operands))
  return sum(padded_bytes(shape, off_chip) for shape in (run.shape, *operands))


def cycles(text: str, generation: Generation) -> dict:
  """Sums XLA's estimates over a compiled program's text.

  Returns:
    cycles of a device; collectives, {opcode: {times, bytes}} of a device.
  """
  total, collectives, shapes = 0, {}, {}
  for run in instructions(text):
    shapes[run.name] = run.shape
    opcode = run.opcode.removesuffix('-start')
    if opcode in _COLLECTIVES:
      row = collectives.setdefault(opcode, {'times': 0, 'bytes': 0})
      row['times'] += run.times
      # A reduction sends its result as well.
      row['bytes'] += (
        run.times * padded_bytes(run.shape) * (1 + (opcode == 'all-reduce'))
      )
    elif known := _CYCLES.search(run.text):
      total += run.times * int(known[1])
    elif not is_free(run):
      total += run.times * _declared(run, shapes, generation)
  return {'cycles': total, 'collectives': collectives}


def is_free(run: Instruction) -> bool:
  """Whether an instruction takes no time here: it runs beside others, or moves nothing."""
  beside = run.opcode.endswith(('-start', '-done'))
  calls = run.opcode == 'custom-call' and any(name in run.text for name in _FREE_CALLS)
  return beside or calls or run.opcode in (*FREE, *_COLLECTIVES)


def _declared(run, shapes, generation: Generation) -> int:
  """Returns cycles of an instruction without XLA's estimate."""
  work = [moved_bytes(run, shapes) / generation.bytes_per_cycle]
  if declared := _ESTIMATE.search(run.text):
    numbers = {key: float(value) for key, value in json.loads(declared[1]).items()}
    work.append(numbers.get('flops', 0) / generation.ops_per_cycle)
    work.append(numbers.get('transcendentals', 0) / _TRANSCENDENTALS)
  return math.ceil(max(work))
