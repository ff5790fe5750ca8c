"""Two processes over loopback train, evaluate, stop, save and resume as one run.

Each has one device. The run is compared with one process of two devices.
"""

import functools
import random
import re
import shutil
import signal
import socket
import time

import jax
import numpy as np
import pytest

from tests.support import naming, runs
from vit_jax import distributed, errors, models, sharding, trees
from vit_jax.checkpoint import checkpoints
from vit_jax.evaluators import predictions

# A batch is added up in another order on other devices. What would magnify that rounding
# is left out: a moment kept in bfloat16 (2^-9 of a step where it rounds the other way)
# and Adam's division by gradients that are rounding alone.
CHANGES = (
  *('steps=12', 'checkpoint.every=4', 'optim.schedule.warmup=4'),
  *('optim.moment_dtype=None', 'optim.eps=0.001'),
)


@pytest.fixture(scope='module')
def shared(tmp_path_factory):
  """A compilation cache shared by the runs with the same devices."""
  return dict(
    JAX_COMPILATION_CACHE_DIR=str(tmp_path_factory.mktemp('compiled')),
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0',
  )


def arguments(workdir, *changes):
  return [*runs.flags(*CHANGES, *changes), f'--workdir={workdir}']


def start_two(workdir, shared, *changes, sabotage=('', '')) -> list[runs.Process]:
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = free.getsockname()[1]
  return [
    runs.Process(
      *arguments(workdir, *changes),
      f'--distributed=127.0.0.1:{port},2,{index}',
      sabotage=sabotage[index],
      **shared,
    )
    for index in range(2)
  ]


def run_two(workdir, shared, *changes, **more) -> list[tuple[int, str, str]]:
  return [process.end() for process in start_two(workdir, shared, *changes, **more)]


def run_one(workdir, monkeypatch, devices) -> None:
  """Runs the same training in this process, on some of its devices."""
  make_mesh = functools.partial(sharding.make_mesh, devices=jax.devices()[:devices])
  monkeypatch.setattr(sharding, 'make_mesh', make_mesh)
  status, _ = runs.run(workdir, *CHANGES)
  assert status['state'] == 'finished'


def params(workdir) -> dict[str, np.ndarray]:
  saved = checkpoints.Checkpoints(workdir / 'checkpoints')
  config = saved.meta()['config']
  model = models.build(**config['model'])
  image = np.zeros((1, *config['resolved']['image_shape']), np.float32)
  init = lambda: model.init(jax.random.key(0), image)['params']
  return trees.flatten(saved.restore_params(jax.eval_shape(init))[0])


def assert_alike(one, other, atol):
  ours, theirs = params(one), params(other)
  for name, value in ours.items():
    np.testing.assert_allclose(value, theirs[name], rtol=0, atol=atol, err_msg=name)
  for a, b in zip(runs.rows(one), runs.rows(other), strict=True):
    assert a.keys() == b.keys()
    for key in a:
      np.testing.assert_allclose(a[key], b[key], rtol=1e-4, atol=atol, err_msg=key)


@pytest.fixture(scope='module')
def reference(tmp_path_factory):
  """The folder of one process with two devices."""
  workdir = tmp_path_factory.mktemp('one')
  with pytest.MonkeyPatch.context() as monkeypatch:
    run_one(workdir, monkeypatch, 2)
  return workdir


@pytest.mark.thorough
def test_two_processes_go_on_where_one_was(reference, shared, tmp_path):
  workdir = shutil.copytree(reference, tmp_path / 'run')
  for step in ('8', '12'):
    shutil.rmtree(workdir / 'checkpoints' / step)
  (code, out, error), (other_code, other_out, other_error) = run_two(workdir, shared)
  assert (code, other_code) == (0, 0), error + other_error
  assert re.search(naming('step 4'), out)
  assert re.search(naming('12 steps'), out)
  assert (
    'step' not in other_out
  )  # the first speaks; the transport says a line of its own
  assert_alike(workdir, reference, 1e-6)
  assert runs.saved(workdir) == runs.saved(reference)
  assert runs.status(workdir)['state'] == 'finished'
  ours, theirs = predictions.read(workdir)['test'], predictions.read(reference)['test']
  assert len(ours['index']) == 360
  assert ours['step'] == 12
  for key in ('index', 'label'):
    np.testing.assert_array_equal(ours[key], theirs[key])
  highest = lambda found: found['probability'][:, 0]
  np.testing.assert_allclose(highest(ours), highest(theirs), atol=1e-4)


@pytest.mark.faults  # test_preemption asks the same of one process and a fake
def test_a_signal_to_one_stops_both_and_other_numbers_go_on(
  reference, shared, tmp_path, monkeypatch, faults_table
):
  first, second = start_two(tmp_path, shared)
  first.until_step(3)
  second.popen.send_signal(signal.SIGTERM)
  codes = [process.end()[0] for process in (first, second)]
  assert codes == [75, 75]
  status = runs.status(tmp_path)
  assert status['state'] == 'preempted'
  assert 3 <= status['step'] < 12
  assert str(status['step']) in runs.saved(tmp_path)
  run_one(tmp_path, monkeypatch, 1)
  assert_alike(tmp_path, reference, 1e-6)
  faults_table('signals', 'SIGTERM to one of two processes', 'handled')


@pytest.mark.faults
def test_killed_thirty_times_either_or_both(shared, tmp_path, faults_table):
  # So many that no run ends before its killer looks; with the moment in bfloat16 again, as
  # all that is compared here has the same devices, and is equal bit for bit.
  longer = ('steps=400', 'optim.moment_dtype=bfloat16', 'optim.eps=1e-8')
  ends = run_two(tmp_path / 'whole', shared, *longer)
  assert [code for code, *_ in ends] == [0, 0]
  workdir, rng = tmp_path / 'killed', random.Random(0)
  steps = sorted(rng.randint(1, 300) for _ in range(24))
  for _ in range(6):
    steps.insert(rng.randint(0, len(steps)), 0)
  for step in steps:
    processes = start_two(workdir, shared, *longer)
    if step:
      processes[0].until_step(step)  # or a later one, where the run goes on
      time.sleep(rng.uniform(0, 0.05))
    else:
      time.sleep(rng.uniform(0, 8))  # while they start, meet, compile, restore
    victim = rng.randrange(2)
    processes[victim].popen.kill()
    time.sleep(rng.choice((0, 0.5)))  # the other notices, or not
    processes[1 - victim].popen.kill()
    for process in processes:
      process.end()
  ends = run_two(workdir, shared, *longer)
  assert [code for code, *_ in ends] == [0, 0]
  assert runs.status(workdir) == runs.status(tmp_path / 'whole')
  assert runs.rows(workdir) == runs.rows(tmp_path / 'whole')
  for number, step in enumerate(steps):
    faults_table('kills, two processes', f'{number}, at step {step}', 'handled')


def test_a_spec_that_is_none_is_refused_at_once():
  for spec, expected in (
    ('10.0.0.1', 'HOST:PORT,COUNT,INDEX'),
    ('10.0.0.1:80,2,2', 'from 0'),
    ('10.0.0.1:80,two,1', 'HOST:PORT,COUNT,INDEX'),
  ):
    with pytest.raises(errors.UserError, match=naming(spec, expected)):
      distributed.start(spec)
