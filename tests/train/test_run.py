"""A run in this process: its steps, its files, its ends."""

import contextlib
import io
import json
import re

import jax
import numpy as np
import pytest

import vit_jax
from tests.support import image_folder, naming, runs
from vit_jax import config, errors
from vit_jax.data import bad_images
from vit_jax.train import progress, run

pytestmark = pytest.mark.usefixtures('one_device')


# -- a run with everything on ----------------------------------------------------------


@pytest.fixture(scope='module')
def full(tmp_path_factory):
  """A finished run with everything on: (workdir, status, rows, printed text)."""
  workdir = tmp_path_factory.mktemp('full')
  evals = {'test': {**runs.EVALS['test'], 'every': 0.25}}  # a fraction of the run
  evals['ema'] = {**evals['test'], 'use_ema': True, 'every': 8}
  changes = ['steps=12', 'log.every=2', 'log.profile=True']
  changes += ['checkpoint.every=3', 'checkpoint.keep_latest=1', 'optim.lr=0.3']
  changes += ['optim.schedule.warmup=12', 'checkpoint.best=test/loss']
  out = io.StringIO()
  with contextlib.redirect_stdout(out):
    status, rows = runs.run_on_one_device(workdir, *changes, evals=evals)
  return workdir, status, rows, out.getvalue()


def test_files_of_a_run(full):
  workdir, status, rows, _ = full
  assert (status['state'], status['step']) == ('finished', 12)
  assert re.fullmatch('[0-9a-f]{64}', status['fingerprint'])
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  assert [json.loads(line) for line in lines] == rows
  config = json.loads((workdir / 'config.json').read_text())
  assert config['model']['num_classes'] == 10
  assert config['resolved']['total_steps'] == 12
  assert config['resolved']['num_examples'] == 1437
  assert config['resolved']['class_names'] == [str(i) for i in range(10)]
  (start,) = json.loads((workdir / 'environment.json').read_text())
  assert start['kernels'] == {'used': [], 'verified': []}  # a CPU has none
  assert [p for p in (workdir / 'profile').rglob('*') if p.is_file()]
  assert not list(workdir.glob('*.tmp'))


def test_rows_and_lines_are_where_they_are_due(full):
  _, _, rows, out = full
  at = lambda name: [row['step'] for row in rows if name in row]
  assert at('train/loss') == [2, 4, 6, 8, 10, 12]
  assert at('test/top1') == [3, 6, 9, 12]
  assert at('ema/top1') == [8, 12]
  for key in ('loss', 'accuracy', 'grad_norm', 'lr', 'masked', 'skipped'):
    assert f'train/{key}' in rows[0]
  assert rows[0]['time/images_per_s'] > 0
  assert {row['test/examples'] for row in rows if 'test/examples' in row} == {360}
  train_line = r'(?m)^step (\d+)/12  loss [\d.]+  [\d,]+ images/s  (?:.* )?left$'
  assert list(map(int, re.findall(train_line, out))) == at('train/loss')
  assert out.count('  test/top1 ') == 4
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
  # Averaged parameters, evaluated on request, lag some ten steps behind.
  (ema,) = (row['ema/loss'] for row in rows if row['step'] == 12 and 'ema/loss' in row)
  assert abs(scores[12] - ema) > 1e-3


def finite(workdir) -> int:
  """Asserts that the newest checkpoint's params are finite; returns its step."""
  loaded = vit_jax.load(workdir)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(loaded.params))
  return loaded.step


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
  ended = runs.status(tmp_path)
  assert (ended['state'], ended['exit'], ended['error']) == ('failed', 76, message)
  bad = [row['train/skipped_in_a_row'] for row in runs.rows(tmp_path)]
  assert bad[-3:] == [1, 2, 3]


def test_an_evaluation_at_another_size_is_refused(tmp_path):
  data = {**runs.TEST, 'pp': 'resize(16)|value_range(-1, 1)'}
  evals = {'test': {**runs.EVALS['test'], 'data': data}}
  with pytest.raises(
    errors.UserError, match=naming('config.evals.test.data.pp', [16, 16, 1], [8, 8, 1])
  ):
    runs.run(tmp_path, evals=evals)


# -- a folder of images, some of them broken ---------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """Returns a folder of 39 images to train on and 15 to evaluate on, and five broken."""
  monkeypatch.chdir(runs.ROOT)
  folder = image_folder.write(tmp_path / 'images')
  train = folder / 'train' / 'b'
  jpeg, png = ((train / name).read_bytes() for name in ('0.jpg', '1.png'))
  (train / 'truncated.jpg').write_bytes(jpeg[: len(jpeg) // 2])
  (train / 'truncated.png').write_bytes(png[: len(png) // 2])
  (train / 'empty.jpg').write_bytes(b'')
  (train / 'zeros.png').write_bytes(bytes(100))
  (folder / 'val' / 'c' / 'text.jpg').write_bytes(b'This is not an image.')
  return folder


def train_on(folder, workdir, *changes):
  # Ten batches of eight: every file is met at least once.
  small = 'variant=mu/4,res=16,batch=8,steps=10,warmup=2'
  c = config.load(f'configs/folder.py:data={folder},{small}')
  config.override(c, ['evals.val.every=5', 'checkpoint.every=5', *changes])
  return run.train(c, workdir)


def test_a_folder_with_five_broken_files(tmp_path, folder):
  workdir = tmp_path / 'run'
  status, rows = train_on(folder, workdir)
  assert status['state'] == 'finished'
  log = bad_images.read_log(workdir / 'bad_images.jsonl')
  assert sorted(line['path'].rpartition('/')[2] for line in log) == [
    *('empty.jpg', 'text.jpg', 'truncated.jpg', 'truncated.png', 'zeros.png')
  ]
  assert all(line['reason'] for line in log)
  text = progress.summary(rows, status, {}, workdir, seconds=1.0)
  assert re.search(naming('could not be read: 5', f'{workdir}/bad_images.jsonl'), text)
  assert rows[-2]['train/masked'] >= 4
  # An evaluation leaves out images that it cannot read, and reports their number.
  assert rows[-1]['val/examples'] == 15
  assert rows[-1]['val/bad_images'] == 1
  assert config.read(workdir)['resolved']['num_examples'] == 43


def test_too_many_broken_files_end_the_run(tmp_path, folder):
  workdir = tmp_path / 'run'
  with pytest.raises(errors.UserError, match=naming(4, 43, 'max_bad_fraction', 3)):
    train_on(folder, workdir, 'data.max_bad_fraction=0.08')
  status = runs.status(workdir)
  assert (status['state'], status['exit']) == ('failed', 2)
  assert 'bad_images.jsonl' in status['error']
