"""The lock on a workdir in a bucket: an object with a lease, which its holder renews.

An object can be written on the condition that nobody has written it since it was read
(its generation), so only one run gets the lock. A run that finds the object older than its
lease, by the clock of the server, may replace it; the previous holder notices at its next
renewal, and stops without writing anything more.
"""

import contextlib
import json
import os
import threading
import time

from vit_jax import buckets, distributed
from vit_jax.errors import LockLost, RunError
from vit_jax.train import holder

# Seconds that a lock lasts without a renewal, and between two renewals: five may fail.
LEASE, RENEW = 120.0, 20.0
# Seconds between two looks at the lock of another run.
_LOOK = 2.0


class Lease:
  """The lock of a run, from `take` to `release`."""

  def __init__(self, url):
    self.url = url
    self._holder = dict(
      **holder.this_process(),
      machine=_machine(),
      token=os.urandom(8).hex(),
      lease=LEASE,
    )
    self._generation, self._renewed, self._lost = 0, 0.0, ''
    self._lock, self._released = threading.Lock(), threading.Event()

  def take(self) -> None:
    """Takes the lock; one that nobody renews is taken when its lease has ended.

    Raises:
      UserError: another run has it and is alive.
      Others: as `buckets.write`.
    """
    seen = None
    while True:
      found, generation, left = self._look()
      if found and left > 0:
        if seen not in (None, generation):  # it was renewed while we looked
          raise holder.refusal(self.url.parent, holder.name(found))
        if seen is None:
          distributed.say(
            f'{self.url} is held by {holder.name(found)}: waiting up to {left:.0f} s to '
            'see whether that run is alive.'
          )
        seen = generation
        time.sleep(min(left, _LOOK))
        continue
      try:
        self._write(generation)
        break
      except buckets.Changed:  # another one was faster
        seen = generation
    threading.Thread(target=self._renew_often, daemon=True).start()

  def is_held(self) -> bool:
    """Returns whether a run has the lock, or died less than a lease ago."""
    holder, _, left = self._look()
    return bool(holder) and left > 0

  def check(self) -> None:
    """Raises LockLost if another run has taken the lock.

    A lease that has ended is renewed first. Raises as `buckets.write` if that fails.
    """
    if not self._lost and time.monotonic() - self._renewed > LEASE:
      self._renew()  # this process slept, or the bucket was out of reach
    if self._lost:
      raise LockLost(
        f'{self.url.parent} was taken by {self._lost}, as this run gave no sign of life '
        f'for {LEASE:.0f} s. It stops, and writes nothing more there.'
      )

  def release(self) -> None:
    """Gives the lock up; the object stays, as an empty JSON object."""
    self._released.set()
    # If this fails, the lock ends with its lease.
    with self._lock, contextlib.suppress(OSError, RunError):
      if not self._lost:
        buckets.write(self.url, b'{}\n', self._generation)

  def _look(self) -> tuple[dict, int, float]:
    """Returns (holder or {}, generation, seconds that are left of its lease)."""
    try:
      found = buckets.read(self.url)
    except FileNotFoundError:
      return {}, 0, 0.0
    try:
      held_by = json.loads(found.data)
      left = 0.0 if not held_by or _is_dead(held_by) else held_by['lease'] - found.age
    except (ValueError, KeyError, TypeError, AttributeError):  # damaged
      held_by, left = {'pid': '?'}, LEASE - found.age
    return held_by, found.generation, left

  def _write(self, generation: int) -> None:
    data = (json.dumps(self._holder) + '\n').encode()
    before = time.monotonic()
    self._generation = buckets.write(self.url, data, generation)
    self._renewed = before

  def _renew(self) -> None:
    with self._lock:
      if self._lost or self._released.is_set():
        return
      try:
        self._write(self._generation)
      except buckets.Changed:
        other, _, _ = self._look()
        self._lost = holder.name(other) if other else 'another run, which has ended'

  def _renew_often(self) -> None:
    while not self._released.wait(RENEW):
      # A failure may pass (an outage, a token that expired): the next renewal tries again,
      # and `check` raises once it has lasted for LEASE.
      with contextlib.suppress(OSError, RunError):
        self._renew()


def _machine() -> str:
  """Returns an id of this boot and its table of processes; '' where Linux has none."""
  try:
    with open('/proc/sys/kernel/random/boot_id') as file:
      return f'{file.read().strip()} {os.readlink("/proc/self/ns/pid")}'
  except OSError:
    return ''


def _is_dead(found: dict) -> bool:
  # The kernel knows whether a process of this machine is alive: no lease to wait for.
  if not found['machine'] or found['machine'] != _machine():
    return False
  try:
    os.kill(found['pid'], 0)
  except ProcessLookupError:
    return True
  except PermissionError:
    pass
  return False
