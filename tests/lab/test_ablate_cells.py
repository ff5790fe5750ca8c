"""vit_jax ablate: the cells of each ablation, and what is refused."""

import importlib

import pytest

from tests.support import commands, naming, runs
from tests.support.figures import small_figures  # noqa: F401
from vit_jax import errors
from vit_jax.lab import published
from vit_jax.lab.ablate import __main__ as ablate
from vit_jax.lab.ablate import arguments, asked, data_size, posemb
from vit_jax.lab.grid import cells as grid
from vit_jax.tools.inspect import cost


def cells_of(name, *argv):
  """Returns (config, cells by name) of a command line."""
  args = arguments.parse([name, *argv])
  _, config, found = asked.cells(args, asked.ablation(name))
  assert len({cell.name for cell in found}) == len(found)
  return config, {cell.name: cell for cell in found}


# --- cells ----------------------------------------------------------------------------


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(n, marks=() if n == 'families' else pytest.mark.slow)
    for n in arguments.NAMES
  ],
)
def test_each_ablation_is_documented_and_fits_its_data(name, tmp_path):
  module = importlib.import_module(f'vit_jax.lab.ablate.{name}')
  guide = (runs.ROOT / 'docs/guides/ablations.md').read_text()
  assert f'`{name}`' in guide
  for data in module.ABLATION.bases:
    config, found = cells_of(name, '--data', data)
    assert set(module.ABLATION.published) <= set(found)
    first, *_, last = found.values()
    grid.plan(config, [first, last], [0], tmp_path)


@pytest.mark.slow
def test_position_embeddings_differ_by_the_parameters_of_the_paper():
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
  config, found = cells_of('posemb')
  assert list(found) == list(expected)
  model = lambda cell: grid.changed(config, cell.changes)['model']
  sizes = {
    name: cost.of({'num_classes': 10, **model(cell)}, (16, 16, 1)).parameters
    for name, cell in found.items()
  }
  assert {name: size - sizes['none'] for name, size in sizes.items()} == expected


def test_table_8_is_the_papers():
  shown = posemb.ABLATION.published
  assert len(shown) == len(published.TABLE_8) == 8
  assert shown['none'] == '61.38'
  assert max(shown, key=lambda cell: float(shown[cell])) == '1d-shared'


def test_table_7_has_the_averages_that_the_paper_prints():
  means = [sum(values) / 5 for values in published.TABLE_7.values()]
  assert means == pytest.approx([89.33, 88.79, 94.01, 93.72], abs=0.025)
  adam = {row.name: row for row in published.TABLE_6 if row.epochs == 7}
  for name in ('R50x1', 'R152x2'):
    row = adam[name]
    five = row.imagenet, row.cifar10, row.cifar100, row.pets, row.flowers
    assert published.TABLE_7[name, 'adam'] == five


def test_heads_have_the_papers_ratio_of_rates():
  _, found = cells_of('head', '--set', 'optim.lr=8e-4')
  rates = {name: cell.changes['optim.lr'] for name, cell in found.items()}
  assert rates.pop('gap-lower-lr') == pytest.approx(3e-4)
  assert set(rates.values()) == {8e-4}
  assert {cell.changes['model.classifier'] for cell in found.values()} == {
    *('token', 'gap', 'map'),
  }


@pytest.mark.slow
def test_shapes_meet_at_the_base_and_compute_more_or_less():
  config, found = cells_of('shape')
  sizes = {}
  for name, cell in found.items():
    model = grid.changed(config, cell.changes)['model']
    sizes[name] = cost.of({'num_classes': 10, **model}, (16, 16, 1)).operations
  base = sizes.pop('base')
  pairs = (('depth-1', 'depth-4'), ('width-24', 'width-96'), ('mlp-48', 'mlp-192'))
  for less, more in (*pairs, ('patch-8', 'patch-2'), ('all-x0.5', 'all-x2')):
    assert sizes.pop(less) < base < sizes.pop(more)
  assert not sizes
  # Of a recipe that names a variant, too.
  _, found = cells_of('shape', '--config', 'vit_b16')
  assert found['base'].changes == {
    'model.depth': 12,
    'model.width': 768,
    'model.mlp_dim': 3072,
    'model.patch_size': (16, 16),
  }
  assert found['all-x2'].changes['model.patch_size'] == [8, 8]


