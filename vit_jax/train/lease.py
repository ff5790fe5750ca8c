"""The lock on a workdir in a bucket: an object with a lease, which its holder renews.

An object can be written on the condition that nobody has written it since it was read
(its generation). So one run gets the lock, and whoever finds the object older than its
lease, by the clock of the server, may replace it: then the one before finds at its next
renewal that it is no longer its own, and stops without writing anything more.
"""

import contextlib
import datetime
import json
import os
import socket
import threading
import time

from vit_jax import buckets, distributed
from vit_jax.errors import LockLost, RunError, Unreachable, UserError

# Seconds for which a run that gives no sign of life keeps its lock; and after which it
# gives the next: five may fail.
LEASE, RENEW = 120.0, 20.0
# Seconds between two looks at a lock that may be about to end.
_LOOK = 2.0


class Lease:
  """The lock of a run, from `take` to `release`."""

  def __init__(self, url):
    self.url = url
    self._holder = dict(
      pid=os.getpid(),
      host=socket.gethostname(),
      machine=_machine(),
      started=datetime.datetime.now().astimezone().isoformat(timespec='seconds'),
      token=os.urandom(8).hex(),
      lease=LEASE,
    )
    self._generation, self._renewed, self._lost = 0, 0.0, ''
    self._lock, self._released = threading.Lock(), threading.Event()

  def take(self) -> None:
    """Takes the lock; waits for that of a run which gives no sign of life.

    Raises:
      UserError: another run has it and is alive.
      Others: as `buckets.write`.
    """
    seen = None
    while True:
      holder, generation, left = self._look()
      if holder and left > 0:
        if seen not in (None, generation):  # it was renewed while we looked
          raise UserError(
            f'Another run holds workdir {self.url.parent}: {_name(holder)}. Wait for '
            'it, stop it (it saves on SIGTERM), or choose another --workdir.'
          )
        if seen is None:
          distributed.say(
            f'{self.url} is held by {_name(holder)}: waiting to see whether that run is '
            f'alive, {left:.0f} s at most.'
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
    """Raises LockLost once another run has the lock, or might have."""
    if not self._lost and time.monotonic() - self._renewed > LEASE:
      self._renew()  # this process slept, or the bucket was out of reach
    if self._lost:
      raise LockLost(
        f'{self.url.parent} was taken by {self._lost}, as this run gave no sign of life '
        f'for {LEASE:.0f} s. It stops, and writes nothing more there.'
      )

  def release(self) -> None:
    """Gives the lock up; the object stays, and holds nothing."""
    self._released.set()
    # What fails here lets the lease end.
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
      holder = json.loads(found.data)
      left = 0.0 if not holder or _is_dead(holder) else holder['lease'] - found.age
    except (ValueError, KeyError, TypeError, AttributeError):  # damaged
      holder, left = {'pid': '?', 'host': '?', 'started': '?'}, LEASE - found.age
    return holder, found.generation, left

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
        holder, _, _ = self._look()
        self._lost = _name(holder) if holder else 'another run, which has ended'

  def _renew_often(self) -> None:
    while not self._released.wait(RENEW):
      with contextlib.suppress(Unreachable):  # `check` has it, once it lasts
        self._renew()


def _name(holder: dict) -> str:
  get = lambda key: holder.get(key, '?')
  return f'process {get("pid")} on {get("host")}, since {get("started")}'


def _machine() -> str:
  """Returns what tells this boot, and its table of processes, from all others; or ''."""
  try:
    with open('/proc/sys/kernel/random/boot_id') as file:
      return f'{file.read().strip()} {os.readlink("/proc/self/ns/pid")}'
  except OSError:
    return ''


def _is_dead(holder: dict) -> bool:
  # Of a process of this machine the kernel knows, and nobody needs to wait.
  if not holder['machine'] or holder['machine'] != _machine():
    return False
  try:
    os.kill(holder['pid'], 0)
  except ProcessLookupError:
    return True
  except PermissionError:
    pass
  return False
