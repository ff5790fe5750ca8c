import json
import pathlib
import re
import runpy
import subprocess
import sys

import pytest

from vit_jax import cli
from vit_jax.tools.doctor import __main__ as doctor
from vit_jax.tools.doctor import packages

ROOT = pathlib.Path(__file__).parents[2]


def run(capsys, *argv):
  code = cli.run(doctor.main, list(argv))
  out, err = capsys.readouterr()
  assert err == ''
  return code, out


def test_a_machine_that_works(capsys):
  code, out = run(capsys, '--json')
  record = json.loads(out.splitlines()[-1])
  assert (code, record['ok']) == (0, True)
  assert record['smoke']['ok']
  assert len(record['devices']) == 8  # fake ones, see conftest.py
  assert record['cores'] >= 1
  assert record['memory_bytes'] > 2**28
  assert record['disk_free_bytes'] >= 0
  versions = {p['name']: p['version'] for p in record['packages']}
  import jax

  assert versions['jax'] == jax.__version__
  assert all(p['problem'] is None for p in record['packages'] if p['needed'])


def test_a_machine_without_any_package():
  # -S: without site-packages, as after a failed installation.
  command = [sys.executable, '-S', '-m', 'vit_jax.tools.doctor']
  done = subprocess.run([*command, '--json'], cwd=ROOT, capture_output=True, text=True)
  assert (done.returncode, done.stderr) == (1, '')
  record = json.loads(done.stdout.splitlines()[-1])
  assert all(p['problem'] == 'missing' for p in record['packages'])
  assert record['advice'][0].startswith('numpy, jax, ')
  assert any('[tf]' in line and 'pip install' in line for line in record['advice'])
  assert not record['smoke']['ok']


def examine_without_smoke(monkeypatch, **smoke):
  smoke = {'ok': True, 'seconds': 0.0, 'error': None} | smoke
  monkeypatch.setattr(doctor, 'smoke_test', lambda: smoke)


def test_a_platform_that_is_expected(capsys, monkeypatch):
  # JAX falls back to the CPU with a warning where a driver fails.
  examine_without_smoke(monkeypatch)
  assert run(capsys, '--expect', 'cpu')[0] == 0
  code, out = run(capsys, '--expect', 'tpu')
  assert code == 1
  assert 'expected: tpu' in out
  record = json.loads(run(capsys, '--expect', 'gpu', '--json')[1])
  assert (record['ok'], record['lacks']) == (False, 'gpu')


def test_missing_packages_and_how_to_get_them(capsys, monkeypatch):
  examine_without_smoke(monkeypatch)
  version = packages.importlib.metadata.version
  absent = {'tensorflow-cpu', 'tensorflow', 'tensorboard', 'vit_jax'}

  def lookup(name):
    if name in absent:
      raise packages.importlib.metadata.PackageNotFoundError(name)
    return version(name)

  monkeypatch.setattr(packages.importlib.metadata, 'version', lookup)
  code, out = run(capsys)
  assert code == 0  # neither stops a training
  assert f"pip install -e '{ROOT}[tf]'" in out
  assert re.search(rf"tensorboard.*TensorBoard.*pip install -e '{ROOT}'\n", out)

  absent.remove('vit_jax')
  monkeypatch.setattr(
    packages.importlib.metadata,
    'version',
    lambda n: '1' if n == 'vit_jax' else lookup(n),
  )
  assert "pip install 'vit_jax[tf]'" in run(capsys)[1]


def test_a_broken_or_old_package(capsys, monkeypatch):
  examine_without_smoke(monkeypatch)
  imported = packages.importlib.import_module

  def broken(name):
    if name == 'optax':
      raise ImportError('libfoo.so: no such file')
    return imported(name)

  monkeypatch.setattr(packages.importlib, 'import_module', broken)
  wanted = lambda name: '>=99' if name == 'flax' else None
  monkeypatch.setattr(packages, '_wanted', wanted)
  code, out = run(capsys)
  assert code == 1
  assert re.search(r'optax.*ImportError: libfoo\.so', out)
  assert re.search(r'flax.*\d.*>=99', out)


def test_a_failing_step(capsys, monkeypatch):
  def fail():
    raise RuntimeError('no kernel image\nis available')

  monkeypatch.setattr(doctor, '_train_one_step', fail)
  code, out = run(capsys)
  assert code == 1
  assert re.search(r'step.*RuntimeError: no kernel image\n', out)


def test_an_accelerator_that_jax_does_not_see(tmp_path, monkeypatch):
  (tmp_path / 'nvidia0').touch()
  files = {'cuda': ('NVIDIA GPU', (f'{tmp_path}/nvidia[0-9]*',))}
  monkeypatch.setattr(doctor, 'ACCELERATORS', files)
  cpu, gpu = ({'platform': p, 'kind': p, 'memory': None} for p in ('cpu', 'gpu'))
  (line,) = doctor._advice([], [cpu])
  assert 'NVIDIA GPU is here' in line
  assert '[cuda]' in line
  assert doctor._advice([], [gpu]) == []


def test_knows_every_requirement_of_setup(monkeypatch, tmp_path):
  setuptools = pytest.importorskip('setuptools')
  requirements = pytest.importorskip('packaging.requirements')
  given = {}
  monkeypatch.setattr(setuptools, 'setup', lambda **kw: given.update(kw))
  (tmp_path / 'vit_jax').mkdir()
  (tmp_path / 'README.md').touch()
  for name in ('setup.py', 'vit_jax/version.py'):
    (tmp_path / name).write_text((ROOT / name).read_text())
  runpy.run_path(str(tmp_path / 'setup.py'))
  known = {
    name: package.extra
    for package in packages.PACKAGES
    for name in (package.name, *package.instead)
  }

  def names(lines):
    for line in lines:
      yield requirements.Requirement(line).name.lower().replace('_', '-')

  for name in names(given['install_requires']):
    assert known[name] is None
  for extra, lines in given['extras_require'].items():
    for name in names(lines):
      assert name in known, extra
      assert extra in ('cuda', 'tpu', 'dev') or known[name] == extra
