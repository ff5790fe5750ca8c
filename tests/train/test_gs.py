"""Runs in a bucket, gs://: killed, cut off, damaged, resumed, loaded, read by the tools.

Each ends with the same bits as an undisturbed run on disk, or with one line.
"""

import contextlib
import itertools
import os
import random
import signal
import socket
import sys

import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.support import emulator, naming, runs
from tests.train.test_resume import reference, same_as, shared  # noqa: F401, fixtures
from vit_jax import errors, files
from vit_jax.checkpoint import checkpoints
from vit_jax.data import bad_images
from vit_jax.train.process import StopSignal
from vit_jax.train.workdir import LocalFolder

pytestmark = [
  pytest.mark.usefixtures('gcs_without_tensorflow'),
  pytest.mark.filterwarnings('ignore:Sending a large body:ResourceWarning'),
]

BRIEF = (
  *('steps=8', 'optim.schedule.warmup=2', 'checkpoint.every=2'),
  'checkpoint.best=train/loss',
)


# -- files -------------------------------------------------------------------------------


def test_paths_have_the_methods_of_pathlib(gcs_folder):
  path = files.path('gs://bucket/a/b.c')
  assert str(path) == 'gs://bucket/a/b.c' == os.fspath(path)
  assert path == files.path(path)
  assert (str(path.parent), path.name) == ('gs://bucket/a', 'b.c')
  assert str(path.with_suffix('.x') / 'y') == 'gs://bucket/a/b.x/y'
  assert not (gcs_folder / 'x').exists()
  data = os.urandom(3 << 20)
  files.replace(gcs_folder / 'x/y z%', lambda file: file.write(data))
  assert (gcs_folder / 'x').is_dir()
  assert [p.name for p in (gcs_folder / 'x').glob('y*')] == ['y z%']
  assert (gcs_folder / 'x/y z%').read_bytes() == data


def test_a_folder_of_files_is_copied(gcs_folder):
  local = LocalFolder(gcs_folder)
  (local.folder / 'a/b').mkdir(parents=True)
  (local.folder / 'a/b/x').write_bytes(b'1')
  local.push()
  (local.folder / 'a/b/x').write_bytes(b'12')
  (local.folder / 'y').write_bytes(b'3')
  local.close()
  assert (gcs_folder / 'a/b/x').read_bytes() == b'12'
  assert (gcs_folder / 'y').read_bytes() == b'3'
  assert not local.folder.exists()


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
  """Returns two runs and the faults that the first met.

  The first is in the bucket: it was interrupted and resumed while requests failed. The
  second is on disk and was left alone. Then the checkpoints of the first when it was
  interrupted, and {fault: how often it happened}.
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
      runs.run(str(url), *BRIEF, evals={})
    steps = runs.saved(url)
    patch.setattr(StopSignal, 'should_stop', ask)
    runs.run(f'{url}/', *BRIEF, evals={})
    faults = gcs.count()
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
  assert (url / 'config.json').read_bytes() == (local / 'config.json').read_bytes()
  # The log holds messages about requests that failed; a bucket has no locks.
  names = {path.name for path in url.iterdir()} - {'log.txt'}
  assert names == {path.name for path in local.iterdir()} - {'run.lock'}


def test_a_finished_run_is_left_alone(run, monkeypatch, capsys):
  url, *_ = run
  runs.on_one_device(monkeypatch)
  before = (url / 'status.json').read_bytes()
  runs.run(url, *BRIEF, evals={})
  assert (url / 'status.json').read_bytes() == before
  assert 'step 8/' not in capsys.readouterr().out


@pytest.mark.parametrize('step', ['', '@best', '@4'])
def test_load_takes_a_run_in_a_bucket(run, step):
  url, local, *_ = run
  loaded, expected = (vit_jax.load(f'{x}{step}') for x in (url, local))
  assert loaded.step == expected.step
  assert (loaded.format, loaded.class_names) == ('run', expected.class_names)
  np.testing.assert_array_equal(
    loaded.params['head']['kernel'], expected.params['head']['kernel']
  )
  with pytest.raises(errors.UserError, match=naming(f'{url}@7', '7', '8')):
    vit_jax.load(f'{url}@7')


def test_predict_takes_a_run_in_a_bucket(run, tmp_path, capsys):
  from vit_jax.tools import predict

  url, local, *_ = run
  Image.new('L', (8, 8)).save(tmp_path / 'x.png')
  texts = []
  for where in (url, local):
    assert predict.main([f'{where}@4', str(tmp_path / 'x.png')]) == 0
    texts.append(capsys.readouterr().out.replace(str(where), 'RUN'))
  assert texts[0] == texts[1]


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


@pytest.fixture
def finished(gcs_folder, monkeypatch):
  """Returns a finished run in the bucket, with events and a profile."""
  runs.on_one_device(monkeypatch)
  log = ('log.tensorboard=True', 'log.profile=True')
  runs.run(gcs_folder / 'run', *BRIEF, *log, evals={})
  return gcs_folder / 'run'


def test_damage_and_events_in_the_bucket(
  gcs_proxy, finished, gcs_folder, capfd, faults_table
):
  names = [path.name for path in finished.iterdir()]
  events = [name for name in names if 'tfevents' in name]
  assert max(len((finished / name).read_bytes()) for name in events) > 500
  fs = files.filesystem()
  assert [x for x in fs.find(f'{finished}/profile') if 'xplane' in x]

  url, copy = finished, gcs_folder / 'copy'
  fs.copy(str(url), str(copy), recursive=True)
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


# -- processes -----------------------------------------------------------------------


@pytest.mark.faults
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
  for kill, step in enumerate(sorted(rng.randint(1, runs.STEPS - 10) for _ in '123')):
    process = runs.Process(*args, **shared)
    process.until_step(step)
    process.popen.kill()
    code, _, error = process.end()
    assert code == -signal.SIGKILL
    assert 'Traceback' not in error
    faults_table('buckets: kills', f'kill {kill}', 'handled')
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


@pytest.mark.faults
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
  # Requests of gcsfs alone: TensorStore tries for a quarter of an hour.
  gcs_proxy.fault = lambda n, method, path: None if 'tensorstore' in path else '503'
  code, _, error = process.end()
  assert code == 75
  assert 'Traceback' not in error
  assert error.splitlines()[-1].startswith(f'error: {gcs_folder}')
  faults_table('buckets: requests', 'an outage', 'refused', error.splitlines()[-1])
  gcs_proxy.fault = lambda *_: None
  assert runs.Process(*args, **shared).end()[0] == 0
  same_as(reference, gcs_folder)


@pytest.mark.faults
def test_two_processes_share_a_bucket(shared, gcs_folder, tmp_path):  # noqa: F811
  results = {}
  for where in (gcs_folder, tmp_path / 'local'):
    for steps in ('steps=4', 'steps=8'):  # the second resumes
      with contextlib.closing(socket.socket()) as free:
        free.bind(('127.0.0.1', 0))
        address = f'127.0.0.1:{free.getsockname()[1]}'
      flags = runs.flags(*BRIEF, steps, 'optim.schedule.decay_until=1.0')
      flags += [f'--workdir={where}', '--config.resume_allow=steps,optim']
      processes = [
        runs.Process(*flags, f'--distributed={address},2,{i}', **shared) for i in (0, 1)
      ]
      for code, _, error in [process.end() for process in processes]:
        assert code == 0, error
    results[where] = runs.status(where), runs.rows(where), runs.saved(where)
  assert results[gcs_folder] == results[tmp_path / 'local']
