"""An input pipeline that stalls names the file that its reader waits for."""

import re
import threading
import time

from tests.support import image_folder
from vit_jax.data import image_file, pipeline, stalls


def test_a_stall_names_the_file(tmp_path, monkeypatch, capfd):
  """One file of a dead mount: its reader waits in the kernel."""
  root = image_folder.write(tmp_path)
  dead, alive = threading.Event(), threading.Event()

  def opened(file, *args, **options):
    if file.endswith('b/3.png'):
      dead.set()
      alive.wait(20)
    return open(file, *args, **options)

  data = pipeline.EvalBatches(str(root), 'train', image_folder.FOLDER, 8)
  list(data.iterate())  # TensorFlow loaded and the ops traced
  monkeypatch.setattr(image_file, 'open', opened, raising=False)
  monkeypatch.setattr(stalls.watch, '__defaults__', (0.2,))
  line, printed = f'{root}/train/b/3.png', ['']

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
  assert sum(batch['mask'].sum() for batch in data.iterate()) == 39
  thread.join()
  assert re.search(r'No batch of data for \d+ s\. Being read: ', printed[0])
  assert printed[0].count(line) > 1
  assert not stalls._UNDER_WAY
