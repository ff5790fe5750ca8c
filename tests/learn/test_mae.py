"""MAE: a step of the authors' code, their files, and a run with what starts from it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import vit_jax
from tests.support import GOLDEN, golden, naming, runs
from tests.support.figures import draw, run, small_figures  # noqa: F401
from vit_jax import config, models, optim, sharding, tasks, trees, weights
from vit_jax.errors import UserError
from vit_jax.learn.files import FORMATS
from vit_jax.optim import multipliers
from vit_jax.train.step import gradients
from vit_jax.weights import rename
from vit_jax.weights.configs import Facts

KEY = jax.random.key(4)
SMALL = dict(patch_size=(8, 8), width=32, depth=2, mlp_dim=128, num_heads=2)
SMALL |= dict(act='gelu_erf', num_classes=None)
DECODER = dict(decoder_width=24, decoder_depth=1, decoder_heads=3)


def spec(side: int, batch: int = 3):
  return {'image': jax.ShapeDtypeStruct((batch, side, side, 3), jnp.float32)}


def build(side=48, task=None, **fields):
  return tasks.build(
    'mae', models.build('vit', **SMALL | fields), spec(side), **task or DECODER
  )


def recipe(name: str) -> dict:
  return config.load(f'{runs.ROOT}/configs/{name}.py')['optim']


# -- steps of the authors' code ---------------------------------------------------------


def ours(arrays: dict) -> dict:
  """Returns {our name: array} of arrays under the authors' names."""
  facts = Facts({'num_heads': 2}, config={'decoder_num_attention_heads': 3})
  authors = next(f for f in FORMATS if f.own == 'mae')
  rules = authors.rules({'mask_token': np.zeros((1, 1, 24)), **arrays}, facts)
  flat, unknown = rename.to_ours(arrays, rules)
  assert not unknown
  return flat


def part(name: str, prefix: str) -> dict:
  """Returns {our name: array} of those arrays of a golden that have a prefix."""
  arrays = golden(name).items()
  return ours({n.removeprefix(prefix): x for n, x in arrays if n.startswith(prefix)})


def of_parameters(name: str, names: str, values: str) -> dict:
  """Returns {our name: value} of a value for each of the authors' parameters."""
  reference, out = golden(name), {}
  for theirs, value in zip(reference[names], reference[values], strict=True):
    out |= dict.fromkeys(ours({theirs: reference[f'params/{theirs}']}), value.item())
  return out


def assert_updated(params: dict, expected: dict, grads: dict):
  """Compares parameters after AdamW's first step.

  Where a gradient is zero but for rounding, as for biases of keys, the step has its sign.
  """
  params = trees.flatten(jax.device_get(params))
  for name, x in grads.items():
    seen = np.abs(x) > 1e-6
    # The reference is off its own float64 by 7e-8.
    np.testing.assert_allclose(
      np.where(seen, params[name] - expected[name], 0), 0, atol=1e-6, err_msg=name
    )


def assert_grads(grads: dict, expected: dict, fixed=()):
  grads = trees.flatten(grads)
  assert grads.keys() - expected.keys() == {*fixed}
  for name, x in expected.items():
    np.testing.assert_allclose(grads[name], x, rtol=0, atol=1e-6, err_msg=name)
  for name in fixed:
    assert not grads[name].any()


def test_three_steps_of_the_authors_code():
  reference, task = golden('mae_step'), build()
  start = part('mae_step', 'params/')
  fresh = trees.flatten(jax.jit(lambda: task.init(KEY, spec(48)))()['params'])
  shapes = lambda flat: {n: x.shape for n, x in flat.items()}
  assert shapes(fresh) == shapes(start)
  for name in task.fixed:
    np.testing.assert_array_equal(fresh[name], start[name])
  options = recipe('mae_i1k') | dict(lr=float(reference['lr']), schedule=None)
  assert options['wd'] == pytest.approx(reference['weight_decay'])
  optimizer = optim.build(**options, total_steps=10)
  params = trees.unflatten(start)
  state = optimizer.tx.init(params)
  batch = {'image': reference['image'], 'weight': np.full(3, 1 / 3, np.float32)}

  @jax.jit
  def step(params, state, order):
    ordered = batch | {'order': order}
    loss = lambda params: task.loss({'params': params}, ordered, KEY)[0]
    value, grads = jax.value_and_grad(loss)(params)
    rate = jnp.float32(options['lr'])
    updates, state = optimizer.tx.update(grads, state, params, rate=rate, good=True)
    return value, grads, jax.tree.map(jnp.add, params, updates), state

  orders = np.argsort(reference['noise'], axis=-1).astype(np.int32)
  for i in range(3):
    loss, grads, params, state = step(params, state, orders[i])
    np.testing.assert_allclose(loss, reference['losses'][i], rtol=1e-6)
    if i == 0:
      expected = part('mae_step', 'grads/')
      assert_grads(grads, expected, task.fixed)
      assert_updated(params, part('mae_step', 'after_1/'), expected)
  for name in task.fixed:
    np.testing.assert_array_equal(trees.flatten(params)[name], start[name])
  factors = trees.flatten(trees.select(options['wd_rules'], params))
  decayed = of_parameters('mae_step', 'names', 'decayed')
  assert {n: bool(factors[n]) for n in decayed} == decayed


