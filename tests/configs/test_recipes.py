"""Every pre-training recipe against the published one, see published_recipes.json."""

import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import runs
from vit_jax import config, models, optim, trees
from vit_jax.data.ops import registry
from vit_jax.train import schema

_GROUPS = json.loads(Path(__file__).with_name('published_recipes.json').read_text())
RECIPES = {
  spec: group['shared'] | own
  for group in _GROUPS
  for spec, own in group['recipes'].items()
}
# Enough of a model's parameters to see which of them decay.
PARAMS = {
  'embedding': {'kernel': jnp.ones((2, 2)), 'bias': jnp.ones(2)},
  'Transformer': {'encoderblock_0': {'LayerNorm_0': {'scale': jnp.ones(2)}}},
  'stage1_block_0': {'attention': {'relative_positions': {'rows': jnp.ones((3, 2))}}},
  'cls': jnp.ones(2),
  'head': {'kernel': jnp.ones((2, 2)), 'bias': jnp.ones(2)},
}


@functools.cache
def measure_decay(options: str) -> dict[str, float]:
  """Returns by how much a step of rate 1 without a gradient decays parameters of 1."""
  tx = optim.build(lr=1.0, total_steps=1, **json.loads(options)).tx
  zeros = jax.tree.map(jnp.zeros_like, PARAMS)
  updates, _ = tx.update(zeros, tx.init(PARAMS), PARAMS, rate=jnp.float32(1))
  return {name: -float(u.ravel()[0]) for name, u in trees.flatten(updates).items()}


@pytest.mark.parametrize('spec', RECIPES)
def test_a_recipe_is_that_of_its_table(spec):
  row = RECIPES[spec]
  c = schema.check(config.load(f'{runs.ROOT}/configs/{spec}'))
  assert c['data']['batch_size'] == row['batch']
  assert c['model']['name'] == row.get('name', 'vit')
  assert c['model']['variant'] == row['model']

  steps = config.total_steps(c, row['examples'], row['batch'])
  assert steps == row.get('steps') or steps == round(
    row['epochs'] * row['examples'] / row['batch']
  )
  family = models.family(c['model']['name'])
  optimizer = optim.build(**c['optim'], total_steps=steps, family=family)
  lr, warmup, end = row['lr'], row['warmup'], row.get('end', 0.0)
  middle = warmup + (steps - warmup) / 2
  expected = {0: 0.0, warmup / 2: lr / 2, warmup: lr}
  if row['decay'] == 'rsqrt':  # timescale 10k, 50k steps of cooldown
    expected |= {20_000: lr / np.sqrt(2), 110_000: lr / np.sqrt(11)}
    expected |= {975_000: lr / np.sqrt(97.5) / 2, steps: 0.0}
  elif row['decay'] == 'multistep':  # a third each
    expected |= {middle: lr / 10, steps: lr / 100}
  else:
    expected |= {middle: (lr + end) / 2, steps: end}
  rates = optimizer.rate(np.array(list(expected)))
  # float32: the end of a cosine, 1 + cos pi, is off by 1e-7 of the peak.
  np.testing.assert_allclose(
    rates, list(expected.values()), rtol=1e-4, atol=1e-7 * lr, err_msg=str(expected)
  )

  options = {k: v for k, v in c['optim'].items() if k not in ('lr', 'schedule')}
  for name, value in measure_decay(json.dumps(options)).items():
    decayed = re.fullmatch(row.get('decayed', '.*kernel'), name)
    factor = row['wd'] if decayed else row.get('wd_others', 0.0)
    factor = row.get('wd_head', factor) if name == 'head/kernel' else factor
    np.testing.assert_allclose(value, factor, rtol=1e-5, err_msg=name)
  sgd = row.get('name') in ('bit', 'resnet', 'resnet_gn') and 'jft' not in spec
  optimizers = {'rsqrt': 'adafactor', 'multistep': 'sgd'}
  name = optimizers.get(row['decay'], 'sgd' if sgd else 'adamw')
  options = [c['optim'].get(key) for key in ('name', 'clip', 'moment_dtype')]
  assert options == [name, row.get('clip'), row.get('moment')]

  task = c['task']
  assert task == row.get('task', task)
  assert task.get('loss', 'softmax') == ('sigmoid' if row.get('sigmoid') else 'softmax')
  mixing = [task.get(key, 0) for key in ('label_smoothing', 'mixup', 'cutmix')]
  assert mixing == [row.get(key, 0) for key in ('smoothing', 'mixup', 'cutmix')]
  assert task.get('mixup_mode', 'batch') == 'batch'

  # Two numbers: big_vision's, as the published runs of Google's code had it (True); three:
  # timm's with noise and increasing severities.
  randaug = tuple(row.get('randaug') or ())
  augment = {
    0: '',
    2: f'|randaug{(*randaug, True)}',
    3: f'|randaug_increasing{randaug}',
  }[len(randaug)]
  erasing = f'|random_erasing({row["erasing"]})' if row.get('erasing') else ''
  crop = row.get('crop', 'inception_crop(224)')
  assert c['data']['pp'] == f'decode|{crop}|flip_lr{augment}|value_range{erasing}'
  central = 'decode|resize_small(256)|central_crop(224)|value_range'
  assert c['evals']['val']['data']['pp'] == central

  model = models.build(**{'num_classes': 10, **c['model']})
  hidden = model.width if row.get('hidden') else None
  fields = {
    'dropout': 0.0,
    'stochastic_depth': row.get('depth', 0.0),
    'posemb': 'learn',
  }
  # None: 1 / sqrt(width), big_vision's; 0.02 is vision_transformer's.
  fields |= {'posemb_std': 0.02, 'representation_size': hidden}
  fields['head_bias_init'] = row.get('bias', 0.0)
  for field, default in fields.items():
    assert getattr(model, field, default) == row.get(field, default), field
  for field in ('classifier', 'zero_pad_pool', 'zero_init'):
    assert field not in row or getattr(model, field) == row[field]
  # Images held out from training choose the best step; the reported ones do not.
  if c['data']['split'] == 'train[:99%]':
    splits = {name: section['data']['split'] for name, section in c['evals'].items()}
    averaged = {'ema': 'validation'} if c['optim'].get('ema') else {}
    assert splits == {'minival': 'train[99%:]', 'val': 'validation'} | averaged
    assert c['checkpoint']['best'] == 'minival/top1'


