"""What may change between a run and its continuation, and what a finished run answers."""

import re
import shutil

import pytest

from tests.support import naming, runs
from tests.train.test_resume import again, reference  # noqa: F401, its fixture
from vit_jax.checkpoint import checkpoints


@pytest.fixture
def finished(reference, tmp_path):  # noqa: F811
  """A copy of the reference's folder: a run at its end."""
  return shutil.copytree(reference, tmp_path / 'finished')


def test_a_finished_run_tells_its_results_again(finished, capfd):
  before = {path: path.stat().st_mtime_ns for path in finished.rglob('*.json*')}
  # Neither what is logged or kept, nor eight devices in place of one, is a reason to
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
    naming('config.resume_allow=optmi.lr', 'optim.lr'), capfd.readouterr().err
  )
  assert not (tmp_path / 'new').exists()


@pytest.mark.slow
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
  # The continuation is now what the folder holds.
  assert again(finished, *changes) == 0


@pytest.mark.slow
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


@pytest.mark.slow
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
