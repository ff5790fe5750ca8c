"""TensorBoard's files hold each step once, even after kills."""

import collections
import shutil
import subprocess
import sys
from unittest import mock

import pytest

from tests.support import runs
from vit_jax.train import events

SHORT = ('steps=6', 'optim.schedule.warmup=2', 'log.tensorboard=True', 'log.every=1')
SHORT += ('checkpoint.every=2', 'checkpoint.keep_latest=3', 'checkpoint.best=None')


# Writes the events of six steps to the folder argv[1], by the writer that runs have.
WRITE = """
import sys
from vit_jax.train import metrics
writer = metrics._tensorboard(sys.argv[1])
for step in range(1, 7):
  writer.write_scalars(step, {'train/loss': 1 / step, 'train/accuracy': step / 7})
writer.flush()
writer.close()
"""


def scalars(workdir) -> list[tuple]:
  """Returns (name, step, value) of all events, read by TensorBoard's own code."""
  from tensorboard.backend.event_processing import event_file_loader
  from tensorboard.util import tensor_util

  return [
    (value.tag, event.step, tensor_util.make_ndarray(value.tensor).item())
    for path in sorted(workdir.glob('events.out.tfevents.*'))
    for event in event_file_loader.EventFileLoader(str(path)).Load()
    for value in event.summary.value
    if value.metadata.plugin_data.plugin_name == 'scalars'
  ]


def read(workdir) -> collections.Counter:
  """Returns {(name, step): times} of all event files."""
  return collections.Counter((name, step) for name, step, _ in scalars(workdir))


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  """The folder of a file of events of six steps."""
  workdir = tmp_path_factory.mktemp('written')
  with mock.patch.object(sys, 'argv', ['', str(workdir)]):
    exec(WRITE, {})
  return workdir


def test_events_without_tensorflow_are_the_same(written, tmp_path):
  code = 'import sys\nsys.modules["tensorflow"] = None\n' + WRITE
  code += 'assert "clu.metric_writers" not in sys.modules'
  subprocess.run([sys.executable, '-c', code, str(tmp_path)], check=True)
  assert scalars(tmp_path) == scalars(written)
  assert len(scalars(tmp_path)) == 12


def test_a_run_that_resumes_repeats_no_event(tmp_path, monkeypatch):
  runs.on_one_device(monkeypatch)
  run = tmp_path / 'first'
  runs.run(run, *SHORT, evals={})
  want = read(run)
  assert set(want.values()) == {1}
  assert {step for _, step in want} >= {1, 2, 3, 4, 5, 6}
  again = shutil.copytree(run, tmp_path / 'run')
  for step in ('4', '6'):  # killed after its rows of step 6, before that checkpoint
    shutil.rmtree(again / 'checkpoints' / step)
  runs.run(again, *SHORT, evals={})
  assert read(again) == want
  assert runs.rows(again) == runs.rows(run)
  assert len(list(again.glob('events*'))) == 2  # the first one's times are kept


@pytest.mark.parametrize('step', [-1, 0, 3, 6, 100])
def test_what_is_cut(written, tmp_path, step):
  (path,) = written.glob('events*')
  kept = tmp_path / path.name
  shutil.copy(path, kept)
  events.forget(tmp_path, step)
  want = {key: n for key, n in read(written).items() if key[1] <= step}
  assert read(tmp_path) == want
  if step > 6:
    assert kept.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
  'damage',
  [b'', b'\xff' * 40, b'\0' * 40, b'\5\0\0'],
  ids=['none', 'ones', 'zeros', 'torn'],
)
def test_damage_is_cut_off(written, tmp_path, damage):
  (path,) = written.glob('events*')
  (tmp_path / path.name).write_bytes(path.read_bytes() + damage)
  events.forget(tmp_path, 3)
  assert read(tmp_path) == {k: n for k, n in read(written).items() if k[1] <= 3}
  (tmp_path / path.name).write_bytes(damage)
  events.forget(tmp_path, 3)
