"""Reading a compiled program's text: which instructions run, how often, on what shapes."""

import re
from collections.abc import Iterator
from typing import NamedTuple

_HEAD = re.compile(r'^(ENTRY )?%?([\w.\-]+) .*\{\s*$')
_INSTRUCTION = re.compile(
  r'^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$'
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# The end of a scan, or of a product with a kernel that comes in shares of other devices, as
# TPU programs have it: the counter, from 0, less than a constant.
_UNTIL = re.compile(r'ROOT .* compare\(%[\w.\-]+, %([\w.\-]+)\), direction=LT')
_CALLED = re.compile(
  r'(?:to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)'
)
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')
_SHAPE = re.compile(r'([a-z]\w*)\[([\d,]*)\](?:\{([\d,]*)(:[^}]*)?\})?')
_BITS = {'pred': 8, 's4': 4, 'u4': 4, 'token': 0}


class Instruction(NamedTuple):
  """One instruction of a program that is ready to run.

  Attributes:
    name, shape, opcode: as in the text.
    operands: names. text: the line. times: how often it runs in one call.
    trips: of a loop, how often its body runs each time; None: not known, counted once.
  """

  name: str
  shape: str
  opcode: str
  operands: tuple[str, ...]
  text: str
  times: int
  trips: int | None = None

  @property
  def op_name(self) -> str:
    """The path of JAX's operation that it comes from, its root's where it is a fusion."""
    match = re.search(r'op_name="([^"]*)"', self.text)
    return match[1] if match else ''


def instructions(text: str) -> Iterator[Instruction]:
  """Yields what ENTRY runs and all that it calls.

  The inside of a fusion is the fusion's own; a loop's body counts as often as it runs,
  once if that is not known; of a conditional every branch counts.
  """
  found, entry = _computations(text)

  def walk(name, times):
    for line in found.get(name, ()):
      match = _INSTRUCTION.match(line)
      if not match:
        continue
      opcode = match[3]
      arguments = match[4].split('), ')[0]
      operands = tuple(re.findall(r'%([\w.\-]+)', arguments))
      trips = _trips(line, found) if opcode == 'while' else None
      yield Instruction(match[1], match[2], opcode, operands, line, times, trips)
      called = _CALLED.findall(line)
      if opcode == 'while':
        called = re.findall(r'body=%?([\w.\-]+)', line)
        inner = times * (trips or 1)
      elif opcode in ('call', 'conditional', 'async-start'):
        inner = times
        if branches := _BRANCHES.search(line):
          called += [b.strip().lstrip('%') for b in branches[1].split(',')]
      else:
        continue
      for other in called:
        yield from walk(other, inner)

  yield from walk(entry, 1)


def _trips(line: str, found: dict[str, list[str]]) -> int | None:
  if known := _TRIPS.search(line):
    return int(known[1])
  condition = re.search(r'condition=%?([\w.\-]+)', line)
  lines = found.get(condition[1], []) if condition else []
  for until in filter(None, map(_UNTIL.search, lines)):
    value = re.compile(rf'%?{re.escape(until[1])} = [su]32\S* constant\((\d+)\)')
    if constant := next(filter(None, map(value.search, lines)), None):
      return int(constant[1])
  return None


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
  """Returns ({name: lines}, name of ENTRY)."""
  found, entry, lines = {}, '', None
  # A kernel's metadata is printed on lines of its own.
  text = re.sub(r'kernel_metadata=\{\n(.*)\n\}', r'kernel_metadata={\1}', text)
  for line in text.splitlines():
    if not line.startswith((' ', '}')) and (head := _HEAD.match(line)):
      lines = found[head[2]] = []
      entry = head[2] if head[1] else entry
    elif line.startswith('}'):
      lines = None
    elif lines is not None:
      lines.append(line)
  return found, entry


def copied_bytes(shape: str) -> int:
  """Returns what an asynchronous copy reads and writes of memory, by the shape of its start.

  That shape is a tuple of source, copy and context; of a slice's start, the source is the
  whole array. What lies on chip, S(1), is no memory.
  """
  ends = [found for found in _SHAPE.finditer(shape) if found[2]]  # without the context
  size = min((padded_bytes(found[0]) for found in ends), default=0)
  return size * sum('S(' not in (found[4] or '') for found in ends)


def padded_bytes(shape: str) -> int:
  """Returns the bytes of 'bf16[64,197,768]{2,1,0:T(8,128)(2,1)}' as it lies in memory.

  The axes that vary fastest are padded to the tile, (8, 128) here. A tuple is the sum of
  its parts.
  """
  total = 0
  for dtype, dims, order, tiling in _SHAPE.findall(shape):
    sizes = [int(n) for n in dims.split(',')] if dims else []
    minor = [int(n) for n in order.split(',')] if order else []
    tile = re.match(r':T\(([\d,]+)\)', tiling)
    if tile and minor:
      tile = [int(n) for n in tile[1].split(',')]
      for axis, unit in zip(minor, reversed(tile), strict=False):
        sizes[axis] = -(-sizes[axis] // unit) * unit
    count = 1
    for size in sizes:
      count *= size
    digits = re.search(r'\d+', dtype)
    bits = _BITS.get(dtype, int(digits[0]) if digits else 8)
    total += count * bits // 8
  return total