def test_the_small_vit_has_the_parameters_that_its_authors_print():
  c = config.load(f'{runs.ROOT}/configs/vit_s16_i1k.py')
  model = models.build(**c['model'], scan=True)  # one block to trace, not twelve
  image = jnp.zeros((1, 224, 224, 3))
  params = jax.eval_shape(model.init, jax.random.key(0), image)
  assert sum(x.size for x in jax.tree.leaves(params)) == 22_122_472


@pytest.mark.parametrize(
  ('variant', 'res', 'lr', 'depth'),
  [('S/16', 224, 4e-3, 0.05), ('B/16', 192, 3e-3, 0.2), ('L/16', 192, 3e-3, 0.45)],
)
def test_deit3_is_that_of_its_authors(variant, res, lr, depth):
  c = schema.check(config.load(f'{runs.ROOT}/configs/deit3_i1k.py:variant={variant}'))
  assert c['data']['batch_size'] == 2048
  crop = f'decode(3)|random_resized_crop({res})|flip_lr|three_augment(0.3)'
  assert c['data']['pp'] == f'{crop}|value_range'
  assert f'central_crop({res})' in c['evals']['val']['data']['pp']
  expected = {'loss': 'sigmoid(threshold=0.0)', 'mixup': 0.8, 'cutmix': 1.0}
  assert c['task'] == {'name': 'classify', **expected}
  model = models.build(**{'num_classes': 10, **c['model']})
  fields = model.stochastic_depth, model.depth_rates, model.classifier
  assert fields == (depth, 'uniform', 'token')
  steps = config.total_steps(c, 1_268_355, 2048)
  assert steps == round(800 * 1_268_355 / 2048)
  assert (c['optim']['name'], c['optim']['wd']) == ('lamb', 0.05)
  rate = optim.build(**c['optim'], total_steps=steps).rate
  np.testing.assert_allclose(rate(5 * 1_268_355 / 2048), lr, rtol=1e-3)
  np.testing.assert_allclose(rate(steps), 1e-5, rtol=1e-3)


@pytest.mark.parametrize('name', ['vit_b16', 'masked_patches'])
def test_few_shot_images_are_those_of_the_reference_code(name):
  c = config.load(f'{runs.ROOT}/configs/{name}.py:fewshot=tfds:dtd')
  fewshot = c['evals']['fewshot']
  # big_vision's configs/common_fewshot.py
  assert fewshot['pp'] == 'decode|resize(256)|central_crop(224)|value_range'


def test_augreg_s_words_are_checked():
  load = lambda arg: config.load(f'{runs.ROOT}/configs/augreg_i1k.py:{arg}')
  for arg, message in (
    ('aug=medium3', 'Did you mean "medium'),
    ('names=csv', r"one of \['config', 'files'\]"),
    ('variant=S/8', r"one of \['Ti/16', 'S/32'"),
  ):
    with pytest.raises(config.UserError, match=message):
      load(arg)


