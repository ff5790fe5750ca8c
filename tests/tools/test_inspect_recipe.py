"""Totals of recipes: every config of the repository, and sums by hand."""

import itertools
import json
import re

import pytest

from tests.support import commands, naming, runs
from vit_jax import config
from vit_jax.errors import UserError
from vit_jax.tools.inspect import __main__ as inspect
from vit_jax.tools.inspect import recipe, split_sizes

CONFIGS = list(config.recipes().values())
# Of other recipes `test_the_recipe_itself_is_sound` builds the model.
QUICK = {(name, '') for name in ('vit_b16', 'mixer_i1k', 'masked_patches', 'detr_coco')}


def run(capsys, *argv):
  return commands.run(inspect.main, capsys, *argv)


def record_of(capsys, *argv):
  code, out, err = run(capsys, *argv, '--json')
  assert (code, err) == (0, '')
  return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize(
  ('name', 'arguments'),
  [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in itertools.product((path.stem for path in CONFIGS), ('', ':debug'))
  ],
)
def test_every_config(capsys, name, arguments):
  path = runs.ROOT / f'configs/{name}.py'
  record = record_of(capsys, '--config', f'{path}{arguments}')
  assert record['examples'] == record['steps'] * record['batch_size'] > 0
  assert record['params'] > 0
  assert record['exaflops'] == pytest.approx(
    3 * record['gflops'] * record['examples'] / 1e9
  )
  if record['train_examples']:
    assert record['epochs'] == record['examples'] / record['train_examples']


def b16(arguments=''):
  return ['--config', f'{runs.ROOT}/configs/vit_b16.py{arguments}']


def test_imagenet_21k_by_hand(capsys):
  record = record_of(capsys, *b16(':variant=L/16,batch=1024'))
  images = 14_197_122 - 102_400  # full[102400:]
  assert record['train_examples'] == images
  assert record['steps'] == round(90 * images / 1024)
  assert record['classes'] == 21_843
  assert record['model'] == 'vit:L/16'
  assert record['resolution'] == [224, 224]
  assert (
    record['params'] > 304_326_632
  )  # with the paper's 1,000 classes and no hidden layer


def test_overrides_and_examples(capsys):
  flags = ('--examples', '1e6', '--config.data.batch_size=1000')
  flags += ('--config.epochs=2.5', '--config.optim.schedule.warmup=100')
  record = record_of(capsys, *b16(), *flags)
  assert record['train_examples'] == 1_000_000
  assert record['steps'] == 2_500
  assert record['epochs'] == 2.5


def test_the_text(capsys):
  code, out, err = run(capsys, *b16())
  assert (code, err) == (0, '')
  assert re.search(naming('14,094,722', 'exaFLOPs'), out)
  code, out, err = run(capsys, '--config', f'{runs.ROOT}/configs/folder.py')
  assert code == 0
  assert re.search(naming('--examples', 'head'), out)


def test_the_memory_that_a_recipe_asks_about():
  pp = 'decode|resize(16)|onehot|value_range(-1, 1)'
  words = ['model.remat=full', f'data.pp={pp}']
  config = recipe.load(f'{runs.ROOT}/configs/vit_b16.py:debug', words)
  mesh = {'data': 2, 'fsdp': 1, 'tensor': 1}
  request = recipe.request(config, recipe.describe(config), mesh)
  assert json.loads(json.dumps(request)) == request
  assert request['model'] == config['model']
  assert request['optim'] == config['optim']
  assert (request['batch'], request['mesh']) == (32, mesh)
  assert request['image'] == [16, 16, 3]
  assert request['features'] == {'label': [[10], 'float32']}


@pytest.mark.parametrize(
  ('name', 'beside'),
  [
    ('detr_coco', {'image_mask': [[1344, 1344], 'uint8']}),
    ('vitdet_digits:head=segment', {'segments': [[64, 64], 'uint8']}),
  ],
)
def test_objects_are_padded_as_the_pipeline_says(name, beside):
  config = recipe.load(name, [])
  source = recipe.opened(config['data'])
  most = 100 if name == 'detr_coco' else 4
  assert recipe._features(config, source, [1344, 1344], 10) == {
    'boxes': [[most, 4], 'float32'],
    'boxes_mask': [[most], 'float32'],
    'label': [[most], 'int32'],
    'label_mask': [[most], 'float32'],
    **beside,
  }


