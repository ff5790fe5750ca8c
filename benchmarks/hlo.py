"""The instructions of a program that XLA compiled for a TPU, read from its text."""

import itertools
import json
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

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


def shapes(bodies: dict[str, list[str]]) -> dict[str, str]:
  """Returns {name: shape} of all instructions of a program, also of those inside fusions."""
  lines = itertools.chain(*bodies.values())
  return {m[1]: m[2] for m in map(_INSTRUCTION.match, lines) if m}


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
  run: Instruction,
  shapes: dict[str, str],
  bodies: dict[str, list[str]],
  off_chip: bool = False,
) -> int:
  """Returns the bytes that an instruction reads and writes; an operand counts once.

  Of a stack of arrays it moves only the slice that it takes or replaces, as in a scan.
  """
  operands = (shapes.get(name, '') for name in dict.fromkeys(run.operands))
  total = sum(padded_bytes(shape, off_chip) for shape in (run.shape, *operands))
  stacks = set()
  for inside in _inside(run, bodies):
    if inside[3] not in ('dynamic-slice', 'dynamic-update-slice'):
      continue
    stack, update, *_ = re.findall(r'%([\w.\-]+)', inside[4])
    if whole := padded_bytes(shapes[stack], off_chip):
      replaced = inside[3] == 'dynamic-update-slice'
      part = shapes[update] if replaced else inside[2]
      # The result is a whole stack, too; as an operand, a stack counted once above.
      total += padded_bytes(part) - whole * (replaced + (stack not in stacks))
      stacks.add(stack)
  return total


def _inside(run: Instruction, bodies: dict[str, list[str]]) -> Iterator[re.Match]:
  """Yields an instruction, and those inside it if it is a fusion."""
  lines = [run.text]
  while lines:
    line = lines.pop()
    if match := _INSTRUCTION.match(line):
      yield match
    for name in re.findall(r'calls=%?([\w.\-]+)', line):
      lines += bodies.get(name, ())


def operations(
  run: Instruction, shapes: dict[str, str], bodies: dict[str, list[str]]
) -> float:
  """Returns the operations of an instruction's products, 2 per pair of numbers.

  Padding, and the zeros that dilation inserts, do not count. A Pallas kernel's operations
  are those that it declares.

  Args:
    shapes: of all instructions of the program, also of those inside fusions.
  """
  if declared := re.search(r'"cost_estimate":(\{[^}]*\})', run.text):
    return float(json.loads(declared[1]).get('flops', 0))
  return sum(
    _product(inside[2], inside[4], shapes)
    for inside in _inside(run, bodies)
    if inside[3] == 'convolution'
  )


def _product(shape: str, rest: str, shapes: dict[str, str]) -> int:
  """Returns the operations of a convolution: XLA for TPUs writes all products as one."""
  dims = lambda text: [int(n) for n in _SHAPE.search(text)[2].split(',') if n]
  left, right = (dims(shapes[x]) for x in re.findall(r'%([\w.\-]+)', rest)[:2])
  out = dims(shape)
  left_axes, right_axes, axes = re.search(
    r'dim_labels=(\w+)_(\w+)->(\w+)', rest
  ).groups()
  window = re.search(r'window=\{([^}]*)\}', rest)
  window = dict(item.split('=') for item in window[1].split()) if window else {}
  total = 2 * out[axes.index('b')] * out[axes.index('f')] * right[right_axes.index('i')]
  count = len(out) - 2
  setting = lambda key, default: window.get(key, 'x'.join([default] * count)).split('x')
  lows = (int(pad.split('_')[0]) for pad in setting('pad', '0_0'))
  keys = ('size', 'stride', 'rhs_dilate', 'lhs_dilate')
  settings = (map(int, setting(key, '1')) for key in keys)
  for axis, low, size, stride, step, spread in zip(
    map(str, range(count)), lows, *settings, strict=False
  ):
    last = spread * (left[left_axes.index(axis)] - 1)
    places = (
      at * stride + offset * step - low
      for at in range(out[axes.index(axis)])
      for offset in range(size)
    )
    total *= sum(0 <= place <= last and place % spread == 0 for place in places)
  return total


def is_free(run: Instruction) -> bool:
  """Whether an instruction takes no time here: it runs beside others, or moves nothing."""
  beside = run.opcode.endswith(('-start', '-done'))
  calls = run.opcode == 'custom-call' and any(name in run.text for name in _FREE_CALLS)
  return beside or calls or run.opcode in (*FREE, *_COLLECTIVES)
