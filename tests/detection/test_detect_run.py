"""A run that detects: data with boxes, the set loss and COCO's metric in one train loop."""

import pytest

from tests.support import naming, runs
from vit_jax import models
from vit_jax.errors import UserError

DATA = dict(
  source='digits_canvas',
  split='train[:8]',
  pp='value_range(-1, 1)|pad_to(boxes=4, label=4)',
  batch_size=8,
)


@pytest.fixture(autouse=True)
def model(monkeypatch):
  monkeypatch.setitem(models.MODELS, 'tiny_detector', 'tiny_detector')


def run(workdir, steps, evaluator='coco', **more):
  """Returns the last row of a run that trains and is evaluated on eight canvases."""
  c = runs.small(
    f'steps={steps}', 'optim.schedule.warmup=2', 'log.every=50', 'checkpoint.every=1000'
  )
  sections = dict(
    model={'name': 'tiny_detector', 'width': 64},
    task={'name': 'detect'},
    data={**c['data'], **DATA},
    optim={**c['optim'], 'lr': 3e-3, 'ema': None},
    evals={'test': {'type': evaluator, 'data': DATA}},
    checkpoint={**c['checkpoint'], 'best': 'test/ap50'},
  )
  sections |= more
  _, rows = runs.train.train({**c, **sections}, workdir)
  return rows[-1]


@pytest.mark.slow
def test_a_few_steps(tmp_path, capsys, monkeypatch):
  runs.on_one_device(monkeypatch)
  last = run(tmp_path / 'run', 2)
  assert last['test/examples'] == 8
  assert 0 <= last['test/ap50'] < 0.2
  assert 'test/ap_large' not in last  # no digit is as large
  # The objects' boxes and classes come from the data, not from the config.
  assert '8 images, 10 classes' in capsys.readouterr().out


@pytest.mark.slow
def test_eight_canvases_are_learned_by_heart(tmp_path):
  last = run(tmp_path / 'run', 500)
  assert last['test/ap50'] > 0.9


def test_an_evaluator_of_another_task(tmp_path):
  with pytest.raises(UserError, match=naming('classification', 'detect', 'coco')):
    run(tmp_path / 'run', 2, evaluator='classification')


def test_a_model_that_gives_no_boxes(tmp_path):
  with pytest.raises(UserError, match=naming('detect', 'boxes', 'vit')):
    run(tmp_path / 'run', 2, model={'name': 'vit', 'variant': 'mu/8'})
