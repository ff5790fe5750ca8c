"""A run in this process: its steps, its files, its ends."""

import contextlib
import io
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import image_folder, naming, runs
from vit_jax import config, errors, models
from vit_jax.checkpoint import checkpoints
from vit_jax.data import bad_images
from vit_jax.train import progress, run, schema

pytestmark = pytest.mark.usefixtures('one_device')


# -- a run with everything on ----------------------------------------------------------


@pytest.fixture(scope='module')
def full(tmp_path_factory):
  """A finished run with everything on: (workdir, status, rows, printed text)."""
  workdir = tmp_path_factory.mktemp('full')
  evals = {'test': {**runs.EVALS['test'], 'every': 0.25}}  # a fraction of the run
  evals['ema'] = {**evals['test'], 'use_ema': True, 'every': 8}
  changes = ['steps=12', 'log.every=2', 'log.tensorboard=True', 'log.profile=True']
  changes += ['checkpoint.every=3', 'checkpoint.keep_latest=1', 'optim.lr=0.3']
  changes += ['optim.schedule.warmup=12', 'checkpoint.best=test/loss']
  out = io.StringIO()
  with contextlib.redirect_stdout(out):
    status, rows = runs.run_on_one_device(workdir, *changes, evals=evals)
  return workdir, status, rows, out.getvalue()


def test_files_of_a_run(full):
  workdir, status, rows, _ = full
  assert status['state'] == 'finished'
  assert status['step'] == 12
  assert re.fullmatch('[0-9a-f]{64}', status['fingerprint'])
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  assert [json.loads(line) for line in lines] == rows
  resolved = json.loads((workdir / 'config.json').read_text())
  assert resolved['model']['num_classes'] == 10
  assert resolved['resolved']['total_steps'] == 12
  assert resolved['resolved']['num_examples'] == 1437
  assert resolved['resolved']['class_names'] == [str(i) for i in range(10)]
  assert list(workdir.glob('events.out.tfevents.*'))
  assert [p for p in (workdir / 'profile').rglob('*') if p.is_file()]
  assert not list(workdir.glob('*.tmp'))


def test_rows_are_where_they_are_due(full):
  _, _, rows, _ = full
  at = lambda name: [row['step'] for row in rows if name in row]
  assert at('train/loss') == [2, 4, 6, 8, 10, 12]
  assert at('test/top1') == [3, 6, 9, 12]
  assert at('ema/top1') == [8, 12]
  first = rows[0]
  for key in ('loss', 'accuracy', 'grad_norm', 'lr', 'masked', 'skipped'):
    assert f'train/{key}' in first
  assert first['time/images_per_s'] > 0
  assert {row['test/examples'] for row in rows if 'test/examples' in row} == {360}


def test_progress_lines(full):
  *_, out = full
  lines = [line for line in out.splitlines() if line.startswith('step ')]
  train_line = r'step (\d+)/12  loss [\d.]+  [\d,]+ images/s  (.* )?left'
  steps = [int(m[1]) for line in lines if (m := re.fullmatch(train_line, line))]
  assert steps == [2, 4, 6, 8, 10, 12]
  assert sum('test/top1' in line for line in lines) == 4
  assert re.search(r'Step compiled in [\d.]+ s; it needs [\d.]+ GiB per device of', out)
  assert re.search(r'total +2,762\n', out)


def test_the_best_and_the_latest_checkpoints_are_kept(full):
  workdir, status, rows, _ = full
  scores = {row['step']: row['test/loss'] for row in rows if 'test/loss' in row}
  best = min(scores, key=scores.get)
  assert best < 12, 'a rate that only rises was to spoil the last step'
  assert {int(name) for name in runs.saved(workdir)} == {best, 12}
  assert (status['best_step'], status['last_good_step']) == (best, 12)
  text = progress.summary(rows, status, {}, workdir, seconds=1.0)
  assert re.search(naming('newest step 12', f'best step {best}'), text)
  assert finite(workdir) == 12


