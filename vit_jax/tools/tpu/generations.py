"""The generations of TPUs: what the vendor says of them, and the rates of XLA's cost model.

Vendor's numbers: cloud.google.com/tpu/docs (v2 to v6e, tpu7x), read 2026-11. A device is
what JAX sees as one: a core of v2, v3 and 7x, of which a chip has two; else a chip.
"""

import math
import re
from typing import NamedTuple

from vit_jax.errors import UserError, choose


class Generation(NamedTuple):
  """One generation, of one device.

  Attributes:
    tflops: the vendor's peak in bfloat16, 1e12 operations per second.
    ops_per_cycle: of its matrix units, a multiply-add as two: 2 x 128 x 128 for each unit
      (2 x 256 x 256 from v6e on).
    bytes_per_cycle: of memory, by XLA's cost model: what it expects of `x + 1` on 256 MiB.
    hbm: bytes of memory.
    interconnect: bytes per second, in and out together, to other chips.
    devices: on a chip. cores: of a device.
    slice: the smallest that can be compiled for. axes, chips: of the largest there is.
    calibrated: whether XLA's estimate of a product of 4096 x 4096 matrices comes to 95 %
      of `ops_per_cycle` or more, so that cycles and the vendor's rate speak of one clock.
  """

  tflops: float
  ops_per_cycle: int
  bytes_per_cycle: float
  hbm: int
  interconnect: float
  devices: int
  cores: int
  slice: str
  axes: int
  chips: int
  calibrated: bool = False

  @property
  def clock(self) -> float:
    """Cycles per second, by which the units reach the vendor's peak."""
    return self.tflops * 1e12 / self.ops_per_cycle


_UNIT, _WIDE = 2 * 128 * 128, 2 * 256 * 256
_GIB = 2**30

GENERATIONS = {
  'v2': Generation(22.5, 1 * _UNIT, 446, 8 * _GIB, 31e9, 2, 1, '2x2x1', 2, 256, True),
  'v3': Generation(61.5, 2 * _UNIT, 448, 16 * _GIB, 41e9, 2, 1, '2x2x1', 2, 1024, True),
  'v4': Generation(275, 8 * _UNIT, 897, 32 * _GIB, 300e9, 1, 2, '2x2x1', 3, 4096),
  'v5e': Generation(197, 4 * _UNIT, 438, 16 * _GIB, 400e9, 1, 1, '2x2', 2, 256, True),
  'v5p': Generation(
    459, 8 * _UNIT, 1125, 95 * _GIB, 1200e9, 1, 2, '2x2x1', 3, 8960, True
  ),
  'v6e': Generation(918, 4 * _WIDE, 756, 32 * _GIB, 800e9, 1, 1, '2x2', 2, 256),
  '7x': Generation(1153.5, 4 * _WIDE, 1265, 96 * _GIB, 600e9, 2, 1, '2x2x1', 3, 9216),
}


def parse(text: str) -> tuple[str, str]:
  """Returns ('v3', '4x4') of 'v3:4x4'; the smallest slice for 'v3' alone.

  Raises:
    UserError: for an unknown generation, a slice as gcloud names it, or one that is of
      more axes or chips than there are.
  """
  name, _, shape = text.lower().removeprefix('tpu').partition(':')
  if re.fullmatch(r'v\w+-\d+', name):
    raise UserError(
      f'{text!r} is a slice as gcloud names it, by its cores or chips. Write its chips along '
      "each axis: 'v3-8' is v3:2x2, 'v3-32' v3:4x4, 'v5litepod-8' v5e:2x4."
    )
  generation = choose(
    'TPU generation', name, GENERATIONS, ', with a slice as in v3:4x4'
  )
  shape = shape or generation.slice
  _check_shape(text, name, shape)
  return name, shape


def _check_shape(text: str, name: str, shape: str) -> None:
  # libtpu takes shapes that are not made, or aborts the process.
  generation = GENERATIONS[name]
  sizes = (
    [int(n) for n in shape.split('x')] if re.fullmatch(r'\d+(x\d+)*', shape) else []
  )
  further = sizes[generation.axes :]
  if not sizes or any(n > 1 for n in further) or math.prod(sizes) > generation.chips:
    raise UserError(
      f'{text!r}: slices of {name} have chips along {generation.axes} axes, up to '
      f'{generation.chips:,} of them, as in {name}:{generation.slice}.'
    )
