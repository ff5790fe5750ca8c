"""Runs that are killed, stopped and restarted end with the same bits as an undisturbed run.

And the changes of a config that a continuation may have.

Arms are compared on one machine, on one device each: bitwise equality holds there.
"""

import random
import re
import shutil
import signal
import time

import pytest

from tests.support import naming, runs
from vit_jax import cli, main
from vit_jax.checkpoint import checkpoints


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
@pytest.mark.parametrize('seed', [1, 2])
def test_killed_ten_times(seed, reference, shared, tmp_path, faults_table):
  kill_and_restart(10, seed, reference, shared, tmp_path)
  for kill in range(10):
    faults_table('kills, one process', f'kill {kill} of series {seed}', 'handled')


def test_a_killed_run_ends_like_one_never_touched(
  reference, shared, tmp_path, one_device, capfd
):
  arguments = [*runs.flags(), f'--workdir={tmp_path}']
  process = runs.Process(*arguments, **shared)
  process.until_step(11)  # step 5's is whole, as saving step 10 waited for it
  process.popen.kill()
  code, _, error = process.end()
  assert (code, error) == (-signal.SIGKILL, '')

  # In this process, which takes half as long; `make faults` restarts it in others.
  assert again(tmp_path) == 0
  out, error = capfd.readouterr()
  assert error == ''
  assert '\nResuming' in out
  same_as(reference, tmp_path)


@pytest.mark.faults
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


# -- changes between a run and its continuation ------------------------------------------


@pytest.fixture
def finished(reference, tmp_path):
  """A copy of the reference's folder: a run at its end."""
  return shutil.copytree(reference, tmp_path / 'finished')


def test_a_finished_run_tells_its_results_again(finished, capfd):
  before = {path: path.stat().st_mtime_ns for path in finished.rglob('*.json*')}
  # Neither other logging and retention, nor eight devices in place of one, is a reason to
  # train again.
  assert again(finished, 'log.every=7', 'checkpoint.keep_latest=2') == 0
  out, error = capfd.readouterr()
  assert error == ''
  assert re.search(naming(f'{runs.STEPS} steps'), out)
  assert 'test/top1' in out
  assert 'compiled' not in out
  (line,) = (x for x in out.splitlines() if x.startswith('This run is finished'))
  more = f'--config.steps={runs.STEPS * 2}', '--config.resume_allow=steps'
  assert re.search(naming(f'step {runs.STEPS}', f'--workdir={finished}', *more), line)
  assert {path: path.stat().st_mtime_ns for path in finished.rglob('*.json*')} == before


def test_other_mathematics_is_refused_with_a_table(finished, capfd):
  before = runs.status(finished), runs.rows(finished)
  assert again(finished, 'optim.lr=0.5', 'data.split=train[:50%]') == 2
  _, error = capfd.readouterr()
  first, _, *table, last = error.splitlines()
  assert first.startswith('error: ')
  assert str(finished) in first
  assert [line.split()[0] for line in table] == [
    *('data.split', 'optim.lr', 'data.fingerprint', 'data.num_examples')
  ]
  assert table[1].split() == ['optim.lr', '0.003', '0.5']
  assert table[3].split() == ['data.num_examples', '1437', '718']
  assert re.search(
    naming('--workdir', '--config.resume_allow=data.split,optim.lr'), last
  )
  assert (runs.status(finished), runs.rows(finished)) == before


def test_what_no_checkpoint_has_is_refused_before_a_file_changes(
  finished, capfd, one_device
):
  files = [finished / name for name in ('config.json', 'status.json', 'metrics.jsonl')]
  before = [path.read_bytes() for path in files]
  changes = ('model.mlp_dim=64', f'steps={runs.STEPS + 2}')
  assert again(finished, *changes, 'resume_allow=model.mlp_dim,steps') == 2
  facts = f'step {runs.STEPS}', '(16, 32) float32', '(16, 64) float32'
  assert re.search(naming(*facts), capfd.readouterr().err)
  assert [path.read_bytes() for path in files] == before


def test_a_change_is_allowed_by_its_whole_name_or_a_section(finished, capfd):
  for name, whole in (('lr', 'optim.lr'), ('optmi.lr', 'optim.lr')):
    assert again(finished, 'optim.lr=0.5', f'resume_allow={name}') == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert re.search(naming(f'config.resume_allow={name}', whole), line)
  assert again(finished, 'optim.lr=0.5', 'resume_allow=optim') == 0


def test_a_name_that_allows_nothing_is_refused_when_a_run_starts(tmp_path, capfd):
  assert again(tmp_path / 'new', 'resume_allow=optmi.lr') == 2
  assert re.search(
    naming('config.resume_allow=optmi.lr', 'optim'), capfd.readouterr().err
  )
  assert not (tmp_path / 'new').exists()


def test_a_change_allowed_by_name_goes_on(finished, capfd, monkeypatch):
  runs.on_one_device(monkeypatch)
  total = runs.STEPS + 2
  changes = ('optim.lr=0.5', f'steps={total}')
  assert again(finished, *changes, 'resume_allow=optim.lr') == 2
  _, _, row, _ = capfd.readouterr().err.splitlines()
  assert row.split() == ['steps', str(runs.STEPS), str(total)]
  assert again(finished, *changes, 'resume_allow=optim.lr,steps') == 0
  assert re.search(naming(f'step {runs.STEPS}'), capfd.readouterr().out)
  assert runs.status(finished)['step'] == total
  assert runs.rows(finished)[-2]['step'] == total
  # The folder now holds the continuation.
  assert again(finished, *changes) == 0


def test_an_evaluation_added_later_is_made_up_for(finished, capfd, monkeypatch):
  runs.on_one_device(monkeypatch)
  ema = {**runs.EVALS['test'], 'use_ema': True}
  before = runs.status(finished), runs.rows(finished)
  assert again(finished, f'evals={ {**runs.EVALS, "ema": ema} }') == 0
  assert runs.status(finished) == before[0]
  *old, new = runs.rows(finished)
  assert old == before[1]
  assert new['step'] == runs.STEPS
  assert new['ema/examples'] == 360


def test_a_damaged_newest_checkpoint_costs_its_steps_only(finished, capfd, monkeypatch):
  runs.on_one_device(monkeypatch)
  before = runs.status(finished), runs.rows(finished)
  step = finished / 'checkpoints' / str(runs.STEPS)
  for path in (step / 'params').rglob('*'):
    if path.is_file():
      path.write_bytes(b'')
  # The end was reached, but its state is gone.
  status = finished / 'status.json'
  status.write_text(status.read_text().replace('finished', 'running'))
  assert again(finished) == 0
  out, error = capfd.readouterr()
  assert re.search(naming(f'step {runs.STEPS}', f'{step}.corrupt'), error)
  assert error.count('\n') == 1
  assert re.search(naming(f'step {runs.STEPS - 5}'), out)
  after = runs.rows(finished)
  # Compiled for one device of eight here, which the reference did not have.
  assert [row['step'] for row in after] == [row['step'] for row in before[1]]
  assert after[-1]['test/loss'] == pytest.approx(before[1][-1]['test/loss'], rel=1e-4)
  names = runs.saved(finished)
  assert f'{runs.STEPS}.corrupt' in names
  assert checkpoints.Checkpoints(finished / 'checkpoints').latest() == runs.STEPS
