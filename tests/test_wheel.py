"""The sdist, the wheel built from it, and a run from the wheel outside of any clone."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import vit_jax
from tests.support import runs

ROOT = runs.ROOT


def _call(command, folder: Path, **environment: str) -> str:
  done = subprocess.run(
    command,
    cwd=folder,
    env=os.environ | environment,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


def _build(what: str, source: Path, dest: Path) -> Path:
  """Calls setuptools as pip and `python -m build` do, without their environment."""
  code = f'from setuptools import build_meta as b; b.build_{what}({str(dest)!r})'
  _call([sys.executable, '-c', code], source)
  (made,) = dest.iterdir()
  return made


@pytest.fixture(scope='module')
def clone(tmp_path_factory):
  # A copy: setuptools writes beside setup.py, under the eyes of other tests.
  source = tmp_path_factory.mktemp('clones') / 'vit_jax'
  source.mkdir()
  manifest = (ROOT / 'MANIFEST.in').read_text(encoding='utf-8')
  for name in ('vit_jax', 'configs', *re.findall(r'^graft (\S+)', manifest, re.M)):
    left_out = shutil.ignore_patterns('__pycache__', 'golden')
    shutil.copytree(ROOT / name, source / name, ignore=left_out)
  for path in ROOT.iterdir():
    if path.is_file():
      shutil.copy(path, source)
  return source


@pytest.fixture(scope='module')
def sdist(clone, tmp_path_factory):
  return _build('sdist', clone, tmp_path_factory.mktemp('sdist'))


@pytest.fixture(scope='module')
def wheel(sdist, tmp_path_factory):
  unpacked = tmp_path_factory.mktemp('unpacked')
  with tarfile.open(sdist) as archive:
    archive.extractall(unpacked, filter='data')
  (source,) = unpacked.iterdir()
  return _build('wheel', source, tmp_path_factory.mktemp('wheel'))


def test_the_sdist_has_all_that_git_tracks_except_golden_files(sdist):
  if not (ROOT / '.git').exists():
    pytest.skip('not a checkout')
  # The checkout may be another user's.
  tracked = _call(['git', '-c', 'safe.directory=*', 'ls-files'], ROOT).split()
  with tarfile.open(sdist) as archive:
    names = {name.partition('/')[2] for name in archive.getnames()}
  expected = {name for name in tracked if not name.startswith('tests/golden/')}
  assert expected <= names, 'MANIFEST.in lacks something'
  manifest = (ROOT / 'MANIFEST.in').read_text(encoding='utf-8')
  assert '\nprune tests/golden\n' in manifest
  assert sdist.stat().st_size < 4 << 20


def test_the_wheel_has_what_a_user_needs_and_no_more(wheel):
  with zipfile.ZipFile(wheel) as archive:
    names = set(archive.namelist())
    metadata = archive.read(f'vit_jax-{vit_jax.__version__}.dist-info/METADATA')
  configs = {f'vit_jax/configs/{p.name}' for p in (ROOT / 'configs').glob('*.py')}
  assert configs
  assert {'vit_jax/py.typed', 'vit_jax/__main__.py', *configs} <= names
  assert any('.dist-info/' in name and name.endswith('LICENSE') for name in names)
  assert {name.split('/')[0] for name in names} == {
    'vit_jax',
    f'vit_jax-{vit_jax.__version__}.dist-info',
  }
  assert b'Provides-Extra: tpu' in metadata
  for version in (b'3.11', b'3.12', b'3.13'):
    assert b'Classifier: Programming Language :: Python :: ' + version in metadata


def test_a_script_beside_the_clone_imports_the_package(clone, tmp_path):
  # The script's folder is first in sys.path, and the clone in it has the package's name.
  (tmp_path / 'wheel').mkdir()
  with zipfile.ZipFile(_build('editable', clone, tmp_path / 'wheel')) as archive:
    archive.extractall(tmp_path / 'site')
  script = clone.parent / 'script.py'
  script.write_text(
    f'import site; site.addsitedir({str(tmp_path / "site")!r})\n'
    'import vit_jax; print(vit_jax.__file__); vit_jax.load\n'
  )
  # Without the installed packages, which have another vit_jax.
  said = _call([sys.executable, '-E', '-S', str(script)], tmp_path)
  assert said.strip() == str(clone / 'vit_jax/__init__.py')


def test_the_wheel_trains_in_an_empty_folder(wheel, reference, tmp_path):
  site, folder = tmp_path / 'site', tmp_path / 'empty'
  folder.mkdir()
  pip = [sys.executable, '-m', 'pip', '--disable-pip-version-check', 'install', '-q']
  _call([*pip, '--no-index', '--no-deps', '--target', str(site), str(wheel)], folder)
  # Before the checkout that this environment has installed.
  environment = {'PYTHONPATH': str(site), 'XLA_FLAGS': runs.one_device()}
  command = str(site / 'bin' / 'vit_jax')
  said = _call([command, '--version'], folder, **environment)
  assert said.startswith(f'vit_jax {vit_jax.__version__} from {site / "vit_jax"} ')
  _, *small = runs.flags()
  command = [command, 'train', '--config=digits:debug', '--workdir=run', *small]
  said = _call(command, folder, **environment)
  assert f'Done: {runs.STEPS} steps' in said
  runs.assert_same(reference, folder / 'run')
  assert [path.name for path in folder.iterdir()] == ['run']
