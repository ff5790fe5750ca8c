"""Objects in a bucket: paths, conditional writes, folders of files, lines."""

import contextlib
import os
import threading

import pytest

from tests.support import emulator
from vit_jax import buckets, errors
from vit_jax.data import bad_images
from vit_jax.train import disk

pytestmark = pytest.mark.usefixtures('gcs_without_tensorflow')


def test_a_write_on_a_condition(gcs_proxy, gcs_folder):
  for fault in (None, 'lost', '503', 'reset'):
    url, once = gcs_folder / str(fault), [fault]
    gcs_proxy.fault = lambda *_, once=once: once.pop() if once else None
    first = buckets.write(url, b'1', 0)  # though its answer got lost
    once.append(fault)
    second = buckets.write(url, b'2', first)
    for wrong in (0, first, second + 1):
      with pytest.raises(buckets.Changed):
        buckets.write(url, b'3', wrong)
    assert buckets.read(url)[:2] == (b'2', second)


def test_a_folder_of_files_is_copied(gcs_folder):
  local = disk.LocalFolder(gcs_folder)
  (local.folder / 'a/b').mkdir(parents=True)
  (local.folder / 'a/b/x').write_bytes(b'1')
  local.push()
  (local.folder / 'a/b/x').write_bytes(b'12')
  (local.folder / 'y').write_bytes(b'3')
  local.close()
  assert (gcs_folder / 'a/b/x').read_bytes() == b'12'
  assert (gcs_folder / 'y').read_bytes() == b'3'
  assert not local.folder.exists()
  lost = disk.LocalFolder(gcs_folder / 'lost')
  (lost.folder / 'x').write_bytes(b'1')
  with pytest.raises(errors.LockLost), contextlib.closing(lost):
    raise errors.LockLost('another run has the folder')
  assert not (gcs_folder / 'lost/x').exists()
  assert not lost.folder.exists()


def test_a_large_object(gcs_folder):
  data = os.urandom(3 << 20)
  (gcs_folder / 'x').write_bytes(data)
  assert (gcs_folder / 'x').read_bytes() == data


def test_lines_are_written_now_and_then_and_all_by_flush(gcs_proxy, gcs_folder):
  url = gcs_folder / 'x.jsonl'
  lines = buckets.Lines(url, b'0\n', every=0.05)
  del gcs_proxy.seen[:]
  for i in range(1, 200):
    lines.add(b'%d\n' % i)
  lines.flush()
  assert url.read_bytes() == b''.join(b'%d\n' % i for i in range(200))
  assert len(gcs_proxy.seen) < 20
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


def test_bad_images_of_several_processes_are_all_listed_once(gcs_proxy, gcs_folder):
  log = gcs_folder / 'bad_images.jsonl'
  emulator.fails(gcs_proxy, 7)

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
  assert bad_images.read_log(gcs_folder / 'none') == []


def test_paths(gcs_folder):
  path = buckets.path('gs://bucket/a/b.c')
  assert str(path) == 'gs://bucket/a/b.c' == os.fspath(path)
  assert (str(path.parent), path.name) == ('gs://bucket/a', 'b.c')
  assert str(path.with_suffix('.x') / 'y') == 'gs://bucket/a/b.x/y'
  assert path == buckets.path(path) == path.absolute()
  assert not (gcs_folder / 'x').exists()
  (gcs_folder / 'x/y z%').write_bytes(b'1')
  assert ((gcs_folder / 'x').is_dir(), (gcs_folder / 'x').is_file()) == (True, False)
  assert [p.name for p in (gcs_folder / 'x').glob('y*')] == ['y z%']
  assert list((gcs_folder / 'nothing').glob('*')) == []
  assert (gcs_folder / 'x/y z%').read_bytes() == b'1'


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
