"""Runs as weights: loading a run's folder, and starting a run from weights."""

import functools
import re
import shutil

import jax
import numpy as np
import pytest

import vit_jax
from tests.support import GOLDEN, naming, runs
from vit_jax import cli, trees, weights
from vit_jax.data import pipeline
from vit_jax.errors import UserError
from vit_jax.tools import convert
from vit_jax.train import trainer

COMMON = ('checkpoint.best=None', 'optim.schedule.warmup=0')


pytestmark = pytest.mark.usefixtures('one_device')


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """A finished run of a few steps: (workdir, its last metrics)."""
  workdir = tmp_path_factory.mktemp('finished')
  evals = {'test': runs.EVALS['test'] | {'every': 8}}
  evals['ema'] = evals['test'] | {'use_ema': True}
  changes = ('steps=8', 'optim.lr=0.03', *COMMON)
  _, rows = runs.run_on_one_device(workdir, *changes, evals=evals)
  values = {k: v for row in rows if row['step'] == 8 for k, v in row.items()}
  return workdir, values


def top1(model, params, pp):
  data = dict(source='digits', split='test', batch_size=360, pp=pp)
  test = pipeline.evaluate(**data)
  (batch,) = test.iterate()
  batch = test.on_device(batch)
  logits, _ = jax.jit(model.apply)({'params': params}, batch['image'])
  return np.mean(np.argmax(logits, -1) == batch['label'])


@pytest.mark.slow
@pytest.mark.parametrize('ema', [False, True])
def test_a_run_loads_with_its_names_and_its_accuracy(finished, ema):
  workdir, values = finished
  loaded = weights.load(workdir, ema=ema)
  assert loaded.class_names == [str(i) for i in range(10)]
  assert (loaded.image_size, loaded.channels) == ((8, 8), 1)
  assert loaded.pp == 'decode(1)|value_range(-1, 1)'
  assert re.search(naming(str(workdir), '2,762 parameters', '8 x 8 x 1'), repr(loaded))
  expected = values['ema/top1' if ema else 'test/top1']
  assert top1(loaded.model, loaded.params, loaded.pp) == pytest.approx(expected)


def finetune(workdir, source, *changes, weights=(), model=(), **sections):
  sections['weights'] = {'source': str(source), **dict(weights)}
  return runs.run(workdir, *COMMON, *changes, model=dict(model), **sections)


@pytest.mark.slow
def test_a_run_starts_where_its_weights_are(finished, tmp_path, capsys):
  source, values = finished
  evals = {'test': runs.EVALS['test'] | {'every': 1}}
  _, rows = finetune(tmp_path, source, 'steps=1', 'optim.lr=1e-30', evals=evals)
  accuracy = next(row['test/top1'] for row in rows if 'test/top1' in row)
  assert accuracy == pytest.approx(values['test/top1'])
  assert re.search(naming(23), capsys.readouterr().out)  # all parameters
  loaded = weights.load(tmp_path)  # the model is written out in config.json
  assert loaded.model.depth == 1
  assert loaded.model.dropout == 0.1
  start = trees.flatten(weights.load(source).params)
  for ema in (False, True):
    now = trees.flatten(weights.load(tmp_path, ema=ema).params)
    for name in start:  # zeros move by the rate, the average by rounding
      np.testing.assert_allclose(now[name], start[name], rtol=1e-6, atol=1e-20)


