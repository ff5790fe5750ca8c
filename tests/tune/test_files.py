"""A tuned model from the run that trained it to other files and back."""

import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import pytest

import vit_jax
from tests.support import naming, runs, tuning
from vit_jax import errors, models, trees
from vit_jax.tools import convert, evaluate
from vit_jax.weights import export, from_section, read, readers, tuned

CHANGES = ('steps=2', 'checkpoint.every=2', 'checkpoint.best=None', 'optim.ema=None')
SECTIONS = {
  'lora': {'method': 'lora', 'rank': 4, 'alpha': 8},
  'mlp': {'method': 'mlp', 'layers': 2},
}


@pytest.fixture(scope='module')
def made(tmp_path_factory):
  """Returns the folder of finished runs 'lora' and 'mlp', and of their weights.npz."""
  folder = tmp_path_factory.mktemp('tuned')
  weights = {'source': str(tuning.write_body(folder)), 'skip': ['head/.*']}
  for name, section in SECTIONS.items():
    runs.run_on_one_device(
      *(folder / name, *CHANGES, 'optim.schedule.warmup=0', 'optim.lr=0.1'),
      weights=weights,
      tune=section,
      evals={'test': runs.EVALS['test']},
    )
  return folder


def images():
  rng = np.random.default_rng(0)
  return rng.uniform(-1, 1, (4, 8, 8, 1)).astype(np.float32)


def logits(loaded):
  return np.asarray(jax.jit(loaded.model.apply)(loaded.variables, images())[0])


def test_a_loaded_run_computes_as_it_was_evaluated(made, capsys):
  for name, section in SECTIONS.items():
    loaded = vit_jax.load(made / name)
    assert loaded.tune == section
    assert set(loaded.params['tune'])
    assert evaluate.main([str(made / name), '--json']) == 0
    record = json.loads(capsys.readouterr().out)
    last = runs.rows(made / name)[-1]
    assert record['loss'] == pytest.approx(last['test/loss'], rel=1e-5)  # another batch
  stats = trees.flatten(loaded.variables['batch_stats'])
  assert set(stats) == {'tune/norm_0/mean', 'tune/norm_0/var'}
  assert 'with mlp' in repr(loaded)


def test_lora_is_folded_into_the_weights(made, tmp_path):
  file = str(tmp_path / 'whole.npz')
  assert convert.main([str(made / 'lora'), file]) == 0
  whole, loaded = vit_jax.load(file, num_heads=2), vit_jax.load(made / 'lora')
  assert not whole.tune
  np.testing.assert_allclose(logits(whole), logits(loaded), atol=1e-5)
  start = vit_jax.load(made / 'weights.npz', num_heads=2, num_classes=10)
  assert np.abs(logits(whole) - logits(start)).max() > 1e-3


@pytest.mark.parametrize('name', SECTIONS)
def test_what_was_tuned_goes_with_a_copy_of_the_weights(made, tmp_path, name, capsys):
  file = str(tmp_path / 'tuned.safetensors')
  assert convert.main([str(made / name), file, '--tuned_only', '--json']) == 0
  record = json.loads(capsys.readouterr().out)
  assert record['params'] == runs.status(made / name)['trained_parameters']
  weights = shutil.copy(made / 'weights.npz', tmp_path / 'copy.npz')
  again = vit_jax.load(weights, num_heads=2, tune=file)
  np.testing.assert_array_equal(logits(again), logits(vit_jax.load(made / name)))
  with np.load(weights) as arrays:
    other = dict(arrays)
  other['embedding/bias'] = other['embedding/bias'] + 1
  np.savez(weights, **other)
  with pytest.raises(errors.UserError, match=naming('other weights', 'embedding/bias')):
    vit_jax.load(weights, num_heads=2, tune=file)
  with pytest.raises(errors.UserError, match=naming(name)):
    vit_jax.load(made / name, tune=file)
  with pytest.raises(errors.UserError, match=naming(file, 'tune=')):
    vit_jax.load(file)


def test_parameters_are_added_to_weights_that_have_none(made):
  loaded = vit_jax.load(
    made / 'weights.npz', num_heads=2, num_classes=3, tune=SECTIONS['lora']
  )
  added = trees.flatten(loaded.params['tune'])
  assert {x.shape for x in added.values()} == {(16, 4), (4, 16)}
  assert logits(loaded).shape == (4, 3)


def load(folder, tune, **options):
  return vit_jax.load(folder / 'weights.npz', num_heads=2, tune=tune, **options)


# (call in the folder `made`, words of the error)
REFUSED = [
  (
    lambda made: tuned.merge(from_section(f'{made}/mlp').read()),
    ('mlp', 'tune/dense_0'),
  ),
  (
    lambda made: convert.main([f'{made}/mlp', f'{made}/mlp.npz']),
    ('tune/dense_0', '--tuned_only'),
  ),
  (
    lambda made: load(made, {'method': 'lora', 'rnk': 4}, num_classes=3),
    ('tune.rnk', 'rank'),
  ),
  (lambda made: load(made, f'{made}/weights.npz'), ('weights.npz', '--tuned_only')),
  (lambda made: load(made, 'lora'), ('lora',)),
]