def test_the_resnet_computes_as_much_as_the_vit(monkeypatch):
  _, found = cells_of('data_size')
  operations = {
    name: cost.of({'num_classes': 36, **cell.changes['model']}, (32, 32, 3)).operations
    for name, cell in found.items()
  }
  vit, resnet = operations['vit-3pct'], operations['resnet-3pct']
  assert resnet == pytest.approx(vit, rel=0.1)
  assert found['resnet-10pct'].changes['data.split'] == 'train[:10%]'
  monkeypatch.setattr(data_size, '_BLOCKS', ((1,),))
  with pytest.raises(errors.UserError, match=naming('GFLOPs', '--set')):
    data_size.equal_compute(found['vit-3pct'].changes['model'], (16, 16, 1))


def test_optimizers_keep_what_the_recipe_says():
  config, found = cells_of('optimizer', '--config', 'bit_i21k')
  assert found['sgd'].changes['optim'] == config['optim']
  adam = found['adam'].changes['optim']
  assert (adam['name'], adam['lr'], adam['wd']) == ('adamw', 1e-3, 0.1)
  assert adam['schedule'] == config['optim']['schedule']
  _, found = cells_of('optimizer', '--data', 'shapes:class')
  assert found['adam'].changes['optim']['lr'] == 2e-3


def test_cells_bring_those_whose_runs_they_start_from():
  _, found = cells_of('tune', '--cells', 'linear,lora')
  assert list(found) == ['pretrain', 'linear', 'lora']
  _, found = cells_of('masked', '--cells', 'scratch')
  assert list(found) == ['scratch']


# --- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
  ('argv', 'facts'),
  [
    (['posenb'], ("'posenb'", 'posemb')),
    (['head', '--config', 'bit_i21k:debug'], ('head', 'bit', '--config')),
    (['shape', '--config', 'vit_jft:variant=R50+B/16'], ('shape', 'hybrid')),
    (['shape', '--set', 'model.depth=3'], ('model.depth=3', '--set')),
    (['optimizer', '--config', 'digits'], ('optimizer', 'vit', 'bit_i21k')),
    (['posemb', '--config', 'finetune'], ('posemb', 'config.model.name')),
    (['data_size', '--config', 'vit_i1k'], ('data_size', 'train[:99%]')),
    (['data_size', '--config', 'digits'], ('data_size', 'epochs', 'steps=N')),
    (['posemb', '--data', 'shapes:count'], ("'shapes:count'", 'shapes:position')),
    (['posemb', '--data', 'x', '--config', 'digits'], ("'data=x'", 'epochs')),
    (['posemb', '--seeds', '0,a'], ("'0,a'",)),
    (['posemb', '--cells', 'none,3d'], ("'3d'", '2d')),
    (['posemb', '--set', 'model.posemb=none'], ('model.posemb', 'cells')),
    (['posemb', '--set', 'model.depht=3'], ('depht', 'depth')),
    (['posemb', '--set', 'seed=3'], ('seed', '--seeds')),
    (['posemb', '--set', 'log.report=True'], ('log.report', 'vit_jax report')),
    (['posemb', '--set', 'steps=4'], ('none', 'warmup')),
  ],
  ids=lambda value: ' '.join(value) if isinstance(value, list) else '',
)
def test_refused_in_one_line(argv, facts, tmp_path, capsys):
  argv = [*argv, '--out', tmp_path / 'out']
  commands.assert_refused(ablate.main, capsys, argv, facts)
  assert not (tmp_path / 'out').exists()


def test_a_folder_of_ones_own(tmp_path):
  config, _ = cells_of('posemb', '--data', str(tmp_path))
  assert config['data']['source'] == str(tmp_path)
