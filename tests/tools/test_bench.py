"""`tools.bench` on a tiny model: rows, the table, dtypes, the peak, mistakes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import commands, naming
from vit_jax import models
from vit_jax.errors import OutOfMemory
from vit_jax.machine import cores
from vit_jax.tools.bench import __main__ as bench
from vit_jax.tools.bench import ours as bench_ours
from vit_jax.train import runtime

TINY = ('vit:mu/16', '--resolution', '32', '--set', 'num_classes=10')
QUICK = ('--steps', '2', '--batch', '2')


# The tool where these cannot be imported, with small products for its peak.
BLOCKED = """
import sys
class Refuse:
  def find_spec(self, name, path=None, target=None):
    refused = {'tensorflow', 'torch', 'timm', 'clu', 'ml_collections', 'orbax'}
    if name.partition('.')[0] in refused:
      raise ModuleNotFoundError(f'{name} is blocked by the test', name=name)
sys.meta_path.insert(0, Refuse())
from vit_jax import cli
from vit_jax.tools.bench import __main__ as bench, ours as bench_ours
bench_ours.SIZES = (64, 128)
sys.exit(cli.run(bench.main, sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def small_products(monkeypatch):
  monkeypatch.setattr(bench_ours, 'SIZES', (64, 128))


def run(capsys, *argv):
  return commands.run(bench.main, capsys, *argv)


def params():
  model = models.build('vit:mu/16', num_classes=10)
  shapes = models.shapes_of(model, (32, 32, 3))['params']
  return sum(x.size for x in jax.tree.leaves(shapes))


@pytest.mark.slow
def test_rows_and_their_file_without_tensorflow(tmp_path):
  out = tmp_path / 'new' / 'result.json'
  argv = (*TINY, '--steps', '3', '--batch', '2', '--json', '--out', str(out))
  done = subprocess.run(
    [sys.executable, '-c', BLOCKED, *argv],
    capture_output=True,
    text=True,
    cwd=Path(__file__).parents[2],
  )
  assert done.returncode == 0, done.stderr
  record = json.loads(done.stdout.splitlines()[-1])
  assert json.loads(out.read_text()) == record
  assert {'tool', 'date', 'command', 'machine', 'versions', 'rows', 'peak'} == set(
    record
  )
  assert record['command'].startswith('python -m vit_jax.tools.bench vit:mu/16 --res')
  assert record['machine']['cores'] == cores()
  assert record['versions']['jax'] == jax.__version__
  rows = record['rows']
  assert [row['mode'] for row in rows] == ['train', 'forward']
  peak = record['peak']['float32']
  assert peak['size'] in (64, 128)
  for row in rows:
    step = row['step_s']
    assert 0 < step['min'] <= step['median'] <= step['max']
    assert 2 <= step['turns'] * step['steps_per_turn'] <= 3
    assert row['images_per_s'] == row['batch'] / step['median']
    assert row['params'] == params()
    assert row['memory_from'] == 'compiler'
    # 5 tokens, width 32, MLP 128, one layer; patches of 16 x 16 x 3; 10 classes.
    products = 4 * 768 * 32 + 5 * (4 * 32 * 32 + 2 * 32 * 128) + 2 * 25 * 32 + 320
    assert row['gflops'] == 2 * products / 1e9
    passes = 3 if row['mode'] == 'train' else 1
    rate = passes * 2 * products * row['images_per_s']
    assert row['mfu'] == pytest.approx(rate / peak['flops_per_s'])
  # Parameters and two moments, float32, are among what a training step holds.
  assert rows[0]['memory_bytes'] > 3 * 4 * params()
  assert rows[1]['memory_bytes'] > 4 * params()


@pytest.mark.slow
def test_the_table(capsys):
  argv = (*TINY, '--steps', '1', '--mode', 'forward')
  code, out, _ = run(capsys, *argv, '--batch', '2,4')
  assert code == 0
  assert 'vit:mu/16, num_classes=10 at 32x32 px' in out
  small, large = out.splitlines()[-2:]
  assert small.startswith('forward float32        2 ')
  assert large.startswith('forward float32        4 ')
  assert small.endswith('best') != large.endswith('best')
  assert 'best' not in run(capsys, *argv, '--batch', '2')[1]


@pytest.mark.slow
def test_dtypes_are_measured_apart(capsys):
  argv = ('--mode', 'forward', '--dtype', 'float32,bfloat16', *QUICK, '--json')
  code, out, _ = run(capsys, *TINY, *argv)
  record = json.loads(out)
  assert code == 0
  assert [row['dtype'] for row in record['rows']] == ['float32', 'bfloat16']
  assert all(row['best'] for row in record['rows'])
  assert set(record['peak']) == {'float32', 'bfloat16'}


@pytest.mark.slow
def test_the_step_trains():
  model = bench_ours.Model('vit:mu/16', 'float32', (32, 32), {'num_classes': 3})
  step = bench_ours.Step(model, 'train', 4)
  before = jax.tree.map(np.asarray, step._state.params)
  assert step.turn(5) > 0
  assert int(step._state.step) == 5
  assert int(step._state.counters['skipped']) == 0
  changed = jax.tree.map(lambda a, b: bool(np.any(a != b)), before, step._state.params)
  assert all(jax.tree.leaves(changed))


def test_a_step_of_tuning_trains_its_part(capsys):
  words = ('--mode', 'train', *QUICK, '--json')
  code, out, _ = run(capsys, *TINY, *words, '--tune', 'method=lora', '--tune', 'rank=2')
  (row,) = json.loads(out)['rows']
  assert (code, row['mfu']) == (0, None)  # what it leaves out is not counted
  assert row['set'] == ['num_classes=10', 'tune.method=lora', 'tune.rank=2']
  for settings, fact in [
    (('method=lora', 'rnk=2'), '--tune.rnk'),
    (('rank=2',), '--tune method='),
  ]:
    code, _, error = run(
      capsys, *TINY, *words, *(f'--tune={setting}' for setting in settings)
    )
    assert code == 2
    assert fact in error


@pytest.mark.slow
def test_forward_gives_the_logits_of_the_model():
  model = bench_ours.Model('vit:mu/16', 'float32', (32, 32), {'num_classes': 3})
  step = bench_ours.Step(model, 'forward', 4)
  params, logits = step._step(step._state, step._batch)
  images = step._batch['image'].astype(jnp.float32) / 127.5 - 1
  expected, _ = jax.jit(model.module.apply)({'params': params}, images)
  # Rounding of another order of sums, in float32.
  np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_the_peak_is_the_best_of_several_sizes(monkeypatch):
  seconds = {64: 1e-3, 128: 1e-3, 256: 0.6, 512: 1e-9}
  monkeypatch.setattr(bench_ours, 'SIZES', tuple(seconds))
  monkeypatch.setattr(bench_ours, '_product_seconds', lambda size, dtype: seconds[size])
  # 256 is slow; after so long a product no larger one is tried.
  expected = {'flops_per_s': 2 * 128**3 / 1e-3, 'size': 128}
  assert bench_ours.matrix_peak('float32') == expected


def test_out_of_memory_is_a_row(capsys, monkeypatch):
  compile_step = runtime.compile_step

  def limited(step, abstract, spec, mesh):
    if len(spec['image'].shape) and spec['image'].shape[0] > 2:
      raise OutOfMemory('A step needs 9.0 GiB. Try a smaller config.data.batch_size.')
    return compile_step(step, abstract, spec, mesh)

  monkeypatch.setattr(runtime, 'compile_step', limited)
  argv = (*TINY, '--mode', 'forward', '--batch', '8,2', '--steps', '1')
  code, out, err = run(capsys, *argv, '--json')
  full, fits = json.loads(out)['rows']
  assert code == 0
  assert re.search(naming('memory', '9.0 GiB'), full['error'])
  assert 'images_per_s' not in full
  assert fits['best']
  assert fits['error'] is None
  assert re.search(naming('batch 8', 'memory'), err)
  assert re.search(r' 8  .*9\.0 GiB', run(capsys, *argv)[1])


@pytest.mark.parametrize(
  ('argv', 'facts'),
  [
    ([], ('MODEL',)),
    (['vit:X/16'], ("'X/16'", 'B/16')),
    ([*TINY, '--mode', 'trian'], ("'trian'", 'train')),
    ([*TINY, '--dtype', 'float16'], ("'float16'", 'bfloat16')),
    ([*TINY, '--batch', '8,0'], ('--batch', "'0'")),
    ([*TINY, '--steps', '0'], ('--steps', "'0'")),
    ([*TINY, '--resolution', '40'], ('40x40', '16x16')),
    ([*TINY, '--set', 'dtype=bfloat16'], ('--dtype',)),
    ([*TINY, '--set', 'clasifier=map'], ("'clasifier'", 'classifier')),
    ([*TINY, '--set', 'num_classes=None'], ('classes',)),
    ([*TINY, '--vs', 'tim'], ("'tim'", 'timm')),
    ([*TINY, '--rounds', '3'], ('--rounds', '--vs')),
    ([*TINY, '--torch-compile'], ('--torch-compile', '--vs')),
    ([*TINY, '--torch-python', sys.executable], ('--torch-python', '--vs')),
    ([*TINY, '--vs', 'timm', '--torch-python', 'no/python'], ('no/python',)),
    ([*TINY, '--vs', 'timm', '--set', 'dropout=0.1'], ('dropout',)),
    (
      [*TINY, '--vs', 'timm', '--set', 'representation_size=8'],
      ('timm', 'representation_size=8'),
    ),
    ([*TINY, '--out', 'result.txt'], ('result.txt', '.json')),
    ([*TINY, '--out', f'{__file__}/result.json'], ('--out', __file__)),
  ],
)
def test_mistakes_end_with_one_line_and_exit_code_2(capsys, argv, facts):
  commands.assert_refused(bench.main, capsys, argv, facts)