def test_fine_tuning_is_that_of_the_authors():
  reference = golden('mae_finetune')
  c = config.load(f'{runs.ROOT}/configs/mae_finetune_i1k.py')
  fields = {
    k: v for k, v in c['model'].items() if k not in ('dtype', 'stochastic_depth')
  }
  model = models.build('vit', **SMALL | dict(depth=3, num_classes=7) | fields)
  params = trees.unflatten(part('mae_finetune', 'params/'))
  loss_of = lambda params: softmax_of(model, params, reference)
  (loss, logits), grads = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(params)
  np.testing.assert_allclose(logits, reference['pool_logits'], rtol=0, atol=5e-6)
  np.testing.assert_allclose(loss, reference['pool_loss'], rtol=1e-6)
  expected = part('mae_finetune', 'grads/')
  assert_grads(grads, expected)

  options = c['optim'] | dict(lr=1e-3)
  options['schedule'] |= dict(end=1e-6 / 1e-3)
  optimizer = optim.build(**options, total_steps=10_000, family=model.family)
  np.testing.assert_allclose(optimizer.rate(3025), reference['lr'], rtol=1e-6)
  scales = multipliers.layer_factors(model.family, params, options['layer_decay'])
  assert scales == pytest.approx(
    of_parameters('mae_finetune', 'pool_names', 'pool_lr_scale')
  )
  factors = trees.flatten(trees.select(multipliers.WD_RULES, params))
  decay = of_parameters('mae_finetune', 'pool_names', 'pool_weight_decay')
  assert {n: f * options['wd'] for n, f in factors.items()} == pytest.approx(decay)

  @jax.jit
  def step(params, grads, rate):
    state = optimizer.tx.init(params)
    updates, _ = optimizer.tx.update(grads, state, params, rate=rate, good=True)
    return jax.tree.map(jnp.add, params, updates)

  after = step(params, grads, reference['lr'])
  assert_updated(after, part('mae_finetune', 'after/'), expected)


def softmax_of(model, params, reference):
  logits, _ = model.apply({'params': params}, reference['image'])
  return -(jax.nn.log_softmax(logits) * reference['target']).sum(-1).mean(), logits


# -- initial values, devices, micro-batches ---------------------------------------------


def test_initial_values_are_those_of_the_authors():
  task = build(scan=True, width=64, mlp_dim=256)
  params = trees.flatten(jax.jit(lambda: task.init(KEY, spec(48)))()['params'])
  block = 'Transformer/encoderblock/'
  # The largest value of a uniform distribution, sqrt(6 / (inputs + outputs)).
  limits = {
    'embedding/kernel': 192 + 64,
    f'{block}MultiHeadDotProductAttention_0/query/kernel': 64 + 3 * 64,
    f'{block}MultiHeadDotProductAttention_0/out/kernel': 64 + 64,
    f'{block}MlpBlock_0/Dense_0/kernel': 64 + 256,
    'mae/embed/kernel': 64 + 24,
    'mae/pred/kernel': 24 + 192,
  }
  for name, sides in limits.items():
    assert abs(params[name]).max() == pytest.approx((6 / sides) ** 0.5, rel=0.01), name
  for name in ('cls', 'mae/mask'):
    assert params[name].std() == pytest.approx(0.02, rel=0.3)
  for name, x in params.items():
    if name.endswith(('bias', 'scale')):
      assert (x == name.endswith('scale')).all(), name


def batch(size=16):
  rng = np.random.default_rng(0)
  return {
    'image': rng.normal(size=(size, 32, 32, 3)).astype(np.float32),
    'weight': np.arange(size, dtype=np.float32) / 120,  # the first counts nothing
    'index': np.arange(size, dtype=np.int32),
  }


