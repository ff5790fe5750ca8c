"""Preparing a data set is stopped, killed or out of disk: it resumes to the same bytes."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.support import naming
from tests.support.archives import synsets, write_tar
from vit_jax.data import sources
from vit_jax.data.prepare import buckets, imagenet21k, writer
from vit_jax.errors import DiskFull, UserError


class Killed(BaseException):
  """Like a kill: no `except Exception` catches it."""


def files_of(directory):
  out = {}
  for name in sorted(os.listdir(directory)):
    with open(os.path.join(directory, name), 'rb') as file:
      out[name] = file.read()
  return out


@pytest.fixture
def in_parts(monkeypatch):
  """Several buckets and shards of few images."""
  from tensorflow_datasets.core.utils import shard_utils

  monkeypatch.setattr(buckets, '_BUCKET', 4000)
  many = lambda self, *args, **kwargs: 4
  monkeypatch.setattr(shard_utils.ShardConfig, 'get_number_shards', many)


@pytest.mark.parametrize('mode', ['w', 'w:gz'])
def test_an_interrupted_run_goes_on(tmp_path, monkeypatch, in_parts, mode):
  tar = write_tar(tmp_path / 'a.tar', synsets(), mode)
  plan = imagenet21k.plan(tar)
  whole, _ = writer.prepare(plan, str(tmp_path / 'whole'))
  add, write = buckets.Writer.add, writer._write_shard
  read = []
  # There are 40 images. Stopped at the 1st, 7th and 16th of those not yet counted, then
  # at a shard.
  for number, target in ((1, 'add'), (7, 'add'), (16, 'add'), (3, 'shard')):
    left = [number]

    def add_some(self, place, data, left=left, target=target):
      add(self, place, data)
      read.append(place.key)
      if target == 'add':
        left[0] -= 1
      if left[0] == 0:
        raise Killed  # so that this image is on disk, but does not count

    def write_some(*args, left=left):
      left[0] -= 1
      if left[0] == 0:
        raise Killed
      return write(*args)

    monkeypatch.setattr(buckets.Writer, 'add', add_some)
    monkeypatch.setattr(writer, '_write_shard', write_some)
    with pytest.raises(Killed):
      writer.prepare(imagenet21k.plan(tar), str(tmp_path), checkpoint_every=0)
    assert os.listdir(tmp_path / 'imagenet21k') == ['incomplete.1.0.0']
    with pytest.raises(UserError, match=naming('imagenet21k', 'TFDS_DATA_DIR')):
      sources.build('imagenet21k', 'full', data_dir=str(tmp_path))
  monkeypatch.setattr(buckets.Writer, 'add', lambda *args: pytest.fail('read again'))
  monkeypatch.setattr(writer, '_write_shard', write)
  again, _ = writer.prepare(imagenet21k.plan(tar), str(tmp_path), checkpoint_every=0)
  assert len(set(read)) == 40
  assert len(read) == 43
  assert os.listdir(tmp_path / 'imagenet21k') == ['1.0.0']
  assert files_of(again) == files_of(whole)


@pytest.mark.slow
def test_a_killed_process_leaves_nothing_that_looks_whole(tmp_path):
  tar = write_tar(tmp_path / 'a.tar', synsets(4, 60))
  code = (
    'import sys, time\n'
    'from vit_jax.data.prepare import buckets, imagenet21k, writer\n'
    'add, left = buckets.Writer.add, [150]\n'
    'def add_some(*args):\n'
    '  add(*args)\n'
    '  left[0] -= 1\n'
    '  if not left[0]:\n'
    '    print("now", flush=True)\n'
    '    time.sleep(600)\n'
    'buckets.Writer.add = add_some\n'
    'plan = imagenet21k.plan(sys.argv[1])\n'
    'writer.prepare(plan, sys.argv[2], checkpoint_every=0.001)\n'
  )
  home = tmp_path / 'D/imagenet21k'
  args = [sys.executable, '-c', code, tar, str(tmp_path / 'D')]
  with subprocess.Popen(args, stdout=subprocess.PIPE, text=True) as process:
    assert process.stdout.readline() == 'now\n'
    process.send_signal(signal.SIGKILL)
  assert os.listdir(home) == ['incomplete.1.0.0']
  lines = []
  plan = imagenet21k.plan(tar)
  again, result = writer.prepare(plan, str(tmp_path / 'D'), log=lines.append)
  assert result['splits']['full']['examples'] == 240
  assert re.search(r'after \d+ images', lines[0])
  whole, _ = writer.prepare(plan, str(tmp_path / 'whole'))
  assert files_of(again) == files_of(whole)


@pytest.mark.faults
def test_the_same_bytes_of_every_process_and_after_kills(tmp_path):
  tar, folders, kills = write_tar(tmp_path / 'a.tar', synsets(4, 200)), [], 0
  for number, delay in enumerate((None, None, 0.01, 0.1, 0.2)):
    home = tmp_path / str(number)
    args = [sys.executable, '-m', 'vit_jax.tools.prepare', 'imagenet21k']
    args += ['--from', str(tar), '--data_dir', str(home)]
    environment = {**os.environ, 'PYTHONHASHSEED': str(number)}
    for kill in (True, False) if delay is not None else (False,):
      with subprocess.Popen(
        args, env=environment, stdout=subprocess.DEVNULL
      ) as process:
        if kill:
          while not home.exists():
            time.sleep(0.01)
          time.sleep(delay)
          process.kill()
      done = (home / 'imagenet21k' / '1.0.0').exists()
      assert done or kill
      kills += not done
      if done:
        break
    folders.append(files_of(home / 'imagenet21k' / '1.0.0'))
  assert kills
  assert all(files == folders[0] for files in folders)


def test_other_input_does_not_go_on(tmp_path, monkeypatch):
  tar = write_tar(tmp_path / 'a.tar', synsets())

  def stop(*args):
    raise Killed

  monkeypatch.setattr(writer, '_write_shard', stop)
  with pytest.raises(Killed):
    writer.prepare(imagenet21k.plan(tar), str(tmp_path))
  monkeypatch.undo()
  for side in (8, 16):  # begun without one
    with pytest.raises(UserError, match=naming('incomplete.1.0.0', 'delete')):
      writer.prepare(imagenet21k.plan(tar, max_side=side), str(tmp_path))
  write_tar(tmp_path / 'a.tar', synsets(5))
  with pytest.raises(UserError, match=naming('incomplete.1.0.0', 'delete')):
    writer.prepare(imagenet21k.plan(tar), str(tmp_path))


def test_two_at_once_are_refused(tmp_path):
  plan = imagenet21k.plan(write_tar(tmp_path / 'a.tar', synsets()))
  seen = []

  def log(line):
    with pytest.raises(UserError, match=naming('incomplete.1.0.0', 'process')):
      writer.prepare(plan, str(tmp_path))
    seen.append(line)

  writer.prepare(plan, str(tmp_path), log=log)
  assert seen


def test_disk_full_keeps_what_is_done(tmp_path, monkeypatch):
  plan = imagenet21k.plan(write_tar(tmp_path / 'a.tar', synsets()))
  usage = type('Usage', (), {'free': 1000})
  monkeypatch.setattr(writer.shutil, 'disk_usage', lambda path: usage)
  with pytest.raises(DiskFull, match=naming('GB', '--data_dir')):
    writer.prepare(plan, str(tmp_path))
  monkeypatch.undo()

  def full(*args):  # as ArrayRecord says it
    raise RuntimeError('write() failed: No space left on device; writing x')

  monkeypatch.setattr(writer, '_write_shard', full)
  with pytest.raises(DiskFull, match=naming(f'{tmp_path}/imagenet21k', 'again')):
    writer.prepare(plan, str(tmp_path))
  monkeypatch.undo()
  monkeypatch.setattr(writer, '_scatter', lambda *args: pytest.fail('read again'))
  assert writer.prepare(plan, str(tmp_path))[1]['splits']['full']['examples'] == 40
