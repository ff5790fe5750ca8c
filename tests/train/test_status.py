"""Who writes status.json when process 0 of a run dies, and when nobody may."""

import fcntl
import json

import pytest

from vit_jax import distributed
from vit_jax.errors import PeerLost
from vit_jax.train import lock, peers, status

MINE, ANOTHER = '{"pid": 7}\n', '{"pid": 8}\n'


class Saved:
  def latest(self):
    return 40

  def best_step(self):
    return None


def end_of_a_survivor(workdir, monkeypatch) -> dict:
  """Returns status.json after process 1 has lost process 0, whose lock said MINE."""
  with monkeypatch.context() as patch, status.on_failure(workdir, Saved(), MINE):
    patch.setattr(distributed, 'is_first', lambda: False)
    for record in peers._records:
      record(PeerLost('process 0 died'))
  return json.loads((workdir / 'status.json').read_text())


@pytest.fixture
def workdir(tmp_path):
  (tmp_path / lock.LOCK_FILE).write_text(MINE)
  status.write(tmp_path, step=42, state='running')
  return tmp_path


def test_a_survivor_says_that_process_0_died(workdir, monkeypatch):
  found = end_of_a_survivor(workdir, monkeypatch)
  expected = {'step': 42, 'state': 'preempted', 'exit': 75, 'error': 'process 0 died'}
  assert found == expected | {'last_good_step': 40, 'best_step': None}
  with lock.lock(workdir):  # and keeps nobody out
    pass


def test_a_survivor_leaves_another_runs_status_alone(workdir, monkeypatch):
  # Process 0 hangs, or a run that was started again is in the folder.
  with open(workdir / lock.LOCK_FILE) as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    assert end_of_a_survivor(workdir, monkeypatch)['state'] == 'running'
  # Such a run was there, and has died in turn.
  (workdir / lock.LOCK_FILE).write_text(ANOTHER)
  assert end_of_a_survivor(workdir, monkeypatch)['state'] == 'running'
  # Process 0 has said how it ended.
  (workdir / lock.LOCK_FILE).write_text(MINE)
  status.write(workdir, step=42, state='failed', error='its data are gone')
  assert end_of_a_survivor(workdir, monkeypatch)['error'] == 'its data are gone'
  with lock.inherited(workdir, '') as ours:  # nothing is known of it, as in a bucket
    assert not ours
