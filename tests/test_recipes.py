"""Every pre-training recipe against the published tables.

The numbers are those of the ViT paper's Table 3 (arXiv 2010.11929), of big_vision's
configs for AugReg, "Better plain ViT baselines", Mixer and BiT, of "Scaling Vision
Transformers" (arXiv 2106.04560), of ConvNeXt's Table 5 (arXiv 2201.03545), of Swin's
config.py (microsoft/Swin-Transformer; learning rates there are for batches of 512) and of
MViT's configs (facebookresearch/mvit; theirs are for batches of 256), with weight decay as
AdamW means it: times the rate.
"""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from vit_jax import config, models, optim, trees
from vit_jax.data.ops import registry
from vit_jax.train import schema

I1K, I21K, JFT = 1_281_167, 14_197_122, 303_000_000
I21K_TRAIN = I21K - 51_200


def paper(spec, lr, epochs, wd, decay, dropout, examples, **more):
  """A row of Table 3: batch 4096, warmup 10k."""
  row = dict(batch=4096, warmup=10_000, sigmoid=True, hidden=True)
  row |= dict(lr=lr, epochs=epochs, wd=wd, decay=decay, dropout=dropout)
  return pytest.param(spec, row | dict(examples=examples) | more, id=spec)


def jft(variant, lr, epochs, **more):
  spec = f'vit_jft.py:variant={variant}'
  more = dict(end=1e-5, bias=-10.0, model=variant) | more
  return paper(spec, lr, epochs, 0.1, 'linear', 0.0, JFT, **more)


def i21k(variant, epochs=90):
  spec = f'vit_b16.py:variant={variant},epochs={epochs}'
  more = dict(end=1e-5, bias=-10.0, smoothing=1e-4, model=variant)
  return paper(spec, 1e-3, epochs, 0.03, 'linear', 0.1, I21K - 102_400, **more)