def test_averaged_parameters_are_evaluated_on_request(full):
  _, _, rows, _ = full
  test, ema = (
    next(row for row in rows if row['step'] == 12 and f'{name}/loss' in row)
    for name in ('test', 'ema')
  )
  # With a decay of 0.9 the mean lags some ten steps behind.
  assert abs(test['test/loss'] - ema['ema/loss']) > 1e-3


def finite(workdir) -> int:
  """Asserts that the newest checkpoint's params are finite; returns its step."""
  c = json.loads((workdir / 'config.json').read_text())
  model = models.build(**c['model'])
  image = jnp.zeros((1, *c['resolved']['image_shape']))
  abstract = jax.eval_shape(model.init, jax.random.key(0), image)['params']
  with contextlib.closing(checkpoints.Checkpoints(workdir / 'checkpoints')) as saved:
    params, _ = saved.restore_params(abstract)
    for leaf in jax.tree.leaves(params):
      assert np.isfinite(leaf).all()
    return saved.latest()


# -- runs that end without success -------------------------------------------------


def test_too_many_bad_steps(tmp_path):
  changes = ['steps=40', 'optim.lr=1e38', 'optim.clip=None', 'max_bad_steps=3']
  changes += ['checkpoint.every=1', 'optim.schedule.warmup=0']
  with pytest.raises(errors.Diverged) as error:
    runs.run(tmp_path, *changes, 'checkpoint.best=None', evals={})
  assert error.value.exit_code == 76
  message = str(error.value)
  assert '\n' not in message
  newest = finite(tmp_path)
  assert re.search(naming(3, newest, 'config.optim.lr'), message)
  status = runs.status(tmp_path)
  assert (status['state'], status['exit']) == ('failed', 76)
  assert status['error'] == message
  bad = [row['train/skipped_in_a_row'] for row in runs.rows(tmp_path)]
  assert bad[-3:] == [1, 2, 3]


def test_parameters_that_are_not_finite_fail_the_run(tmp_path):
  # The one step has a finite loss and gradient; its update is infinite.
  changes = ['steps=1', 'optim.lr=1e38', 'optim.schedule.warmup=0']
  changes += ['optim.lr_rules=[(".*", 1e3)]', 'checkpoint.best=None']
  with pytest.raises(errors.Diverged, match=naming('step 1', 'config.optim.lr')):
    runs.run(tmp_path, *changes, evals={})
  status = runs.status(tmp_path)
  assert (status['state'], status['exit']) == ('failed', 76)
  assert status['last_good_step'] is None
  assert not (tmp_path / 'checkpoints').exists()


def test_a_run_that_ends_on_a_bad_step_fails(tmp_path):
  # Fewer bad steps than max_bad_steps, but the last state is one that gives no loss.
  changes = ['steps=4', 'optim.lr=1e38', 'optim.clip=None', 'checkpoint.every=1']
  changes += ['optim.schedule.warmup=0', 'checkpoint.best=None']
  for _ in range(2):  # a restart at the end does not make it one
    with pytest.raises(errors.Diverged, match=naming('The last', 'of 4 steps')):
      runs.run(tmp_path, *changes, evals={})
    status = runs.status(tmp_path)
    assert (status['state'], status['exit']) == ('failed', 76)
    assert status['last_good_step'] == finite(tmp_path)


def test_out_of_memory_is_said_before_the_first_step(tmp_path, capsys):
  with pytest.raises(errors.OutOfMemory) as error:
    runs.run(
      tmp_path,
      'checkpoint.best=None',
      data=dict(
        source='synthetic',
        split='train',
        # 17 TiB. With 2**22 an array has 2**32 rows, which XLA's compiler for CPUs keeps
        # in 32 bits and divides by: jaxlib 0.12.0.1 ends in SIGFPE.
        batch_size=2**20,
        pp='value_range(-1, 1)',
        source_options=dict(size=64, num_classes=10, num_examples=100),
      ),
      evals={},
    )
  assert error.value.exit_code == 77
  needed, there = re.findall(r'([\d.]+) GiB', str(error.value).replace(',', ''))
  assert float(needed) > float(there)
  assert 'config.data.batch_size' in str(error.value)
  assert 'step 1/' not in capsys.readouterr().out
  assert runs.status(tmp_path)['exit'] == 77


