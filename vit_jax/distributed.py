"""Joins several processes to one run, and tells the first from the others.

Every process runs the same program on its own devices. Only the first one writes metrics,
status and config. All of them write checkpoints, into a folder that they share.
"""

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax import terminal
from vit_jax.errors import UserError, printable

AUTO = 'auto'
# Timeouts in seconds. If the first process ends, the others notice it at once. If another
# one ends, they notice it after HEARTBEAT seconds without a sign of life. A process waits
# up to JOIN seconds until all have started, because machines may take minutes. At the end
# it waits up to LEAVE seconds for the others to finish.
HEARTBEAT, LEAVE, JOIN = 18, 24, 300


def start(spec: str) -> None:
  """Joins this process to its run. Call it before anything asks for devices.

  Args:
    spec: 'auto' if JAX can read the cluster from the environment (Cloud TPU, SLURM, GKE,
      Open MPI), or 'HOST:PORT,COUNT,INDEX': the address of process 0, the number of
      processes, and the index of this one.
  """
  patience = dict(
    heartbeat_timeout_seconds=HEARTBEAT,
    shutdown_timeout_seconds=LEAVE,
    initialization_timeout=JOIN,
  )
  if spec == AUTO:
    try:
      jax.distributed.initialize(**patience)
    except ValueError as error:
      raise UserError(
        f'--distributed: found no cluster here ({error}): name it, HOST:PORT,COUNT,INDEX.'
      ) from None
    return
  address, *numbers = spec.split(',')
  complete = ':' in address and len(numbers) == 2 and all(n.isdigit() for n in numbers)
  if not complete or not int(numbers[1]) < int(numbers[0]):
    raise UserError(
      f"--distributed={spec}: expected 'auto' or HOST:PORT,COUNT,INDEX (from 0)."
    )
  count, index = map(int, numbers)
  jax.distributed.initialize(address, count, index, **patience)


def is_first() -> bool:
  """Whether this process is the first, which prints and writes; starts no devices."""
  return not jax.distributed.is_initialized() or jax.process_index() == 0


def broadcast_first(value: int) -> int:
  """Returns the value (int32) of the first process on every process; all must call it."""
  if jax.process_count() == 1:
    return value
  return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def agree(ok: bool) -> bool:
  """Returns whether `ok` holds on every process; all must call it."""
  if jax.process_count() == 1:
    return ok
  return bool(np.all(multihost_utils.process_allgather(np.int32(ok))))


def say(line: str) -> None:
  """Writes a line to standard error, in the first process only."""
  if is_first():
    terminal.say(printable(line, keep='\n'))
