"""How the attention kernels for TPUs divide their work: by what fits on the chip."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.kernels.placement import tpus
from vit_jax.kernels.tpu_rows import LANES, round_up


class Block(NamedTuple):
  """What a grid step takes: `rows` queries, and `lanes` channels of whole heads."""

  lanes: int
  rows: int


class Plan(NamedTuple):
  """How the kernels divide their work.

  Attributes:
    head: channels of a head.
    forward, backward: what a grid step of each kernel takes.
    product: dtype of the matrix units' operands; v2 and v3 take float32, which they round
      to bfloat16 themselves.
    vmem: bytes of on-chip memory that a kernel may use.
    interpret: run on any platform, slowly, for tests.
  """

  head: int
  forward: Block
  backward: Block
  product: str
  vmem: int
  interpret: bool = False


class WindowPlan(NamedTuple):
  """How the kernels of attention within windows divide theirs.

  Attributes:
    head: channels of a head.
    windows, lanes: of a grid step, those of whole heads.
    product, vmem, interpret: see `Plan`.
  """

  head: int
  windows: int
  lanes: int
  product: str
  vmem: int
  interpret: bool = False


def plan(query: jax.Array, key: jax.Array) -> Plan | None:
  """Returns how the TPUs of the mesh (`jax.set_mesh`) should attend; None if they can't.

  None without a mesh, as in a model used by itself, on one of other devices, or where it
  does not divide the batch and the heads.

  Args:
    query: [B, N, M, Dh]; key: [B, S, M, Dh].
  """
  chip = _chip(query)
  return None if chip is None else _fitting(chip, chip.groups, query, key)


def plan_by_head(query: jax.Array, key: jax.Array, added: int) -> Plan | None:
  """Returns how the TPUs of the mesh should attend, one head a grid step; None as for `plan`.

  Args:
    query: [B, N, M, Dh]; key: [B, S, M, Dh].
    added: R, the channels of the bias's factors: see `tpu_attention.attend_by_head`.
  """
  chip = _chip(query)
  return None if chip is None else _fitting(chip, [1], query, key, added)


def _fitting(chip: '_Chip', groups, query, key, added: int = 0) -> Plan | None:
  _, queries, _, head = query.shape
  blocks = [
    Block(n * head, rows)
    for rows in (queries, *(n for n in (512, 256, 128) if n < queries))
    for n in groups
  ]
  chosen = []
  for needs in (_forward_bytes, _backward_bytes):
    fit = (
      b for b in blocks if needs(b, key.shape[1], chip.product, added) <= chip.vmem
    )
    chosen.append(next(fit, None))
  return None if None in chosen else Plan(head, *chosen, chip.product, chip.vmem)


# Heads of all windows of a grid step, one after the other in its program: with 12, 6 and 3
# it takes 1.03, 1.20 and 1.43 times the cycles (attention of Swin-T's first stage and its
# derivative, v5e).
_UNROLLED = 24


def plan_windows(query: jax.Array, windows: int) -> WindowPlan | None:
  """Returns how the TPUs of the mesh should attend within windows; None as for `plan`.

  None, too, for v6e and what came after it: libtpu 0.0.42 compiles a step of two of Swin-T's
  blocks for v6e for more than seven minutes, and for two without the kernels.

  Args:
    query: [B n, N, M, Dh].
    windows: n, of an image.
  """
  chip = _chip(query)
  if chip is None or chip.generation > 5 or chip.images % windows:
    return None
  _, tokens, _, head = query.shape
  for group in chip.groups:
    for n in range(windows, 0, -1):
      if windows % n == 0 and n * group <= _UNROLLED:
        needs = _window_bytes(n, group * head, group, tokens, chip.product)
        if needs <= chip.vmem:
          return WindowPlan(head, n, group * head, chip.product, chip.vmem)
  return None


class _Chip(NamedTuple):
  """What a device of the mesh is, and is given.

  Attributes:
    images: its share of the batch: windows, where those are attended within.
    groups: the sizes that groups of heads may have, largest first.
    product, vmem: see `Plan`.
    generation: 5 of v5e.
  """

  images: int
  groups: list[int]
  product: str
  vmem: int
  generation: int


def _chip(query: jax.Array) -> _Chip | None:
  batch, _, heads, head = query.shape
  mesh = tpus(batch)
  if mesh is None or query.dtype != jnp.bfloat16 or heads % mesh.shape['tensor']:
    return None
  heads //= mesh.shape['tensor']
  from jax.experimental.pallas import tpu as pltpu

  info, half = pltpu.get_tpu_info(), jnp.bfloat16.dtype
  product = 'bfloat16' if info.is_matmul_supported(half, half) else 'float32'
  vmem = info.vmem_capacity_bytes * 15 // 16  # the rest is the compiler's
  group = math.lcm(head, LANES) // head  # heads whose channels fill whole registers
  groups = [heads, *(n for n in range(heads, 0, -1) if heads % n == n % group == 0)]
  images = batch // (mesh.shape['data'] * mesh.shape['fsdp'])
  return _Chip(images, groups, product, vmem, info.generation)


# Estimates of the on-chip memory that a grid step takes, in bytes. float32 operands count
# twice: libtpu 0.0.42 allocated 1.4 to 2 times as much for them (widths of 768 to 1280,
# 197 to 577 tokens).


def _forward_bytes(block: Block, keys: int, product: str, added: int) -> int:
  rows, keys, lanes = (
    round_up(block.rows, 16),
    round_up(keys, LANES),
    round_up(block.lanes, LANES) + round_up(added, LANES),
  )
  blocks = 2 * 2 * lanes * (2 * rows + 2 * keys)  # two of each, of two bytes
  scores = 4 * 4 * rows * keys
  return (2 if product == 'float32' else 1) * (blocks + 4 * lanes * rows + scores)


def _backward_bytes(block: Block, keys: int, product: str, added: int) -> int:
  rows, keys = block.rows, round_up(keys, 16)
  lanes = round_up(block.lanes, LANES) + round_up(added, LANES)
  blocks = 2 * 2 * lanes * (3 * round_up(rows, 16) + 4 * keys)
  sums = 4 * lanes * (round_up(rows, 16) + 2 * keys)
  scores = 4 * 6 * round_up(rows, LANES) * keys
  return (2 if product == 'float32' else 1) * (blocks + sums + scores)


def _window_bytes(
  windows: int, lanes: int, heads: int, tokens: int, product: str
) -> int:
  rows, keys = round_up(tokens, 16), round_up(tokens, LANES)
  blocks = 2 * 2 * windows * rows * round_up(lanes, LANES) * 7
  scores = 4 * rows * keys
  added = (2 * (2 * heads + windows) + heads) * scores  # bias and its derivative, mask
  return (2 if product == 'float32' else 1) * (blocks + added + 6 * scores)
