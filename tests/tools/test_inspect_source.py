"""`inspect` of a file of weights, and of a run's folder."""

import json
import re

import numpy as np
import pytest

from tests.support import GOLDEN, commands, naming, runs
from vit_jax.tools.inspect import __main__ as inspect
from vit_jax.train.workdir import lock


def run(capsys, *argv):
  return commands.run(inspect.main, capsys, *argv)


def test_a_file_of_weights(capsys):
  source = GOLDEN / 'vit_google_token.npz'
  code, out, _ = run(capsys, source)
  assert code == 0
  assert re.search(naming('google vit', '32x32', '67,594', 'depth=3'), out)
  # Blocks that are alike are one row.
  assert re.search(r'encoderblock_0/MlpBlock_0/Dense_0/kernel +\(48, 96\) x3\n', out)
  code, out, _ = run(capsys, source, '--json')
  record = json.loads(out)
  assert record['params'] == 67594
  with np.load(source) as file:
    assert record['shapes']['head/kernel'] == list(file['head/kernel'].shape)
    assert len(record['shapes']) == len(file.files)


def test_what_a_file_does_not_tell_is_set(capsys, tmp_path):
  (tmp_path / 'model.safetensors').symlink_to(GOLDEN / 'vit_timm' / 'model.safetensors')
  code, _, err = run(capsys, tmp_path)
  assert code == 2
  assert re.search(naming('num_heads'), err)
  code, out, _ = run(capsys, tmp_path, '--set', 'num_heads=4', '--json')
  assert code == 0
  assert json.loads(out)['fields']['num_heads'] == 4


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """The folder of a run of four steps, of which 2 and 4 are kept."""
  workdir = tmp_path_factory.mktemp('run')
  changes = ('steps=4', 'optim.schedule.warmup=0', 'checkpoint.every=2', 'log.every=2')
  evals = {'test': runs.EVALS['test'] | {'every': 2}}
  runs.run_on_one_device(workdir, *changes, evals=evals, tune={'method': 'full'})
  return workdir


@pytest.mark.slow
def test_a_run(capsys, finished):
  code, out, _ = run(capsys, f'{finished}@2', '--json')
  assert code == 0
  record = json.loads(out)
  assert record['config'] == json.loads((finished / 'config.json').read_text())
  assert [row['step'] for row in record['steps']] == [2, 4]
  assert (record['step'], record['state']) == (2, 'finished')
  top1 = {row['step']: row['metrics']['test/top1'] for row in record['steps']}
  assert record['best'] == max(top1, key=lambda step: (top1[step], step))
  assert record['params'] == record['trained'] == 2762
  assert record['shapes']['head/kernel'] == [16, 10]
  assert record['class_names'] == [str(i) for i in range(10)]

  code, out, _ = run(capsys, finished)
  assert code == 0
  facts = ('run vit', 'digits', 'adamw', '10: 0, 1', 'finished')
  assert re.search(naming(*facts), out)
  at = {step: f'test/top1 {value:.4g}' for step, value in top1.items()}
  at[record['best']] += ', the best'
  assert re.search(rf'checkpoints +step 2 \({at[2]}\), step 4 \({at[4]}\)\n', out)
  assert re.search(r'read +step 4\n', out)


def test_a_run_that_was_killed_is_not_running(capsys, short_run, tmp_path):
  for name in ('config.json', 'checkpoints'):
    (tmp_path / name).symlink_to(short_run / name)
  status = json.loads((short_run / 'status.json').read_text())
  status |= {'state': 'running'}
  (tmp_path / 'status.json').write_text(json.dumps(status))
  state = lambda: json.loads(run(capsys, tmp_path, '--json')[1])['state']
  assert state() == 'running'  # without a lock nobody knows
  with lock(tmp_path):
    assert state() == 'running'
  assert state() == 'interrupted'
  assert re.search(r'state +interrupted: ', run(capsys, tmp_path)[1])
  with lock(tmp_path):  # to look at it does not keep a run out
    pass


def test_what_does_not_go_with_a_source(capsys, short_run, tmp_path):
  for argv, facts in (
    ((short_run, '--mesh', 'data=8'), ('--mesh',)),
    ((short_run, '--set', 'depth=2'), ('--set',)),
    ((f'{short_run}@3',), ("'3'", [2, 4])),
    (('nowhere.npz',), ("'nowhere.npz'", '--zoo')),
    (('~nobody-of-this-name/a.npz',), ('~nobody-of-this-name/a.npz',)),
    (('a' * 5_000,), ('a' * 5_000,)),
    ((tmp_path,), (tmp_path, 'config.json')),
  ):
    commands.assert_refused(inspect.main, capsys, argv, facts)