def test_the_cifar_example_is_that_of_its_source():
  c = config.load(f'{runs.ROOT}/configs/cifar10_ti16.py')
  assert (c['seed'], c['epochs'], c['data']['batch_size']) == (42, 10, 128)
  assert c['optim']['name'] == 'adam'
  optimizer = optim.build(**c['optim'], total_steps=3910)
  # CosineAnnealingLR(T_max=10) of torch, set after each epoch, and from epoch 8 on the
  # constant rate under which Lightning averages weights.
  epochs = np.minimum(np.arange(10), 8)
  expected = 1e-3 * 0.5 * (1 + np.cos(np.pi * epochs / 10))
  for n in range(10):
    rates = optimizer.rate(np.array([n * 391, n * 391 + 390]))
    np.testing.assert_allclose(rates, expected[n], rtol=1e-5)
  assert c['checkpoint']['best'] == 'val/loss'
  (resize,) = (op for op in registry.parse(c['data']['pp']) if op.name == 'resize')
  assert resize.text == "resize(224, antialias=True, rounding='nearest')"  # as Pillow
  assert c['task'] == {'name': 'classify', 'loss': 'softmax'}


@pytest.mark.parametrize('examples', [49_000, 300])
def test_an_epoch_of_the_cifar_example_is_one_of_its_data(examples):
  c = schema.check(config.load(f'{runs.ROOT}/configs/cifar10_ti16.py:weights='))
  total = config.total_steps(c, examples, 128)
  epochs = [round(n * total / 10) for n in range(11)]
  assert total == round(10 * examples / 128)
  c = schema.convert_periods(c, total)
  assert c['evals']['val']['every'] == c['checkpoint']['every'] == epochs[1]
  optimizer = optim.build(**c['optim'], total_steps=total)
  rates = np.asarray(optimizer.rate(np.arange(total)))
  (changes,) = np.nonzero(np.diff(rates))
  np.testing.assert_allclose(changes + 1, epochs[1:9], atol=1)  # rounded up, not down
  # The parameters are averaged where the last two epochs end.
  update = lambda mean, n: (optimizer.average(mean, n + 1.0, n),) * 2
  means = jax.lax.scan(update, 0.0, jnp.arange(total))[1].tolist()
  assert means[epochs[9] - 2 : epochs[9]] == [epochs[9] - 1, epochs[9]]
  assert means[epochs[9]] == epochs[9]
  assert means[-2:] == [epochs[9], (epochs[9] + total) / 2]


# Batch, rate, weight decay; steps before each drop and in all; words of the parameters that
# do not decay: detectron2's and the authors' configs.
DETECTORS = {
  'R50-FPN,times=1': (16, 0.02, 1e-3, (60_000, 80_000, 90_000), ''),
  'R50-FPN': (16, 0.02, 1e-3, (210_000, 250_000, 270_000), ''),
  'R101-DC5,times=9': (16, 0.02, 1e-3, (750_000, 790_000, 810_000), ''),
  'swin:T': (16, 1e-4, 0.05, (197_910, 241_890, 263_880), 'backbone/norm relative'),
  'swin:L,lsj=True': (64, 4e-5, 0.05, (81_944, 88_773, 92_187), 'norm relative'),
  'vitdet:B': (64, 1e-4, 0.1, (163_889, 177_546, 184_375), 'norm pos_embedding'),
  'vitdet:H': (64, 1e-4, 0.1, (122_916, 133_159, 138_281), ''),
}


@pytest.mark.parametrize('variant', DETECTORS)
def test_detectors_are_trained_as_published(variant):
  batch, lr, wd, (*drops, steps), still = DETECTORS[variant]
  c = schema.check(config.load(f'rcnn_coco:variant={variant}'))
  assert (c['data']['batch_size'], c['steps'], c['optim']['wd']) == (batch, steps, wd)
  rate = optim.build(
    **c['optim'], total_steps=steps, family=models.family(c['model']['name'])
  ).rate
  for i, step in enumerate(drops):
    rates = rate(np.array([step - 5, step + 5]))
    np.testing.assert_allclose(rates, lr * 0.1 ** np.array([i, i + 1]), rtol=1e-5)
  if c['optim']['wd_rules'] == [['.*', 1.0]]:  # No model need be traced.
    assert not still
    return
  small = config.load(f'rcnn_coco:debug,variant={variant}')
  shapes = models.build(**small['model']).shapes((64, 64, 3))
  words = [word.split('/') for word in still.split()]
  for name in trees.flatten(shapes['params']):
    exempt = any(all(part in name.lower() for part in word) for word in words)
    factor = trees.first_match(c['optim']['wd_rules'], name)
    assert factor == (not exempt), name
