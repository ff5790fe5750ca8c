"""ViTDet in training: a detector and a segmenter of digits, from the run of a ViT."""

import runpy

import numpy as np
import pytest

from tests.support import naming, runs
from vit_jax import config, models, trees, weights
from vit_jax.errors import UserError
from vit_jax.train import schema

CONFIG = f'{runs.ROOT}/configs/vitdet_digits.py'


def like(run, head: str) -> dict:
  """Returns the config, its ViTDet of the sizes of the ViT in a run's folder."""
  c = config.load(f'{CONFIG}:debug,head={head},weights={run}')
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
  given, _ = weights.fit(source, model, (64, 64))
  below = 'backbone/' if head == 'detr' else 'backbone/backbone/'
  theirs = trees.flatten(weights.load(short_run).params)
  followed = ('Transformer/encoder_norm/', 'head/')
  kept = [name for name in theirs if not name.startswith(followed)]
  assert set(given) == {f'{below}{name}' for name in kept}
  for name in kept:
    np.testing.assert_array_equal(given[f'{below}{name}'], theirs[name])


def test_rates_of_a_started_backbone_decay_and_those_of_a_fresh_one_do_not():
  assert config.load(f'{CONFIG}:weights=RUN')['optim']['layer_decay'] == 0.7
  assert 'layer_decay' not in config.load(CONFIG)['optim']


def test_an_unknown_head():
  with pytest.raises(UserError, match=naming("'segmnt'", "'segment'")):
    config.load(f'{CONFIG}:head=segmnt')


@pytest.mark.slow
def test_a_vit_and_what_is_built_on_it(tmp_path, monkeypatch):
  runs.on_one_device(monkeypatch)
  vit = tmp_path / 'vit'
  runs.train.train(config.load(f'{CONFIG}:debug,head=classify'), vit)
  for head, number in (('detr', 'ap50'), ('segment', 'mean_iou')):
    c = config.load(f'{CONFIG}:debug,head={head},weights={vit}')
    status, rows = runs.train.train(c, tmp_path / head)
    runs.assert_finished(status, rows, c['evals'])
    assert 0 <= rows[-1][f'test/{number}'] < 1
  picture = tmp_path / 'canvases.png'
  script = runpy.run_path(f'{runs.ROOT}/docs/images/canvases.py')
  script['main'](tmp_path / 'detr', tmp_path / 'segment', picture)
  assert picture.stat().st_size > 1_000
