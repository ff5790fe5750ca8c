"""Runs that learn from a teacher: what they write, how they resume, what they refuse."""

import json
import re

import numpy as np
import pytest

import vit_jax
from tests.support import GOLDEN, image_folder, naming, runs
from vit_jax import config, trees
from vit_jax.errors import UserError
from vit_jax.tools.inspect import source
from vit_jax.train import teacher

# The student sees 16 x 16 pixels of another range, the teacher 8 x 8.
STUDENT = (
  *runs.SHORT,
  'model.patch_size=(4,4)',
  "data.pp=resize(16, method='bicubic', rounding='nearest')|value_range(0, 1)",
  'optim.accum=2',
)
EVALS = {'test': runs.EVALS['test'] | {'data': runs.TEST | {'pp': STUDENT[-2][8:]}}}


def distil(folder, teacher, *changes, name='distill', evals=EVALS):
  task = dict(name=name, teacher=str(teacher))
  return runs.run(folder, *STUDENT, *changes, task=task, evals=evals)


@pytest.fixture(scope='module')
def distilled(reference, tmp_path_factory):
  folder = tmp_path_factory.mktemp('distilled')
  with pytest.MonkeyPatch.context() as patch:
    runs.on_one_device(patch)
    status, rows = distil(folder, reference)
  runs.assert_finished(status, rows, EVALS)
  return folder


def test_a_run_says_who_its_teacher_is(distilled, reference):
  written = json.loads((distilled / 'config.json').read_text())
  section = written['task']['teacher']
  assert section.pop('model')['width'] == 16
  # [0, 1] becomes [-1, 1].
  expected = {'source': str(reference), 'image_size': [8, 8], 'scale': [2.0]}
  assert section == expected | {'shift': [-1.0]}
  assert {'train/loss', 'train/agreement'} <= runs.rows(distilled)[0].keys()


def test_pixels_of_the_teacher_are_those_of_its_pipeline():
  config = {
    'task': {'name': 'distill', 'teacher': str(GOLDEN / 'convnext_timm')},
    'data': {'pp': 'decode|resize(32)|value_range(-1, 1)'},
    'model': {'num_classes': 10},
    'resolved': {'image_shape': [32, 32, 3], 'class_names': None},
  }
  section = teacher.complete(config, None)['task']['teacher']
  pixels = np.random.default_rng(0).uniform(size=(5, 3))
  ours = (2 * pixels - 1) * section['scale'] + section['shift']
  # ImageNet's mean and deviation, which pipelines hold to seven digits.
  expected = (pixels - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
  np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_the_loaded_run_is_the_student(distilled, reference):
  loaded = vit_jax.load(str(distilled))
  assert 'distill' not in loaded.params
  assert loaded.image_size == (16, 16)
  names = {path.name for path in (distilled / 'checkpoints' / '4').rglob('*')}
  assert not any('teacher' in name for name in names)
  text = source.render(source.describe(str(distilled), {}))
  assert re.search(rf'teacher +{reference}\n', text)
  assert 'distill/' not in text
  averaged = vit_jax.load(str(distilled), ema=True)
  assert trees.flatten(averaged.params).keys() == trees.flatten(loaded.params).keys()


def test_a_killed_run_ends_with_the_same_bits(
  distilled, reference, tmp_path, one_device
):
  folder = runs.killed(distilled, tmp_path / 'run')
  distil(folder, reference)
  runs.assert_same(distilled, folder)


def test_another_teacher_is_refused(distilled, reference, tmp_path, one_device):
  folder = runs.killed(distilled, tmp_path / 'run')
  other = f'{reference}@20'
  with pytest.raises(UserError, match=naming('config.task.teacher', 'distill/teacher')):
    distil(folder, other)


def test_features_of_a_teacher_are_learned_without_labels(
  reference, tmp_path, one_device
):
  evals = {
    'few': dict(
      type='fewshot',
      datasets={'digits': dict(source='digits', train='train[:200]', test='test[:40]')},
      pp=EVALS['test']['data']['pp'],
      batch_size=40,
      shots=[2],
      seeds=[0],
    )
  }
  options = dict(name='distill_features', evals=evals)
  whole = tmp_path / 'whole'
  status, rows = distil(whole, reference, 'checkpoint.best=None', **options)
  runs.assert_finished(status, rows, evals)
  folder = runs.killed(whole, tmp_path / 'run')
  distil(folder, reference, 'checkpoint.best=None', **options)
  runs.assert_same(whole, folder)
  loaded = vit_jax.load(str(folder))
  assert loaded.model.num_classes is None
  assert 'distill' not in loaded.params


def test_images_without_labels_get_the_classes_of_the_teacher(
  reference, tmp_path, one_device
):
  image_folder.write_noise(tmp_path / 'data', [f'train/{i}.png' for i in range(8)])
  more = (f'data.source={tmp_path}/data', 'checkpoint.best=None')
  pp = "data.pp=decode(1)|resize(8, rounding='nearest')|value_range(-1, 1)"
  distil(tmp_path / 'whole', reference, *more, pp, evals={})
  folder = runs.killed(tmp_path / 'whole', tmp_path / 'run')
  distil(folder, reference, *more, pp, evals={})
  loaded = vit_jax.load(str(folder))
  assert (loaded.step, loaded.model.num_classes) == (4, 10)
  assert loaded.class_names == [str(i) for i in range(10)]


@pytest.mark.parametrize('recipe', ['deit_i1k', 'digits', 'finetune'])
def test_recipes_start_with_a_teacher(recipe, reference, tmp_path, monkeypatch):
  runs.on_one_device(monkeypatch)
  monkeypatch.chdir(runs.ROOT)
  # The recipes of ImageNet take digits as colour images.
  place = GOLDEN / 'vit_google_token.npz' if recipe == 'deit_i1k' else reference
  c = config.load(f'configs/{recipe}.py:debug,teacher={place}')
  runs.until_the_first_step(monkeypatch, c, tmp_path)


@pytest.mark.parametrize(
  ('place', 'more', 'facts'),
  [
    ('vit_google_token.npz', (), ('vit_google_token.npz', '3-channel', '1')),
    ('dinov3_hf', ('data.pp=decode(3)|value_range(-1, 1)',), ('=distill_features',)),
    ('detr_hf', ('data.pp=decode(3)|value_range(-1, 1)',), ('detr_hf', 'boxes')),
    ('none.npz', (), ('config.task.teacher', 'none.npz')),
    ('run', ('data.pp=value_range(-1, 1, 1, 255)',), ('1, 255', 'value_range(lo, hi)')),
    ('run', ('data.classes=[1,2]',), ('10 classes', '2')),
    ('run', ('data.classes=[1,0,2,3,4,5,6,7,8,9]',), ("class 0 is '0'", "'1'")),
  ],
)
def test_teachers_that_do_not_fit_are_refused(
  place, more, facts, reference, tmp_path, one_device
):
  weights = reference if place == 'run' else GOLDEN / place
  with pytest.raises(UserError, match=naming(*facts)):
    distil(tmp_path, weights, 'checkpoint.best=None', *more, evals={})
