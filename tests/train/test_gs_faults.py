"""Runs in a bucket that are killed, cut off, taken over and damaged.

Each ends with the same bits as an undisturbed run, or with one line.
"""

import itertools
import json
import random
import signal
import socket

import pytest

import vit_jax
from tests.support import emulator, naming, runs
from tests.train.test_resume import reference, same_as, shared  # noqa: F401, their fixtures
from vit_jax import buckets, errors
from vit_jax.train import lock, preemption

pytestmark = pytest.mark.faults

BRIEF = (
  *('steps=8', 'optim.schedule.warmup=2'),
  *('checkpoint.every=2', 'checkpoint.best=None'),
)


def test_killed_while_requests_fail(
  reference,  # noqa: F811
  shared,  # noqa: F811
  gcs_proxy,
  gcs_folder,
  faults_table,
):
  rng = random.Random(0)
  args = [*runs.flags(), f'--workdir={gcs_folder}']
  kinds = ('503', 'reset', 'lost', '429', 'slow')
  emulator.fails(gcs_proxy, 60, kinds)
  for step in sorted(rng.randint(1, runs.STEPS - 10) for _ in range(3)):
    process = runs.Process(*args, **shared)
    process.until_step(step)
    process.popen.kill()
    code, _, error = process.end()
    assert code == -signal.SIGKILL
    assert 'Traceback' not in error
  process = runs.Process(*args, **shared)
  code, _, error = process.end()
  assert code == 0, error
  same_as(reference, gcs_folder)
  assert runs.saved(gcs_folder) == runs.saved(reference)
  counts = gcs_proxy.count()
  assert all(counts[kind] > 2 for kind in kinds), counts
  for kind in kinds:
    for i in range(counts[kind]):
      faults_table('buckets: requests', f'{kind} {i}', 'handled')
  for kill in range(3):
    faults_table('buckets: kills', f'kill {kill}', 'handled')


def test_stopped_by_a_signal_and_refused_beside_one_that_runs(
  reference,  # noqa: F811
  shared,  # noqa: F811
  gcs_folder,
):
  args = [*runs.flags(), f'--workdir={gcs_folder}']
  first = runs.Process(*args, **shared)
  first.until_step(3)
  first.popen.send_signal(signal.SIGSTOP)  # alive, for the kernel, and so for its lease
  second = runs.Process(*args, **shared)
  assert second.popen.stderr.readline().startswith(f'{gcs_folder}/run.lock is held by')
  second.popen.kill()
  second.end()
  first.popen.send_signal(signal.SIGCONT)
  first.popen.send_signal(signal.SIGTERM)
  assert first.end()[0] == 75
  assert runs.status(gcs_folder)['state'] == 'preempted'
  assert (gcs_folder / lock.LOCK_FILE).read_bytes() == b'{}\n'
  assert runs.Process(*args, **shared).end()[0] == 0
  same_as(reference, gcs_folder)


def test_an_outage_ends_a_run_that_resumes(
  reference,  # noqa: F811
  shared,  # noqa: F811
  gcs_proxy,
  gcs_folder,
  faults_table,
):
  args = [*runs.flags(), f'--workdir={gcs_folder}']
  process = runs.Process(*args, **shared)
  process.until_step(7)
  # What gcsfs asks, that is: TensorStore tries for a quarter of an hour.
  gcs_proxy.fault = lambda n, method, path: None if 'tensorstore' in path else '503'
  code, _, error = process.end()
  assert code == 75
  assert 'Traceback' not in error
  assert error.splitlines()[-1].startswith(f'error: {gcs_folder}')
  faults_table('buckets: requests', 'an outage', 'refused', error.splitlines()[-1])
  gcs_proxy.fault = lambda *_: None
  assert runs.Process(*args, **shared).end()[0] == 0
  same_as(reference, gcs_folder)


