"""`vit_jax inspect --config C --tpu v3:16x16` compiles a recipe for a slice of TPUs.

libtpu can compile for TPUs that this machine does not have. Memory is exact. Cycles are the
sum of XLA's estimate for each fusion and, for Pallas kernels, of their declared work at the
device's peak rates. The host, copies and collectives are left out.
"""

import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from vit_jax import files
from vit_jax.errors import OutOfMemory, UserError, choose

_GIB = 2**30
# Without these variables, libtpu asks a metadata server about its machine, and does not let a
# second process use it.
_ENVIRONMENT = {
  'JAX_PLATFORMS': 'cpu',
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_ACCELERATOR_TYPE': 'v5litepod-4',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  'TPU_STDERR_LOG_LEVEL': '3',
}


class Generation(NamedTuple):
  """A generation of TPUs. A device is a core in v2, v3 and 7x, and a chip in all others.

  Attributes:
    tflops: the vendor's peak of a device in bfloat16, in 1e12 operations per second
      (cloud.google.com/tpu/docs, 2026-11).
    ops_per_cycle: operations per cycle of its matrix units.
    bytes_per_cycle: bytes per cycle of its memory, by XLA's cost model.
    hbm: bytes of its memory.
    slice: the smallest slice for which libtpu can compile.
    axes, chips: number of axes and of chips of the largest slice.
    link: the vendor's rate from a chip to its neighbour, in 1e9 bytes per second.
  """

  tflops: float
  ops_per_cycle: int
  bytes_per_cycle: float
  hbm: int
  slice: str
  axes: int
  chips: int
  link: float


# Operations per cycle of a matrix unit.
_UNIT, _WIDE = 2 * 128 * 128, 2 * 256 * 256
GENERATIONS = {
  'v2': Generation(22.5, 1 * _UNIT, 446, 8 * _GIB, '2x2x1', 2, 256, 62),
  'v3': Generation(61.5, 2 * _UNIT, 448, 16 * _GIB, '2x2x1', 2, 1024, 82),
  'v4': Generation(275, 8 * _UNIT, 897, 32 * _GIB, '2x2x1', 3, 4096, 50),
  'v5e': Generation(197, 4 * _UNIT, 438, 16 * _GIB, '2x2', 2, 256, 50),
  'v5p': Generation(459, 8 * _UNIT, 1125, 95 * _GIB, '2x2x1', 3, 8960, 100),
  'v6e': Generation(918, 4 * _WIDE, 756, 32 * _GIB, '2x2', 2, 256, 100),
  '7x': Generation(1153.5, 4 * _WIDE, 1265, 96 * _GIB, '2x2x1', 3, 9216, 100),
}


def parse(text: str) -> tuple[str, str]:
  """Parses 'v3:4x4' to ('v3', '4x4'); 'v3' alone is its smallest slice.

  Raises:
    UserError: for an unknown generation or an impossible shape. libtpu would accept such a
      shape, or abort the process.
  """
  name, _, shape = text.lower().removeprefix('tpu').partition(':')
  generation = choose('TPU generation', name, GENERATIONS)
  shape = shape or generation.slice
  match = re.fullmatch(r'\d+(x\d+)*', shape)
  sizes = [int(n) for n in shape.split('x')] if match else []
  beyond = any(n > 1 for n in sizes[generation.axes :])
  if not sizes or beyond or math.prod(sizes) > generation.chips:
    raise UserError(
      f'{text!r}: slices of {name} have {generation.axes} axes and at most '
      f'{generation.chips:,} chips, as in {name}:{generation.slice}.'
    )
  return name, shape


def prepare() -> None:
  """Prepares this process to compile for TPUs; to be called before JAX is first used."""
  if importlib.util.find_spec('libtpu') is None:
    raise UserError(
      'Compiling for TPUs needs libtpu: run `make .venv-tpu`, then .venv-tpu/bin/python.'
    )
  os.environ.update(_ENVIRONMENT)


def devices(text: str) -> list:
  """Returns descriptions of the devices of a slice, 'v3:4x4' or 'v5e'."""
  import jax
  from jax.experimental import topologies

  name, shape = parse(text)
  # On v4, both cores of a chip are one device, as on Cloud TPU VMs.
  megacore = {'chip_config_name': 'megacore'} if name == 'v4' else {}
  platform = f'tpu{name}' if name == '7x' else name
  try:
    described = topologies.get_topology_desc(
      platform='tpu', topology_name=f'{platform}:{shape}', **megacore
    )
  except jax.errors.JaxRuntimeError as error:
    raise UserError(
      f'--tpu {text}: no slice of {name} has this shape, unlike {GENERATIONS[name].slice}: '
      f'{str(error).splitlines()[0]}'
    ) from None
  return list(described.devices)


