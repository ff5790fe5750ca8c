"""Files that block their reader, are not regular or too large; an input pipeline that stalls."""

import os
import re
import threading
import time

import numpy as np
import pytest
from PIL import Image

from tests.support import naming
from vit_jax.data import bad_images, image_file, pipeline, stalls

PP = 'decode|resize(8)|value_range(-1, 1)'


@pytest.fixture
def folder(tmp_path):
  root = tmp_path / 'root'
  for name in 'ab':
    (root / 'train' / name).mkdir(parents=True)
    for i in range(6):
      Image.new('RGB', (9, 9)).save(root / 'train' / name / f'{i}.png')
  return root


def bad_of(root, tmp_path) -> dict[str, str]:
  """Returns {file name: reason} of the bad images of a folder."""
  log = tmp_path / 'bad.jsonl'
  data = pipeline.evaluate(
    str(root), 'train', PP, 8, bad_log=str(log), max_bad_fraction=1.0
  )
  list(data.iterate())
  lines = bad_images.read_log(log)
  return {os.path.basename(line['path']): line['reason'] for line in lines}


def test_only_regular_files_of_a_sane_size_are_opened(folder, tmp_path):
  os.mkfifo(folder / 'train/a/fifo.png')
  (folder / 'train/a/zero.png').symlink_to('/dev/zero')
  (folder / 'train/a/self.png').symlink_to('self.png')
  (folder / 'train/a/self').symlink_to('self')
  with open(folder / 'train/b/huge.png', 'wb') as file:
    file.truncate(6 << 30)
  reasons = bad_of(folder, tmp_path)
  assert 'regular file' in reasons.pop('fifo.png')
  assert 'regular file' in reasons.pop('zero.png')
  assert 'symbolic links' in reasons.pop('self.png')
  assert re.search(naming(f'{6 << 30:,}', f'{256 << 20:,}'), reasons.pop('huge.png'))
  assert not reasons


def test_names_that_are_not_utf8(folder, tmp_path):
  data = (folder / 'train/a/0.png').read_bytes()
  odd = os.fsencode(folder) + b'/train/caf\xe9'
  os.mkdir(odd)
  for name in (b'x\xff.png', b'y.png'):
    with open(odd + b'/' + name, 'wb') as file:
      file.write(data)
  with open(odd + b'/z\xff.png', 'wb') as file:
    file.write(data[:20])
  assert list(bad_of(folder, tmp_path)) == [os.fsdecode(b'z\xff.png')]
  source = pipeline.train(str(folder), 'train', PP, 8).source
  assert source.class_names == ['a', 'b', os.fsdecode(b'caf\xe9')]
  assert np.bincount(source.labels).tolist() == [6, 6, 3]


def test_a_stall_names_the_file(folder, monkeypatch, capfd):
  """One file of a dead mount: its reader waits in the kernel."""
  dead, alive = threading.Event(), threading.Event()

  def opened(file, *args, **options):
    if file.endswith('b/3.png'):
      dead.set()
      alive.wait(20)
    return open(file, *args, **options)

  data = pipeline.evaluate(str(folder), 'train', PP, 8)
  list(data.iterate())  # TensorFlow loaded and the ops traced
  monkeypatch.setattr(image_file, 'open', opened, raising=False)
  monkeypatch.setattr(stalls.watched, '__defaults__', (0.2,))
  line = f'{folder}/train/b/3.png'
  printed = ['']

  def release():
    dead.wait(20)
    for _ in range(100):
      printed[0] += capfd.readouterr().err
      if printed[0].count(line) > 1:  # again, as it goes on
        break
      time.sleep(0.1)
    alive.set()

  thread = threading.Thread(target=release)
  thread.start()
  assert sum(batch['mask'].sum() for batch in data.iterate()) == 12
  thread.join()
  assert re.search(r'No batch of data for \d+ s\. Being read: ', printed[0])
  assert printed[0].count(line) > 1
  assert not stalls._UNDER_WAY