def test_two_processes_share_a_bucket(shared, gcs_folder, tmp_path):  # noqa: F811
  found = {}
  for where in (gcs_folder, tmp_path / 'local'):
    for steps in ('steps=4', 'steps=8'):  # the second resumes
      with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        address = f'127.0.0.1:{free.getsockname()[1]}'
      flags = runs.flags(*BRIEF, steps, 'optim.schedule.decay_until=1.0')
      flags += [f'--workdir={where}', '--config.resume_allow=steps,resolved,optim']
      processes = [
        runs.Process(*flags, f'--distributed={address},2,{i}', **shared) for i in (0, 1)
      ]
      for code, _, error in [process.end() for process in processes]:
        assert code == 0, error
    found[where] = runs.status(where), runs.rows(where), runs.saved(where)
  assert found[gcs_folder] == found[tmp_path / 'local']


@pytest.fixture
def finished(gcs_folder, monkeypatch):
  """Returns a finished run in the bucket, with events."""
  runs.on_one_device(monkeypatch)
  emulator.refuse_tensorflow(monkeypatch)
  runs.run(
    gcs_folder / 'run', *BRIEF, 'log.tensorboard=True', 'log.profile=True', evals={}
  )
  return gcs_folder / 'run'


def test_events_and_profiles_are_in_the_bucket(finished):
  names = [path.name for path in finished.iterdir()]
  (events,) = (name for name in names if 'tfevents' in name)
  assert len((finished / events).read_bytes()) > 500
  assert [x for x in buckets.filesystem().find(f'{finished}/profile') if 'xplane' in x]


def test_a_damaged_step_is_set_aside_in_the_bucket(
  gcs_proxy, finished, gcs_folder, capfd, faults_table
):
  url, copy = finished, gcs_folder / 'copy'
  buckets.filesystem().copy(str(url), str(copy), recursive=True)
  (copy / 'status.json').write_bytes(b'{}')
  (data,) = (copy / 'checkpoints/8/meta').glob('metadata')
  data.write_bytes(data.read_bytes()[:-20])
  runs.run(copy, *BRIEF, evals={})
  assert runs.status(copy)['fingerprint'] == runs.status(url)['fingerprint']
  assert '8.corrupt' in runs.saved(copy)
  assert 'damaged' in capfd.readouterr().err
  faults_table('buckets: damage', 'a step', 'handled')
  # An outage while a step is read is not damage: nothing is set aside.
  names = runs.saved(copy)
  gcs_proxy.fault = lambda n, method, path: '503' if 'alt=media' in path else None
  with pytest.raises(errors.Unreachable):
    vit_jax.load(str(copy))
  gcs_proxy.fault = lambda *_: None
  assert runs.saved(copy) == names


def test_a_run_that_lost_its_lock_writes_nothing_more(gcs_folder, monkeypatch):
  runs.on_one_device(monkeypatch)
  polls, ask = itertools.count(), preemption.StopSignal.should_stop
  taken = []

  def taken_over(self):
    if next(polls) == 3:
      found = buckets.read(gcs_folder / lock.LOCK_FILE)
      holder = json.loads(found.data) | {'pid': 1, 'host': 'other'}
      buckets.write(gcs_folder / lock.LOCK_FILE, json.dumps(holder).encode())
      (gcs_folder / 'metrics.jsonl').write_bytes(b'theirs\n')
      (gcs_folder / 'status.json').write_bytes(b'theirs')
      self.check.__self__._renew()
      taken.append(True)
    return ask(self)

  monkeypatch.setattr(preemption.StopSignal, 'should_stop', taken_over)
  with pytest.raises(errors.LockLost, match=naming('other')):
    runs.run(gcs_folder, *BRIEF, evals={})
  assert taken
  assert (gcs_folder / 'metrics.jsonl').read_bytes() == b'theirs\n'
  assert (gcs_folder / 'status.json').read_bytes() == b'theirs'
  assert json.loads((gcs_folder / lock.LOCK_FILE).read_bytes())['host'] == 'other'
