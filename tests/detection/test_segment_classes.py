"""The classes of segments: those of a model are as many, and have the same names."""

import jax
import pytest

from tests.support import naming, runs
from vit_jax import sharding
from vit_jax.data import pipeline
from vit_jax.detection.evaluators.segmentation import Segmentation
from vit_jax.errors import UserError
from vit_jax.evaluators.class_match import Classes
from vit_jax.tools.inspect import recipe
from vit_jax.train import start

NAMES = ['background', *map(str, range(10))]

CANVASES = dict(
  source='digits_canvas',
  split='train[:8]',
  source_options={'segments': True},
  pp='value_range(-1, 1)|pad_to(boxes=4, label=4)',
)


@pytest.fixture
def resolved():
  """Returns a function model section -> the config as a run on canvases resolves it."""
  data = pipeline.train(**CANVASES, batch_size=8)
  given = dict(task={'name': 'segment'}, data=CANVASES, steps=1, evals={})
  given |= dict(checkpoint={}, log={})
  return lambda section: start.resolve({**given, 'model': section}, data)


def test_a_model_has_the_classes_of_the_segments(resolved):
  config = resolved({})
  assert config['model']['num_classes'] == 11  # not the 10 of the boxes
  assert config['resolved']['class_names'] == NAMES


def test_a_model_without_a_class_of_the_segments_is_refused(resolved):
  facts = ('digits_canvas', 'segments', '11 classes', 'num_classes=10')
  with pytest.raises(UserError, match=naming(*facts)):
    resolved({'num_classes': 10})


@pytest.fixture(scope='module')
def evaluator():
  mesh = sharding.make_mesh(1, devices=jax.devices()[:1])
  data = {**CANVASES, 'batch_size': 8}
  return lambda model, **o: Segmentation(mesh, lambda: None, model, data=data, **o)


def test_an_evaluation_of_other_classes_is_refused_before_it_begins(evaluator):
  evaluator(Classes(NAMES, 11))
  evaluator(Classes([*NAMES, ''], 12))
  with pytest.raises(
    UserError, match=naming('digits_canvas', 'class 10', '10 classes')
  ):
    evaluator(Classes(None, 10))
  evaluator(Classes(None, 10), ignore=10)
  with pytest.raises(UserError, match=naming('Class 0', "'background'", "'0'")):
    evaluator(Classes(NAMES[1:], 11))


@pytest.mark.slow
def test_inspect_counts_a_head_for_them():
  checked = recipe.load(f'{runs.ROOT}/configs/vitdet_digits.py:debug,head=segment', [])
  assert recipe.describe(checked)['classes'] == 11