@pytest.mark.parametrize(('call', 'words'), REFUSED)
def test_a_run_or_file_of_another_kind_is_refused(made, call, words):
  with pytest.raises(errors.UserError, match=naming(*words)):
    call(made)


def test_weights_of_a_tuned_run_are_folded(made):
  # As config.weights is opened.
  source = tuned.merge(from_section(str(made / 'lora')).read())
  assert not source.tune
  assert not source.added
  kernel = 'Transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel'
  with np.load(made / 'weights.npz') as arrays:
    assert np.abs(source.flat[kernel] - arrays[kernel]).max() > 1e-4


# -- files as a run would write them, without the run ----------------------------------

VIT = dict(patch_size=(4, 4), width=16, depth=2, mlp_dim=16, num_heads=2, num_classes=3)


@functools.cache
def initial():
  model = models.build('vit', **VIT)
  return tuning.random(model.shapes((16, 16, 3))['params'])


def source(folder, size=16):
  """Returns (weights for images of 16 x 16 px, a `Source` as a run at `size` has it)."""
  file = folder / 'start.npz'
  np.savez(file, **initial())
  start = read(str(file), num_heads=2)
  if size == 16:
    return file, start
  flat = trees.flatten(vit_jax.load(file, image_size=size, num_heads=2).params)
  return file, dataclasses.replace(start, flat=flat, image_size=(size, size))


def write(start, section, folder, added, **config):
  """Writes the tuned parameters to a new folder, with some of its config changed."""
  run = dataclasses.replace(start, tune=section, added=added)
  names = [n for n in run.flat if n.startswith('head/')]
  record = tuned.make_record(run, [*names, *added], {})
  export.save(folder, *record)
  if config:
    raw = readers.read(folder)
    arrays = {name: np.asarray(x) for name, x in raw.arrays.items()}
    shutil.rmtree(folder)
    ((key, old),) = raw.config.items()
    export.save(folder, arrays, {key: old | config})
  return folder


PROMPTS = dict(method='vpt', number=2)


@pytest.mark.parametrize('size', [8, 16])
def test_tuned_files_remember_the_size_that_was_tuned_at(tmp_path, size):
  weights, run = source(tmp_path, size)
  prompts = {'tune/prompts': np.ones((1, 2, 16), np.float32)}
  file = write(run, PROMPTS, tmp_path / 'file', prompts)
  loaded = vit_jax.load(weights, num_heads=2, tune=file)
  assert loaded.image_size == (size, size)
  table = run.flat['Transformer/posembed_input/pos_embedding']
  own = loaded.params['Transformer']['posembed_input']['pos_embedding']
  np.testing.assert_array_equal(own, table)
  larger = vit_jax.load(weights, num_heads=2, tune=file, image_size=24)
  assert larger.params['Transformer']['posembed_input']['pos_embedding'].shape[1] == 37


def test_tuned_files_go_with_scanned_blocks(tmp_path):
  weights, run = source(tmp_path)
  run = dataclasses.replace(run, fields=run.fields | {'scan': True})
  file = write(run, {}, tmp_path / 'file', {})
  loaded = vit_jax.load(weights, num_heads=2, tune=file)
  assert loaded.params['Transformer']['encoderblock']['LayerNorm_0']['bias'].ndim == 2


MLP = dict(method='mlp', layers=2)
HIDDEN = {
  f'tune/dense_0/{n}': np.ones(s) for n, s in (('kernel', (16, 16)), ('bias', 16))
}
HIDDEN |= {f'tune/norm_0/{n}': np.ones(16) for n in ('scale', 'bias')}
ONES = np.ones((1, 2, 16), np.float32)
# (section, added parameters, changes of the file's config, words of the error)
WRONG = [
  (MLP, HIDDEN, {}, ('norm_0/mean', '(16,)')),
  (PROMPTS, {}, {}, ('tune/prompts', '(1, 2, 16)')),
  (PROMPTS, {'tune/prompts': ONES * np.nan}, {}, ('tune/prompts', 'NaN')),
  (PROMPTS, {'tune/prompts': ONES.astype(int)}, {}, ('tune/prompts', 'int64')),
  ({}, {'tune/prompts': ONES}, {}, ('tune/prompts', 'tune')),
  ({}, {}, {'image_size': [10**9, 16]}, ('image_size', '16384')),
  ({}, {}, {'fields': {'num_classes': 4}}, ('head', '4')),
]


@pytest.mark.parametrize(('section', 'added', 'config', 'words'), WRONG)
def test_tuned_files_with_wrong_contents_are_refused(
  tmp_path, section, added, config, words
):
  weights, run = source(tmp_path)
  file = write(run, section, tmp_path / 'file', added, **config)
  with pytest.raises(errors.UserError, match=naming(*words)):
    vit_jax.load(weights, num_heads=2, tune=file)
