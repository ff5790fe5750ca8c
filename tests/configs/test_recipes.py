"""Recipes against the published ones, and against what they were when last checked.

published_recipes.json has the numbers of papers and of their code. checked_recipes.json
has every key of the checked configs. After a change that is meant, renew it and read the
difference: python -m tests.configs.test_recipes
"""

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
CHECKED = Path(__file__).with_name('checked_recipes.json')
# Enough of a model's parameters to see which of them decay.
PARAMETERS = (
  *('embedding/kernel', 'embedding/bias', 'cls', 'head/kernel', 'head/bias'),
  'Transformer/encoderblock_0/LayerNorm_0/scale',
  'stage1_block_0/attention/relative_positions/rows',
)


def checked(spec: str) -> dict:
  """Returns the checked config of a recipe, flat: {'optim.lr': 0.1, ...}."""

  def flatten(section, prefix=''):
    for key, value in section.items():
      if isinstance(value, dict) and value:
        yield from flatten(value, f'{prefix}{key}.')
      else:
        yield prefix + key, value

  whole = schema.check(config.load(f'{runs.ROOT}/configs/{spec}'))
  return json.loads(json.dumps(dict(flatten(whole))))


def names() -> list[str]:
  """Returns the recipes of checked_recipes.json."""
  detectors = [f'rcnn_coco.py:variant={variant}' for variant in DETECTORS]
  return [*RECIPES, *detectors, 'cifar10_ti16.py:weights=']


def write() -> None:
  """Writes checked_recipes.json, a line for each recipe."""
  lines = [f'{json.dumps(spec)}: {json.dumps(checked(spec))}' for spec in names()]
  CHECKED.write_text('{\n' + ',\n'.join(lines) + '\n}\n')


def test_recipes_are_what_they_were_when_checked():
  stored = json.loads(CHECKED.read_text())
  assert list(stored) == names()
  for spec, expected in stored.items():
    assert checked(spec) == expected, spec


@pytest.mark.parametrize('spec', RECIPES)
def test_a_recipe_is_that_of_its_table(spec):
  row, c = RECIPES[spec], checked(spec)
  steps = config.total_steps(c, row['examples'], row['batch'])
  assert steps == row.get('steps') or steps == round(
    row['epochs'] * row['examples'] / row['batch']
  )
  sgd = row.get('name') in ('bit', 'resnet', 'resnet_gn') and 'jft' not in spec
  optimizers = {'rsqrt': 'adafactor', 'multistep': 'sgd'}
  published = {
    'data.batch_size': row['batch'],
    'model.name': row.get('name', 'vit'),
    'model.variant': row['model'],
    'model.dropout': row.get('dropout'),
    'model.stochastic_depth': row.get('depth'),
    'model.head_bias_init': row.get('bias'),
    'optim.name': optimizers.get(row['decay'], 'sgd' if sgd else 'adamw'),
    'optim.lr': row['lr'],
    'optim.clip': row.get('clip'),
    'optim.moment_dtype': row.get('moment'),
    'optim.schedule.decay': row['decay'],
    'optim.schedule.warmup': row['warmup'],
    'task.loss': None
    if 'task' in row
    else 'sigmoid'
    if row.get('sigmoid')
    else 'softmax',
    'task.label_smoothing': row.get('smoothing'),
    'task.mixup': row.get('mixup'),
    'task.cutmix': row.get('cutmix'),
  }
  for key, value in published.items():
    assert (c.get(key) or None) == (value or None), key
  if row['decay'] in ('linear', 'cosine'):
    end = c.get('optim.schedule.end', 0) * row['lr']
    assert end == pytest.approx(row.get('end', 0))
  assert c.get('task.mixup_mode', 'batch') == 'batch'
  for key, value in row.get('task', {}).items():
    assert c[f'task.{key}'] == value, key

  for name in PARAMETERS:
    decayed = re.fullmatch(row.get('decayed', '.*kernel'), name)
    factor = row['wd'] if decayed else row.get('wd_others', 0.0)
    factor = row.get('wd_head', factor) if name == 'head/kernel' else factor
    rules = c.get('optim.wd_rules', optim.WD_RULES)
    wd = c['optim.wd'] * trees.first_match(rules, name)
    assert wd == pytest.approx(factor), name

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
  assert c['data.pp'] == f'decode|{crop}|flip_lr{augment}|value_range{erasing}'
  central = 'decode|resize_small(256)|central_crop(224)|value_range'
  assert c['evals.val.data.pp'] == central

  # None: 1 / sqrt(width), big_vision's; 0.02 is vision_transformer's.
  defaults = {'posemb': 'learn', 'posemb_std': 0.02, 'classifier': 'token'}
  defaults |= {'zero_pad_pool': True, 'zero_init': True}
  for field, default in defaults.items():
    assert c.get(f'model.{field}', default) == row.get(field, default), field
  assert bool(c.get('model.representation_size')) == row.get('hidden', False)


def test_the_small_vit_has_the_parameters_that_its_authors_print():
  c = config.load(f'{runs.ROOT}/configs/vit_s16_i1k.py')
  model = models.build(**c['model'], scan=True)  # one block to trace, not twelve
  image = jnp.zeros((1, 224, 224, 3))
  params = jax.eval_shape(model.init, jax.random.key(0), image)
  assert sum(x.size for x in jax.tree.leaves(params)) == 22_122_472


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


if __name__ == '__main__':
  write()
