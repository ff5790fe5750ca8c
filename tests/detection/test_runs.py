"""Detectors and segmenters in training: recipes, devices, the start from a ViT, runs."""

import functools
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import naming, runs
from vit_jax import config, models, optim, sharding, tasks, trees, tune, weights
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
  found = {name: float(x[0]) for name, x in trees.flatten(updates).items()}
  assert found == pytest.approx({'backbone/scale': -1e-9, 'head/bias': -1e-8}, rel=1e-4)
  assert paper['optim']['clip'] == 0.1
  assert (paper['task']['l1'], paper['task']['giou']) == (5.0, 2.0)
  assert paper['task']['no_object'] == 0.1


def test_the_stem_and_the_first_stage_are_frozen(paper):
  model = models.build(**paper['model'])
  assert (model.dropout, model.attention_dropout) == (0.1, 0.1)
  tuning = tune.attach(model, models.family_of(model), (64, 64, 3), **paper['tune'])
  assert tuning.model is model  # its norms are frozen without help
  shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 64, 64, 3)))
  sizes = {name: x.size for name, x in trees.flatten(shapes['params']).items()}
  trained = sum(
    size for name, size in sizes.items() if trees.first_match(tuning.rules, name)
  )
  # The published 41,302,368 with a head for 91 classes and "no object", not 80.
  assert trained == 41_302_368 - 11 * 257


# -- a small one --------------------------------------------------------------------------


VITDET = f'{runs.ROOT}/configs/vitdet_digits.py'


def tiny(**fields):
  fields = {'num_classes': 10, **models.family('detr').tiny[0], **fields}
  return models.build('detr', **fields)


def batch(examples=8):
  """Returns images with 0 to 3 boxes each, and padding of different widths."""
  rng = np.random.default_rng(0)
  images = rng.uniform(-1, 1, (examples, 32, 32, 3)).astype(np.float32)
  mask = np.ones((examples, 32, 32), np.uint8)
  for i in range(examples):
    mask[i, 32 - 2 * i :] = 0
  centre, side = rng.uniform(0.3, 0.7, (2, examples, 3, 2)).astype(np.float32)
  return {
    'image': images,
    'image_mask': mask,
    'boxes': np.concatenate([centre - side / 4, centre + side / 4], -1),
    'boxes_mask': (np.arange(3) < np.arange(examples)[:, None] % 4).astype(np.float32),
    'label': rng.integers(0, 10, (examples, 3)).astype(np.int32),
    'weight': np.full(examples, 1 / examples, np.float32),
  }


@functools.partial(jax.jit, static_argnums=0)
def loss_and_gradient(task, variables, given):
  key = jax.random.key(0)

  def loss(params):
    prepared = task.prepare(given, key)
    return task.loss({**variables, 'params': params}, prepared, key)[0]

  return jax.value_and_grad(loss)(variables['params'])


@pytest.fixture(scope='module')
def small():
  """Returns (task, variables, batch)."""
  given = batch()
  task = tasks.build('detect', tiny(), given)
  return task, jax.jit(lambda: task.init(jax.random.key(0), given))(), given


def test_the_same_on_eight_devices(small):
  task, variables, given = small
  whole = jax.device_get(loss_and_gradient(task, variables, given))
  mesh = sharding.make_mesh(4, 2)
  with jax.set_mesh(mesh):
    split = loss_and_gradient(task, variables, sharding.global_batch(given, mesh))
  scale = max(np.abs(g).max() for g in jax.tree.leaves(whole[1]))
  for a, b in zip(jax.tree.leaves(split), jax.tree.leaves(whole), strict=True):
    # float32 sums in another order.
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * scale)


def test_the_layers_are_split_over_a_tensor_axis(small):
  _, variables, _ = small
  rules = sharding.resolve_rules('fsdp_tensor')
  layers = [n for n in trees.flatten(variables['params']) if '/layer_' in n]
  kernels = [n for n in layers if n.endswith('/kernel')]
  # Projections and the MLP's two, of one encoder layer and two decoder layers.
  assert len(kernels) == (4 + 2) + 2 * (8 + 2)
  for name in kernels:
    assert 'tensor' in trees.first_match(rules, name), name


def test_a_detector_is_tuned_like_other_models():
  model = tiny()
  section = dict(method='lora', rank=2, layers=[r'decoder/.*/(query|value)/kernel'])
  tuning = tune.attach(model, models.family_of(model), (32, 32, 3), **section)
  given = {key: x[:1] for key, x in batch().items()}
  task = tasks.build('detect', tuning.model, given)
  shapes = jax.eval_shape(lambda: task.init(jax.random.key(0), given))
  added = trees.flatten(shapes['params']['tune'])
  assert len(added) == 2 * 2 * 2 * 2  # two layers, attentions, kernels, factors
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  out = jax.eval_shape(task.predict, zeros, given)  # with a mask
  assert out['boxes'].shape == (1, 5, 4)


# -- from a ViT --------------------------------------------------------------------------


def like(run, head: str) -> dict:
  """Returns the config, its ViTDet of the sizes of the ViT in a run's folder."""
  c = config.load(f'{VITDET}:debug,head={head},weights={run}')
  vit = weights.load(run)
  vitdet = c['model']['backbone']
  vitdet = vitdet if head == 'detr' else vitdet['backbone']
  assert vitdet['name'] == 'vitdet'
  for field in ('width', 'depth', 'mlp_dim', 'num_heads', 'patch_size'):
    vitdet[field] = getattr(vit.model, field)
  vitdet |= dict(global_blocks=(0,), pretrained_size=vit.image_size)
  c['model'].pop('levels', None)  # named after the size of the recipe's patches
  return schema.check(c)


@pytest.mark.parametrize('head', ['detr', 'segment'])
def test_the_run_of_a_vit_starts_it(short_run, head):
  c = like(short_run, head)
  source = weights.from_section(**c['weights'])
  model = models.build(**c['model'], num_classes=11)
  started, _ = weights.fit(source, model, (64, 64))
  below = 'backbone/' if head == 'detr' else 'backbone/backbone/'
  theirs = trees.flatten(weights.load(short_run).params)
  followed = ('Transformer/encoder_norm/', 'head/')
  shared = [name for name in theirs if not name.startswith(followed)]
  assert set(started) == {f'{below}{name}' for name in shared}
  for name in shared:
    np.testing.assert_array_equal(started[f'{below}{name}'], theirs[name])


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
