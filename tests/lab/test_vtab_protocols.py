"""vit_jax vtab: what each protocol says of a task, and what is refused before any run."""

import pytest

from tests.support import GOLDEN, commands, naming
from vit_jax import optim
from vit_jax.errors import UserError
from vit_jax.lab.vtab import __main__ as vtab
from vit_jax.lab.vtab import arguments, asked, benchmarks, results
from vit_jax.train import program

SOURCE = str(GOLDEN / 'vit_google_token.npz')  # images of 32 x 32 pixels


def task(name, *argv, tmp_path):
  args = arguments.parse([SOURCE, *argv])
  model = asked.told(SOURCE)
  return asked.task(args, args.benchmark, name, model, tmp_path)


def config(name, *argv, tmp_path):
  """Returns the config of the first run."""
  return task(name, *argv, tmp_path=tmp_path).search.planned[0].config


def test_the_papers_protocol(tmp_path):
  of = lambda name: task(name, tmp_path=tmp_path)
  planned = of('cifar100').search.planned
  assert [run.config['seed'] for run in planned] == [0, 1, 2]
  found = planned[0].config
  assert (found['steps'], found['data']['batch_size']) == (2500, 512)
  assert found['data']['split'] == 'train800val200'
  assert set(found['evals']) == {'test'}
  assert found['evals']['test']['data']['split'] == 'test'
  section = found['optim']
  assert (section['name'], section['lr'], section['clip']) == ('sgd', 0.01, 1.0)
  assert section['momentum'] == 0.9
  assert section['schedule'] == {'decay': 'cosine', 'warmup': 500}
  assert 'wd' not in section
  assert found['model'] == {'dtype': 'float32', 'representation_size': None}
  assert found['data']['pp'].split('|') == [
    'decode(3)',
    "resize(448, rounding='nearest')",
    'random_crop(384)',
    'flip_lr',
    'value_range(-1, 1)',
  ]
  pp = lambda name: of(name).search.planned[0].config['data']['pp']
  assert 'flip' not in pp('svhn')
  assert 'random_crop(384)' in pp('svhn')
  assert 'flip' in pp('clevr_count')
  assert 'crop' not in pp('clevr_count')
  assert pp('dspr_loc').count('|') == 2


@pytest.mark.slow
def test_bits_hyperrule(tmp_path):
  large = config('pets', '--protocol', 'bit', tmp_path=tmp_path)
  assert (large['steps'], large['data']['batch_size']) == (500, 512)
  assert 'random_crop(384)' in large['data']['pp']
  small = config('svhn', '--protocol', 'bit', tmp_path=tmp_path)
  assert "resize(160, rounding='nearest')|random_crop(128)" in small['data']['pp']
  assert 'mixup' not in small['task']
  rate = optim.build(**small['optim'], total_steps=500).rate
  assert [float(rate(step)) for step in (50, 150, 250, 350, 450)] == pytest.approx(
    [0.0015, 0.003, 3e-4, 3e-5, 3e-6]
  )


# tune.method -> optimizer, rates for 256 images, batch size, by the paper's appendix.
BODIES, HEADS = (1e-4, 5e-4, 1e-3, 5e-3), (50, 25, 10, 5, 2.5, 1, 0.5, 0.25, 0.1, 0.05)
GRIDS = {
  'full': ('adamw', BODIES, 384, 384),
  'bias': ('adamw', BODIES, 128, 128),
  'linear': ('sgd', HEADS, 1024, 800),  # no more than there are images to train on
  'vpt': ('sgd', HEADS, 128, 128),
}


