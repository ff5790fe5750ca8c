"""A run in a bucket, gs://, on an emulator on the loopback, with faults on the way."""

import contextlib
import itertools
import os
import threading

import emulator
import numpy as np
import pytest
import runs
from conftest import GOLDEN, naming
from PIL import Image

import vit_jax
from vit_jax import buckets, errors
from vit_jax.data import bad_images
from vit_jax.train import disk, lease, lock, preemption

BRIEF = (
  'steps=8',
  'optim.schedule.warmup=2',
  'checkpoint.every=2',
  'checkpoint.best=train/loss',
)


@pytest.fixture(scope='module')
def proxy():
  with emulator.behind_proxy() as proxy:
    emulator.hurry()
    yield proxy


@pytest.fixture(autouse=True)
def no_faults(proxy, monkeypatch):
  proxy.fault = lambda *_: None
  emulator.refuse_tensorflow(monkeypatch)
  yield
  proxy.fault = lambda *_: None


@pytest.fixture
def folder(request):
  """Returns a folder in the bucket, of the test's own."""
  return buckets.path(f'gs://{emulator.BUCKET}/{request.node.name}')


@pytest.fixture(scope='module')
def run(proxy, tmp_path_factory):
  """A run that was interrupted and resumed, all the while with faults; and one that
  nothing happened to, on disk."""
  local = tmp_path_factory.mktemp('local')
  url = buckets.path(f'gs://{emulator.BUCKET}/run')
  with pytest.MonkeyPatch.context() as patch:
    runs.on_one_device(patch)
    emulator.refuse_tensorflow(patch)
    runs.run(local, *BRIEF, evals={})
    emulator.fails(proxy, 40)
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
    faults = proxy.count()
    proxy.fault = lambda *_: None
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

  url, local, *_ = run
  Image.new('L', (8, 8)).save(tmp_path / 'x.png')
  texts = []
  for where in (url, local):
    assert predict.main([f'{where}@4', str(tmp_path / 'x.png')]) == 0
    texts.append(capsys.readouterr().out.replace(str(where), 'RUN'))
  assert texts[0] == texts[1]
  assert source.is_source(f'{url}@best')
  found, expected = (source.describe(f'{x}@best', {}) for x in (url, local))
  for record in (found, expected):
    del record['source']
    for row in record['steps']:
      row['metrics'] = {k: v for k, v in row['metrics'].items() if 'time/' not in k}
  assert found == expected
  with pytest.raises(errors.UserError, match=naming(f'{url}@7', '7', '8')):
    vit_jax.load(f'{url}@7')


def test_a_step_without_its_last_object_is_none(run, folder):
  from vit_jax.checkpoint import checkpoints

  buckets.filesystem().copy(
    f'{run[0]}/checkpoints/4', f'{folder}/checkpoints/4', recursive=True
  )
  assert checkpoints.Checkpoints(folder / 'checkpoints').latest() == 4
  buckets.filesystem().rm_file(f'{folder}/checkpoints/4/commit_success.txt')
  assert checkpoints.Checkpoints(folder / 'checkpoints').latest() is None


def test_a_bucket_that_is_not_there_or_not_ours(proxy, folder):
  with pytest.raises(errors.UserError, match=naming('gs://nobody', '--workdir')):
    runs.run('gs://nobody/run')
  with pytest.raises(errors.UserError, match=naming('gs://')):
    runs.run('gs://')
  proxy.fault = lambda *_: '403'
  with pytest.raises(errors.NotAllowed, match=naming(folder, 'gcloud')) as caught:
    runs.run(folder)
  assert caught.value.exit_code == 2
  proxy.fault = lambda *_: '503'
  with pytest.raises(errors.Unreachable, match=naming(folder)) as caught:
    runs.run(folder)
  assert caught.value.exit_code == 75


def test_only_a_bucket_that_does_not_answer_is_unreachable():
  from gcsfs.retry import HttpError

  url = 'gs://b/x'
  for error, kind in (
    (HttpError({'code': 503}), errors.Unreachable),
    (TimeoutError(), errors.Unreachable),
    (HttpError({'code': 401, 'message': 'Anonymous caller'}), errors.NotAllowed),
    (HttpError({'code': 400, 'message': 'No such bucket name'}), errors.UserError),
    (TypeError('a defect'), TypeError),
    (OSError(28, os.strerror(28)), OSError),  # of the local disk
  ):
    with pytest.raises(kind) as caught, buckets.errors_of(url):
      raise error
    assert type(caught.value) is kind
    assert '\n' not in str(caught.value)
    assert url in str(caught.value) or caught.value is error


