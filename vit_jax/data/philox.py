"""Random numbers as arithmetic: a pure function of (seed, position, op).

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3",
table 2 and section 3.3), vectorised over counters. An op receives its random numbers and
holds no generator. So a position gets the same numbers for any batch size, parallelism,
number of hosts or restart, and adding an op changes no other op's numbers.
"""

import numpy as np

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # golden ratio and sqrt(3) - 1
_MASK = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox(counter, key: tuple[int, int], rounds: int = 10) -> np.ndarray:
  """Returns Philox4x32 blocks: uint32 [..., 4] for counters [..., 4] (< 2**32)."""
  c0, c1, c2, c3 = np.moveaxis(np.asarray(counter, np.uint64), -1, 0)
  for i in range(rounds):
    k0 = np.uint64((key[0] + i * _W0) & 0xFFFFFFFF)
    k1 = np.uint64((key[1] + i * _W1) & 0xFFFFFFFF)
    p0, p1 = c0 * _M0, c2 * _M1
    c0, c1, c2, c3 = (
      (p1 >> _32) ^ c1 ^ k0,
      p1 & _MASK,
      (p0 >> _32) ^ c3 ^ k1,
      p0 & _MASK,
    )
  return np.stack([c0, c1, c2, c3], -1).astype(np.uint32)


def uniforms(seed: int, positions: np.ndarray, counts: tuple[int, ...]) -> np.ndarray:
  """Returns numbers in [0, 1) for each position and op.

  Args:
    seed: 0 <= seed < 2**64.
    positions: int [n], positions in the endless order of examples.
    counts: how many numbers each random op takes.

  Returns:
    float32 [n, sum(counts)], multiples of 2**-24. The numbers of op k begin at column
    sum(counts[:k]) and depend on (seed, position, k) only.
  """
  positions = np.asarray(positions, np.uint64)
  words = [(op, block) for op, n in enumerate(counts) for block in range(-(-n // 4))]
  if not words:
    return np.zeros((len(positions), 0), np.float32)
  counter = np.empty((len(positions), len(words), 4), np.uint64)
  counter[:, :, 0] = (positions & _MASK)[:, None]
  counter[:, :, 1] = (positions >> _32)[:, None]
  counter[:, :, 2:] = np.array(words, np.uint64)
  bits = philox(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(len(positions), -1)
  starts = np.cumsum([0] + [-(-n // 4) * 4 for n in counts])
  keep = [start + i for start, n in zip(starts, counts, strict=False) for i in range(n)]
  return (bits[:, keep] >> 8).astype(np.float32) * np.float32(2.0**-24)