@pytest.mark.parametrize('method', GRIDS)
def test_vpts_protocol(method, tmp_path):
  name, rates, batch_size, cut = GRIDS[method]
  argv = ['--protocol', 'vpt', '--set', f'tune.method={method}']
  search = task('dmlab', *argv, tmp_path=tmp_path).search
  assert len(search.planned) == 4 * len(rates)
  assert {run.seed for run in search.planned} == {0}
  sections = [run.config['optim'] for run in search.planned]
  assert {section['name'] for section in sections} == {name}
  found = list(dict.fromkeys(section['lr'] for section in sections))
  # Rising: of equal accuracies the smaller rate is taken.
  assert found == pytest.approx([rate * batch_size / 256 for rate in sorted(rates)])
  assert max(len(str(rate)) for rate in found) < 10  # they name folders
  assert {section['wd'] for section in sections} == {0.01, 0.001, 0.0001, 0.0}
  first = search.planned[0].config
  assert first['data']['batch_size'] == cut
  assert (first['data']['split'], first['epochs']) == ('train800', 100)
  assert first['data']['pp'] == (
    "decode(3)|resize(224, rounding='nearest')|value_range(-1, 1)"
  )
  assert first['evals']['val']['data']['split'] == 'val200'
  assert first['evals']['val'].get('every') is None  # at the end only
  assert first['optim']['schedule']['warmup'] == pytest.approx(10 * 800 / cut, abs=1)
  assert search.pick == ('val/top1', True)
  final = search.again(search.planned[5].cell)
  assert [run.seed for run in final] == [42, 44, 82, 100, 800]
  last = final[0].config
  assert last['data']['split'] == 'train800val200'
  assert list(last['evals']) == ['test']
  for key in ('lr', 'wd'):
    assert last['optim'][key] == sections[5][key]
  assert last['optim']['schedule']['warmup'] == pytest.approx(10 * 1000 / cut, abs=1)


def test_fgvc_is_the_same_with_other_tasks(tmp_path):
  argv = ['--fgvc', '--protocol', 'vpt', '--set', 'tune.method=bias']
  search = task('cub', *argv, tmp_path=tmp_path).search
  first = search.planned[0].config
  assert first['data']['source'] == 'fgvc:cub'
  assert first['data']['pp'].split('|')[1:-1] == [
    "resize_small(256, rounding='nearest')",
    *('random_crop(224)', 'flip_lr'),
  ]
  assert first['evals']['val']['data']['pp'].split('|')[1:-1] == [
    *("resize_small(256, rounding='nearest')", 'central_crop(224)')
  ]
  # VPT reports the test accuracy of what learned from the training split alone.
  splits = lambda argv, name='cub': [
    run.config['data']['split']
    for search in [task(name, *argv, tmp_path=tmp_path).search]
    for run in (
      search.again(search.planned[0].cell) if search.again else search.planned
    )
  ]
  assert splits(argv) == ['train'] * 5
  assert splits(['--fgvc', '--protocol', 'bit']) == ['trainval'] * 3
  # BiT's rule for sets of 20,000 and more.
  birds = config('nabirds', '--fgvc', '--protocol', 'bit', tmp_path=tmp_path)
  assert (birds['steps'], birds['task']['mixup']) == (10_000, 0.1)
  assert birds['optim']['schedule']['warmup'] == 500
  assert results.groups_of(benchmarks.FGVC) == {
    'Mean of 5': [
      *('CUB-200-2011', 'NABirds', 'Oxford Flowers', 'Stanford Dogs', 'Stanford Cars')
    ]
  }


