"""Reading a compiled program's text: which instructions run, how often, on what shapes."""

import re
from collections.abc import Iterator
from typing import NamedTuple

_HEAD = re.compile(r'^(ENTRY )?%?([\w.\-]+) .*\{\s*$')
_INSTRUCTION = re.compile(
  r'^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$'
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(
  r'(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)'
)
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')
_SHAPE = re.compile(r'([a-z]\w*)\[([\d,]*)\](?:\{([\d,]*)(:[^}]*)?\})?')
_BITS = {'pred': 8, 's4': 4, 'u4': 4, 'token': 0}


class Instruction(NamedTuple):
  """One instruction of a program that is ready to run.

  Attributes:
    name, shape, opcode: as in the text.
    operands: names. text: the line. times: how often it runs in one call.
  """

  name: str
  shape: str
  opcode: str
  operands: tuple[str, ...]
  text: str
  times: int

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
      yield Instruction(match[1], match[2], opcode, operands, line, times)
      called = _CALLED.findall(line)
      if opcode == 'while':
        trips = _TRIPS.search(line)
        inner = times * int(trips[1]) if trips else times
      elif opcode in ('call', 'conditional', 'async-start'):
        inner = times
        if branches := _BRANCHES.search(line):
          called += [b.strip().lstrip('%') for b in branches[1].split(',')]
      else:
        continue
      for other in called:
        yield from walk(other, inner)

  yield from walk(entry, 1)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
  """Returns ({name: lines}, name of ENTRY)."""
  found, entry, lines = {}, '', None
  for line in text.splitlines():
    if not line.startswith((' ', '}')) and (head := _HEAD.match(line)):
      lines = found[head[2]] = []
      entry = head[2] if head[1] else entry
    elif line.startswith('}'):
      lines = None
    elif lines is not None:
      lines.append(line)
  return found, entry


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
