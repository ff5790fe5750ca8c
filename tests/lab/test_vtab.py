"""vit_jax vtab: protocols, means, missing data, and runs that are stopped."""

import json
import os
import re
import signal

import pytest

from tests.support import GOLDEN, commands, naming, stand_in, vtab_fakes
from vit_jax import errors, optim
from vit_jax.lab import published, table, vtab
from vit_jax.lab.protocols import VTAB
from vit_jax.train import loop, program, progress

SOURCE = str(GOLDEN / 'vit_google_token.npz')  # images of 32 x 32 pixels

# --- protocols ------------------------------------------------------------------------


@pytest.fixture
def grid(tmp_path):
  model = vtab.read_model(SOURCE)
  return lambda task, *argv: vtab.plan(
    vtab._parse([SOURCE, *argv]), task, model, tmp_path
  )


def pp_of(config):
  return config['data']['pp'].split('|')[1:-1]


def test_the_papers_protocol(grid):
  runs = grid('cifar100').runs
  assert [run.config['seed'] for run in runs] == [0, 1, 2]
  first = runs[0].config
  assert (first['steps'], first['data']['batch_size']) == (2500, 512)
  assert first['data']['split'] == 'train800val200'
  assert [x['data']['split'] for x in first['evals'].values()] == ['test']
  assert first['optim'] == {
    **dict(name='sgd', lr=0.01, clip=1.0, momentum=0.9, moment_dtype='bfloat16'),
    **dict(schedule={'decay': 'cosine', 'warmup': 500}, accum=8),
  }
  assert first['model'] == {'dtype': 'float32', 'representation_size': None}
  larger, resize = (f"resize({size}, rounding='nearest')" for size in (448, 384))
  for task, ops in {
    'cifar100': [larger, 'random_crop(384)', 'flip_lr'],
    'svhn': [larger, 'random_crop(384)'],
    'clevr_count': [resize, 'flip_lr'],
    'dspr_loc': [resize],
  }.items():
    assert pp_of(grid(task).runs[0].config) == ops


def test_bits_hyperrule(grid):
  of = lambda task, *argv: grid(task, '--protocol', 'bit', *argv).runs[0].config
  large, small = of('pets'), of('svhn')
  assert (large['steps'], large['data']['batch_size']) == (500, 512)
  assert 'random_crop(384)' in large['data']['pp']
  assert "resize(160, rounding='nearest')|random_crop(128)" in small['data']['pp']
  assert 'mixup' not in small['task']
  rate = optim.build(**small['optim'], total_steps=500).rate
  assert [float(rate(step)) for step in (50, 150, 250, 350, 450)] == pytest.approx(
    [0.0015, 0.003, 3e-4, 3e-5, 3e-6]
  )
  birds = of('nabirds', '--fgvc')  # a set of 20,000 and more
  assert (birds['steps'], birds['task']['mixup']) == (10_000, 0.1)
  assert birds['optim']['schedule']['warmup'] == 500


# tune.method -> optimizer, rates for 256 images, batch size, by the paper's appendix.
BODIES, HEADS = (1e-4, 5e-4, 1e-3, 5e-3), (50, 25, 10, 5, 2.5, 1, 0.5, 0.25, 0.1, 0.05)
GRIDS = {
  'full': ('adamw', BODIES, 384, 384),
  'bias': ('adamw', BODIES, 128, 128),
  'linear': ('sgd', HEADS, 1024, 800),  # no more than there are images to train on
  'vpt': ('sgd', HEADS, 128, 128),
}


@pytest.mark.parametrize('method', GRIDS)
def test_vpts_protocol(method, grid):
  name, rates, batch_size, cut = GRIDS[method]
  search = grid('dmlab', '--protocol', 'vpt', '--set', f'tune.method={method}')
  assert (len(search.runs), {run.seed for run in search.runs}) == (4 * len(rates), {0})
  sections = [run.config['optim'] for run in search.runs]
  assert {section['name'] for section in sections} == {name}
  ours = list(dict.fromkeys(section['lr'] for section in sections))
  # Rising: of equal accuracies the smaller rate is taken.
  assert ours == pytest.approx([rate * batch_size / 256 for rate in sorted(rates)])
  assert max(len(str(rate)) for rate in ours) < 10  # they name folders
  assert {section['wd'] for section in sections} == {0.01, 0.001, 0.0001, 0.0}
  first = search.runs[0].config
  assert first['data']['batch_size'] == cut
  assert (first['data']['split'], first['epochs']) == ('train800', 100)
  assert pp_of(first) == ["resize(224, rounding='nearest')"]
  assert first['evals']['val']['data']['split'] == 'val200'
  assert first['evals']['val'].get('every') is None  # at the end only
  assert first['optim']['schedule']['warmup'] == pytest.approx(10 * 800 / cut, abs=1)
  assert (search.pick, search.larger) == ('val/top1', True)
  final = search.final(search.runs[5].cell)
  assert [run.seed for run in final] == [42, 44, 82, 100, 800]
  last = final[0].config
  assert (last['data']['split'], list(last['evals'])) == ('train800val200', ['test'])
  assert [last['optim'][k] for k in ('lr', 'wd')] == [
    sections[5][k] for k in ('lr', 'wd')
  ]
  assert last['optim']['schedule']['warmup'] == pytest.approx(10 * 1000 / cut, abs=1)


