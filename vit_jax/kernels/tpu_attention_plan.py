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


def plan(query: jax.Array, key: jax.Array) -> Plan | None:
  """Returns how the TPUs of the mesh (`jax.set_mesh`) should attend; None if they can't.

  None without a mesh, as in a model used by itself, on one of other devices, or where it
  does not divide the batch and the heads.

  Args:
    query: [B, N, M, Dh]; key: [B, S, M, Dh].
  """
  batch, queries, heads, head = query.shape
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
  blocks = [
    Block(n * head, rows)
    for rows in (queries, *(n for n in (512, 256, 128) if n < queries))
    for n in groups
  ]
  chosen = []
  for needs in (_forward_bytes, _backward_bytes):
    fit = (block for block in blocks if needs(block, key.shape[1], product) <= vmem)
    chosen.append(next(fit, None))
  return None if None in chosen else Plan(head, *chosen, product, vmem)


# Estimates of the on-chip memory that a grid step takes, in bytes. float32 operands count
# twice: libtpu 0.0.42 allocated 1.4 to 2 times as much for them (widths of 768 to 1280,
# 197 to 577 tokens).


def _forward_bytes(block: Block, keys: int, product: str) -> int:
  rows, keys, lanes = (
    round_up(block.rows, 16),
    round_up(keys, LANES),
    round_up(block.lanes, LANES),
  )
  blocks = 2 * 2 * lanes * (2 * rows + 2 * keys)  # two of each, of two bytes
  scores = 4 * 4 * rows * keys
  return (2 if product == 'float32' else 1) * (blocks + 4 * lanes * rows + scores)


def _backward_bytes(block: Block, keys: int, product: str) -> int:
  rows, keys, lanes = block.rows, round_up(keys, 16), round_up(block.lanes, LANES)
  blocks = 2 * 2 * lanes * (3 * round_up(rows, 16) + 4 * keys)
  sums = 4 * lanes * (round_up(rows, 16) + 2 * keys)
  scores = 4 * 6 * round_up(rows, LANES) * keys
  return (2 if product == 'float32' else 1) * (blocks + sums + scores)
