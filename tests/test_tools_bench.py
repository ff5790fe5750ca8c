"""`tools.bench` on a tiny model, without PyTorch: timm's side is a script that sleeps."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import naming

from vit_jax import cli, models
from vit_jax.errors import OutOfMemory
from vit_jax.tools.bench import __main__ as bench
from vit_jax.tools.bench import ours as bench_ours
from vit_jax.tools.bench import peer as bench_peer
from vit_jax.tools.bench import record as bench_record
from vit_jax.tools.bench import text as bench_text
from vit_jax.tools.bench import torch_worker
from vit_jax.train import runtime

TINY = ('vit:mu/16', '--resolution', '32', '--set', 'num_classes=10')
QUICK = ('--steps', '2', '--batch', '2')

# Answers as torch_worker does; a step takes 20 ms, and batch 4 does not fit.
WORKER = """
import json, sys, time
spec = {}
for line in sys.stdin:
  message = json.loads(line)
  print('a library that prints', flush=True)
  if 'check' in message:
    reply = {'timm': json.dumps(message['check'])}
  elif 'build' in message:
    spec = message['build']
    reply = {'params': %d, 'warm_up_s': 0.5}
    if spec['batch'] == 4:
      reply = {'error': 'OutOfMemoryError: CUDA out of memory', 'memory': True}
  else:
    time.sleep(0.02 * message['turn'])
    wall = 0.02 * message['turn']
    reply = {'wall': wall, 'cpu': wall / 2, 'memory_bytes': 123}
  print(json.dumps(reply), flush=True)
"""


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
  code = cli.run(bench.main, list(argv))
  out, err = capsys.readouterr()
  return code, out, err


def params():
  model = models.build('vit:mu/16', num_classes=10)
  shapes = bench_ours.shapes(model, (32, 32))
  return sum(x.size for x in jax.tree.leaves(shapes))


@pytest.fixture
def worker(tmp_path, monkeypatch):
  """Has our side start the script above as if it were timm's."""

  def make(count):
    path = tmp_path / 'worker.py'
    path.write_text(WORKER % count)
    monkeypatch.setattr(bench_peer, 'SCRIPT', path)
    return ('--vs', 'timm', '--torch-python', sys.executable, '--rounds', '3')

  return make


def test_rows_and_their_file_without_tensorflow(tmp_path):
  out = tmp_path / 'new' / 'result.json'
  argv = (*TINY, '--steps', '3', '--batch', '2', '--json', '--out', str(out))
  done = subprocess.run(
    [sys.executable, '-c', BLOCKED, *argv],
    capture_output=True,
    text=True,
    cwd=Path(__file__).parents[1],
  )
  assert done.returncode == 0, done.stderr
  record = json.loads(done.stdout.splitlines()[-1])
  assert json.loads(out.read_text()) == record
  assert {'tool', 'date', 'command', 'machine', 'versions', 'rows', 'peak'} == set(
    record
  )
  assert record['command'].startswith('python -m vit_jax.tools.bench vit:mu/16 --res')
  assert record['machine']['cores'] == bench_record.cores()
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


def test_dtypes_are_measured_apart(capsys):
  argv = ('--mode', 'forward', '--dtype', 'float32,bfloat16', *QUICK, '--json')
  code, out, _ = run(capsys, *TINY, *argv)
  record = json.loads(out)
  assert code == 0
  assert [row['dtype'] for row in record['rows']] == ['float32', 'bfloat16']
  assert all(row['best'] for row in record['rows'])
  assert set(record['peak']) == {'float32', 'bfloat16'}


def test_the_step_trains():
  model = bench_ours.Model('vit:mu/16', 'float32', (32, 32), {'num_classes': 3})
  step = bench_ours.Step(model, 'train', 4)
  before = jax.tree.map(np.asarray, step._state.params)
  assert step.turn(5) > 0
  assert int(step._state.step) == 5
  assert int(step._state.counters['skipped']) == 0
  changed = jax.tree.map(lambda a, b: bool(np.any(a != b)), before, step._state.params)
  assert all(jax.tree.leaves(changed))


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