def compiled(
  lowered,
  slice: str,
  read: Callable[..., dict],
  options: dict[str, str] | None = None,
  more: str = '',
) -> dict:
  """Compiles a lowered program; returns the facts that `read` takes from the compiled one.

  They are cached, because JAX's own cache cannot load programs for devices that are not
  there.

  Args:
    read: returns values that JSON can express.
    options: of the compiler.
    more: names anything else that the facts depend on.
  """
  versions = (f'{x} {importlib.metadata.version(x)}' for x in ('jax', 'libtpu'))
  flags = (os.environ.get(name, '') for name in ('XLA_FLAGS', 'LIBTPU_INIT_ARGS'))
  # Where and whether the compiler dumps files makes no difference to the program.
  flags = (re.sub(r'--xla_\w*dump\S*', '', text) for text in flags)
  key = '\n'.join([slice, *versions, *flags, repr(options), more, lowered.as_text()])
  name = f'{slice}-{hashlib.sha256(key.encode()).hexdigest()}.json.gz'.replace(':', '-')
  file = files.cache_dir() / 'programs' / name
  if file.exists():
    return json.loads(gzip.decompress(file.read_bytes()))
  print(f'Compiling for {slice}: minutes.', file=sys.stderr, flush=True)
  facts = read(lowered.compile(options))
  file.parent.mkdir(parents=True, exist_ok=True)
  files.replace(file, gzip.compress(json.dumps(facts).encode()))
  return facts


def inspect(config: dict, record: dict, text: str) -> dict:
  """Compiles the step of a recipe for a slice such as 'v3:16x16', on two meshes.

  The second mesh has all devices on fsdp, or on data if the recipe's mesh has fsdp.

  Returns:
    tpu, devices and hbm; the facts of `_compile_step` on the recipe's mesh; hours of the
    whole run; other, the facts of the second mesh, without bytes if the step does not fit.

  Raises:
    UserError: if the step does not fit into the memory of a device.
  """
  from vit_jax import sharding

  name, shape = parse(text)
  where, described, hbm = f'{name}:{shape}', devices(text), GENERATIONS[name].hbm
  mesh = sharding.make_mesh(**config['mesh'], devices=described)
  own, other = _compile_step(config, record, mesh, where), None
  if (share := sharding.batch_divisor(mesh)) > 1:
    sizes = (share, 1) if mesh.shape['fsdp'] > 1 else (1, share)
    second = sharding.make_mesh(*sizes, mesh.shape['tensor'], devices=described)
    other = _compile_step(config, record, second, where)
  if 'bytes' not in own:
    advice = (
      '--config.model.remat=full, --config.optim.accum=2 (for pairs of images and texts '
      '--config.task.parts=2) or a larger slice'
    )
    if other and 'bytes' in other:
      axes = ('data', 'fsdp')
      advice = ' '.join(f'--config.mesh.{axis}={other["mesh"][axis]}' for axis in axes)
    raise UserError(
      f'--tpu {where}: the step does not fit on {mesh.size} devices of '
      f'{hbm / _GIB:g} GiB: {"; ".join(_render_steps(own, other))}. Try {advice}.'
    )
  hours = own['step_s'] * record['steps'] / 3600
  return {
    'tpu': where,
    'devices': mesh.size,
    'hbm': hbm,
    **own,
    'hours': hours,
    'other': other,
  }


def _compile_step(config: dict, record: dict, mesh, where: str) -> dict:
  """Compiles the step of a recipe for a mesh on a slice such as 'v3:16x16'.

  Returns:
    mesh; bytes, temp_bytes and argument_bytes of a device; cycles of a step, and its
    `collectives`; step_s, at the clock that the vendor's peak implies, with alone_s, the
    time of the collectives beside which nothing else runs; or why it does not fit.
  """
  import jax

  from vit_jax import kernels, sharding
  from vit_jax.tools.inspect import recipe
  from vit_jax.train import runtime

  name, shape = parse(where)
  trainer = recipe.trainer(config, record, mesh)
  generation, sizes = GENERATIONS[name], dict(mesh.shape)
  # The described devices cannot run anything, and so cannot verify kernels. Use all kernels.
  used = kernels.using(*kernels.KERNELS)
  read = lambda program: {'text': program.as_text(), **runtime.memory(program)}
  try:
    with jax.set_mesh(mesh), used, runtime.report_out_of_memory(OutOfMemory):
      options = sharding.compiler_options(mesh)
      memory = compiled(trainer.lower(), where, read, options)
  except OutOfMemory as error:
    return {'mesh': sizes, 'why': str(error)}
  program = memory.pop('text')
  # libtpu does not reject all programs that are too large.
  if memory['bytes'] > generation.hbm:
    return {'mesh': sizes, 'why': f'{memory["bytes"] / _GIB:.2f} GiB'}
  work = cycles(program, generation)
  # A chip at the corner of a slice has one neighbour on each axis.
  links = sum(int(n) > 1 for n in shape.split('x')) or 1
  counts, alone = collectives(program)
  alone_s = alone / (links * generation.link * 1e9)
  return {
    'mesh': sizes,
    **memory,
    'cycles': work,
    'collectives': counts,
    'alone_s': alone_s,
    'step_s': work * generation.ops_per_cycle / (generation.tflops * 1e12) + alone_s,
  }


