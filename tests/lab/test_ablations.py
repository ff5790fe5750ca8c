"""The cells of every ablation, and a run of each on its own data."""

import re

import pytest

from tests.support import commands
from vit_jax import config as config_lib
from vit_jax.lab import runner, sweep
from vit_jax.lab.ablations import ABLATIONS, CELLS, RESNET
from vit_jax.lab.published import CLAIMS
from vit_jax.tools.inspect.model import cost


def plan(tmp_path, name, *argv):
  """Returns {cell: config} of the runs of seed 0, all of them checked."""
  grid = sweep.plan(sweep.parse(['--ablation', name, *argv]), tmp_path)
  return {run.cell: run.config for run in grid.runs if run.seed == grid.runs[0].seed}


def size(config, shape=(16, 16, 1)):
  return cost({'num_classes': 10, **config['model']}, shape)


def test_the_papers_numbers_and_claims_are_about_cells(tmp_path):
  for name in ('head', 'tune', 'axial', 'resolution'):
    assert plan(tmp_path, name)
  cells = {}
  for name, ablation in ABLATIONS.items():
    base = runner.change(config_lib.load(ablation.config), ablation.changes)
    cells[name] = ablation.cells(base)
    assert set(ablation.beside[1]) <= set(cells[name])
  for claim in CLAIMS:
    assert claim.first in cells[claim.ablation]
    assert claim.second in cells[claim.ablation] or 0 < float(claim.second) < 1


def test_position_embeddings_differ_by_the_parameters_of_the_paper(tmp_path):
  N, g, D, L, head = 16, 4, 96, 3, 16
  expected = {
    'none': 0,
    '1d': N * D,
    '1d-every': L * N * D,
    '1d-shared': N * D,
    '2d': g * D,
    '2d-every': L * g * D,
    '2d-shared': g * D,
    'relative': L * (2 * N - 1) * head,
    'rotary': 0,
    'sincos2d': 0,
  }
  sizes = {name: size(c).parameters for name, c in plan(tmp_path, 'posemb').items()}
  assert {name: n - sizes['none'] for name, n in sizes.items()} == expected


def test_heads_have_the_papers_ratio_of_rates(tmp_path):
  cells = plan(tmp_path, 'head', '--set', 'optim.lr=8e-4')
  rates = {name: config['optim']['lr'] for name, config in cells.items()}
  assert rates.pop('gap-lower-lr') == pytest.approx(3e-4)
  assert set(rates.values()) == {8e-4}


def test_shapes_meet_at_the_base_and_compute_more_or_less(tmp_path):
  sizes = {name: size(c).operations for name, c in plan(tmp_path, 'shape').items()}
  base = sizes.pop('base')
  pairs = (('depth-1', 'depth-4'), ('width-24', 'width-96'), ('mlp-48', 'mlp-192'))
  for less, more in (*pairs, ('patch-8', 'patch-2'), ('all-x0.5', 'all-x2')):
    assert sizes.pop(less) < base < sizes.pop(more)
  assert not sizes


def test_models_beside_a_vit_compute_as_much(tmp_path):
  cells = plan(tmp_path, 'families')
  vit = size(cells.pop('vit')).operations
  for config in cells.values():
    assert size(config).operations == pytest.approx(vit, rel=0.1)
  cells = plan(tmp_path, 'data_size')
  assert cells['resnet-10pct']['data']['split'] == 'train[:10%]'
  vit = size(cells['vit-3pct'], (32, 32, 3)).operations
  assert size({'model': RESNET}, (32, 32, 3)).operations == pytest.approx(vit, rel=0.1)


def test_optimizers_keep_the_recipe_s(tmp_path):
  cells = plan(tmp_path, 'optimizer')
  assert cells['adamw']['optim']['lr'] == 2e-3
  assert cells['sgd']['optim'] == {
    **dict(name='sgd', lr=0.3, wd=1e-3, momentum=0.9, clip=1.0),
    'schedule': cells['adamw']['optim']['schedule'],
  }


def test_pyramids_have_as_many_anchors_of_each_size(tmp_path):
  cells = {name: c['model'] for name, c in plan(tmp_path, 'pyramid').items()}
  levels = {name: len(model['anchor_sizes']) for name, model in cells.items()}
  assert levels == {'none': 1, 'fpn_stages': 4, 'fpn_last': 4, 'simple': 4}
  for name, model in cells.items():
    assert sum(map(len, model['anchor_sizes'])) == 4
    assert model['backbone']['pyramid'] == name


def test_masked_pretrains_without_labels_and_tunes_with_few(tmp_path):
  cells = plan(tmp_path, 'masked')
  assert len(cells) == 9
  for name, task in CELLS['masked'].items():
    before, after = cells[f'pretrain-{name}'], cells[name]
    assert before['task'] == {'name': 'masked_patches', **task}
    assert (before['data']['split'], after['data']['split']) == ('train', 'train[:100]')
    assert after.pop('weights') == {'source': f'{tmp_path}/runs/pretrain-{name}-seed0'}
    assert after == {k: v for k, v in cells['scratch'].items() if k != 'weights'}


def test_cells_bring_those_that_they_start_from(tmp_path):
  assert list(plan(tmp_path, 'tune', '--cells', 'linear,lora')) == [
    *('pretrain', 'linear', 'lora')
  ]
  cells = plan(tmp_path, 'tune')
  assert set(cells) == {'pretrain', *CELLS['tune']}
  assert cells['pretrain']['data']['classes'] == [0, 1, 2, 3, 4]
  assert cells['lora']['data']['classes'] == [5, 6, 7, 8, 9]


# As small as the data allows: compiling is most of the time.
_SHORT = ['steps=2', 'optim.schedule.warmup=1', 'data.batch_size=8']
_FEW = 'evals.test.data.split=test[:8]'
STARTED = {
  'masked': ('scratch', ['steps=2', 'optim.schedule.warmup=1', 'model.depth=1']),
  'posemb': ('1d-shared', [*_SHORT, 'model.depth=1']),
  'axial': ('axial', [*_SHORT, 'model.depth=1']),
  'tune': ('pretrain', ['epochs=0.4', 'optim.schedule.warmup=1', 'model.depth=1']),
  'shape': ('patch-8', _SHORT),
  'optimizer': ('sgd', [*_SHORT, _FEW]),
  'families': ('mixer', [*_SHORT, _FEW]),
  'data_size': ('resnet-3pct', [*_SHORT, _FEW]),
  'resolution': ('16px', [*_SHORT, _FEW]),
  'pyramid': ('fpn_stages', [*_SHORT, _FEW]),
}


@pytest.mark.slow
@pytest.mark.usefixtures('one_device')
@pytest.mark.parametrize('name', STARTED)
def test_each_starts_on_its_own_data(name, tmp_path, capsys):
  cell, words = STARTED[name]
  argv = ['--ablation', name, '--cells', cell, '--set', *words, 'seed=0']
  code, _, error = commands.run(sweep.main, capsys, *argv, '--out', tmp_path)
  assert (code, [x for x in error.splitlines() if 'warning' not in x]) == (0, [])
  (row,) = commands.results(tmp_path)
  assert row['steps'] == '2'
  assert any(re.search(r'_\d+shot$|top1$|/mask_ap$', key) for key in row)
