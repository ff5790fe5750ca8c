"""A run of masked patch prediction, and tools that read its folder."""

import json

import numpy as np
import pytest

import vit_jax
from tests.support import naming, runs
from vit_jax import trees
from vit_jax.errors import UserError
from vit_jax.tools import evaluate, predict
from vit_jax.tools.inspect import recipe
from vit_jax.train import run as train

DIGITS = dict(source='digits', train='train[:200]', test='test[:40]')
TASK = dict(name='masked_patches', target='downsized')
EVALS = {
  'val': dict(type='masked_patches', data=runs.TEST | {'split': 'test[:40]'}),
  'few': dict(
    type='fewshot',
    datasets={'digits': DIGITS},
    pp='value_range(-1, 1)',
    batch_size=40,
    shots=[2],
    seeds=[0],
  ),
}
CHANGES = (*runs.SHORT, 'checkpoint.best=val/loss', 'model.patch_size=(4,4)')


@pytest.fixture(scope='module')
def pretrained_run(tmp_path_factory):
  folder = tmp_path_factory.mktemp('masked')
  status, rows = runs.run_on_one_device(folder, *CHANGES, task=TASK, evals=EVALS)
  runs.assert_finished(status, rows, EVALS)
  return folder


@pytest.fixture(scope='module')
def encoder(pretrained_run):
  """Returns {name: array} as the checkpoint's files have them."""
  import orbax.checkpoint as ocp

  stored = ocp.StandardCheckpointer().restore(
    pretrained_run.absolute() / 'checkpoints' / '4' / 'params'
  )
  flat = {name: np.asarray(x) for name, x in trees.flatten(stored).items()}
  return {n: x for n, x in flat.items() if not n.startswith('masked_patches/')}


def assert_encoder(params, encoder):
  assert set(params) == set(encoder)
  for name, x in params.items():
    np.testing.assert_array_equal(x, encoder[name], err_msg=name)


def test_a_run_measures_masked_patches_and_features(pretrained_run):
  last = [row for row in runs.rows(pretrained_run) if row['step'] == 4]
  measured = {'val/loss', 'val/accuracy', 'val/examples', 'few/digits_2shot'}
  assert measured <= {key for row in last for key in row}
  config = json.loads((pretrained_run / 'config.json').read_text())
  assert config['model']['num_classes'] is None


def test_load_gives_the_encoder_bit_for_bit(pretrained_run, encoder):
  averaged = vit_jax.load(f'{pretrained_run}@best', ema=True)
  assert set(averaged.params) == {'Transformer', 'embedding'}
  loaded = vit_jax.load(str(pretrained_run))
  assert loaded.model.num_classes is None
  assert (loaded.step, loaded.image_size) == (4, (8, 8))
  assert loaded.pp == 'decode(1)|value_range(-1, 1)'
  assert_encoder(trees.flatten(loaded.params), encoder)
  _, features = loaded.model.apply(loaded.variables, np.zeros((1, 8, 8, 1), np.float32))
  assert features['pre_logits'].shape == (1, 16)


def test_fine_tuning_takes_the_encoder_and_a_new_head(
  pretrained_run, encoder, tmp_path, one_device, monkeypatch
):
  start, init = {}, train.Trainer.init
  monkeypatch.setattr(
    train.Trainer, 'init', lambda self, x: start.update(x) or init(self, x)
  )
  config = runs.small(*runs.SHORT, 'data.pp=value_range(-1, 1)', 'steps=2')
  config |= {'model': {}, 'weights': {'source': str(pretrained_run)}, 'evals': {}}
  config['checkpoint'] = dict(every=2)
  assert train.train(config, tmp_path / 'run')[0]['exit'] == 0
  assert_encoder(start, encoder)
  tuned = vit_jax.load(str(tmp_path / 'run'))
  assert tuned.params['head']['kernel'].shape == (16, 10)


def test_inspect_knows_the_recipe():
  config = recipe.load('masked_patches', [])
  record = recipe.describe(config, examples=303_000_000)
  assert (record['classes'], record['beside']) == (None, 'masked_patches')
  assert record['epochs'] == pytest.approx(13.5, abs=0.1), 'the paper: about 14'
  assert 'task masked_patches' in recipe.render(record, 'masked_patches')


def test_tools_that_need_classes_refuse_in_a_line(pretrained_run, tmp_path):
  image = tmp_path / 'x.png'
  image.write_bytes(b'')
  for run in (
    lambda: evaluate.main([str(pretrained_run), '--data=digits', '--split=test']),
    lambda: predict.main([str(pretrained_run), str(image)]),
  ):
    with pytest.raises(UserError, match=naming('finetune', 'head')) as error:
      run()
    assert '\n' not in str(error.value)


CLASSIFY = dict(task=dict(name='classify'))
# Changes of the config, and the words of the error.
REFUSED = [
  (dict(evals=runs.EVALS), ('config.evals.test.type', 'classification', 'fewshot')),
  (CLASSIFY, ('config.evals.val.type', 'masked_patches', 'classification')),
  (dict(model=dict(name='vit', num_classes=10)), ('num_classes', '10')),
  # Labels that are not trained on are read all the same, for few-shot evaluations.
  ({'data.num_classes': 9}, ('0 to 9', 'num_classes', '9')),
]


@pytest.mark.parametrize(('changes', 'words'), REFUSED)
def test_a_task_data_and_evaluations_that_do_not_fit(tmp_path, changes, words):
  flags = [f'{key}={value}' for key, value in changes.items() if '.' in key]
  sections = {key: value for key, value in changes.items() if '.' not in key}
  config = runs.small(*CHANGES, *flags, **(dict(task=TASK, evals=EVALS) | sections))
  with pytest.raises(UserError, match=naming(*words)):
    train.train(config, tmp_path)


def test_data_of_more_classes_than_the_model(tmp_path):
  config = runs.small('data.num_classes=10', 'model.num_classes=9')
  with pytest.raises(UserError, match=naming('config.data.num_classes', '10', '9')):
    train.train(config, tmp_path)
