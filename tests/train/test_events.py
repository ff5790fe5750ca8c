"""TensorBoard's files hold each step once, even after kills."""

import collections
import shutil

import pytest

from tests.support import runs
from vit_jax.train import events, metrics

SHORT = ('steps=6', 'optim.schedule.warmup=2', 'log.tensorboard=True', 'log.every=1')
SHORT += ('checkpoint.every=2', 'checkpoint.keep_latest=3', 'checkpoint.best=None')


def read(workdir) -> collections.Counter:
  """Returns {(name, step): times} of all event files, read by TensorBoard's own code."""
  from tensorboard.backend.event_processing import event_file_loader

  found = collections.Counter()
  for path in workdir.glob('events.out.tfevents.*'):
    for event in event_file_loader.EventFileLoader(str(path)).Load():
      found.update((value.tag, event.step) for value in event.summary.value)
  return found


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  """The folder of a file of events of six steps, by the writer that runs have."""
  workdir = tmp_path_factory.mktemp('written')
  writer = metrics._tensorboard(workdir)
  for step in range(1, 7):
    writer.write_scalars(step, {'train/loss': 1 / step, 'train/accuracy': step / 7})
  writer.close()
  return workdir


@pytest.mark.slow
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