@pytest.mark.parametrize(
  ('pp', 'shape'),
  [
    ('decode|inception_crop(224)|value_range(-1, 1)', (224, 224, 3)),
    ('decode(1)|resize((8, 12))|value_range(-1, 1)', (8, 12, 1)),
    ('decode|resize_small(9)|central_crop(size=8)|value_range(0, 1)', (8, 8, 3)),
    ('decode|resize(9)|random_crop(8, padding=2)|flip_lr', (8, 8, 3)),
  ],
)
def test_the_size_of_images(pp, shape):
  assert recipe.image_shape(pp) == shape


def test_a_size_that_is_open():
  for pp in ('decode|value_range(-1, 1)', 'decode|resize(9)|resize_small(8)'):
    with pytest.raises(UserError, match=naming(f"'{pp}'", 'resize(size)')):
      recipe.image_shape(pp)


@pytest.mark.parametrize(
  ('source', 'split', 'number'),
  [
    ('tfds:imagenet2012', 'train[:99%]', 1_268_355),
    ('imagenet2012:5.1.0', 'train+validation', 1_331_167),
    ('tfds:cifar10:3.0.2', 'train[-10%:]', 5_000),
    ('tfds:imagenet21k', 'full[102400:]', 14_094_722),
    ('records:jft300m', 'train', 303_000_000),
    ('vtab:cifar100', 'train800val200', 1000),
    ('vtab:snorb_elev', 'val200[:50%]', 100),
    ('records:jft3b', 'train', 3_000_000_000),
  ],
)
def test_sizes_of_splits(source, split, number):
  assert split_sizes.count(source, split) == number


@pytest.mark.parametrize(
  ('source', 'split', 'facts'),
  [
    ('tfds:imagnet2012', 'train', ("'tfds:imagnet2012'", 'imagenet2012', '--examples')),
    ('folder:/data/mine', 'train', ("'folder:/data/mine'", '--examples')),
    ('tfds:cifar10', 'trian', ("'trian'", "'train'", '--examples')),
    ('tfds:cifar10', 'train[', ("'train['", 'train[:90%]')),
    ('records:jft3b', 'train[:50%]', ("'train[:50%]'", 3000000000, '--examples')),
  ],
)
def test_sizes_that_are_not_known(source, split, facts):
  with pytest.raises(UserError, match=naming(*facts)):
    split_sizes.count(source, split)


@pytest.mark.parametrize(
  ('argv', 'facts'),
  [
    (['--config', 'configs/nothing.py'], ("'configs/nothing.py'",)),
    ([*b16(':variant=X/16')], ("'X/16'", 'B/16')),
    ([*b16(), '--config.optm.lr=1'], ('config.optm', 'optim')),
    ([*b16(), '--config.optim.lr=-1.0'], ('config.optim.lr=-1.0',)),
    ([*b16(), '--config.data.batch_size=0'], ('batch_size=0', 1)),
    ([*b16(':data=folder:/mine')], ('folder:/mine', '--examples')),
    ([*b16(':train=fulll')], ("'fulll'", 'full')),
    ([*b16(':res=225')], ('225x225', '16x16')),
    ([*b16(), '--examples', '0'], ('--examples', 0)),
    ([*b16(), '--batch', '8'], ('--config', '--batch')),
    ([*b16(), 'vit:B/16'], ('--config', 'vit:B/16')),
    ([*b16(), '--hbm', '32'], ('--hbm', '--mesh')),
    ([*b16(), '--mesh', 'data=3'], (4096, 3)),
    ([*b16(), '--tpu', 'v3:2x2', '--mesh', 'data=8'], ('--mesh', '--config.mesh.')),
    ([*b16(), '--tpu', 'v3:2x2', '--hbm', '16'], ('--hbm', '--tpu')),
    ([*b16(), '--confg.seed=1'], ('--confg.seed=1',)),
    (['vit:B/16', '--config.seed=1'], ('--config.seed=1',)),
  ],
)
def test_mistakes(capsys, argv, facts):
  commands.assert_refused(inspect.main, capsys, argv, facts)


def test_weights_that_name_the_model(capsys):
  path = f'{runs.ROOT}/configs/finetune.py'
  assert record_of(capsys, '--config', path)['model'] == 'vit:B/16'
  code, _, err = run(capsys, '--config', f'{path}:weights=/not/there.npz')
  assert code == 2
  assert '--config.model.variant=B/16' in err
