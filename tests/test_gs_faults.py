"""Runs in a bucket that are killed, cut off, taken over and damaged: bitwise, or one line."""

import itertools
import json
import random
import signal
import socket

import emulator
import pytest
import runs
from conftest import naming
from test_resume import reference, same_as, shared  # noqa: F401, their fixtures

import vit_jax
from vit_jax import buckets, errors
from vit_jax.train import lock, preemption

pytestmark = pytest.mark.faults

BRIEF = (
  *('steps=8', 'optim.schedule.warmup=2'),
  *('checkpoint.every=2', 'checkpoint.best=None'),
)


@pytest.fixture(scope='module')
def proxy():
  with emulator.behind_proxy() as proxy:
    yield proxy


@pytest.fixture(autouse=True)
def no_faults(proxy):
  proxy.fault = lambda *_: None
  yield
  proxy.fault = lambda *_: None


@pytest.fixture
def folder(request):
  return buckets.path(f'gs://{emulator.BUCKET}/{request.node.name}')


def test_killed_while_requests_fail(
  reference,  # noqa: F811
  shared,  # noqa: F811
  proxy,
  folder,
  faults_table,
):
  rng = random.Random(0)
  args = [*runs.flags(), f'--workdir={folder}']
  kinds = ('503', 'reset', 'lost', '429', 'slow')
  emulator.fails(proxy, 60, kinds)
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
  same_as(reference, folder)
  assert runs.saved(folder) == runs.saved(reference)
  counts = proxy.count()
  assert all(counts[kind] > 2 for kind in kinds), counts
  for kind in kinds:
    for i in range(counts[kind]):
      faults_table('buckets: requests', f'{kind} {i}', 'handled')
  for kill in range(3):
    faults_table('buckets: kills', f'kill {kill}', 'handled')


def test_stopped_by_a_signal_and_refused_beside_one_that_runs(
  reference,  # noqa: F811
  shared,  # noqa: F811
  folder,
):
  args = [*runs.flags(), f'--workdir={folder}']
  first = runs.Process(*args, **shared)
  first.until_step(3)
  first.popen.send_signal(signal.SIGSTOP)  # alive, for the kernel, and so for its lease
  second = runs.Process(*args, **shared)
  assert second.popen.stderr.readline().startswith(f'{folder}/run.lock is held by')
  second.popen.kill()
  second.end()
  first.popen.send_signal(signal.SIGCONT)
  first.popen.send_signal(signal.SIGTERM)
  assert first.end()[0] == 75
  assert runs.status(folder)['state'] == 'preempted'
  assert (folder / lock.LOCK_FILE).read_bytes() == b'{}\n'
  assert runs.Process(*args, **shared).end()[0] == 0
  same_as(reference, folder)


def test_an_outage_ends_a_run_that_resumes(
  reference,  # noqa: F811
  shared,  # noqa: F811
  proxy,
  folder,
  faults_table,
):
  args = [*runs.flags(), f'--workdir={folder}']
  process = runs.Process(*args, **shared)
  process.until_step(7)
  # What gcsfs asks, that is: TensorStore tries for a quarter of an hour.
  proxy.fault = lambda n, method, path: None if 'tensorstore' in path else '503'
  code, _, error = process.end()
  assert code == 75
  assert 'Traceback' not in error
  assert error.splitlines()[-1].startswith(f'error: {folder}')
  faults_table('buckets: requests', 'an outage', 'refused', error.splitlines()[-1])
  proxy.fault = lambda *_: None
  assert runs.Process(*args, **shared).end()[0] == 0
  same_as(reference, folder)


def test_two_processes_share_a_bucket(shared, folder, tmp_path):  # noqa: F811
  found = {}
  for where in (folder, tmp_path / 'local'):
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
  assert found[folder] == found[tmp_path / 'local']


@pytest.fixture
def finished(folder, monkeypatch):
  """Returns a run in the bucket, with events."""
  runs.on_one_device(monkeypatch)
  emulator.refuse_tensorflow(monkeypatch)
  emulator.hurry()
  runs.run(folder / 'run', *BRIEF, 'log.tensorboard=True', 'log.profile=True', evals={})
  return folder / 'run'


def test_events_and_profiles_are_in_the_bucket(finished):
  names = [path.name for path in finished.iterdir()]
  (events,) = (name for name in names if 'tfevents' in name)
  assert len((finished / events).read_bytes()) > 500
  assert [x for x in buckets.filesystem().find(f'{finished}/profile') if 'xplane' in x]


def test_a_damaged_step_is_set_aside_in_the_bucket(
  proxy, finished, folder, capfd, faults_table
):
  url, folder = finished, folder / 'copy'
  buckets.filesystem().copy(str(url), str(folder), recursive=True)
  (folder / 'status.json').write_bytes(b'{}')
  (data,) = (folder / 'checkpoints/8/meta').glob('metadata')
  data.write_bytes(data.read_bytes()[:-20])
  runs.run(folder, *BRIEF, evals={})
  assert runs.status(folder)['fingerprint'] == runs.status(url)['fingerprint']
  assert '8.corrupt' in runs.saved(folder)
  assert 'damaged' in capfd.readouterr().err
  faults_table('buckets: damage', 'a step', 'handled')
  # An outage while a step is read is no damage: nothing is set aside.
  names = runs.saved(folder)
  proxy.fault = lambda n, method, path: '503' if 'alt=media' in path else None
  with pytest.raises(errors.Unreachable):
    vit_jax.load(str(folder))
  proxy.fault = lambda *_: None
  assert runs.saved(folder) == names


def test_a_run_that_lost_its_lock_writes_nothing_more(folder, monkeypatch):
  runs.on_one_device(monkeypatch)
  polls, ask = itertools.count(), preemption.StopSignal.should_stop
  taken = []

  def taken_over(self):
    if next(polls) == 3:
      found = buckets.read(folder / lock.LOCK_FILE)
      holder = json.loads(found.data) | {'pid': 1, 'host': 'other'}
      buckets.write(folder / lock.LOCK_FILE, json.dumps(holder).encode())
      (folder / 'metrics.jsonl').write_bytes(b'theirs\n')
      (folder / 'status.json').write_bytes(b'theirs')
      self.check.__self__._renew()
      taken.append(True)
    return ask(self)

  monkeypatch.setattr(preemption.StopSignal, 'should_stop', taken_over)
  with pytest.raises(errors.LockLost, match=naming('other')):
    runs.run(folder, *BRIEF, evals={})
  assert taken
  assert (folder / 'metrics.jsonl').read_bytes() == b'theirs\n'
  assert (folder / 'status.json').read_bytes() == b'theirs'
  assert json.loads((folder / lock.LOCK_FILE).read_bytes())['host'] == 'other'