def test_averaged_parameters_that_do_not_exist():
  ema = {**runs.EVALS['test'], 'use_ema': True}
  c = runs.small('optim.ema=None', evals={'test': ema})
  with pytest.raises(
    errors.UserError, match=naming('config.evals.test.use_ema', 'config.optim.ema')
  ):
    schema.check(c)


# -- variants of the loop --------------------------------------------------------------


def test_an_evaluation_at_another_size_is_refused(tmp_path):
  data = {**runs.TEST, 'pp': 'resize(16)|value_range(-1, 1)'}
  evals = {'test': {**runs.EVALS['test'], 'data': data}}
  with pytest.raises(
    errors.UserError, match=naming('config.evals.test.data.pp', [16, 16, 1], [8, 8, 1])
  ):
    runs.run(tmp_path, evals=evals)


# -- a folder of images, some of them broken ---------------------------------------------


def break_five(folder) -> set[str]:
  """Adds five files that are not images; returns their paths."""
  jpeg, png = ((folder / name).read_bytes() for name in ('0.jpg', '1.png'))
  broken = {
    folder / 'truncated.jpg': jpeg[: len(jpeg) // 2],
    folder / 'truncated.png': png[: len(png) // 2],
    folder / 'text.jpg': b'This is not an image.',
    folder / 'empty.jpg': b'',
    folder / 'zeros.png': bytes(100),
  }
  for path, data in broken.items():
    path.write_bytes(data)
  return set(map(str, broken))


def train_on(folder, workdir, *changes):
  # Ten batches of eight: every file is met at least once.
  small = 'variant=mu/4,res=16,batch=8,steps=10,warmup=2'
  c = config.load(f'configs/folder.py:data={folder},{small}')
  config.override(c, ['evals.val.every=5', 'checkpoint.every=5', *changes])
  return run.train(c, workdir)


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A folder of 39 images to train on and 15 to evaluate on."""
  monkeypatch.chdir(runs.ROOT)
  return image_folder.write(tmp_path / 'images')


def test_a_folder_with_five_broken_files(tmp_path, folder):
  workdir = tmp_path / 'run'
  broken = break_five(folder / 'train' / 'b')
  text = folder / 'val' / 'c' / 'text.jpg'  # one of them is met in evaluation
  (folder / 'train' / 'b' / 'text.jpg').rename(text)
  broken = {path for path in broken if not path.endswith('text.jpg')} | {str(text)}
  status, rows = train_on(folder, workdir)
  assert status['state'] == 'finished'
  log = bad_images.read_log(workdir / 'bad_images.jsonl')
  assert sorted(line['path'] for line in log) == sorted(broken)
  assert all(line['reason'] for line in log)
  text = progress.summary(rows, status, {}, workdir, seconds=1.0)
  assert re.search(naming('could not be read: 5', f'{workdir}/bad_images.jsonl'), text)
  assert rows[-2]['train/masked'] >= 4
  # An evaluation leaves out images that it cannot read, and says so.
  assert rows[-1]['val/examples'] == 15
  assert rows[-1]['val/bad_images'] == 1
  resolved = json.loads((workdir / 'config.json').read_text())['resolved']
  assert resolved['class_names'] == ['a', 'b', 'c']
  assert resolved['num_examples'] == 43


def test_too_many_broken_files_end_the_run(tmp_path, folder):
  break_five(folder / 'train' / 'b')
  with pytest.raises(errors.UserError, match=naming(5, 44, 'max_bad_fraction', 4)):
    train_on(folder, tmp_path / 'run', 'data.max_bad_fraction=0.1')
  status = runs.status(tmp_path / 'run')
  assert (status['state'], status['exit']) == ('failed', 2)
  assert 'bad_images.jsonl' in status['error']
