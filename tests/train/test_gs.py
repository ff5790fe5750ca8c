"""Runs in a bucket, gs://: killed, cut off, damaged, resumed, loaded, read by the tools.

Each ends with the same bits as an undisturbed run on disk, or with one line.
"""

import collections
import itertools
import os
import random
import signal
import sys

import numpy as np
import pytest

import vit_jax
from tests.support import emulator, naming, runs
from vit_jax import config, errors, files
from vit_jax.checkpoint import checkpoints
from vit_jax.data import bad_images
from vit_jax.train.process import StopSignal

pytestmark = [
  pytest.mark.usefixtures('gcs_without_tensorflow'),
  pytest.mark.filterwarnings('ignore:Sending a large body:ResourceWarning'),
]

BRIEF = (
  *('steps=8', 'optim.schedule.warmup=2', 'checkpoint.every=2'),
  'checkpoint.best=train/loss',
)
LOG = ('log.tensorboard=True', 'log.profile=True')


# -- files -------------------------------------------------------------------------------


def test_files_in_a_bucket(gcs_folder):
  path = files.path('gs://bucket/a/b.c')
  assert str(path) == 'gs://bucket/a/b.c' == os.fspath(path)
  assert path == files.path(path)
  data = os.urandom(3 << 20)
  files.replace(gcs_folder / 'x/y z%', lambda file: file.write(data))
  assert [p.name for p in (gcs_folder / 'x').glob('y*')] == ['y z%']
  assert (gcs_folder / 'x/y z%').read_bytes() == data


def test_bad_images_are_listed_once(gcs_proxy, gcs_folder):
  log = str(gcs_folder / 'bad_images.jsonl')
  emulator.fails(gcs_proxy, 7)
  for path in 'abcabd':
    bad_images._append(log, {'path': path, 'reason': 'x', 'source': 'y'})
  assert [x['path'] for x in bad_images.read_log(log)] == list('abcd')


def test_only_a_bucket_that_does_not_answer_is_unreachable():
  from gcsfs.retry import HttpError

  cases = [
    (HttpError({'code': 503}), errors.Unreachable),
    (HttpError({'code': 403}), errors.NotAllowed),
    (HttpError({'code': 400}), errors.UserError),
    (TimeoutError(), errors.Unreachable),
    (ValueError('UNAVAILABLE: retries exhausted'), errors.Unreachable),
    (ZeroDivisionError(), ZeroDivisionError),
  ]
  for error, kind in cases:
    with pytest.raises(kind) as caught, files.outages('gs://b/x'):
      raise error
    assert type(caught.value) is kind
  with pytest.raises(TimeoutError), files.outages('/on/disk'):
    raise TimeoutError


# -- runs ----------------------------------------------------------------------------


@pytest.fixture(scope='module')
def run(gcs, tmp_path_factory):
  """Returns (url, folder, checkpoints at the interruption, {fault: number}) of two runs.

  The one in the bucket, with events and a profile, was interrupted and resumed while
  requests failed; the one on disk was left alone.
  """
  local = tmp_path_factory.mktemp('local')
  url = files.path(f'gs://{emulator.BUCKET}/run')
  with pytest.MonkeyPatch.context() as patch:
    runs.on_one_device(patch)
    emulator.refuse_tensorflow(patch)
    runs.run(local, *BRIEF, evals={})
    emulator.fails(gcs, 100)
    polls, ask = itertools.count(), StopSignal.should_stop

    def interrupted(self):
      if next(polls) == 5:  # after five steps
        raise KeyboardInterrupt
      return ask(self)

    patch.setattr(StopSignal, 'should_stop', interrupted)
    with pytest.raises(KeyboardInterrupt):
      runs.run(str(url), *BRIEF, *LOG, evals={})
    steps = runs.saved(url)
    patch.setattr(StopSignal, 'should_stop', ask)
    runs.run(f'{url}/', *BRIEF, *LOG, evals={})
    faults = collections.Counter(fault for _, fault in gcs.requests)
    gcs.fault = lambda *_: None
  return url, local, steps, faults


def test_a_run_resumes_bitwise_although_requests_fail(run):
  url, local, steps, faults = run
  assert steps
  assert '8' not in steps
  assert all(faults[kind] for kind in ('503', 'reset', 'lost', '429')), faults
  assert runs.status(url) == runs.status(local)
  assert runs.rows(url) == runs.rows(local)
  assert runs.saved(url) == runs.saved(local)
  ours, theirs = map(config.read, (url, local))
  assert ours | {'log': None} == theirs | {'log': None}
  # The log holds messages about requests that failed; a bucket has no locks.
  names = {path.name for path in url.iterdir()} - {'log.txt'}
  events = {name for name in names if 'tfevents' in name}
  assert max(len((url / name).read_bytes()) for name in events) > 500
  assert [x for x in files.filesystem().find(f'{url}/profile') if 'xplane' in x]
  assert names - events - {'profile'} == {path.name for path in local.iterdir()} - {
    'run.lock'
  }


@pytest.mark.parametrize('step', ['', '@best', '@4'])
def test_load_takes_a_run_in_a_bucket(run, step):
  url, local, *_ = run
  loaded, expected = (vit_jax.load(f'{x}{step}') for x in (url, local))
  assert (loaded.format, loaded.step) == ('run', expected.step)
  np.testing.assert_array_equal(
    loaded.params['head']['kernel'], expected.params['head']['kernel']
  )


