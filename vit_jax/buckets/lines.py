"""Files of lines in a bucket, where an object can only be replaced as a whole."""

import contextlib
import threading
from collections.abc import Callable

from vit_jax.buckets import client
from vit_jax.errors import RunError


class Lines:
  """Lines that this process alone adds to an object, which is written now and then.

  Added lines are held in memory, and a thread writes them together; a kill loses those
  of the last `every` seconds.

  Args:
    url: the object.
    start: what it holds from now on, bytes of whole lines.
    every: seconds between two writes. Google limits them to one a second per object.

  Raises: as `client.write`.
  """

  def __init__(self, url, start: bytes, *, every: float):
    self.url, self._every = url, every
    self._data, self._generation = start, client.write(url, start)
    self._pending: list[bytes] = []
    self._writing = threading.Lock()
    self._due, self._closed = threading.Event(), threading.Event()
    self._thread = threading.Thread(target=self._run, daemon=True)
    self._thread.start()

  def add(self, line: bytes) -> None:
    """Adds a line, with its newline; a later write, or `flush`, writes it."""
    self._pending.append(line)
    self._due.set()

  def flush(self) -> None:
    """Returns once all lines added are in the object.

    Raises:
      Changed: another process has written the object.
      RunError: the bucket cannot be written. The lines are kept for the next write.
    """
    with self._writing:
      if pending := list(self._pending):
        data = self._data + b''.join(pending)
        self._generation = client.write(self.url, data, self._generation)
        self._data = data
        del self._pending[: len(pending)]

  def close(self) -> None:
    """Writes what is pending, unless another process has taken the object over."""
    self._closed.set()
    self._due.set()
    self._thread.join()
    with contextlib.suppress(client.Changed):
      self.flush()

  def _run(self) -> None:
    while not self._closed.is_set():
      self._due.wait()
      self._due.clear()
      if self._closed.wait(self._every):
        return
      # What could not be written stays pending for the next write, or `flush`, which raises.
      with contextlib.suppress(OSError, RunError):
        self.flush()


def update(url, change: Callable[[bytes], bytes | None]) -> None:
  """Replaces an object by what `change` makes of it; safe if others write it too.

  Args:
    change: takes what the object holds, b'' if it does not exist, and returns what it
      is to hold, or None to leave it as it is. Called again if another process has
      written the object meanwhile.

  Raises: as `client.read` and `client.write`.
  """
  while True:
    try:
      found = client.read(url)
      data, generation = found.data, found.generation
    except FileNotFoundError:
      data, generation = b'', 0
    new = change(data)
    if new is None:
      return
    with contextlib.suppress(client.Changed):
      client.write(url, new, generation)
      return
