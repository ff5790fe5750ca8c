"""`tools.bench --vs timm` without PyTorch: timm's side is a script that sleeps."""

import json
import re
import sys

import pytest

from tests.support import naming
from tests.tools.test_bench import QUICK, TINY, params, run, small_products  # noqa: F401
from vit_jax.machine import cores
from vit_jax.tools.bench import ours as bench_ours
from vit_jax.tools.bench import peer as bench_peer
from vit_jax.tools.bench import text as bench_text
from vit_jax.tools.bench import torch_worker

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


@pytest.fixture
def worker(tmp_path, monkeypatch):
  """Lets our side start the script above in place of timm's worker."""

  def make(count):
    path = tmp_path / 'worker.py'
    path.write_text(WORKER % count)
    monkeypatch.setattr(bench_peer, 'SCRIPT', path)
    return ('--vs', 'timm', '--torch-python', sys.executable, '--rounds', '3')

  return make


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
    'threads': cores(),
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