@functools.cache
def plain():
  task = build(side=32, depth=1)
  variables = jax.jit(lambda: task.init(KEY, spec(32)))()
  return task, jax.device_get(variables)


def test_devices_and_micro_batches_change_nothing():
  task, variables = plain()
  loss = lambda params, stats, *args: task.loss({'params': params}, *args)
  results = []
  for devices, accum in ((1, 1), (8, 2)):
    mesh = sharding.make_mesh(devices=jax.devices()[:devices])

    def step(params, batch, accum=accum):
      prepared = task.prepare(batch, KEY, None)
      metrics, grads, _ = gradients(loss, params, {}, prepared, KEY, accum)
      return metrics, grads, prepared['order']

    with jax.set_mesh(mesh):
      compiled = jax.jit(step, out_shardings=sharding.replicated_sharding(mesh))
      on_mesh = sharding.global_batch(batch(), mesh)
      results.append(jax.device_get(compiled(variables['params'], on_mesh)))
  (metrics, grads, order), others = results
  assert np.abs(grads['mae']['mask']).max() > 0
  np.testing.assert_array_equal(others[2], order)
  np.testing.assert_allclose(others[0]['loss'], metrics['loss'], rtol=1e-5)
  for a, b in zip(*map(jax.tree.leaves, (grads, others[1])), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_evaluation_masks_an_example_alike_in_any_batch():
  task, variables = plain()
  predict = jax.jit(task.predict)
  whole = predict(variables, batch())
  one = predict(variables, {k: x[5:6] for k, x in batch().items()})
  np.testing.assert_array_equal(one['masked'][0], whole['masked'][5])
  np.testing.assert_allclose(one['masked_loss'][0], whole['masked_loss'][5], rtol=1e-5)
  assert (whole['masked'].sum(-1) == 12).all()
  _, clean = jax.jit(task.model.apply)(
    {'params': {k: x for k, x in variables['params'].items() if k != 'mae'}},
    batch()['image'],
  )
  for name, x in clean.items():
    np.testing.assert_allclose(whole[name], x, atol=1e-5, err_msg=name)


# -- files --------------------------------------------------------------------------------


FILES = {'mae_hf': ({}, 2), 'mae_original': ({'num_heads': 2}, 1)}


@pytest.mark.parametrize('name', FILES)
def test_files_start_a_run_with_their_decoder_and_come_back(tmp_path, name):
  options, depth = FILES[name]
  source, expected = weights.read(GOLDEN / name, **options), golden(f'{name}.expected')
  model = models.build('vit', **source.fields)
  task = tasks.build('mae', model, spec(32), **DECODER | dict(decoder_depth=depth))
  shapes = trees.flatten(jax.eval_shape(task.init, KEY, spec(32))['params'])
  own = {n: x.shape for n, x in shapes.items() if n.startswith('mae/')}
  taken, report = weights.fit_section(source, {}, model, (32, 32), own)
  assert f'{len(shapes)} parameters taken' in report
  assert 'unused' not in report
  order = np.argsort(expected['noise'], axis=-1)
  out = jax.jit(task.reconstruct)(trees.unflatten(taken), expected['image'], order)
  np.testing.assert_allclose(out['masked_loss'].mean(), expected['loss'], rtol=1e-6)
  np.testing.assert_array_equal(out['masked'], expected['mask'] > 0)
  to = {'mae_hf': 'hf', 'mae_original': 'authors'}[name]
  weights.write(source, tmp_path / 'a', to)
  written = load_file(tmp_path / 'a' / 'model.safetensors')
  arrays = load_file(GOLDEN / name / 'model.safetensors')
  assert written.keys() == arrays.keys()
  for key, x in arrays.items():
    np.testing.assert_array_equal(written[key], x, err_msg=key)
  # Formats without a decoder hold the encoder.
  weights.write(source, tmp_path / 'b', 'timm')
  assert not weights.read(tmp_path / 'b').own


def test_a_decoder_that_does_not_fit_is_named():
  source = weights.read(GOLDEN / 'mae_hf')
  model = models.build('vit', **source.fields)
  own = {name: (5, *x.shape[1:]) for name, x in source.own.items()}
  with pytest.raises(UserError, match=naming('mae/embed/kernel', "'mae/.*'")):
    weights.fit_section(source, {}, model, (32, 32), own)
  _, report = weights.fit_section(source, {'skip': ['mae/.*']}, model, (32, 32), own)
  assert 'initialised afresh: mae/' in report


def test_a_decoder_of_unknown_heads_has_no_place_in_transformers(tmp_path):
  source = weights.read(GOLDEN / 'mae_original', num_heads=2)
  with pytest.raises(UserError, match=naming('heads', 'config.json')):
    weights.write(source, tmp_path / 'a', 'hf')


# -- what is refused ------------------------------------------------------------------------


REFUSED = [
  (lambda: build(task=dict(rate=0.99)), ('rate=0.99', '36 patches')),
  (lambda: build(posemb='rotary'), ("posemb='learn'", 'rotary')),
  (lambda: build(rope='eva'), ("rope='none'", 'eva')),
  (lambda: build(num_classes=10), ('num_classes', '10')),
  (
    lambda: tasks.build('mae', models.build('swin', 'T', num_classes=None), spec(32)),
    ('posemb', 'None'),
  ),
]


@pytest.mark.parametrize(('make', 'words'), REFUSED)
def test_models_and_rates_without_a_task_are_refused(make, words):
  with pytest.raises(ValueError, match=naming(*words)):
    make()


# -- a run ------------------------------------------------------------------------------------


EVALS = {'val': dict(type='masked_patches', data=runs.TEST | {'split': 'test[:40]'})}
CHANGES = (*runs.SHORT, 'checkpoint.best=val/loss', 'optim.b2=0.95')
CHANGES += ("model.act='gelu_erf'", "model.classifier='token'")
TASK = dict(name='mae', **DECODER | dict(decoder_heads=2))


@pytest.fixture(scope='module')
def mae_run(tmp_path_factory):
  folder = tmp_path_factory.mktemp('mae') / 'run'
  status, rows = runs.run_on_one_device(folder, *CHANGES, task=TASK, evals=EVALS)
  runs.assert_finished(status, rows, EVALS)
  return folder


def test_a_killed_run_ends_as_if_it_had_not_been(mae_run, tmp_path):
  folder = runs.killed(mae_run, tmp_path / 'run')
  runs.run_on_one_device(folder, *CHANGES, task=TASK, evals=EVALS)
  runs.assert_same(mae_run, folder)


def test_a_run_starts_another_with_its_decoder(mae_run, tmp_path, monkeypatch, capsys):
  runs.on_one_device(monkeypatch)
  c = runs.small(*CHANGES, task=TASK, evals=EVALS)
  c |= {'weights': {'source': str(mae_run)}, 'model': {}}
  runs.until_the_first_step(monkeypatch, c, tmp_path)
  out = capsys.readouterr().out
  assert re.search(r'run vit, step 4\): \d+ parameters taken', out)
  assert 'afresh' not in out


def test_images_are_drawn_with_their_reconstruction(mae_run, tmp_path, capsys):
  rows = draw('reconstruction', mae_run, out=tmp_path)
  assert [row['index'] for row in rows] == [str(i) for i in range(8)]
  assert all(0 < float(row['loss']) < 10 for row in rows)
  assert run('reconstruction', mae_run, mae_run) == 2
  assert 'one run' in capsys.readouterr().err


def test_fine_tuning_and_detectors_start_from_the_encoder(
  mae_run, tmp_path, monkeypatch, capsys
):
  runs.on_one_device(monkeypatch)
  c = config.load(f'{runs.ROOT}/configs/mae_finetune_i1k.py:debug,weights={mae_run}')
  c['evals'] = {}
  c['checkpoint'] = {'every': 5}
  # Digits are gray, and RandAugment takes colours.
  c['data']['pp'] = 'resize(16)|value_range'
  runs.until_the_first_step(monkeypatch, c, tmp_path)
  out = capsys.readouterr().out
  assert 'afresh: head/bias, head/kernel, pooled_norm/bias, pooled_norm/scale' in out
  assert 'position embeddings (hw) resized' in out

  fields = {
    k: runs.small()['model'][k] for k in ('width', 'depth', 'mlp_dim', 'num_heads')
  }
  fields |= dict(name='vitdet', act='gelu_erf', patch_size=(2, 2), window=2)
  fields |= dict(global_blocks=(0,), pretrained_size=(8, 8))
  detector = vit_jax.load(str(mae_run), model=fields)
  encoder = trees.flatten(vit_jax.load(str(mae_run)).params)
  kernels = [name for name in encoder if '/encoderblock_0/' in name]
  for name in [*kernels, 'embedding/kernel']:
    ours = trees.flatten(detector.params)[name]
    np.testing.assert_array_equal(ours, encoder[name], err_msg=name)
