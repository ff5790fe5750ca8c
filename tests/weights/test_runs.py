"""Runs as weights: RUN, RUN@best and RUN@STEP, and runs that start from weights."""

import functools
import json
import re
import shutil

import jax
import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.support import GOLDEN, naming, runs
from vit_jax import cli, trees, weights
from vit_jax.data import pipeline
from vit_jax.errors import UserError
from vit_jax.evaluators import predictions
from vit_jax.tools import convert, evaluate, predict
from vit_jax.train import trainer

pytestmark = pytest.mark.usefixtures('one_device')

STEPS = (2, 4, 6)
NO_BEST = ('checkpoint.best=None', 'optim.schedule.warmup=0')


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """A run that gets worse: (workdir, {step: its results on the test images})."""
  workdir = tmp_path_factory.mktemp('run') / 'run@home'  # an @ of its own
  evals = {'final': runs.EVALS['test'] | {'every': 2}}
  evals['ema'] = runs.EVALS['test'] | {'every': 6, 'use_ema': True}
  changes = ('steps=6', 'optim.lr=3', 'optim.schedule.warmup=5', 'log.every=2')
  changes += ('checkpoint.every=2', 'checkpoint.best=final/loss')
  _, rows = runs.run_on_one_device(workdir, *changes, evals=evals)
  results = {step: {} for step in STEPS}
  for row in rows:
    results.get(row['step'], {}).update(row)
  assert best_of(results) != 6, results  # or the tests say nothing
  return workdir, results


def best_of(results):
  return min(results, key=lambda step: results[step]['final/loss'])


def assert_same(a, b, **tolerance):
  a, b = trees.flatten(a.params), trees.flatten(b.params)
  assert a.keys() == b.keys()
  for name, x in a.items():
    np.testing.assert_allclose(x, b[name], **{'rtol': 0, **tolerance}, err_msg=name)


# -- a run as a source ----------------------------------------------------------------


def top1(loaded):
  test = pipeline.EvalBatches('digits', 'test', batch_size=360, pp=loaded.pp)
  (batch,) = test.iterate()
  batch = test.finish_on_device(batch)
  logits, _ = jax.jit(loaded.model.apply)(loaded.variables, batch['image'])
  return np.mean(np.argmax(logits, -1) == batch['label'])


@pytest.mark.parametrize('ema', [False, True])
def test_a_run_loads_with_its_names_and_its_accuracy(finished, ema):
  workdir, results = finished
  loaded = weights.load(workdir, ema=ema)
  assert loaded.class_names == [str(i) for i in range(10)]
  assert (loaded.image_size, loaded.channels) == ((8, 8), 1)
  assert loaded.pp == 'decode(1)|value_range(-1, 1)'
  assert re.search(naming(str(workdir), '2,762 parameters', '8 x 8 x 1'), repr(loaded))
  expected = results[6]['ema/top1' if ema else 'final/top1']
  assert top1(loaded) == pytest.approx(expected)


def test_a_run_prepares_images_as_its_evaluation_or_its_training_did():
  levels = 'value_range((-2, -2, -1), (2, 2, 3))'
  config = {'task': {'name': 'dino'}, 'data': {'pp': f'decode|{levels}'}, 'evals': {}}
  config['resolved'] = {'image_shape': (8, 8, 3)}
  pp = lambda: weights.runs.read_pipeline(config)
  assert pp() == f"decode(3)|resize(8, rounding='none')|{levels}"
  crop = "resize_small({}, method='bicubic', rounding='nearest')|central_crop({})"
  config['resolved']['pixels'] = f'decode|{crop.format(20, 16)}|value_range(-1, 1)'
  assert pp() == f'decode(3)|{crop.format(10, 8)}|{levels}'
  config['evals']['knn'] = {'pp': 'decode|probe'}
  assert pp() == 'decode|probe'


def test_every_step_can_be_read_and_the_best_is_that_of_the_metric(finished):
  workdir, results = finished
  best = best_of(results)
  loaded = {step: vit_jax.load(f'{workdir}@{step}') for step in STEPS}
  assert {step: x.step for step, x in loaded.items()} == {s: s for s in STEPS}
  for source, step in ((workdir, 6), (f'{workdir}@best', best)):
    again = vit_jax.load(source)
    assert again.step == step
    assert f'step {step}' in again.report
    assert_same(again, loaded[step])
  heads = [loaded[step].params['head']['kernel'] for step in STEPS]
  assert not np.array_equal(heads[0], heads[1])


