"""`vit_jax doctor`: machines that work, and those that do not."""

import json
import re

import jax

from tests.support import commands
from vit_jax import models
from vit_jax.tools import doctor


def run(capsys, *argv):
  code, out, err = commands.run(doctor.main, capsys, *argv)
  assert err == ''
  return code, out


def test_a_machine_that_works(capsys):
  code, out = run(capsys, '--json')
  record = json.loads(out)
  assert (code, record['ok']) == (0, True)
  assert record['step']['ok']
  assert len(record['devices']) == 8  # fake ones, see conftest.py
  assert record['memory_bytes'] > 2**28
  assert record['packages']['jax']['version'] == jax.__version__


def test_a_machine_without_any_package():
  # -S: without site-packages, as after a failed installation.
  done = commands.python('-S', '-m', 'vit_jax.tools.doctor', '--json')
  assert (done.returncode, done.stderr) == (1, '')
  record = json.loads(done.stdout)
  assert all(package['problem'] for package in record['packages'].values())
  assert record['advice'][0].startswith('numpy, jax, ')
  assert '[tf]' in record['advice'][1]


def test_a_platform_that_is_expected(capsys, monkeypatch):
  # JAX falls back to the CPU with a warning where a driver fails.
  monkeypatch.setattr(doctor, 'smoke_test', lambda: {'ok': True, 'seconds': 0.0})
  assert run(capsys, '--expect', 'cpu')[0] == 0
  code, out = run(capsys, '--expect', 'tpu')
  assert code == 1
  assert re.search('expected +tpu', out)


def test_a_failing_step_and_a_broken_package(capsys, monkeypatch):
  def fail(*args, **fields):
    raise RuntimeError('no kernel image\nis available')

  monkeypatch.setattr(models, 'build', fail)
  code, out = run(capsys)
  assert code == 1
  assert re.search(r'step.*RuntimeError: no kernel image\n', out)
  monkeypatch.setattr(doctor.importlib, 'import_module', fail)
  assert re.search(r'optax +cannot be imported: RuntimeError', run(capsys)[1])


def test_an_accelerator_that_jax_does_not_see(tmp_path, monkeypatch, capsys):
  (tmp_path / 'nvidia0').touch()
  files = {'cuda': ('NVIDIA GPU', 'gpu', (f'{tmp_path}/nvidia[0-9]*',))}
  monkeypatch.setattr(doctor, 'ACCELERATORS', files)
  monkeypatch.setattr(doctor, 'smoke_test', lambda: {'ok': True, 'seconds': 0.0})
  assert re.search(r'NVIDIA GPU is here.*\[cuda\]', run(capsys)[1])


PARTS = ('one training step', 'device 0', 'jax  ', 'matplotlib', 'pycocotools')


def test_the_verdict_comes_first_and_then_the_next_step(monkeypatch, capsys):
  monkeypatch.setattr(doctor, 'smoke_test', lambda: {'ok': True, 'seconds': 0.0})
  monkeypatch.setattr(doctor.importlib.util, 'find_spec', lambda name: None)
  verdict, needed, *rest = run(capsys)[1].splitlines()
  assert 'training step works' in verdict
  assert '[tf]' in needed
  order = [next(i for i, x in enumerate(rest) if name in x) for name in PARTS]
  assert order == sorted(order)
