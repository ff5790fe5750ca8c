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


def again(workdir, *changes):
  """Starts the run in a folder once more, in this process; returns its exit code."""
  return cli.run(main.main, [*runs.flags(*changes), f'--workdir={workdir}'])


def kill(workdir, step, wait=0.0) -> None:
  """Kills a run some seconds after a train step, or after a line that starts with a word."""
  process = runs.Process(*runs.flags(), f'--workdir={workdir}')
  if isinstance(step, str):
    process.until(step)
  else:
    process.until_step(step)
  time.sleep(wait)
  process.popen.kill()
  code, _, error = process.end()
  assert (code, error) == (-signal.SIGKILL, ''), f'step {step}'


@pytest.mark.faults
@pytest.mark.parametrize('seed', [1, 2])
def test_killed_ten_times(seed, reference, tmp_path, faults_table):
  rng = random.Random(seed)
  last = runs.STEPS - 10  # so that the run cannot end before its killer looks
  # In the steps and saves that follow; also while data are opened, the step is compiled,
  # and the state is restored.
  kills = [(step, 0.05) for step in sorted(rng.randint(1, last) for _ in range(8))]
  for early in (('Run', 2), ('Parameters', 1)):
    kills.insert(rng.randint(0, len(kills)), early)
  for number, (step, seconds) in enumerate(kills):
    kill(tmp_path, step, rng.uniform(0, seconds))
    faults_table('kills, one process', f'kill {number} of series {seed}', 'handled')
  process = runs.Process(*runs.flags(), f'--workdir={tmp_path}')
  code, _, error = process.end()
  assert (code, error) == (0, '')
  runs.assert_same(reference, tmp_path)
  assert runs.saved(tmp_path) == runs.saved(reference)


def test_a_killed_run_ends_like_one_never_touched(
  reference, tmp_path, one_device, capfd
):
  kill(tmp_path, 11)  # step 5's is whole, as saving step 10 waited for it
  # In this process, which takes half as long; `make faults` restarts it in others.
  assert again(tmp_path) == 0
  out, error = capfd.readouterr()
  assert error == ''
  assert '\nResuming' in out
  runs.assert_same(reference, tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize(
  ('number', 'step'), [(signal.SIGTERM, 7), (signal.SIGINT, runs.EVAL_EVERY)]
)
def test_a_stopped_run_ends_like_one_never_touched(
  number, step, reference, tmp_path, faults_table
):
  """Also where an evaluation is cut off: it is done again."""
  arguments = [*runs.flags(), f'--workdir={tmp_path}']
  process = runs.Process(*arguments)
  process.until_step(step)
  process.popen.send_signal(number)
  code, out, error = process.end()
  assert code == 75
  received, ended = error.splitlines()
  assert received.startswith(f'{signal.Signals(number).name}: ')
  status = runs.status(tmp_path)
  assert ended.startswith('Stopped ')
  assert re.search(naming(f'step {status["step"]}', runs.STEPS), ended)
  assert step <= status['step'] <= runs.EVAL_EVERY
  assert (status['state'], status['exit']) == ('preempted', 75)
  assert str(status['step']) in runs.saved(tmp_path)
  assert not any('test/top1' in row for row in runs.rows(tmp_path))

  code, out, error = runs.Process(*arguments).end()
  assert (code, error) == (0, '')
  assert '\nResuming' in out
  runs.assert_same(reference, tmp_path)
  faults_table('signals', f'{signal.Signals(number).name} at step {step}', 'handled')


# -- changes between a run and its continuation ------------------------------------------


@pytest.fixture
def finished(reference, tmp_path):
  """A copy of the reference's folder: a run at its end."""
  return shutil.copytree(reference, tmp_path / 'finished')


def test_a_finished_run_prints_its_results_again(finished, capfd):
  before = {path: path.stat().st_mtime_ns for path in finished.rglob('*.json*')}
  # Neither other logging and retention, nor eight devices in place of one, nor a default that
  # is written out, is a reason to train again.
  changes = ('log.every=7', 'checkpoint.keep_latest=2', 'optim.b1=0.9')
  assert again(finished, *changes) == 0
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


def test_another_structure_is_refused_before_a_file_changes(
  finished, capfd, one_device
):
  files = [finished / name for name in ('config.json', 'status.json', 'metrics.jsonl')]
  before = [path.read_bytes() for path in files]
  changes = ('model.mlp_dim=64', f'steps={runs.STEPS + 2}')
  assert again(finished, *changes, 'resume_allow=model.mlp_dim,steps') == 2
  facts = f'step {runs.STEPS}', '(16, 32) float32', '(16, 64) float32'
  assert re.search(naming(*facts), capfd.readouterr().err)
  assert [path.read_bytes() for path in files] == before


def test_a_change_is_allowed_by_a_section(finished, tmp_path, capfd):
  for workdir in (finished, tmp_path / 'new'):  # a name that no config can have
    assert again(workdir, 'optim.lr=0.5', 'resume_allow=optmi.lr') == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert re.search(naming('config.resume_allow=optmi.lr', 'mean "optim"'), line)
  assert not (tmp_path / 'new').exists()
  assert again(finished, 'optim.lr=0.5', 'resume_allow=optim') == 0


def test_a_change_allowed_by_name_goes_on(finished, capfd, one_device):
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


def test_an_evaluation_added_later_is_made_up_for(finished, capfd, one_device):
  ema = {**runs.EVALS['test'], 'use_ema': True}
  before = runs.status(finished), runs.rows(finished)
  assert again(finished, f'evals={ {**runs.EVALS, "ema": ema} }') == 0
  assert runs.status(finished) == before[0]
  *old, new = runs.rows(finished)
  assert old == before[1]
  assert new['step'] == runs.STEPS
  assert new['ema/examples'] == 360


def test_a_damaged_newest_checkpoint_costs_its_steps_only(finished, capfd, one_device):
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