def augreg(data, variant, randaug, mixup, more=''):
  examples, bias = {'i21k': (I21K_TRAIN, -10.0), 'i1k': (I1K * 99 // 100, -6.9)}[data]
  row = dict(batch=4096, warmup=10_000, sigmoid=True, lr=1e-3, epochs=300, wd=0.1)
  row |= dict(decay='cosine', clip=1.0, bias=bias, moment='bfloat16', model=variant)
  row |= dict(randaug=randaug, mixup=mixup, examples=examples, classifier='token')
  row |= dict(posemb_std=None)
  spec = f'augreg_{data}.py:variant={variant}{more}'
  return pytest.param(spec, row, id=spec)


def other(spec, **row):
  return pytest.param(spec, row, id=spec)


RECIPES = [
  *(i21k(v) for v in ('B/16', 'B/32', 'L/16', 'L/32', 'H/14')),
  i21k('L/16', 30),
  jft('B/32', 8e-4, 7),
  jft('B/16', 8e-4, 7),
  jft('L/32', 6e-4, 7),
  jft('L/16', 4e-4, 7),
  jft('H/14', 3e-4, 14),
  *(jft(v, 1e-3, 7, name='bit', hidden=False) for v in ('R50x1', 'R50x2')),
  jft('R101x1', 8e-4, 7, name='bit', hidden=False),
  *(jft(v, 6e-4, 7, name='bit', hidden=False) for v in ('R152x1', 'R152x2')),
  *(jft(v, 8e-4, 7) for v in ('R50+B/32', 'R50+B/16')),
  jft('R50+L/32', 2e-4, 7),
  jft('R50+L/16', 4e-4, 7),
  *(
    paper(
      *(f'vit_i1k.py:variant={v}', 3e-3, 300, 0.3, 'cosine', 0.1, I1K * 99 // 100),
      **dict(clip=1.0, bias=-6.9, model=v),
    )
    for v in ('B/16', 'L/32')
  ),
  augreg('i21k', 'Ti/16', None, 0.0),
  augreg('i21k', 'S/32', None, 0.0),
  augreg('i21k', 'S/16', (2, 0), 0.0),
  augreg('i21k', 'B/32', (2, 10), 0.2),
  augreg('i21k', 'B/16', (2, 10), 0.2),
  augreg('i21k', 'L/16', (2, 15), 0.5),
  augreg('i1k', 'Ti/16', (2, 0), 0.0),
  augreg('i1k', 'S/32', (2, 15), 0.2),
  *(augreg('i1k', v, (2, 15), 0.5) for v in ('S/16', 'B/32', 'B/16', 'L/16')),
  augreg('i1k', 'B/16', None, 0.0, ',aug=none'),
  augreg('i1k', 'B/16', (2, 0), 0.0, ',aug=light1'),
  augreg('i1k', 'B/16', (2, 10), 0.2, ',aug=light2'),
  augreg('i1k', 'B/16', (2, 15), 0.2, ',aug=medium1'),
  augreg('i1k', 'B/16', (2, 15), 0.5, ',aug=medium2'),
  augreg('i1k', 'B/16', (2, 20), 0.5, ',aug=strong1'),
  augreg('i1k', 'B/16', (2, 20), 0.8, ',aug=strong2'),
  augreg('i1k', 'B/16', (2, 0), 0.0, ',aug=light0,names=files'),
  augreg('i1k', 'B/16', (2, 10), 0.2, ',aug=light1,names=files'),
  *(
    other(
      f'vit_s16_i1k.py:epochs={epochs}',
      **dict(batch=1024, examples=I1K * 99 // 100, epochs=epochs, lr=1e-3, wd=0.1),
      **dict(decay='cosine', warmup=10_000, clip=1.0, bias=0.0, moment='bfloat16'),
      **dict(randaug=(2, 10), mixup=0.2, classifier='gap', hidden=True),
      **dict(posemb='sincos2d', model='S/16'),
    )
    for epochs in (90, 150, 300)
  ),
  *(
    other(
      f'vit_g_jft3b.py:variant={variant}',
      **dict(batch=16_384, examples=3 * 10**9, steps=1_000_000, lr=8e-4, wd=0.03),
      **dict(wd_head=3.0, decay='rsqrt', warmup=10_000, clip=1.0, bias=-10.0),
      **dict(sigmoid=True, classifier='map', model=variant, posemb_std=None),
    )
    for variant in ('g/14', 'G/14')
  ),
  *(
    other(
      f'masked_patches.py:fewshot=tfds:dtd{more}',
      **dict(batch=4096, examples=JFT, steps=1_000_000, lr=2e-4, wd=0.1),
      **dict(decay='cosine', warmup=10_000, bias=0.0, classifier='gap', model='B/16'),
      task=dict(name='masked_patches', target=target, rate=rate),
    )
    for more, target, rate in (
      ('', 'mean_color', 0.5),
      (',target=downsized', 'downsized', 0.5),
      (',target=pixels', 'pixels', 0.5),
      (',rate=0.15', 'mean_color', 0.15),
    )
  ),
  other(
    'mixer_i1k.py',
    **dict(batch=4096, examples=I1K * 99 // 100, epochs=300, lr=1e-3, wd=0.1),
    **dict(decay='linear', end=1e-8, warmup=10_000, clip=1.0, bias=-6.9, depth=0.1),
    **dict(sigmoid=True, randaug=(2, 15), mixup=0.5, name='mixer', model='B/16'),
  ),
  other(
    'convnext_i1k.py',
    **dict(batch=4096, examples=I1K * 99 // 100, epochs=300, lr=4e-3, wd=0.05),
    **dict(decay='cosine', end=1e-6, warmup=6_193, clip=None, bias=0.0, depth=0.1),
    **dict(randaug=(2, 9), mixup=0.8, smoothing=0.1, name='convnext', model='T'),
    **dict(cutmix=1.0, erasing=0.25, crop='inception_crop(224, 8, 100)'),
  ),
  *(
    other(
      f'swin_i1k.py:variant={variant}',
      **dict(batch=1024, examples=I1K * 99 // 100, epochs=300, lr=1e-3, wd=0.05),
      **dict(decay='cosine', end=1e-5, warmup=24_773, clip=5.0, bias=0.0, depth=depth),
      **dict(randaug=(2, 9), mixup=0.8, smoothing=0.1, name='swin', model=variant),
      **dict(cutmix=1.0, erasing=0.25, crop='inception_crop(224, 8, 100)'),
    )
    for variant, depth in (('T', 0.2), ('S', 0.3), ('B', 0.5))
  ),
  *(
    other(
      f'mvit_i1k.py:variant={variant}',
      **dict(batch=2048, examples=I1K * 99 // 100, epochs=300, lr=2e-3, wd=0.05),
      **dict(decay='cosine', end=8e-6, warmup=43_352, clip=1.0, bias=0.0, depth=depth),
      **dict(randaug=(6, 9), mixup=0.8, smoothing=0.1, name='mvit', model=variant),
      **dict(cutmix=1.0, erasing=0.25, crop='inception_crop(224, 8, 100)'),
      decayed=r'.*/(kernel|relative_positions/rows)',
    )
    for variant, depth in (('T', 0.1), ('S', 0.1), ('B', 0.3), ('L', 0.5))
  ),
  other(
    'bit_i1k.py',
    **dict(batch=4096, examples=I1K * 99 // 100, epochs=90, lr=1.6, wd=1e-3),
    **dict(decay='cosine', warmup=1_000, clip=1.0, bias=0.0, moment='bfloat16'),
    **dict(name='resnet_gn', model='R50'),
  ),
  other(
    'bit_i21k.py',
    **dict(batch=4096, examples=I21K_TRAIN, epochs=90, lr=0.48, wd=1e-3),
    **dict(decay='cosine', warmup=5_000, clip=1.0, bias=-10.0, moment='bfloat16'),
    **dict(sigmoid=True, name='bit', model='R50x1', zero_pad_pool=False),
  ),
]

# Enough of a model's parameters to see the rules.
PARAMS = {
  'embedding': {'kernel': jnp.ones((2, 2)), 'bias': jnp.ones(2)},
  'Transformer': {'encoderblock_0': {'LayerNorm_0': {'scale': jnp.ones(2)}}},
  'stage1_block_0': {'attention': {'relative_positions': {'rows': jnp.ones((3, 2))}}},
  'cls': jnp.ones(2),
  'head': {'kernel': jnp.ones((2, 2)), 'bias': jnp.ones(2)},
}


@functools.cache
def decay_of(options: str) -> dict[str, float]:
  """Returns by how much a step of rate 1 without a gradient decays parameters of 1."""
  tx = optim.build(lr=1.0, total_steps=1, **json.loads(options)).tx
  zeros = jax.tree.map(jnp.zeros_like, PARAMS)
  updates, _ = tx.update(zeros, tx.init(PARAMS), PARAMS, rate=jnp.float32(1))
  return {name: -float(u.ravel()[0]) for name, u in trees.flatten(updates).items()}


@pytest.mark.parametrize(('spec', 'row'), RECIPES)
def test_a_recipe_is_that_of_its_table(spec, row):
  c = schema.check(config.load(f'{runs.ROOT}/configs/{spec}'))
  assert c['data']['batch_size'] == row['batch']
  assert (c['model']['name'], c['model']['variant']) == (
    row.get('name', 'vit'),
    row['model'],
  )

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
  else:
    expected |= {middle: (lr + end) / 2, steps: end}
  rates = optimizer.rate(np.array(list(expected)))
  # float32: the end of a cosine, 1 + cos pi, is off by 1e-7 of the peak.
  np.testing.assert_allclose(
    rates, list(expected.values()), rtol=1e-4, atol=1e-7 * lr, err_msg=str(expected)
  )

  options = {k: v for k, v in c['optim'].items() if k not in ('lr', 'schedule')}
  for name, value in decay_of(json.dumps(options)).items():
    decayed = re.fullmatch(row.get('decayed', '.*kernel'), name)
    factor = row['wd'] if decayed else 0.0
    factor = row.get('wd_head', factor) if name == 'head/kernel' else factor
    np.testing.assert_allclose(value, factor, rtol=1e-5, err_msg=name)
  assert c['optim'].get('clip') == row.get('clip')
  assert c['optim'].get('moment_dtype') == row.get('moment')
  assert c['optim']['name'] == (
    'adafactor'
    if row['decay'] == 'rsqrt'
    else 'sgd'
    if row.get('name', 'vit') in ('bit', 'resnet_gn') and 'jft' not in spec
    else 'adamw'
  )

  task = c['task']
  assert task == row.get('task', task)
  assert task.get('loss', 'softmax') == ('sigmoid' if row.get('sigmoid') else 'softmax')
  assert task.get('label_smoothing', 0) == row.get('smoothing', 0)
  assert task.get('mixup', 0.0) == row.get('mixup', 0.0)
  assert task.get('cutmix', 0.0) == row.get('cutmix', 0.0)
  assert task.get('mixup_mode', 'batch') == 'batch'

  ops = registry.parse(c['data']['pp'])
  assert [op.name for op in ops if op.kind == 'image'] == [
    *('decode', 'inception_crop', 'flip_lr'),
    *(['randaug'] if row.get('randaug') else []),
    'value_range',
    *(['random_erasing'] if row.get('erasing') else []),
  ]
  texts = {op.name: op.text for op in ops}
  crop = row.get('crop', 'inception_crop(224)')
  assert texts['inception_crop'] == crop
  assert texts['value_range'] == 'value_range(-1, 1)'
  if row.get('randaug'):  # True: as the published runs of Google's code had it
    theirs = '' if row.get('name') in ('convnext', 'swin', 'mvit') else ', True'
    assert texts['randaug'] == 'randaug({}, {}{})'.format(*row['randaug'], theirs)
  if row.get('erasing'):
    assert texts['random_erasing'] == f'random_erasing({row["erasing"]})'
  assert (
    c['evals']['val']['data']['pp']
    == 'decode|resize_small(256)|central_crop(224)|value_range(-1, 1)'
  )

  model = models.build(**{'num_classes': 10, **c['model']})
  assert getattr(model, 'dropout', 0.0) == row.get('dropout', 0.0)
  assert getattr(model, 'stochastic_depth', 0.0) == row.get('depth', 0.0)
  assert getattr(model, 'posemb', 'learn') == row.get('posemb', 'learn')
  # None: 1 / sqrt(width), big_vision's; 0.02 is vision_transformer's.
  assert getattr(model, 'posemb_std', 0.02) == row.get('posemb_std', 0.02)
  for field in ('classifier', 'zero_pad_pool'):
    if field in row:
      assert getattr(model, field) == row[field]
  hidden = model.width if row.get('hidden') else None
  assert getattr(model, 'representation_size', None) == hidden
  assert model.head_bias_init == row.get('bias', 0.0)
  # What is left out of training chooses the best step; what is reported does not.
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
  'name', ['vit_b16', 'vit_jft', 'vit_g_jft3b', 'masked_patches']
)
def test_few_shot_images_are_those_of_the_reference_code(name):
  c = config.load(f'{runs.ROOT}/configs/{name}.py:fewshot=tfds:dtd')
  fewshot = c['evals']['fewshot']
  # big_vision's configs/common_fewshot.py
  assert fewshot['pp'] == 'decode|resize(256)|central_crop(224)|value_range(-1, 1)'


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
  c = schema.in_steps(c, total)
  assert c['evals']['val']['every'] == c['checkpoint']['every'] == epochs[1]
  optimizer = optim.build(**c['optim'], total_steps=total)
  rates = np.asarray(optimizer.rate(np.arange(total)))
  (changes,) = np.nonzero(np.diff(rates))
  np.testing.assert_allclose(changes + 1, epochs[1:9], atol=1)  # rounded up, not down
  # The parameters are averaged where the last two epochs end.
  update = lambda mean, n: (optimizer.average(mean, n + 1.0, n),) * 2
  seen = jax.lax.scan(update, 0.0, jnp.arange(total))[1].tolist()
  assert seen[epochs[9] - 2 : epochs[9]] == [epochs[9] - 1, epochs[9]]
  assert seen[epochs[9]] == epochs[9]
  assert seen[-2:] == [epochs[9], (epochs[9] + total) / 2]