def test_a_step_without_its_last_object_is_none(run, gcs_folder):
  fs, steps = files.filesystem(), gcs_folder / 'checkpoints'
  fs.copy(f'{run[0]}/checkpoints/4', f'{steps}/4', recursive=True)
  assert checkpoints.Checkpoints(steps).latest() == 4
  fs.rm_file(f'{steps}/4/commit_success.txt')
  assert checkpoints.Checkpoints(steps).latest() is None


def test_a_bucket_that_is_not_there_or_not_ours(gcs_proxy, gcs_folder):
  with pytest.raises(errors.UserError, match=naming('gs://')):
    runs.run('gs://')
  gcs_proxy.fault = lambda *_: '403'
  with pytest.raises(errors.NotAllowed, match=naming(gcs_folder, 'gcloud')) as caught:
    runs.run(gcs_folder)
  assert caught.value.exit_code == 2
  gcs_proxy.fault = lambda *_: '503'
  with pytest.raises(errors.Unreachable, match=naming(gcs_folder)) as caught:
    runs.run(gcs_folder)
  assert caught.value.exit_code == 75


def test_without_gcsfs_the_error_names_the_extra(monkeypatch):
  monkeypatch.setitem(sys.modules, 'gcsfs', None)
  monkeypatch.setattr(files, 'filesystem', files.filesystem.__wrapped__)
  for use in (lambda: runs.run('gs://b/run'), lambda: vit_jax.load('gs://b/run')):
    with pytest.raises(errors.UserError, match=naming('vit_jax[gcs]')):
      use()


def test_damage_in_the_bucket(
  run, gcs_proxy, gcs_folder, monkeypatch, capfd, faults_table
):
  runs.on_one_device(monkeypatch)
  url, status = gcs_folder / 'run', runs.status(run[0])
  files.filesystem().copy(str(run[0]), str(url), recursive=True)
  (url / 'status.json').write_bytes(b'{}')
  (data,) = (url / 'checkpoints/8/meta').glob('metadata')
  data.write_bytes(data.read_bytes()[:-20])
  assert runs.run(url, *BRIEF, evals={})[0]['fingerprint'] == status['fingerprint']
  assert '8.corrupt' in (names := runs.saved(url))
  assert 'damaged' in capfd.readouterr().err
  faults_table('buckets: damage', 'a step', 'handled')
  # An outage while a step is read is not damage: nothing is set aside.
  gcs_proxy.fault = lambda n, method, path: '503' if 'alt=media' in path else None
  with pytest.raises(errors.Unreachable):
    vit_jax.load(str(url))
  gcs_proxy.fault = lambda *_: None
  assert runs.saved(url) == names


# -- processes -----------------------------------------------------------------------


@pytest.mark.faults
def test_killed_while_requests_fail(
  reference,
  gcs_proxy,
  gcs_folder,
  faults_table,
):
  rng = random.Random(0)
  args = [*runs.flags(), f'--workdir={gcs_folder}']
  kinds = ('503', 'reset', 'lost', '429', 'slow')
  emulator.fails(gcs_proxy, 60, kinds)
  for kill, step in enumerate(sorted(rng.randint(1, runs.STEPS - 10) for _ in '123')):
    process = runs.Process(*args)
    process.until_step(step)
    process.popen.kill()
    code, _, error = process.end()
    assert code == -signal.SIGKILL
    assert 'Traceback' not in error
    faults_table('buckets: kills', f'kill {kill}', 'handled')
  process = runs.Process(*args)
  code, _, error = process.end()
  assert code == 0, error
  runs.assert_same(reference, gcs_folder)
  assert runs.saved(gcs_folder) == runs.saved(reference)
  counts = collections.Counter(fault for _, fault in gcs_proxy.requests)
  assert all(counts[kind] > 2 for kind in kinds), counts
  for kind in kinds:
    for i in range(counts[kind]):
      faults_table('buckets: requests', f'{kind} {i}', 'handled')


@pytest.mark.faults
def test_an_outage_ends_a_run_that_resumes(
  reference,
  gcs_proxy,
  gcs_folder,
  faults_table,
):
  args = [*runs.flags(), f'--workdir={gcs_folder}']
  process = runs.Process(*args)
  process.until_step(7)
  # Requests of gcsfs alone: TensorStore tries for a quarter of an hour.
  gcs_proxy.fault = lambda n, method, path: None if 'tensorstore' in path else '503'
  code, _, error = process.end()
  assert code == 75
  assert 'Traceback' not in error
  assert error.splitlines()[-1].startswith(f'error: {gcs_folder}')
  faults_table('buckets: requests', 'an outage', 'refused', error.splitlines()[-1])
  gcs_proxy.fault = lambda *_: None
  assert runs.Process(*args).end()[0] == 0
  runs.assert_same(reference, gcs_folder)


@pytest.mark.faults
def test_two_processes_share_a_bucket(gcs_folder, tmp_path):
  results = []
  for where in (gcs_folder, tmp_path / 'local'):
    for steps in ('steps=4', 'steps=8'):  # the second resumes
      flags = runs.flags(*BRIEF, steps, 'optim.schedule.decay_until=1.0')
      flags += [f'--workdir={where}', '--config.resume_allow=steps,optim']
      address = f'127.0.0.1:{emulator.free_port()}'
      processes = [
        runs.Process(*flags, f'--distributed={address},2,{i}') for i in (0, 1)
      ]
      for code, _, error in [process.end() for process in processes]:
        assert code == 0, error
    results.append((runs.status(where), runs.rows(where), runs.saved(where)))
  assert results[0] == results[1]
