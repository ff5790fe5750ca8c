"""TensorBoard's event files, cut back to a step.

A run that was killed may have written events past its last checkpoint; the run that
resumes writes them again, and TensorBoard would draw both.
"""

import io
import struct
from pathlib import Path

from vit_jax import files

# A record is uint64 length, uint32 checksum of it, the event, uint32 checksum
# (tensorflow/core/lib/io/record_writer.h).
_HEADER, _FOOTER = 12, 4


def forget(workdir: Path, step: int) -> None:
  """Cuts a run's event files where events past `step` begin, or a record is torn.

  Events of one file are in the order of their steps. Raises: OSError.
  """
  for path in sorted(workdir.glob('events.out.tfevents.*')):
    data = path.read_bytes()
    end = _end(data, step)
    if end < len(data):
      files.replace(path, data[:end])


def _end(data: bytes, step: int) -> int:
  """Returns how many bytes of a file come before the first event past `step`."""
  from tensorboard.compat.proto.event_pb2 import Event

  file, at = io.BytesIO(data), 0
  while len(header := file.read(_HEADER)) == _HEADER:
    (size,) = struct.unpack('<Q', header[:8])
    if not size or at + _HEADER + size + _FOOTER > len(data):
      break
    event = file.read(size + _FOOTER)[:size]
    try:
      if Event.FromString(event).step > step:
        break
    except ValueError:  # DecodeError: damaged; what follows would not be read either
      break
    at += _HEADER + size + _FOOTER
  return at
