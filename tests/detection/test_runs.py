"""Detectors and segmenters in training: recipes, devices, the start from a ViT, runs."""

import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import naming, runs
from vit_jax import config, models, optim, sharding, tasks, trees, tune
from vit_jax.errors import UserError
from vit_jax.train import schema

# -- the paper's recipe -------------------------------------------------------------------


@pytest.fixture(scope='module')
def paper():
  return schema.check(config.load(f'{runs.ROOT}/configs/detr_coco.py'))


def test_rates_are_those_of_the_paper(paper):
  steps = config.total_steps(paper, 118_287, paper['data']['batch_size'])
  assert steps == round(300 * 118_287 / 64)
  optimizer = optim.build(**paper['optim'], total_steps=steps)
  epoch = steps // 300
  rates = optimizer.rate(np.array([0, 199 * epoch, 201 * epoch, steps - 1]))
  np.testing.assert_allclose(rates, [1e-4, 1e-4, 1e-5, 1e-5], rtol=1e-6)
  # An update without a gradient: AdamW's decay, at the rates of the two groups.
  params = {'backbone': {'scale': jnp.ones(2)}, 'head': {'bias': jnp.ones(2)}}
  state = optimizer.tx.init(params)
  zeros = jax.tree.map(jnp.zeros_like, params)
  updates, _ = optimizer.tx.update(zeros, state, params, rate=jnp.float32(1e-4))
  decays = {name: float(x[0]) for name, x in trees.flatten(updates).items()}
  assert decays == pytest.approx(
    {'backbone/scale': -1e-9, 'head/bias': -1e-8}, rel=1e-4
  )
  assert paper['optim']['clip'] == 0.1
  assert (paper['task']['l1'], paper['task']['giou']) == (5.0, 2.0)
  assert paper['task']['no_object'] == 0.1


def test_the_stem_and_the_first_stage_are_frozen(paper):
  model = models.build(**paper['model'])
  assert (model.dropout, model.attention_dropout) == (0.1, 0.1)
  tuned, rules = tune.attach(model, model.family, (64, 64, 3), **paper['tune'])
  assert tuned is model  # its norms are frozen without help
  shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 64, 64, 3)))
  sizes = {name: x.size for name, x in trees.flatten(shapes['params']).items()}
  trained = sum(size for name, size in sizes.items() if trees.first_match(rules, name))
  # The published 41,302,368 with a head for 91 classes and "no object", not 80.
  assert trained == 41_302_368 - 11 * 257


# -- a small one --------------------------------------------------------------------------


VITDET = f'{runs.ROOT}/configs/vitdet_digits.py'


def tiny(**fields):
  fields = {'num_classes': 10, **models.family('detr').tiny[0], **fields}
  return models.build('detr', **fields)


def test_the_layers_are_split_over_a_tensor_axis():
  init = lambda: tiny().init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)))
  rules = sharding.resolve_rules('fsdp_tensor')
  params = trees.flatten(jax.eval_shape(init)['params'])
  kernels = [n for n in params if '/layer_' in n and n.endswith('/kernel')]
  # Projections and the MLP's two, of one encoder layer and two decoder layers.
  assert len(kernels) == (4 + 2) + 2 * (8 + 2)
  for name in kernels:
    assert 'tensor' in trees.first_match(rules, name), name


def test_a_detector_is_tuned_like_other_models():
  model = tiny()
  section = dict(method='lora', rank=2, layers=[r'decoder/.*/(query|value)/kernel'])
  tuned, _ = tune.attach(model, model.family, (32, 32, 3), **section)
  shapes = dict(image=(32, 32, 3), image_mask=(32, 32), boxes=(3, 4), boxes_mask=(3,))
  batch = {k: np.zeros((1, *shape), np.float32) for k, shape in shapes.items()}
  batch['label'] = np.zeros((1, 3), np.int32)
  task = tasks.build('detect', tuned, batch)
  shapes = jax.eval_shape(lambda: task.init(jax.random.key(0), batch))
  added = trees.flatten(shapes['params']['tune'])
  assert len(added) == 2 * 2 * 2 * 2  # two layers, attentions, kernels, factors
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  out = jax.eval_shape(task.predict, zeros, batch)  # with a mask
  assert out['boxes'].shape == (1, 5, 4)


# -- from a ViT --------------------------------------------------------------------------


def test_rates_of_a_started_backbone_decay_and_those_of_a_fresh_one_do_not():
  assert config.load(f'{VITDET}:weights=RUN')['optim']['layer_decay'] == 0.7
  assert 'layer_decay' not in config.load(VITDET)['optim']


# -- learning -----------------------------------------------------------------------------


@pytest.mark.slow
def test_detr_learns_eight_canvases_by_heart(tmp_path):
  options = 'steps=800,warmup=20,batch=8,train=train[:8],test=train[:8],eval_every=800'
  c = config.load(f'{runs.ROOT}/configs/detr_digits.py:{options}')
  config.override(c, ['log.tensorboard=False', 'log.report=False'])
  config.override(c, ['model.backbone.widths=(32,64)'])
  _, rows = runs.train.train(c, tmp_path / 'run')
  assert rows[-1]['test/ap50'] > 0.9


@pytest.mark.slow
def test_a_vit_and_what_is_built_on_it(tmp_path, monkeypatch):
  runs.on_one_device(monkeypatch)
  vit = tmp_path / 'vit'
  runs.train.train(config.load(f'{VITDET}:debug,head=classify'), vit)
  for head, number in (('detr', 'ap50'), ('segment', 'mean_iou')):
    c = config.load(f'{VITDET}:debug,head={head},weights={vit}')
    status, rows = runs.train.train(c, tmp_path / head)
    runs.assert_finished(status, rows, c['evals'])
    assert 0 <= rows[-1][f'test/{number}'] < 1
  picture = tmp_path / 'canvases.png'
  script = runpy.run_path(f'{runs.ROOT}/docs/images/canvases.py')
  script['main'](tmp_path / 'detr', tmp_path / 'segment', picture)
  assert picture.stat().st_size > 1_000


def test_an_evaluator_of_another_task(tmp_path):
  c = config.load(f'{runs.ROOT}/configs/detr_digits.py:debug')
  c['evals']['test']['type'] = 'classification'
  with pytest.raises(UserError, match=naming('classification', 'detect', 'coco')):
    runs.train.train(c, tmp_path / 'run')