def test_without_gcsfs_the_error_names_the_extra(monkeypatch):
  import sys

  monkeypatch.setitem(sys.modules, 'gcsfs', None)
  monkeypatch.setattr(
    buckets.client, 'filesystem', buckets.client.filesystem.__wrapped__
  )
  for use in (lambda: runs.run('gs://b/run'), lambda: vit_jax.load('gs://b/run')):
    with pytest.raises(errors.UserError, match=naming('vit_jax[gcs]')):
      use()


def test_a_file_of_weights_comes_from_the_bucket(proxy, folder, tmp_path, monkeypatch):
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path))
  source = f'{folder}/vit.npz'
  with pytest.raises(errors.UserError, match=naming(source)):
    vit_jax.load(source)
  buckets.upload(GOLDEN / 'vit_google_token.npz', source)
  emulator.fails(proxy, 2)
  assert vit_jax.load(source).params['cls'].shape == (1, 1, 48)
  proxy.fault = lambda *_: '403'  # whatever is asked again
  vit_jax.load(source)


def test_a_folder_as_on_a_hub_comes_from_the_bucket(folder, tmp_path, monkeypatch):
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path))
  for path in (GOLDEN / 'vit_timm').iterdir():
    buckets.upload(path, f'{folder}/timm/{path.name}')
  found = vit_jax.load(f'{folder}/timm')
  assert found.format == 'timm'
  expected = vit_jax.load(GOLDEN / 'vit_timm')
  assert found.params['cls'].tolist() == expected.params['cls'].tolist()
  with pytest.raises(errors.UserError, match=naming(folder / 'none')):
    vit_jax.load(f'{folder}/none')
  assert not [p for p in tmp_path.rglob('*') if p.name.startswith('tmp')]


def test_what_writes_to_disk_alone_says_so(run):
  from vit_jax.tools import convert, evaluate, predict

  for tool, *args in (
    (convert, run[1], 'gs://b/x.npz'),
    (evaluate, run[1], '--data', 'digits', '--split', 'test', '--out', 'gs://b/x'),
    (predict, run[1], __file__, '--features', 'gs://b/x.npz'),
  ):
    with pytest.raises(errors.UserError, match=naming(args[-1], 'gcloud')):
      tool.main([str(arg) for arg in args])


# -- the lock -------------------------------------------------------------------------


@pytest.fixture
def fast(monkeypatch):
  monkeypatch.setattr(lease, 'LEASE', 1.0)
  monkeypatch.setattr(lease, 'RENEW', 0.2)
  monkeypatch.setattr(lease, '_LOOK', 0.1)


def test_a_second_run_is_refused_while_the_first_lives(
  folder, fast, proxy, capfd, monkeypatch
):
  monkeypatch.setattr(lease, 'LEASE', 10.0)  # a busy machine may renew a second late
  emulator.fails(proxy, 3)  # renewed all the same
  with lock.lock(folder) as held:
    assert held.workdir == folder
    with pytest.raises(errors.UserError, match=naming(folder, os.getpid())):
      lease.Lease(folder / lock.LOCK_FILE).take()
    held.check()
  assert 'waiting' in capfd.readouterr().err
  with lock.lock(folder):  # at once: the first gave it up
    pass
  assert 'waiting' not in capfd.readouterr().err


def test_the_lock_of_a_dead_run_ends(folder, fast, monkeypatch, capfd):
  monkeypatch.setattr(lease, '_machine', lambda: 'another')
  dead = lease.Lease(folder / lock.LOCK_FILE)
  dead._write(0)  # and no renewals: its process was killed
  alive = lease.Lease(folder / lock.LOCK_FILE)
  alive.take()
  assert 'waiting' in capfd.readouterr().err
  alive.check()
  dead._renew()  # it was not dead, only asleep
  with pytest.raises(errors.LockLost, match=naming(folder, os.getpid())) as caught:
    dead.check()
  assert caught.value.exit_code == 75
  dead.release()
  alive.check()
  alive.release()


def test_the_lock_of_a_dead_process_of_this_machine_holds_nothing(folder, capfd):
  gone = threading.Thread(target=lambda: None)
  gone.start()
  gone.join()
  dead = lease.Lease(folder / lock.LOCK_FILE)
  dead._holder['pid'] = 2**22 + 1  # above the largest that Linux gives
  dead._write(0)
  with lock.lock(folder):
    pass
  assert 'waiting' not in capfd.readouterr().err


@pytest.mark.parametrize('content', [b'', b'{', b'[1]', b'{"lease": "x"}'])
def test_a_damaged_lock_ends_too(folder, fast, content):
  (folder / lock.LOCK_FILE).write_bytes(content)
  with lock.lock(folder):
    pass


