"""TensorBoard's event files, written by the tensorboard package without TensorFlow."""

import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class Events:
  """Writes scalars to a new event file in a folder.

  A run that was killed may have written events past its last checkpoint. The run that
  resumes begins with a session log, at which TensorBoard drops them.
  """

  def __init__(self, folder: Path, step: int):
    """`step`: of the state that the run starts from."""
    self._file = EventFileWriter(str(folder))
    self.flush, self.close = self._file.flush, self._file.close
    start = SessionLog(status=SessionLog.START)
    self._add(step=step + 1, session_log=start)

  def write(self, step: int, values: dict[str, float]) -> None:
    for name, value in values.items():
      self._add(step=step, summary=scalar_pb(name, value))

  def _add(self, **fields) -> None:
    self._file.add_event(Event(wall_time=time.time(), **fields))