def render(record: dict) -> str:
  """Returns the record of `inspect` as text."""
  steps = _render_steps(record, record['other'])
  rows = {
    'slice': f'{record["tpu"]}, {record["devices"]:,} devices of '
    f'{record["hbm"] / _GIB:g} GiB',
    'a step': next(steps),
    'its collectives': ', '.join(
      f'{n:,} {x}' for x, n in record['collectives'].items()
    ),
    'whole run': f'{record["hours"]:.3g} hours',
    'on another mesh': next(steps, None),
  }
  lines = [f'  {label:<22}{value}' for label, value in rows.items() if value]
  lines += [
    '',
    "  Memory is exact. Time is XLA's estimate, without input, host and copies. Collectives",
    '  are counted by their bytes; those that end in -start run beside other operations.',
  ]
  return '\n'.join(lines)


def _render_steps(*steps: dict | None) -> Iterator[str]:
  """Yields a line about the memory and the time of each result of `_compile_step`."""
  gib = lambda size: f'{size / _GIB:.2f} GiB'
  for step in filter(None, steps):
    axes = (f'{axis}={size}' for axis, size in step['mesh'].items() if size > 1)
    mesh = ', '.join(axes) or 'one device'
    if 'bytes' not in step:
      yield f'{mesh} does not fit ({step["why"]})'
      continue
    yield (
      f'{mesh} fits in {gib(step["bytes"])} (temporaries {gib(step["temp_bytes"])}): '
      f'{step["cycles"] / 1e6:,.1f} M cycles and {1e3 * step["alone_s"]:.1f} ms of '
      f'collectives, {1e3 * step["step_s"]:,.1f} ms'
    )


_HEAD = re.compile(r'^(ENTRY )?%?([\w.\-]+) .*\{\s*$')
_ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')
_DECLARED = re.compile(r'"cost_estimate":(\{[^}]*\})')
_LOOP = re.compile(r' while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALL = re.compile(r' (?:call|conditional|async-start)\(')
_CALLED = re.compile(
  r'(?:to_apply|calls|\w+_computations?)=\{?((?:%?[\w.\-]+(?:, )?)+)'
)


# Collectives by their opcode; those that XLA fused with other work, by their name.
_COLLECTIVE = re.compile(
  r' ((?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?)\('
  r'|^ +(?:ROOT )?%(async-collective-start)[\w.]* = '
)
_RESULT = re.compile(r'\b[a-z]+(\d+)\[([\d,]*)\]')


def cycles(text: str, generation: Generation) -> int:
  """Sums the estimated cycles in a program's text; a loop's body counts once per iteration."""
  total = 0
  for line, times in _lines(text):
    if estimate := _ESTIMATE.search(line):
      total += times * int(estimate[1])
    elif declared := _DECLARED.search(line):
      cost = {key: float(value) for key, value in json.loads(declared[1]).items()}
      moved = cost.get('bytes_accessed', 0) / generation.bytes_per_cycle
      products = cost.get('flops', 0) / generation.ops_per_cycle
      total += times * math.ceil(max(moved, products))
  return total


def collectives(text: str) -> tuple[dict[str, int], int]:
  """Counts the collectives of a program's text by name, as often as they run.

  Those that end in '-start' run beside other operations; the others run alone.

  Returns:
    ({name: how often it runs}, the bytes that pass through a chip while nothing else runs).
    An all-reduce passes its result twice, and others pass theirs once.
  """
  counts, alone = Counter(), 0
  for line, times in _lines(text):
    if not (match := _COLLECTIVE.search(line)):
      continue
    counts[name := match[1] or match[2]] += times
    if not name.endswith('-start'):
      passes = times * (2 if name == 'all-reduce' else 1)
      for bits, dims in _RESULT.findall(line[: match.start()]):
        size = math.prod(int(n) for n in dims.split(',') if n)
        alone += passes * size * int(bits) // 8
  return dict(sorted(counts.items())), alone


def _lines(text: str) -> Iterator[tuple[str, int]]:
  """Yields the lines of a program's text, each with how often it runs."""
  lines, called, constants, name, entry = {'': []}, {}, {}, '', ''
  # The metadata of a kernel stands on lines of its own: join them.
  text = re.sub(r'kernel_metadata=\{\n(.*)\n\}', r'kernel_metadata={\1}', text)
  for line in text.splitlines():
    if not line.startswith((' ', '}')) and (head := _HEAD.match(line)):
      name = head[2]
      lines[name], called[name], constants[name] = [], [], []
      entry = name if head[1] else entry
      continue
    lines[name].append(line)
    if loop := _LOOP.search(line):
      # If the number of iterations is not given, it is the only constant of the condition.
      trips = _TRIPS.search(line)
      turns = [int(trips[1])] if trips else constants[loop[1]]
      called[name].append((loop[2], max(turns, default=1)))
    elif _CALL.search(line):
      names = [x for group in _CALLED.findall(line) for x in group.split(', ')]
      called[name] += [(x.removeprefix('%'), 1) for x in names]
    elif constant := re.search(r' = [su]32\S* constant\((\d+)\)', line):
      constants[name].append(int(constant[1]))

  def run(name: str, times: int) -> Iterator[tuple[str, int]]:
    yield from ((line, times) for line in lines[name])
    for inside, turns in called[name]:
      yield from run(inside, times * turns)

  return run(entry, 1)