def test_the_best_is_what_the_tools_measure_predict_and_write(
  finished, tmp_path, capsys
):
  workdir, results = finished
  best, source = best_of(results), f'{workdir}@best'
  args = [source, '--data', 'digits', '--split', 'test', '--json']
  # The data are pixels already: no file to decode.
  assert cli.run(evaluate.main, [*args, '--pp', 'value_range(-1, 1)']) == 0
  record = json.loads(capsys.readouterr().out)
  assert record['step'] == best
  assert record['loss'] == pytest.approx(results[best]['final/loss'], rel=1e-5)

  # Without --data, by the run's own evaluation; it says which.
  out = tmp_path / 'tables'
  assert cli.run(evaluate.main, [source, '--json', '--out', str(out)]) == 0
  assert json.loads(capsys.readouterr().out) == record | {'evaluation': 'final'}
  assert list(predictions.read(out)) == ['final']

  dest = tmp_path / 'best.npz'
  assert cli.run(convert.main, [source, str(dest)]) == 0
  assert f'step {best}' in capsys.readouterr().out
  assert_same(vit_jax.load(dest), vit_jax.load(source))

  image = tmp_path / 'a.png'
  Image.fromarray(np.zeros((8, 8), np.uint8)).save(image)
  assert cli.run(predict.main, [f'{workdir}@4', str(image)]) == 0
  assert f'{workdir}@4: step 4' in capsys.readouterr().out


def test_a_step_that_is_not_there(finished, tmp_path):
  workdir, results = finished
  best = best_of(results)
  for step in ('5', 'last', '', '-2'):
    with pytest.raises(UserError, match=naming(repr(step), [2, 4, 6], best)) as error:
      weights.read(f'{workdir}@{step}')
    assert '\n' not in str(error.value)
  (tmp_path / 'a.npz').touch()
  with pytest.raises(UserError, match=naming('a.npz', '@best')):
    weights.read(tmp_path / 'a.npz@best')
  with pytest.raises(UserError, match=naming("'nowhere@best'")):
    weights.read('nowhere@best')


def test_a_run_that_has_no_best_and_a_damaged_step(finished, tmp_path, capfd):
  config = json.loads((finished[0] / 'config.json').read_text())
  config['checkpoint']['best'] = None
  (tmp_path / 'config.json').write_text(json.dumps(config))
  folder = shutil.copytree(finished[0] / 'checkpoints', tmp_path / 'checkpoints')
  with pytest.raises(UserError, match=naming('--config.checkpoint.best', [2, 4, 6])):
    weights.read(f'{tmp_path}@best')
  shutil.rmtree(folder / '6' / 'params')
  assert weights.load(tmp_path).step == 4
  assert re.search(naming('step 6', 'step 4'), capfd.readouterr().err)
  (tmp_path / 'config.json').write_text('{"a": 1}')
  with pytest.raises(UserError, match=naming(f'{tmp_path}/config.json')):
    vit_jax.load(tmp_path)


def test_a_run_converts_to_npz_and_back(short_run, tmp_path):
  dest = tmp_path / 'digits.npz'
  assert cli.run(convert.main, [str(short_run), str(dest)]) == 0
  new, old = weights.load(dest), weights.load(short_run)
  assert_same(new, old)
  assert (new.class_names, new.pp) == (old.class_names, old.pp)
  assert new.model.num_heads == 2
  with pytest.raises(UserError, match=naming(str(short_run), 1, 'timm', 3)):
    weights.write(weights.read(short_run), tmp_path / 'timm', 'timm')


# -- a run that starts from weights ---------------------------------------------------


def finetune(workdir, source, *changes, weights=(), model=(), **sections):
  sections['weights'] = {'source': str(source), **dict(weights)}
  return runs.run(workdir, *NO_BEST, *changes, model=dict(model), **sections)


def test_a_run_starts_where_its_weights_are(finished, tmp_path, capsys):
  workdir, results = finished
  evals = {'test': runs.EVALS['test'] | {'every': 1}}
  source, changes = f'{workdir}@best', ('steps=1', 'optim.lr=1e-30')
  _, rows = finetune(tmp_path, source, *changes, evals=evals)
  accuracy = next(row['test/top1'] for row in rows if 'test/top1' in row)
  assert accuracy == pytest.approx(results[best_of(results)]['final/top1'])
  assert re.search(naming(23), capsys.readouterr().out)  # all parameters
  loaded = weights.load(tmp_path)  # the model is written out in config.json
  assert (loaded.model.depth, loaded.model.dropout) == (1, 0.1)
  start = weights.load(source)
  for ema in (False, True):  # zeros move by the rate, the average by rounding
    again = weights.load(tmp_path, ema=ema)
    assert_same(again, start, rtol=1e-6, atol=1e-20)


def test_a_resumed_run_does_not_need_its_weights(finished, tmp_path):
  source = shutil.copytree(finished[0], tmp_path / 'source')
  workdir = tmp_path / 'run'
  changes = ('optim.lr=0.03', 'checkpoint.every=2', 'steps=4')
  start = functools.partial(finetune, workdir, source, *changes, evals={})
  whole, _ = start(model=dict(dropout=0.2))
  shutil.rmtree(workdir / 'checkpoints' / '4')
  shutil.rmtree(source)
  for model, facts in (  # fields of the weights, and those beside them, are compared
    (dict(dropout=0.2, depth=2), ('model.depth', 1, 2)),
    ({}, ('model.dropout', 0.2)),
  ):
    with pytest.raises(UserError, match=naming(*facts)):
      start(model=model)
  again, _ = start(model=dict(dropout=0.2))
  assert again['fingerprint'] == whole['fingerprint']


