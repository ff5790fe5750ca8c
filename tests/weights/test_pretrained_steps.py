"""RUN@best and RUN@STEP, wherever a source of weights is taken."""

import json
import re

import jax
import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.support import naming, runs
from vit_jax import cli, trees, weights
from vit_jax.errors import UserError
from vit_jax.evaluators import predictions
from vit_jax.tools import convert, evaluate, predict

STEPS = (2, 4, 6)
COMMON = ('log.every=2', 'checkpoint.every=2')


pytestmark = pytest.mark.usefixtures('one_device')


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """A run that gets worse: (workdir, {step: its loss on the test images})."""
  workdir = tmp_path_factory.mktemp('run') / 'run@home'  # an @ of its own
  evals = {'final': runs.EVALS['test'] | {'every': 2}}
  changes = ('steps=6', 'optim.lr=3', 'optim.schedule.warmup=5')
  best = 'checkpoint.best=final/loss'
  _, rows = runs.run_on_one_device(workdir, *COMMON, *changes, best, evals=evals)
  losses = {row['step']: row['final/loss'] for row in rows if 'final/loss' in row}
  assert min(losses, key=losses.get) != 6, losses  # else the tests say nothing
  return workdir, {step: losses[step] for step in STEPS}


@pytest.mark.slow
def test_every_step_can_be_read_and_the_best_is_that_of_the_metric(finished):
  workdir, losses = finished
  best = min(losses, key=losses.get)
  of = {step: vit_jax.load(f'{workdir}@{step}') for step in STEPS}
  assert {step: loaded.step for step, loaded in of.items()} == {s: s for s in STEPS}
  for source, step in ((workdir, 6), (f'{workdir}@best', best)):
    loaded = vit_jax.load(source)
    assert loaded.step == step
    assert f'step {step}' in loaded.report
    jax.tree.map(np.testing.assert_array_equal, loaded.params, of[step].params)
  heads = [of[step].params['head']['kernel'] for step in STEPS]
  assert not np.array_equal(heads[0], heads[1])


def test_the_best_is_what_the_tools_measure_predict_and_write(
  finished, tmp_path, capsys
):
  workdir, losses = finished
  best, source = min(losses, key=losses.get), f'{workdir}@best'
  args = [source, '--data', 'digits', '--split', 'test', '--json']
  # The data are pixels already: no file to decode.
  assert cli.run(evaluate.main, [*args, '--pp', 'value_range(-1, 1)']) == 0
  record = json.loads(capsys.readouterr().out)
  assert record['step'] == best
  assert record['loss'] == pytest.approx(losses[best], rel=1e-5)

  # Without --data, by the run's own evaluation; it says which.
  out = tmp_path / 'tables'
  assert cli.run(evaluate.main, [source, '--json', '--out', str(out)]) == 0
  assert json.loads(capsys.readouterr().out) == record | {'evaluation': 'final'}
  assert list(predictions.read(out)) == ['final']
  assert cli.run(evaluate.main, [source, '--split', 'train[:60]']) == 0
  out = capsys.readouterr().out
  assert re.search(naming("'final'", 'digits, train[:60]', 'examples     60'), out)

  dest = tmp_path / 'best.npz'
  assert cli.run(convert.main, [source, str(dest)]) == 0
  assert f'step {best}' in capsys.readouterr().out
  written, there = (trees.flatten(vit_jax.load(s).params) for s in (dest, source))
  assert all(np.array_equal(written[name], there[name]) for name in there)

  image = tmp_path / 'a.png'
  Image.fromarray(np.zeros((8, 8), np.uint8)).save(image)
  assert cli.run(predict.main, [f'{workdir}@4', str(image)]) == 0
  assert f'{workdir}@4: step 4' in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_starts_from_the_best_step(finished, tmp_path):
  workdir, _ = finished
  source = f'{workdir}@best'
  changes = (
    'steps=1',
    'optim.lr=1e-30',
    'optim.schedule.warmup=0',
    'checkpoint.best=None',
  )
  runs.run(tmp_path, *COMMON, *changes, model={}, weights={'source': source}, evals={})
  start, now = (trees.flatten(vit_jax.load(s).params) for s in (source, tmp_path))
  for name in start:  # zeros move by the rate
    np.testing.assert_allclose(now[name], start[name], rtol=1e-6, atol=1e-20)


def test_a_step_that_is_not_there(finished, tmp_path):
  workdir, losses = finished
  best = min(losses, key=losses.get)
  for wanted in ('5', 'last', '', '-2'):
    with pytest.raises(UserError, match=naming(repr(wanted), [2, 4, 6], best)) as error:
      weights.read(f'{workdir}@{wanted}')
    assert '\n' not in str(error.value)
  (tmp_path / 'a.npz').touch()
  with pytest.raises(UserError, match=naming('a.npz', '@best')):
    weights.read(tmp_path / 'a.npz@best')
  with pytest.raises(UserError, match=naming("'nowhere@best'")):
    weights.read('nowhere@best')


def test_a_run_that_has_no_best(finished, tmp_path):
  workdir, _ = finished
  config = json.loads((workdir / 'config.json').read_text())
  config['checkpoint']['best'] = None
  (tmp_path / 'config.json').write_text(json.dumps(config))
  (tmp_path / 'checkpoints').symlink_to(workdir / 'checkpoints')
  facts = ('--config.checkpoint.best=final/top1', [2, 4, 6])
  with pytest.raises(UserError, match=naming(*facts)):
    weights.read(f'{tmp_path}@best')


def test_a_damaged_newest_step_is_passed_over_and_said(finished, tmp_path, capfd):
  workdir, _ = finished
  (tmp_path / 'config.json').write_text((workdir / 'config.json').read_text())
  folder = tmp_path / 'checkpoints'
  folder.mkdir()
  (folder / '4').symlink_to(workdir / 'checkpoints' / '4')
  (folder / '6').mkdir()
  assert weights.load(tmp_path).step == 4
  assert re.search(naming('step 6', 'step 4'), capfd.readouterr().err)