@pytest.mark.slow
def test_a_resumed_run_does_not_need_its_weights(finished, tmp_path):
  source = shutil.copytree(finished[0], tmp_path / 'source')
  workdir = tmp_path / 'run'
  changes = ('optim.lr=0.03', 'checkpoint.every=2', 'steps=4')
  start = functools.partial(finetune, workdir, source, *changes, evals={})
  whole, _ = start(model=dict(dropout=0.2))
  shutil.rmtree(workdir / 'checkpoints' / '4')
  shutil.rmtree(source)
  for model, facts in (  # what the weights told, and what stood beside it, are compared
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
  found = {}

  def stop(made):
    found.update(trees.flatten(made.abstract_state.params))
    raise Compiling

  monkeypatch.setattr(trainer.Trainer, 'compile', stop)
  return found


def test_published_weights_get_a_new_head_and_size(tmp_path, capsys, shapes):
  # As far as to the compilation; test_finetune trains such a run.
  # 10 classes again: the head is kept unless it is skipped.
  changes = ('steps=1', 'data.pp=decode(3)|resize(16)|value_range(-1, 1)')
  with pytest.raises(Compiling):
    finetune(
      tmp_path,
      GOLDEN / 'vit_google_prelogits.npz',
      *changes,
      weights=dict(skip=['head/.*', 'pre_logits/.*'], resize='bicubic'),
      model=dict(representation_size=None),
      evals={},
    )
  out = capsys.readouterr().out
  assert re.search(naming((4, 4), (2, 2), 'bicubic'), out)
  left_out = ('head/bias', 'head/kernel', 'pre_logits/bias', 'pre_logits/kernel')
  assert re.search(naming(*left_out), out)
  assert shapes['head/kernel'].shape == (48, 10)


@pytest.mark.slow
def test_published_windows_get_another_size(tmp_path, capsys, shapes):
  # As configs/finetune.py asks for it, which takes a part away that only ViTs have.
  with pytest.raises(Compiling):
    finetune(
      tmp_path,
      GOLDEN / 'swin_hf_pad',
      *('steps=1', 'data.pp=decode(3)|resize(48)|value_range(-1, 1)'),
      weights=dict(skip=['pre_logits/.*', 'head/.*']),
      model=dict(representation_size=None, windows=(6, 6)),
      evals={},
    )
  assert 'from 4x4 to 6x6' in capsys.readouterr().out
  assert shapes['stage1_block_0/relative_positions/table'].shape == (11, 11, 2)
  assert shapes['head/kernel'].shape == (32, 10)


@pytest.mark.thorough
@pytest.mark.parametrize(
  ('weights', 'model', 'facts'),
  [
    (dict(source='nowhere.npz'), {}, ("'nowhere.npz'", '--zoo')),
    (dict(sorce='a.npz'), {}, ('config.weights.sorce', 'source')),
    (
      dict(source=str(GOLDEN / 'vit_timm'), resize='cubic'),
      {},
      ("'cubic'", 'bicubic'),
    ),
    (dict(source=str(GOLDEN / 'vit_timm')), dict(depht=2), ('depht', 'depth')),
    (
      dict(source=str(GOLDEN / 'vit_timm')),
      dict(width=32),
      ('Transformer/encoder_norm/bias', (48,), (32,)),
    ),
  ],
)
def test_bad_weights_end_before_the_run_starts(tmp_path, weights, model, facts):
  pp = 'data.pp=decode(3)|resize(16)|value_range(-1, 1)'
  with pytest.raises(UserError, match=naming(*facts)):
    runs.run(tmp_path, *COMMON, 'steps=1', pp, weights=weights, model=model, evals={})
  assert not (tmp_path / 'config.json').exists()


def test_images_of_other_channels_are_refused(tmp_path):
  with pytest.raises(
    UserError, match=naming('vit_timm', 'config.data.pp', "'decode(3)'")
  ):
    finetune(tmp_path, GOLDEN / 'vit_timm', 'steps=1', evals={})


def test_a_run_converts_to_npz_and_back(short_run, tmp_path):
  workdir = short_run
  dest = tmp_path / 'digits.npz'
  assert cli.run(convert.main, [str(workdir), str(dest)]) == 0
  model, params = vit_jax.load(dest)
  old = weights.load(workdir)
  assert trees.flatten(params).keys() == trees.flatten(old.params).keys()
  jax.tree.map(np.testing.assert_array_equal, params, old.params)
  assert weights.load(dest).class_names == old.class_names
  assert weights.load(dest).pp == old.pp
  assert model.num_heads == 2
  with pytest.raises(UserError, match=naming(str(workdir), 1, 'timm', 3)):
    weights.write(weights.read(workdir), tmp_path / 'timm', 'timm')


def test_a_run_without_checkpoints(tmp_path):
  (tmp_path / 'checkpoints').mkdir()
  (tmp_path / 'config.json').write_text('{"a": 1}')
  with pytest.raises(UserError, match=naming(f'{tmp_path}/config.json')):
    vit_jax.load(tmp_path)


def test_a_run_that_trains_its_head_takes_the_rest_from_its_weights(
  short_run, tmp_path, capsys
):
  source = tmp_path / 'source'
  shutil.copytree(short_run, source)
  run, changes = tmp_path / 'run', ('steps=2', 'optim.lr=0.03', 'checkpoint.every=1')
  finetune(run, source, *changes, tune={'method': 'linear'}, evals={})
  start, loaded = weights.load(source), weights.load(run)
  before, after = trees.flatten(start.params), trees.flatten(loaded.params)
  moved = {name for name in before if not np.array_equal(before[name], after[name])}
  assert moved == {'head/kernel', 'head/bias'}
  assert loaded.class_names == start.class_names

  # What convert writes needs neither the run nor its weights.
  whole = tmp_path / 'whole.npz'
  assert cli.run(convert.main, [str(run), str(whole), '--merge']) == 0
  assert cli.run(convert.main, [str(whole), str(tmp_path / 'b.npz'), '--merge']) == 2
  assert '--merge' in capsys.readouterr().err

  there = tmp_path / 'there'
  source.rename(there)
  with pytest.raises(UserError, match=naming('config.weights.source', 'weights=')):
    weights.load(run)
  again = trees.flatten(weights.load(run, weights=str(there)).params)
  assert all(np.array_equal(again[name], after[name]) for name in after)
  for name, x in trees.flatten(weights.load(whole).params).items():
    np.testing.assert_array_equal(x, after[name])
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
