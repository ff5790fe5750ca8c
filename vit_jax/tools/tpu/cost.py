"""Cycles, memory and parts of a compiled TPU program, by XLA's own cost model.

Every fusion of a compiled program carries `estimated_cycles`, the estimate by which XLA
chose its form. Their sum is the time of a call in cycles of one device. What carries none
(a Pallas kernel, a reshape that moves) counts as the larger of its instructions
(`schedules`; if they are not known, its products and transcendentals as it declares them)
and its bytes, at the device's rates, and is listed. Not in the sum is what runs beside the
units: copies that start and end apart, whose cycles are counted on their own, and
collectives, by bytes. Nor are the host, and waiting for other devices.
"""

import collections
import json
import math
import re

from vit_jax.tools.tpu import hlo, schedules
from vit_jax.tools.tpu.generations import Generation

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_GRID = re.compile(r'kernel_metadata=\{[^}]*"grid":"([\dx]+)"')
_ESTIMATE = re.compile(r'"cost_estimate":(\{[^}]*\})')
_COLLECTIVES = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all')
_COLLECTIVES += ('collective-permute', 'collective-broadcast')
# They move nothing, or their time is that of what they call, start or wait for.
_FREE = {'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'while'}
_FREE |= {'call', 'conditional', 'after-all', 'partition-id', 'replica-id', 'domain'}
_FREE |= {
  'opt-barrier',
  'add-dependency',
  'infeed',
  'outfeed',
  'rng-get-and-update-state',
}
_FREE_CALLS = ('AllocateBuffer', 'AssumeGatherIndicesInBound', 'Sharding', 'Bitcast')

# Numbers in a vector register, 8 x 128: a cycle gives a transcendental of each, at best.
LANES = 1024

_ATTENTION = r'(MultiHeadDotProductAttention_\d+|\w*attention)'
# The first that matches the path of an operation names its part.
_PARTS = (
  (rf'.*/{_ATTENTION}/(query|key|value|out)/.*', 'projections'),
  (rf'.*/{_ATTENTION}/.*', 'attention'),
  (r'.*(MlpBlock_\d+|mlp|token_mixing|channel_mixing)/.*', 'MLP'),
  (r'.*([Nn]orm\w*|gn_\w+|gn\d)/.*', 'norms'),
  (r'.*/(embedding|posembed_input|stem|conv_root)/.*', 'embedding'),
  (r'.*/(head|pre_logits)/.*|.*(log_softmax|log_sigmoid).*', 'head and loss'),
  (r'.*(block|unit|Transformer).*', 'rest of blocks'),
)
PASSES = ('forward', 'backward', 'optimizer')


def measure(program, generation: Generation) -> dict:
  """Returns what one call of a compiled program costs one device.

  Args:
    program: of `jax.jit(...).lower(...).compile()`, for a device of this generation; the
      last that was compiled, asked of once: see `schedules.take`.

  Returns:
    cycles; temp_bytes, argument_bytes, bytes: what the device allocates of it, exactly,
    temporaries, arguments and the most at a time; bytes_accessed: of memory; parts:
    {pass: {part: cycles}}; uncosted: [{op, times, cycles, bytes}], of those without
    XLA's estimate, dearest first; overlapped: {opcode: {times, cycles, bytes}} of copies
    beside the rest; unknown_loops: those counted once, as nothing tells how often they
    run; collectives: {opcode: {times, bytes}} of one device.
  """
  from vit_jax.train import runtime  # JAX is loaded once the process is prepared

  text = program.as_text()
  kernels = {run.name for run in hlo.instructions(text) if _kernel(run)}
  return {
    **count(text, generation, schedules.take(kernels)),
    **runtime.memory(program),
    'bytes_accessed': (program.cost_analysis() or {}).get('bytes accessed'),
  }


def count(text: str, generation: Generation, steps: dict[str, int]) -> dict:
  """Returns cycles, parts, uncosted and collectives of a program's text; see `measure`.

  Args:
    steps: {instruction: cycles of a grid step}, of `schedules.take`.
  """
  parts: dict = {name: collections.Counter() for name in PASSES}
  uncosted, overlapped, collectives, shapes = {}, {}, {}, {}
  total, unknown, trains = 0, 0, 'jvp(' in text
  runs = list(hlo.instructions(text))
  kernels: dict = {}  # the most cycles of those alike, of which libtpu makes one or a few
  for run in runs:
    if (kernel := _kernel(run)) and run.name in steps:
      calls = math.prod(map(int, kernel[-1].split('x')))
      kernels[kernel] = max(calls * steps[run.name], kernels.get(kernel, 0))
  for run in runs:
    shapes[run.name] = run.shape
    opcode = run.opcode.removesuffix('-start')
    unknown += run.opcode == 'while' and run.trips is None
    if run.opcode.endswith('-done') or opcode in _FREE:
      continue
    if opcode in _COLLECTIVES:
      row = collectives.setdefault(opcode, {'times': 0, 'bytes': 0})
      row['times'] += run.times
      # What is received; a reduction sends and receives it.
      size = hlo.padded_bytes(run.shape) * (2 if opcode == 'all-reduce' else 1)
      row['bytes'] += run.times * size
      continue
    if known := _CYCLES.search(run.text):
      cycles = int(known[1])
    else:
      cycles, size = _estimate(run, shapes, kernels, generation)
      if not cycles:
        continue
      if run.opcode.endswith('-start'):
        row = overlapped.setdefault(opcode, {'times': 0, 'cycles': 0, 'bytes': 0})
        for key, value in (('times', 1), ('cycles', cycles), ('bytes', size)):
          row[key] += run.times * value
        continue
      name = _plain(run.op_name) or run.opcode
      row = uncosted.setdefault(
        (run.opcode, name), {'op': f'{run.opcode} {name}', 'times': 0, 'cycles': 0}
      )
      row['bytes'] = size
      row['times'] += run.times
      row['cycles'] += run.times * cycles
    total += run.times * cycles
    which, part = _part(run, trains)
    parts[which][part] += run.times * cycles
  return {
    'cycles': total,
    'parts': {
      name: dict(found.most_common()) for name, found in parts.items() if found
    },
    'uncosted': sorted(uncosted.values(), key=lambda row: -row['cycles']),
    'unknown_loops': unknown,
    'overlapped': overlapped,
    'collectives': collectives,
  }


def _kernel(run) -> tuple | None:
  """Returns what tells Pallas kernels apart: name, results and grid; None: is none."""
  grid = _GRID.search(run.text)
  shapes = tuple(re.findall(r'\w+\[[\d,]*\]', run.shape))
  return (tuple(run.op_name.split('/')[-2:]), shapes, grid[1]) if grid else None


def _estimate(run, shapes, kernels, generation: Generation) -> tuple[int, int]:
  """Returns (cycles, bytes) of an instruction without XLA's estimate."""
  if run.opcode == 'custom-call' and any(name in run.text for name in _FREE_CALLS):
    return 0, 0
  if run.opcode.endswith('-start'):
    size = hlo.copied_bytes(run.shape)
    return math.ceil(size / generation.bytes_per_cycle), size
  size = hlo.padded_bytes(run.shape)
  # Ours are given an array several times, to read it by columns: its bytes count once.
  operands = dict.fromkeys(run.operands)
  size += sum(hlo.padded_bytes(shapes.get(name, '')) for name in operands)
  cycles = size / generation.bytes_per_cycle
  if known := kernels.get(_kernel(run)):
    cycles = max(cycles, known)
  elif declared := _ESTIMATE.search(run.text):
    declared = {key: float(value) for key, value in json.loads(declared[1]).items()}
    cycles = max(
      cycles,
      declared.get('flops', 0) / generation.ops_per_cycle,
      declared.get('transcendentals', 0) / LANES,
    )
  return math.ceil(cycles), size


def _plain(op_name: str) -> str:
  """Returns the path of an operation, blocks that differ in their number as one."""
  return re.sub(r'([Bb]lock)_\d+', r'\1_i', op_name)


def _part(run, trains: bool) -> tuple[str, str]:
  """Returns (pass, part) of an instruction; a fusion is where its root is."""
  name = run.op_name
  which = 'optimizer' if trains else 'forward'
  if 'transpose(' in name or 'rematted_computation' in name:
    which = 'backward'
  elif 'jvp(' in name:
    which = 'forward'
  if run.opcode.startswith('copy') or name.endswith('/transpose'):
    return which, 'copies'
  known = (part for regex, part in _PARTS if re.fullmatch(regex, name))
  return which, next(known, 'rest')