def test_beside_timm(capsys, worker):
  argv = (*TINY, *worker(params()), '--batch', '2,4', '--steps', '6', '--json')
  code, out, _ = run(capsys, *argv, '--mode', 'forward')
  assert code == 0
  record = json.loads(out.splitlines()[-1])
  assert '--torch-python PYTHON' in record['command']
  assert sys.executable not in out
  row, full = record['rows']
  timm, step = row['timm'], row['step_s']
  assert timm['images_per_s'] == pytest.approx(2 / 0.02)
  assert timm['memory_bytes'] == 123
  assert (timm['rounds'], step['turns'], step['steps_per_turn']) == (3, 3, 2)
  assert timm['ratio_min'] <= timm['ratio'] <= timm['ratio_max']
  spec = json.loads(record['versions']['timm'])
  assert spec['model_args']['img_size'] == 32
  assert spec['model_args']['embed_dim'] == 32
  assert spec['model_args']['depth'] == 1
  del spec['model_args']
  assert spec == {
    'architecture': 'vit_base_patch16_224',
    'num_classes': 10,
    'size': [32, 32],
    'device': 'cpu',
    'threads': bench_record.cores(),
    'compile': False,
  }
  # Where only timm's side does not fit, ours is measured alone.
  assert full['timm'].keys() == {'error'}
  assert 'OutOfMemoryError: CUDA out of memory' in full['timm']['error']
  assert full['images_per_s'] > 0
  text = bench_text.table(record).split('beside timm')[1]
  assert re.search(r' 4  .*OutOfMemoryError', text)
  assert f'{timm["ratio"]:.2f} ({timm["ratio_min"]:.2f}-' in text


def test_another_model_is_refused(capsys, worker):
  code, _, err = run(capsys, *TINY, *QUICK, '--mode', 'forward', *worker(7))
  assert code == 2
  assert re.search(naming(f'{params():,}', 'timm', 7), err)


def test_a_worker_that_fails_or_ends(capsys, tmp_path, monkeypatch):
  script = tmp_path / 'worker.py'
  monkeypatch.setattr(bench_peer, 'SCRIPT', script)
  argv = (*TINY, *QUICK, '--vs', 'timm', '--torch-python', sys.executable)
  script.write_text(
    'import json; input(); print(json.dumps({"error": "ModuleNotFoundError: No module '
    'named \'torch\'", "memory": False}))'
  )
  code, _, err = run(capsys, *argv)
  assert code == 2
  facts = ('--torch-python', sys.executable, "'torch'", 'pip install timm')
  assert re.search(naming(*facts), err)
  script.write_text('raise SystemExit(3)')
  code, _, err = run(capsys, *argv)
  assert code == 2
  assert re.search(naming(sys.executable, 3), err)


def test_without_torch_the_way_to_it_is_told(capsys, monkeypatch):
  monkeypatch.setattr(bench_peer.importlib.util, 'find_spec', lambda name: None)
  code, out, err = run(capsys, *TINY, '--vs', 'timm')
  assert (code, out) == (2, '')
  assert '--torch-python PYTHON' in err


def test_models_as_timm_has_them():
  def theirs(name, **fields):
    model = bench_ours.Model(name, 'float32', (224, 224), fields)
    return bench_peer.theirs(model)

  found = theirs('vit:Ti/16', num_classes=10, classifier='gap', scan=True)
  assert found['num_classes'] == 10
  assert found['model_args']['global_pool'] == 'avg'
  assert found['model_args']['act_layer'] == 'gelu'
  assert theirs('mixer:S/32', num_classes=5)['architecture'] == 'mixer_s32_224'


def test_the_server_of_the_other_side():
  class Subject:
    def __init__(self, spec):
      self.about = {'params': 1}
      if spec == 'large':
        raise RuntimeError('CUDA out of memory. Tried to allocate\nmuch')
      if spec == 'nothing':
        raise ModuleNotFoundError("No module named 'timm'")

    @staticmethod
    def check(spec):
      return {'timm': spec}

    def turn(self, steps):
      return {'wall': steps}

  server = torch_worker.Server(Subject)
  assert server.answer({'check': '1.0'}) == {'timm': '1.0'}
  assert server.answer({'build': 'small'}) == {'params': 1}
  assert server.answer({'turn': 3}) == {'wall': 3}
  assert server.answer({'build': 'large'})['memory']
  failed = server.answer({'build': 'nothing'})
  assert failed == {
    'error': "ModuleNotFoundError: No module named 'timm'",
    'memory': False,
  }


def test_turns_alternate_and_ratios_are_of_rounds():
  calls = []
  side = lambda name, times: lambda: (calls.append(name), times.pop(0))[1]
  turn = lambda wall, cpu=1.0: {'wall': wall, 'cpu': cpu}
  ours = side('a', [turn(1), turn(2), turn(4)])
  theirs = side('b', [turn(3), turn(2, 2.0), turn(8, 3.0)])
  turns = bench_peer.alternate(ours, theirs, 3)
  assert ''.join(calls) == 'abbaab'
  # Theirs / ours per round: 3, 1, 2; by CPU time 1, 2, 3.
  assert bench_peer.ratios(*turns) == {
    'ratio': 2,
    'ratio_min': 1,
    'ratio_max': 3,
    'cpu_ratio': 2,
    'rounds': 3,
  }


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
  code, out, err = run(capsys, *argv)
  assert (code, out) == (2, '')
  assert err.startswith('error: ')
  assert re.search(naming(*facts), err)
  assert err.count('\n') == 1