def test_fgvc_is_the_same_with_other_tasks(grid):
  search = grid('cub', '--fgvc', '--protocol', 'vpt', '--set', 'tune.method=bias')
  first = search.runs[0].config
  assert first['data']['source'] == 'fgvc:cub'
  resize = "resize_small(256, rounding='nearest')"
  assert pp_of(first) == [resize, 'random_crop(224)', 'flip_lr']
  assert pp_of(first['evals']['val']) == [resize, 'central_crop(224)']
  # VPT reports the test accuracy of training on the training split alone.
  splits = lambda runs: [run.config['data']['split'] for run in runs]
  assert splits(search.final(search.runs[0].cell)) == ['train'] * 5
  assert splits(grid('cub', '--fgvc', '--protocol', 'bit').runs) == ['trainval'] * 3


def test_set_overrides_the_protocol(grid):
  words = ['optim.lr=0.5', 'optim.wd=0,0.1', 'steps=20', 'seed=7', 'tune.method=linear']
  search = grid('svhn', '--protocol', 'vpt', '--set', *words)
  assert [run.cell for run in search.runs] == ['optim.wd=0', 'optim.wd=0.1']
  first = search.runs[0].config
  assert (first['optim']['lr'], first['steps']) == (0.5, 20)
  assert 'epochs' not in first
  assert first['optim']['schedule']['warmup'] == 2
  assert [run.seed for run in search.final(search.runs[0].cell)] == [7]
  # One setting for all tasks becomes a choice, if there are several values. Warmup and
  # accumulation follow from steps and batch in each combination.
  search = grid('svhn', '--set', 'steps=10,100', 'data.batch_size=64,128')
  assert [run.config['data']['split'] for run in search.runs] == ['train800'] * 4
  sections = [run.config['optim'] for run in search.runs]
  assert [x['schedule']['warmup'] for x in sections] == [2, 2, 20, 20]
  assert [x['accum'] for x in sections] == [1, 2, 1, 2]
  (*_, last) = search.final(search.runs[3].cell)
  assert (last.seed, last.config['data']['split']) == (2, 'train800val200')
  assert last.config['optim']['schedule']['warmup'] == 20
  own = 'optim={"name": "sgd", "lr": 0.1, "schedule": {"warmup": 5}}'
  (first, *_) = grid('svhn', '--set', own).runs
  assert first.config['optim'] == {
    **{'name': 'sgd', 'lr': 0.1, 'accum': 8, 'schedule': {'warmup': 5}},
  }
  # Only the data tells the size of these images: a run will see whether it fits.
  assert grid('svhn', '--set', 'data.pp=decode(3)|value_range(-1, 1)').runs


METHODS = ['--protocol', 'vpt', '--set', 'tune.method=linear,full']
# A command line, and the words of the error.
REFUSED = [
  (['--tasks', 'pet'], ('pet', 'pets', 'natural')),
  (['--protocol', 'bit', '--resolution', '6'], ('--resolution', '6x6', '8x8')),
  # The benchmark fixes these, for training and evaluation.
  (['--set', 'data.split=test'], ('data.split', 'sweep')),
  (['--set', 'data.source=digits'], ('data.source', '--tasks')),
  (['--set', 'evals={}'], ('--set', 'evals', 'val')),
  (METHODS, ('tune.method', 'grid')),  # whose grids differ
]