class Compiling(Exception):
  pass


@pytest.fixture
def shapes(monkeypatch):
  """Ends a run where it compiles, and returns the shapes of its parameters by name."""
  shapes = {}

  def stop(self):
    shapes.update(trees.flatten(self.abstract_state.params))
    raise Compiling

  monkeypatch.setattr(trainer.Trainer, 'compile', stop)
  return shapes


@pytest.mark.parametrize(
  ('source', 'side', 'weights', 'fields', 'facts', 'name', 'shape'),
  [
    (
      *('vit_google_prelogits.npz', 16, dict(resize='bicubic'), {}),
      ((4, 4), (2, 2), 'bicubic', 'head/bias', 'head/kernel', 'pre_logits/kernel'),
      *('head/kernel', (48, 10)),
    ),
    (
      *('swin_hf_pad', 48, {}, dict(windows=(6, 6)), ('4x4', '6x6')),
      *('stage1_block_0/relative_positions/table', (11, 11, 2)),
    ),
  ],
)
def test_published_weights_get_a_new_head_and_size(
  tmp_path, capsys, shapes, source, side, weights, fields, facts, name, shape
):
  # As configs/finetune.py does, which takes away a part that only ViTs have. There are 10
  # classes again: the head is retained unless it is skipped.
  with pytest.raises(Compiling):
    finetune(
      tmp_path,
      GOLDEN / source,
      *('steps=1', f'data.pp=decode(3)|resize({side})|value_range(-1, 1)'),
      weights=dict(skip=['head/.*', 'pre_logits/.*'], **weights),
      model=dict(representation_size=None, **fields),
      evals={},
    )
  assert re.search(naming(*facts), capsys.readouterr().out)
  assert shapes[name].shape == shape


VIT_TIMM = str(GOLDEN / 'vit_timm')


@pytest.mark.parametrize(
  ('weights', 'model', 'facts'),
  [
    (dict(source='nowhere.npz'), {}, ("'nowhere.npz'", '--zoo')),
    (dict(sorce='a.npz'), {}, ('config.weights.sorce', 'source')),
    (dict(source=VIT_TIMM, resize='cubic'), {}, ("'cubic'", 'bicubic')),
    (dict(source=VIT_TIMM), dict(depht=2), ('depht', 'depth')),
    (dict(source=VIT_TIMM), dict(width=32), ('encoder_norm/bias', (48,), (32,))),
    (dict(source=VIT_TIMM), None, ('vit_timm', 'config.data.pp', "'decode(3)'")),
  ],
)
def test_bad_weights_end_before_the_run_starts(tmp_path, weights, model, facts):
  pp = 'value_range(-1, 1)'
  if model is not None:  # without it, images have other channels than the weights
    pp = f'decode(3)|resize(16)|{pp}'
  changes = (*NO_BEST, 'steps=1', f'data.pp={pp}')
  with pytest.raises(UserError, match=naming(*facts)):
    runs.run(tmp_path, *changes, weights=weights, model=model or {}, evals={})
  assert not (tmp_path / 'config.json').exists()


def test_a_run_that_trains_its_head_takes_the_rest_from_its_weights(
  short_run, tmp_path
):
  source = shutil.copytree(short_run, tmp_path / 'source')
  run, changes = tmp_path / 'run', ('steps=2', 'optim.lr=0.03', 'checkpoint.every=1')
  finetune(run, source, *changes, tune={'method': 'linear'}, evals={})
  start, loaded = weights.load(source), weights.load(run)
  before, after = trees.flatten(start.params), trees.flatten(loaded.params)
  moved = {name for name in before if not np.array_equal(before[name], after[name])}
  assert moved == {'head/kernel', 'head/bias'}
  assert loaded.class_names == start.class_names

  # The file that convert writes needs neither the run nor its weights.
  whole = tmp_path / 'whole.npz'
  assert cli.run(convert.main, [str(run), str(whole)]) == 0

  there = source.rename(tmp_path / 'there')
  with pytest.raises(UserError, match=naming('config.weights.source', 'weights=')):
    weights.load(run)
  assert_same(weights.load(run, weights=str(there)), loaded)
  assert_same(weights.load(whole), loaded)
  # A resumed run asks for it too, and refuses other weights.
  more = ('steps=3', *changes[1:], 'resume_allow=steps')
  with pytest.raises(UserError, match=naming('config.weights.source')):
    finetune(run, source, *more, tune={'method': 'linear'}, evals={})
  other = dict(np.load(whole))
  other['Transformer/encoder_norm/scale'][0] += 1e-6
  np.savez(tmp_path / 'other.npz', **other)
  with pytest.raises(UserError, match=naming('config.weights.source', 'encoder_norm')):
    weights.load(run, weights=str(tmp_path / 'other.npz'))
  status, _ = finetune(run, there, *more, tune={'method': 'linear'}, evals={})
  assert status['step'] == 3