def test_set_overrides_the_protocol(tmp_path):
  words = ['optim.lr=0.5', 'optim.wd=0,0.1', 'steps=20', 'seed=7', 'tune.method=linear']
  of = lambda *argv: task('svhn', *argv, tmp_path=tmp_path).search
  search = of('--protocol', 'vpt', '--set', *words)
  assert [run.cell.name for run in search.planned] == ['optim.wd=0', 'optim.wd=0.1']
  first = search.planned[0].config
  assert (first['optim']['lr'], first['steps']) == (0.5, 20)
  assert 'epochs' not in first
  assert first['optim']['schedule']['warmup'] == 2
  assert [run.seed for run in search.again(search.planned[0].cell)] == [7]
  # One setting for all tasks becomes a choice, if there are several values.
  search = of('--set', 'optim.lr=0.003,0.01', 'optim.schedule.warmup=5')
  assert [run.config['data']['split'] for run in search.planned] == ['train800'] * 2
  (*_, last) = search.again(search.planned[0].cell)
  assert (last.seed, last.config['data']['split']) == (2, 'train800val200')
  assert last.config['optim']['schedule']['warmup'] == 5
  # What follows from the steps and the batch does so in each combination.
  search = of('--set', 'steps=10,100', 'data.batch_size=64,128')
  sections = [run.config['optim'] for run in search.planned]
  assert [x['schedule']['warmup'] for x in sections] == [2, 2, 20, 20]
  assert [x['accum'] for x in sections] == [1, 2, 1, 2]
  (*_, last) = search.again(search.planned[3].cell)
  assert last.config['optim']['schedule']['warmup'] == 20
  own = of('--set', 'optim={"name": "sgd", "lr": 0.1}').planned[0].config['optim']
  assert own == {'name': 'sgd', 'lr': 0.1, 'accum': 8}
  # An image of a size that only the data tells: a run will see whether it fits.
  open_size = of('--set', 'data.pp=decode(3)|value_range(-1, 1)')
  asked.check_sizes(
    {'svhn': asked.Asked(open_size, [], [], [], {})}, asked.told(SOURCE)
  )


REFUSED = {
  'a task': ([SOURCE, '--tasks', 'pet'], ('pet', 'pets', 'natural')),
  'no task': ([SOURCE, '--tasks', ''], ('task',)),
  'a protocol': ([SOURCE, '--protocol', 'bits'], ('bits', 'bit')),
  'a key': ([SOURCE, '--set', 'optim.lrr=1'], ('lrr', 'lr')),
  'a method': ([SOURCE, '--set', 'tune.method=lorra'], ('lorra', 'lora')),
  'weights': (['nothing.npz'], ('nothing.npz',)),
  'a resolution': (
    [SOURCE, '--protocol', 'bit', '--resolution', '30'],
    ('caltech101', '--resolution', '30x30', '8x8'),
  ),
  'a duration': ([SOURCE, '--set', 'steps=0'], ('steps=0',)),
  # What the benchmark says would be said in vain, or of training alone.
  'a split': ([SOURCE, '--set', 'data.split=test'], ('data.split', 'sweep')),
  'splits': ([SOURCE, '--set', 'data.split=train800,test'], ('data.split',)),
  'a source': ([SOURCE, '--set', 'data.source=digits'], ('data.source', '--tasks')),
  'a folder': (
    [SOURCE, '--set', 'data.source_options.data_dir=x'],
    ('data.source_options.data_dir', '--data_dir'),
  ),
  'no evaluation': ([SOURCE, '--set', 'evals={}'], ('--set', 'evals', 'val')),
  'a number of prompts': (
    [SOURCE, '--protocol', 'vpt', '--set', 'tune.method=vpt', 'tune.number=None'],
    ('tune', 'number'),
  ),
  'methods, whose grids differ': (
    [SOURCE, '--protocol', 'vpt', '--set', 'tune.method=linear,full'],
    ('tune.method', 'vpt', 'one value'),
  ),
}


@pytest.mark.parametrize('name', REFUSED)
def test_what_is_refused_before_any_run(name, tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(program, 'train', None)
  argv, facts = REFUSED[name]
  argv = [*argv, '--out', tmp_path / 'out']
  commands.assert_refused(vtab.main, capsys, argv, facts)
  assert not (tmp_path / 'out').exists()


def test_tasks_are_named_by_groups_too():
  chosen = benchmarks.VTAB.chosen
  assert len(chosen('all')) == 19
  assert chosen('dmlab,specialized') == [
    *('camelyon', 'eurosat', 'resisc45', 'retinopathy', 'dmlab')
  ]
  with pytest.raises(UserError, match=naming('dtdd', 'dtd')):
    chosen('natural,dtdd')
