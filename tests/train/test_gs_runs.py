"""Runs in a bucket, gs://: resumed although requests fail, loaded, read by the tools."""

import itertools

import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.support import emulator, naming, runs
from vit_jax import buckets, errors
from vit_jax.train import preemption

pytestmark = pytest.mark.usefixtures('gcs_without_tensorflow')

BRIEF = (
  'steps=8',
  'optim.schedule.warmup=2',
  'checkpoint.every=2',
  'checkpoint.best=train/loss',
)


@pytest.fixture(scope='module')
def run(gcs, tmp_path_factory):
  """Returns two runs and what happened to the first.

  The first is in the bucket: it was interrupted and resumed while requests failed. The
  second is on disk and was left alone. Then the checkpoints of the first when it was
  interrupted, and {fault: how often it happened}.
  """
  local = tmp_path_factory.mktemp('local')
  url = buckets.path(f'gs://{emulator.BUCKET}/run')
  with pytest.MonkeyPatch.context() as patch:
    runs.on_one_device(patch)
    emulator.refuse_tensorflow(patch)
    runs.run(local, *BRIEF, evals={})
    emulator.fails(gcs, 100)
    polls, ask = itertools.count(), preemption.StopSignal.should_stop

    def interrupted(self):
      if next(polls) == 5:  # after five steps
        raise KeyboardInterrupt
      return ask(self)

    patch.setattr(preemption.StopSignal, 'should_stop', interrupted)
    with pytest.raises(KeyboardInterrupt):
      runs.run(str(url), *BRIEF, evals={})
    seen = runs.saved(url)
    patch.setattr(preemption.StopSignal, 'should_stop', ask)
    runs.run(f'{url}/', *BRIEF, evals={})
    faults = gcs.count()
    gcs.fault = lambda *_: None
  return url, local, seen, faults


def test_a_run_resumes_bitwise_although_requests_fail(run):
  url, local, seen, faults = run
  assert seen
  assert '8' not in seen
  assert all(faults[kind] for kind in ('503', 'reset', 'lost', '429')), faults
  assert runs.status(url) == runs.status(local)
  assert runs.rows(url) == runs.rows(local)
  assert runs.saved(url) == runs.saved(local)
  assert (url / 'config.json').read_bytes() == (local / 'config.json').read_bytes()


def test_the_folder_holds_what_one_on_disk_does(run):
  url, local, *_ = run
  # The log holds what libraries say of requests that failed.
  names = {path.name for path in url.iterdir()} - {'log.txt'}
  assert names == {path.name for path in local.iterdir()}
  assert (url / 'run.lock').read_bytes() == b'{}\n'  # given up


def test_a_finished_run_is_left_alone(run, monkeypatch, capsys):
  url, *_ = run
  runs.on_one_device(monkeypatch)
  before = (url / 'status.json').read_bytes()
  runs.run(url, *BRIEF, evals={})
  assert (url / 'status.json').read_bytes() == before
  assert 'step 8/' not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize('step', ['', '@best', '@4'])
def test_load_takes_a_run_in_a_bucket(run, step):
  url, local, *_ = run
  found, expected = (vit_jax.load(f'{x}{step}') for x in (url, local))
  assert found.step == expected.step
  assert (found.format, found.class_names) == ('run', expected.class_names)
  np.testing.assert_array_equal(
    found.params['head']['kernel'], expected.params['head']['kernel']
  )


def test_tools_take_a_run_in_a_bucket(run, tmp_path, capsys):
  from vit_jax.tools import predict
  from vit_jax.tools.inspect import source
  from vit_jax.tools.report import __main__ as report
  from vit_jax.tools.report import automatic
  from vit_jax.train.evaluations import write_predictions

  url, local, *_ = run
  Image.new('L', (8, 8)).save(tmp_path / 'x.png')
  texts = []
  for where in (url, local):
    assert predict.main([f'{where}@4', str(tmp_path / 'x.png')]) == 0
    texts.append(capsys.readouterr().out.replace(str(where), 'RUN'))
  assert texts[0] == texts[1]
  assert report.main([str(local), '--out', f'{url}/page.html']) == 0
  assert (url / 'page.html').read_bytes().startswith(b'<!doctype html>')
  answers = {'index': [0, 1], 'label': [3, 4], 'top': [[3], [5]]}
  answers = {key: np.int32(value) for key, value in answers.items()}
  answers |= {'probability': np.float32([[1], [1]]), 'right': np.bool([[1], [0]])}
  write_predictions(url, 'test', 4, answers)
  assert automatic.write(str(url)) == f'{url}/report.html'
  assert b'Largest confusions' in (url / 'report.html').read_bytes()
  assert source.is_source(f'{url}@best')
  found, expected = (source.describe(f'{x}@best', {}) for x in (url, local))
  for record in (found, expected):
    del record['source']
    for row in record['steps']:
      row['metrics'] = {k: v for k, v in row['metrics'].items() if 'time/' not in k}
  assert found == expected
  with pytest.raises(errors.UserError, match=naming(f'{url}@7', '7', '8')):
    vit_jax.load(f'{url}@7')


def test_a_step_without_its_last_object_is_none(run, gcs_folder):
  from vit_jax.checkpoint import checkpoints

  buckets.filesystem().copy(
    f'{run[0]}/checkpoints/4', f'{gcs_folder}/checkpoints/4', recursive=True
  )
  assert checkpoints.Checkpoints(gcs_folder / 'checkpoints').latest() == 4
  buckets.filesystem().rm_file(f'{gcs_folder}/checkpoints/4/commit_success.txt')
  assert checkpoints.Checkpoints(gcs_folder / 'checkpoints').latest() is None


def test_a_bucket_that_is_not_there_or_not_ours(gcs_proxy, gcs_folder):
  with pytest.raises(errors.UserError, match=naming('gs://nobody', '--workdir')):
    runs.run('gs://nobody/run')
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
  import sys

  monkeypatch.setitem(sys.modules, 'gcsfs', None)
  monkeypatch.setattr(
    buckets.client, 'filesystem', buckets.client.filesystem.__wrapped__
  )
  for use in (lambda: runs.run('gs://b/run'), lambda: vit_jax.load('gs://b/run')):
    with pytest.raises(errors.UserError, match=naming('vit_jax[gcs]')):
      use()


@pytest.mark.slow
def test_what_writes_to_disk_alone_says_so(run):
  from vit_jax.tools import convert, evaluate, predict

  for tool, *args in (
    (convert, run[1], 'gs://b/x.npz'),
    (evaluate, run[1], '--data', 'digits', '--split', 'test', '--out', 'gs://b/x'),
    (predict, run[1], __file__, '--features', 'gs://b/x.npz'),
  ):
    with pytest.raises(errors.UserError, match=naming(args[-1], 'gcloud')):
      tool.main([str(arg) for arg in args])
