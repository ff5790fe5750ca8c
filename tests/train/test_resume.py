"""Runs that are killed, stopped and restarted end with the same bits as an undisturbed run.

Arms are compared on one machine, on one device each: bitwise equality holds there.
"""

import os
import random
import re
import signal
import time

import pytest

from tests.support import naming, runs
from vit_jax import cli, main
from vit_jax.train.workdir import LOCK_FILE, lock


@pytest.fixture(scope='module')
def shared(tmp_path_factory):
  """A compilation cache shared by all arms, so that a start is mostly imports."""
  return dict(
    JAX_COMPILATION_CACHE_DIR=str(tmp_path_factory.mktemp('compiled')),
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0',
  )


@pytest.fixture(scope='module')
def reference(tmp_path_factory):
  """The folder of a run that nothing interrupted, in this process: it starts sooner."""
  workdir = tmp_path_factory.mktemp('reference')
  status, _ = runs.run_on_one_device(workdir)
  assert status['state'] == 'finished'
  assert len(runs.rows(workdir)) == runs.STEPS + runs.STEPS // runs.EVAL_EVERY
  return workdir


def again(workdir, *changes):
  """Starts the run in a folder once more, in this process; returns its exit code."""
  return cli.run(main.main, [*runs.flags(*changes), f'--workdir={workdir}'])


def same_as(reference, workdir):
  assert runs.status(workdir) == runs.status(reference)
  assert runs.rows(workdir) == runs.rows(reference)


def kill_and_restart(kills, seed, reference, shared, workdir):
  """Kills a run `kills` times, each fifth before its first step, then lets it end."""
  rng = random.Random(seed)
  early = kills // 5
  last = runs.STEPS - 10  # so that the run cannot end before its killer looks
  steps = sorted(rng.randint(1, last) for _ in range(kills - early))
  for _ in range(early):
    steps.insert(rng.randint(0, len(steps)), None)
  for step in steps:
    process = runs.Process(*runs.flags(), f'--workdir={workdir}', **shared)
    if step is None:  # while data are opened, the step is compiled, the state restored
      word, seconds = rng.choice((('Run', 2), ('Parameters', 1), ('Step compiled', 0)))
      process.until(word)
      time.sleep(rng.uniform(0, seconds))
    else:
      process.until_step(step)
      time.sleep(rng.uniform(0, 0.05))  # anywhere in the steps and saves that follow
    process.popen.kill()
    code, _, error = process.end()
    assert (code, error) == (-signal.SIGKILL, ''), f'step {step}'
  process = runs.Process(*runs.flags(), f'--workdir={workdir}', **shared)
  code, _, error = process.end()
  assert (code, error) == (0, '')
  same_as(reference, workdir)
  assert runs.saved(workdir) == runs.saved(reference)


@pytest.mark.faults
@pytest.mark.parametrize('seed', [1, 2, 3])
def test_killed_ten_times(seed, reference, shared, tmp_path, faults_table):
  kill_and_restart(10, seed, reference, shared, tmp_path)
  for kill in range(10):
    faults_table('kills, one process', f'kill {kill} of series {seed}', 'handled')


def test_a_killed_run_ends_like_one_never_touched(
  reference, shared, tmp_path, one_device, capfd
):
  arguments = [*runs.flags(), f'--workdir={tmp_path}']
  process = runs.Process(*arguments, **shared)
  process.until_step(11)  # that of step 5 is whole, as saving step 10 waited for it
  process.popen.kill()
  code, _, error = process.end()
  assert (code, error) == (-signal.SIGKILL, '')

  # In this process, which takes half as long; `make faults` restarts it in others.
  assert again(tmp_path) == 0
  out, error = capfd.readouterr()
  assert error == ''
  assert '\nResuming' in out
  same_as(reference, tmp_path)


@pytest.mark.faults  # test_preemption stops a run in its own process
def test_a_stopped_run_ends_like_one_never_touched(reference, shared, tmp_path):
  arguments = [*runs.flags(), f'--workdir={tmp_path}']
  process = runs.Process(*arguments, **shared)
  process.until_step(7)
  process.popen.send_signal(signal.SIGTERM)
  code, out, error = process.end()
  assert code == 75
  received, ended = error.splitlines()
  assert received.startswith('SIGTERM: ')
  step = runs.status(tmp_path)['step']
  assert ended.startswith('Stopped ')
  assert re.search(naming(f'step {step}', runs.STEPS), ended)
  assert 7 <= step < runs.EVAL_EVERY
  status = runs.status(tmp_path)
  assert (status['state'], status['exit']) == ('preempted', 75)
  assert str(step) in runs.saved(tmp_path)
  assert 'Done' not in out

  code, out, error = runs.Process(*arguments, **shared).end()
  assert (code, error) == (0, '')
  assert '\nResuming' in out
  same_as(reference, tmp_path)


# Below, an evaluation that a run lacks is made up for; test_evaluators stops one.
@pytest.mark.faults
def test_an_evaluation_that_was_stopped_is_done_again(
  reference, shared, tmp_path, faults_table
):
  arguments = [*runs.flags(), f'--workdir={tmp_path}']
  process = runs.Process(*arguments, **shared)
  process.until_step(runs.EVAL_EVERY)
  process.popen.send_signal(signal.SIGINT)
  code, _, error = process.end()
  assert code == 75
  assert error.startswith('SIGINT: ')
  assert runs.status(tmp_path)['step'] == runs.EVAL_EVERY
  assert not any('test/top1' in row for row in runs.rows(tmp_path))

  code, _, error = runs.Process(*arguments, **shared).end()
  assert (code, error) == (0, '')
  same_as(reference, tmp_path)
  faults_table('signals', 'SIGINT in an evaluation', 'handled')


@pytest.mark.faults
def test_a_second_signal_exits_at_once(reference, shared, tmp_path, faults_table):
  process = runs.Process(*runs.flags(), f'--workdir={tmp_path}', **shared)
  process.until('Parameters:')  # the step is compiled next, which a signal waits for
  process.popen.send_signal(signal.SIGTERM)
  assert process.popen.stderr.readline().startswith('SIGTERM: ')
  sent = time.perf_counter()
  process.popen.send_signal(signal.SIGTERM)
  code, out, error = process.end()
  assert time.perf_counter() - sent < 2
  assert (code, error) == (75, 'second SIGTERM: exiting at once, without saving.\n')
  assert 'step 1/' not in out
  assert not (tmp_path / 'checkpoints').exists()
  faults_table('signals', 'SIGTERM twice while it compiles', 'refused', error)


def test_a_second_run_in_the_folder_refuses(tmp_path, capfd):
  with lock(tmp_path):
    assert again(tmp_path) == 2
  error = capfd.readouterr().err
  assert error.startswith('error: ')
  assert re.search(naming(tmp_path, os.getpid(), '--workdir'), error)
  assert error.count('\n') == 1
  assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]


def test_a_workdir_that_is_a_file(tmp_path, capfd):
  (tmp_path / 'file').touch()
  assert again(tmp_path / 'file') == 2
  assert re.search(naming('--workdir', tmp_path / 'file'), capfd.readouterr().err)