def test_a_lock_is_renewed_after_a_refusal_that_passed(folder, monkeypatch):
  held, tries = lease.Lease(folder / lock.LOCK_FILE), []

  def renew():
    tries.append(len(tries))
    if len(tries) == 3:
      held._released.set()
    raise errors.NotAllowed('the token has expired')

  monkeypatch.setattr(lease, 'RENEW', 0.001)
  monkeypatch.setattr(held, '_renew', renew)
  held._renew_often()
  assert tries == [0, 1, 2]


def test_of_many_that_want_a_lock_one_gets_it(folder, fast):
  got, refused = [], []

  def want():
    wanted = lease.Lease(folder / lock.LOCK_FILE)
    try:
      wanted.take()
      got.append(wanted)
    except errors.UserError as error:
      refused.append(error)

  threads = [threading.Thread(target=want) for _ in range(6)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert (len(got), len(refused)) == (1, 5)
  got[0].release()


# -- objects --------------------------------------------------------------------------


def test_a_write_on_a_condition(proxy, folder):
  for fault in (None, 'lost', '503', 'reset'):
    url, once = folder / str(fault), [fault]
    proxy.fault = lambda *_, once=once: once.pop() if once else None
    first = buckets.write(url, b'1', 0)  # though its answer got lost
    once.append(fault)
    second = buckets.write(url, b'2', first)
    for wrong in (0, first, second + 1):
      with pytest.raises(buckets.Changed):
        buckets.write(url, b'3', wrong)
    assert buckets.read(url)[:2] == (b'2', second)


def test_a_folder_of_files_is_copied(folder):
  local = disk.LocalFolder(folder)
  (local.folder / 'a/b').mkdir(parents=True)
  (local.folder / 'a/b/x').write_bytes(b'1')
  local.push()
  (local.folder / 'a/b/x').write_bytes(b'12')
  (local.folder / 'y').write_bytes(b'3')
  local.close()
  assert (folder / 'a/b/x').read_bytes() == b'12'
  assert (folder / 'y').read_bytes() == b'3'
  assert not local.folder.exists()
  lost = disk.LocalFolder(folder / 'lost')
  (lost.folder / 'x').write_bytes(b'1')
  with pytest.raises(errors.LockLost), contextlib.closing(lost):
    raise errors.LockLost('another run has the folder')
  assert not (folder / 'lost/x').exists()
  assert not lost.folder.exists()


def test_a_large_object(folder):
  data = os.urandom(3 << 20)
  (folder / 'x').write_bytes(data)
  assert (folder / 'x').read_bytes() == data


def test_lines_are_written_now_and_then_and_all_by_flush(proxy, folder):
  url = folder / 'x.jsonl'
  lines = buckets.Lines(url, b'0\n', every=0.05)
  del proxy.seen[:]
  for i in range(1, 200):
    lines.add(b'%d\n' % i)
  lines.flush()
  assert url.read_bytes() == b''.join(b'%d\n' % i for i in range(200))
  assert len(proxy.seen) < 20
  lines.add(b'last\n')
  lines.close()
  assert url.read_bytes().endswith(b'last\n')
  other = buckets.Lines(url, b'', every=60)
  url.write_bytes(b'theirs\n')
  other.add(b'ours\n')
  with pytest.raises(buckets.Changed):
    other.flush()
  other.close()
  assert url.read_bytes() == b'theirs\n'


def test_bad_images_of_several_processes_are_all_listed_once(proxy, folder):
  log = folder / 'bad_images.jsonl'
  emulator.fails(proxy, 7)

  def report(paths):
    for path in paths:
      bad_images._append(log, {'path': path, 'reason': 'x', 'source': 'y'})

  # The lock of a process is not that of others.
  threads = [threading.Thread(target=report, args=('abcdef'[i:],)) for i in range(3)]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(bad_images, '_LOCK', contextlib.nullcontext())
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
  assert sorted(x['path'] for x in bad_images.read_log(log)) == list('abcdef')
  assert bad_images.read_log(folder / 'none') == []


def test_paths(folder):
  path = buckets.path('gs://bucket/a/b.c')
  assert str(path) == 'gs://bucket/a/b.c' == os.fspath(path)
  assert (str(path.parent), path.name) == ('gs://bucket/a', 'b.c')
  assert str(path.with_suffix('.x') / 'y') == 'gs://bucket/a/b.x/y'
  assert path == buckets.path(path) == path.absolute()
  assert not (folder / 'x').exists()
  (folder / 'x/y z%').write_bytes(b'1')
  assert ((folder / 'x').is_dir(), (folder / 'x').is_file()) == (True, False)
  assert [p.name for p in (folder / 'x').glob('y*')] == ['y z%']
  assert list((folder / 'nothing').glob('*')) == []
  assert (folder / 'x/y z%').read_bytes() == b'1'