@pytest.mark.parametrize(('argv', 'words'), REFUSED)
def test_refused_before_any_run(argv, words, tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(program, 'train', None)
  argv = [SOURCE, *argv, '--out', tmp_path / 'out']
  commands.assert_refused(vtab.main, capsys, argv, words)
  assert not (tmp_path / 'out').exists()


def test_tasks_are_named_by_groups_too():
  groups = ['camelyon', 'eurosat', 'resisc45', 'retinopathy', 'dmlab']
  assert VTAB.select('dmlab,specialized') == groups
  assert VTAB.select('all') == list(VTAB.tasks)


# --- the benchmark --------------------------------------------------------------------


# As the paper prints the mean (Table 9, and Table 2 with two digits); the groups by hand.
MEANS = {
  'ViT-H/14 (JFT)': (77.6, 606.8 / 7, 348.0 / 4, 520.2 / 8),
  'ViT-L/16 (JFT)': (76.3, 598.9 / 7, 346.9 / 4, 503.7 / 8),
  'ViT-L/16 (I21k)': (72.7, 582.9 / 7, 338.6 / 4, 460.0 / 8),
}


@pytest.mark.parametrize('name', MEANS)
def test_the_rows_of_table_9_have_the_means_that_the_paper_prints(name):
  values = zip(VTAB.groups, published.TABLE_9[name], strict=True)
  accuracies = {task: [value] for task, value in values}
  means = table.scores(VTAB.groups, VTAB.mean, accuracies)
  assert list(means) == ['Mean of 19', 'Natural', 'Specialized', 'Structured']
  whole, *of_groups = MEANS[name]
  assert round(means['Mean of 19'].mean, 1) == whole
  assert [means[group].mean for group in list(means)[1:]] == pytest.approx(of_groups)
  # With a task missing, neither its group nor all 19 tasks have a mean.
  del accuracies['DMLab']
  assert set(table.scores(VTAB.groups, VTAB.mean, accuracies)) == {
    *('Natural', 'Specialized')
  }


def test_the_deviation_of_a_mean_follows_from_those_of_its_tasks():
  one, two = [70.0, 72.0], [50.0, 50.0, 53.0]
  score = table.score([one, two])
  assert score.mean == (71 + 51) / 2
  assert score.std == pytest.approx((2 + 3) ** 0.5 / 2)
  assert table.score([one, [3.0]]).std is None


# --- runs, of which a stand-in writes the folder --------------------------------------


@pytest.fixture
def trained(monkeypatch):
  """Replaces training; {name of a task: accuracy of seed 0, or an exception}."""
  top1 = {name: 0.5 for name in VTAB.tasks} | {'order': []}

  def rows(config, workdir):
    name = workdir.parents[1].name
    top1['order'].append(f'{name}/{workdir.name}')
    value = stand_in.outcome(top1.get(workdir.name, top1[name]))
    (split,) = config['evals']
    rate = config['optim']['lr']
    value = value + config['seed'] / 100 if split == 'test' else 1 - abs(rate - 0.25)
    return [{'step': 4, f'{split}/top1': value}]

  stand_in.replace_training(monkeypatch, rows)
  return top1


def run(capsys, out, *argv):
  return commands.run(vtab.main, capsys, SOURCE, '--out', out, *argv)


def test_all_tasks_give_the_mean_of_19_and_of_the_groups(trained, tmp_path, capsys):
  trained |= {'camelyon': 0.7, 'dmlab': 0.9}
  code, printed, _ = run(capsys, tmp_path, '--set', 'seed=0,2')
  assert code == 0
  rows = {row['task']: row for row in commands.results(tmp_path)}
  assert len(rows) == 19 + 4
  assert (rows['DMLab']['accuracy'], rows['DMLab']['std']) == ('91.00', '1.41')
  groups = ('Natural', 'Specialized', 'Structured')
  assert [rows[name]['accuracy'] for name in groups] == ['51.00', '56.00', '56.00']
  mean, std = f'{51 + 60 / 19:.2f}', f'{2**0.5 / 19**0.5:.2f}'
  assert [rows['Mean of 19'][key] for key in ('accuracy', 'std')] == [mean, std]
  assert f'\n| Mean of 19 |  | {mean} ± {std} |  |  | 77.6 | 76.3 | 72.7 |\n' in printed


def test_a_task_without_data_is_left_out_and_named(trained, tmp_path, capfd):
  trained['dtd'] = errors.DataError('not prepared. Prepare it with: tfds build dtd')
  argv = ['--tasks', 'cifar100,dtd,dmlab']
  code, out, error = run(capfd, tmp_path, *argv, '--json')
  assert code == 2
  assert re.search(naming('dtd', 'tfds build dtd'), error)
  record = json.loads(out)
  assert list(record['tasks']) == ['cifar100', 'dmlab']
  assert record['tasks']['dmlab']['accuracies'] == pytest.approx([50, 51, 52])
  assert (record['mean'], record['groups'], [*record['failed']]) == (None, {}, ['dtd'])
  text = (tmp_path / 'table.md').read_text()
  assert re.search(naming('2 of 19 tasks', '51.00 %', 'DTD: not prepared'), text)
  assert 'Mean of 19' not in text
  # When the data is there, only that task is trained.
  trained['dtd'] = 0.5
  trained['order'].clear()
  assert run(capfd, tmp_path, *argv)[0] == 0
  assert trained['order'] == [f'dtd/base-seed{n}' for n in range(3)]


def test_the_validation_split_chooses_for_each_task(trained, tmp_path, capfd):
  trained['optim.lr=9.0-seed0'] = errors.Diverged('not finite')
  argv = ['--tasks', 'dtd,svhn', '--set', 'optim.lr=0.1,0.2,0.3,9.0', 'seed=5']
  assert run(capfd, tmp_path, *argv)[0] == 0  # a combination that diverges is a bad one
  rows = [(row['chosen'], row['accuracy']) for row in commands.results(tmp_path)]
  assert rows == [('optim.lr=0.2', '55.00')] * 2
  assert trained['order'][4] == 'dtd/final-optim.lr=0.2-seed5'
  assert 'optim.lr=9.0-seed0 failed' in (tmp_path / 'dtd' / 'table.md').read_text()
  # Where all diverge there is no result.
  trained['dmlab'] = trained['optim.lr=9.0-seed0']
  argv = ['--tasks', 'dmlab', '--set', 'optim.lr=8.0,9.0']
  code, _, error = run(capfd, tmp_path, *argv)
  assert code == errors.Diverged.exit_code
  assert re.search(naming('dmlab', 'not finite'), error)


def test_a_dry_run(trained, tmp_path, capsys):
  argv = ['--protocol', 'vpt', '--tasks', 'natural', '--dry_run']
  _, printed, _ = run(capsys, tmp_path / 'out', *argv)
  assert re.search(naming('tasks: 7', f'runs: {7 * 21}', 'sun397: 21 runs'), printed)
  assert (trained['order'], (tmp_path / 'out').exists()) == ([], False)


# --- real runs ------------------------------------------------------------------------

TASKS = ('svhn', 'dspr_loc')
MINIATURE = [
  *('--tasks', ','.join(TASKS), '--resolution', '32'),
  *('--set', 'tune.method=linear', 'steps=3', 'data.batch_size=8', 'seed=42'),
  *('checkpoint.every=1', 'data.workers=1'),
]
GRID = ['--protocol', 'vpt', '--set', 'optim.lr=0.1,0.5', 'optim.wd=0']


@pytest.mark.usefixtures('one_device')
@pytest.mark.slow
def test_stopped_twice_it_goes_through_to_the_table(tmp_path, capfd, monkeypatch):
  vtab_fakes.write(tmp_path / 'data', TASKS)
  run_loop, observe, loops, steps = loop.Loop.run, progress.Record.train, [], []
  left = [('svhn', 'optim.lr=0.5', 2), ('dspr_loc', 'final', 1)]

  def following(self, *args):
    loops.append(self)
    return run_loop(self, *args)

  def stopping(record, step, values):
    observe(record, step, values)
    task, name = loops[-1].workdir.parents[1].name, loops[-1].workdir.name
    steps.append((task, name, step))
    if left and (task, step) == left[0][::2] and name.startswith(left[0][1]):
      del left[0]
      os.kill(os.getpid(), signal.SIGTERM)

  monkeypatch.setattr(loop.Loop, 'run', following)
  monkeypatch.setattr(progress.Record, 'train', stopping)
  argv = [*MINIATURE, *GRID, '--data_dir', tmp_path / 'data']
  for _, name, step in list(left):
    code, _, error = run(capfd, tmp_path, *argv)
    assert code == 75
    assert re.search(naming(name, f'step {step}', 'same command'), error)
  code, printed, _ = run(capfd, tmp_path, *argv)
  assert code == 0
  # Each run went on from where it was stopped: no step was made twice.
  assert len(steps) == len(set(steps)) == len(TASKS) * 3 * 3
  rows = commands.results(tmp_path)
  assert [row['task'] for row in rows] == ['SVHN', 'dSpr-Loc']
  assert {row['chosen'] for row in rows} <= {'optim.lr=0.1', 'optim.lr=0.5'}
  assert '2 of 19 tasks' in printed
  # Checkpoints of the runs to choose by are removed; reported runs keep theirs.
  left = sorted(path.parent.name for path in tmp_path.glob('*/runs/*/checkpoints'))
  assert [name[:5] for name in left] == ['final', 'final']
