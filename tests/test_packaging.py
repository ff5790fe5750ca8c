"""setup.py, constraints/, the Makefile and the documents agree with one another."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import vit_jax
from tests.support import documents
from vit_jax.__main__ import COMMANDS

ROOT = Path(__file__).parents[1]
CONSTRAINTS = sorted((ROOT / 'constraints').glob('*.txt'))
DOCUMENTS = [*documents.DOCUMENTS, ROOT / 'CONTRIBUTING.md', ROOT / '.ci/run']
# Import names that differ from the name to install.
DISTRIBUTIONS = {'PIL': 'pillow', 'orbax': 'orbax-checkpoint'}
DISTRIBUTIONS |= {
  'google': 'protobuf',
  'yaml': 'pyyaml',
  'mlflow': 'mlflow-skinny',
  'jaxlib': 'jax',
  'sklearn': 'scikit-learn',
  'tensorflow': 'tensorflow-cpu',
}
# Never declared: a peer that the user checks out.
PEERS = {'big_vision'}


@pytest.fixture(scope='module')
def metadata():
  """The keyword arguments that setup.py passes to setuptools."""
  given = {}
  code = compile((ROOT / 'setup.py').read_text(encoding='utf-8'), 'setup.py', 'exec')
  stand_in = SimpleNamespace(setup=given.update, find_packages=lambda include: include)
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, 'setuptools', stand_in)
    command = SimpleNamespace(build_py=object)
    patch.setitem(sys.modules, 'setuptools.command.build_py', command)
    exec(code, {'__file__': str(ROOT / 'setup.py'), '__name__': 'setup'})
  return given


def _requirements(metadata, without: str | None = None) -> list[Requirement]:
  extras = [r for name, r in metadata['extras_require'].items() if name != without]
  return [Requirement(r) for r in sum(extras, metadata['install_requires'])]


def _pins(path: Path) -> dict[str, str]:
  lines = path.read_text(encoding='utf-8').splitlines()
  pins = {}
  for line in lines[1:]:
    # Versions only: no address, no path.
    name, version = re.fullmatch(r'([\w.-]+)==([\w.+!]+)', line).groups()
    pins[canonicalize_name(name)] = version
  return pins


def test_every_document_says_the_same_version_and_date(metadata):
  version = vit_jax.__version__
  assert metadata['version'] == version
  changelog = (ROOT / 'CHANGELOG.md').read_text(encoding='utf-8')
  headings = re.findall(r'^## \[(.+)\](?: - (\S+))?$', changelog, re.MULTILINE)
  newest, date = next(h for h in headings if h[0] != 'Unreleased')
  assert newest == version
  assert re.fullmatch(r'unreleased|\d{4}-\d\d-\d\d', date)
  citation = (ROOT / 'CITATION.cff').read_text(encoding='utf-8')
  cited = dict(re.findall(r'^([a-z-]+): (.*)$', citation, re.MULTILINE))
  assert cited['version'] == version
  assert cited.get('date-released', 'unreleased') == date
  assert cited['license'] == metadata['license']


def test_workflows_run_what_developers_run():
  folder = ROOT / '.github' / 'workflows'
  makefile = (ROOT / 'Makefile').read_text(encoding='utf-8')
  supported = re.search(r'needs Python ([\d., or]+) with', makefile)[1]
  for name in ('ci', 'release'):
    text = (folder / f'{name}.yml').read_text(encoding='utf-8')
    assert 'run: .ci/run' in text
    (tested,) = re.findall(r'^ +python: \[(.+)\]$', text, re.MULTILINE)
    assert re.findall(r'[\d.]+', tested) == re.findall(r'\d[\d.]+\d', supported)
  commands = re.findall(r'^ +vit_jax (\w+)', text, re.MULTILINE)
  assert set(commands) <= set(COMMANDS)
  assert 'train' in commands
  scheduled = (folder / 'slow.yml').read_text(encoding='utf-8')
  assert 'run: make test-slow' in scheduled
  assert 'run: make ci PINNED=no' in scheduled
  # All tests but those that are marked for an environment or a day of their own.
  assert '\nmake ci PYTHON=' in (ROOT / '.ci' / 'run').read_text(encoding='utf-8')
  (ci,) = re.findall(r'^test: lint .*\n\t(.*)$', makefile, re.MULTILINE)
  assert ci.endswith('pytest $(XDIST) $(ARGS)')
  assert re.search('^ci: test ', makefile, re.MULTILINE)


def test_extras(metadata):
  assert set(metadata['extras_require']) == {
    *(
      'train',
      'tf',
      'all',
      'cuda',
      'tpu',
      'gcs',
      'hub',
      'heif',
      'beam',
      'plots',
      'detection',
    ),
    *('wandb', 'mlflow', 'docs', 'peer', 'dev', 'text', 'features'),
  }
  base = {Requirement(r).name for r in metadata['install_requires']}
  assert not [name for name in base if name.startswith('tensor')]


def test_nothing_is_bounded_above(metadata):
  for requirement in _requirements(metadata):
    assert {s.operator for s in requirement.specifier} <= {'>='}, requirement


@pytest.mark.parametrize('path', CONSTRAINTS, ids=lambda p: p.name)
def test_every_requirement_has_a_pin_that_fits(metadata, path):
  pins = _pins(path)
  # Beam has an environment of its own: it wants an older protobuf than TensorFlow
  # (2.77 with 2.21, 2026-11).
  for requirement in _requirements(metadata, without='beam'):
    version = pins.get(canonicalize_name(requirement.name))
    assert version is not None, f'{path.name} has no pin for {requirement.name}'
    assert version in requirement.specifier, f'{path.name}: {requirement} vs {version}'


def test_make_constraints_installs_what_is_pinned(metadata):
  makefile = (ROOT / 'Makefile').read_text(encoding='utf-8')
  recipe = makefile.partition('\nconstraints:')[2]
  installed = re.search(r"'\.\[([\w,]+)\]'", recipe)[1].split(',')
  extras = metadata['extras_require']
  names = {Requirement(r).name for extra in installed for r in extras[extra]}
  names |= {Requirement(r).name for r in metadata['install_requires']}
  assert {r.name for r in _requirements(metadata, without='beam')} <= names


def test_constraints_cover_the_supported_pythons(metadata):
  assert [path.stem for path in CONSTRAINTS] == ['py311', 'py312', 'py313']
  assert metadata['python_requires'] == '>=3.11'


def test_every_import_is_declared(metadata):
  declared = {canonicalize_name(r.name) for r in _requirements(metadata)}
  for path in (ROOT / 'vit_jax').rglob('*.py'):
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
      if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
      elif isinstance(node, ast.ImportFrom):
        names = [node.module]
      else:
        continue
      for name in (name.partition('.')[0] for name in names):
        if name == 'vit_jax' or name in sys.stdlib_module_names or name in PEERS:
          continue
        distribution = canonicalize_name(DISTRIBUTIONS.get(name, name))
        assert distribution in declared, (
          f'{path.name} imports {name}; add it to setup.py'
        )


def test_extras_named_in_messages_and_documents_exist(metadata):
  for path in [*(ROOT / 'vit_jax').rglob('*.py'), *DOCUMENTS]:
    text = path.read_text(encoding='utf-8')
    for group in re.findall(r"""pip install [^\n]*?\.\[([a-z,]+)\]""", text):
      unknown = set(group.split(',')) - set(metadata['extras_require'])
      assert not unknown, f'{path.name} names the extra {unknown}'


def test_make_targets_named_in_documents_exist():
  makefile = (ROOT / 'Makefile').read_text(encoding='utf-8')
  targets = set(re.findall(r'^([a-z-]+):', makefile, re.MULTILINE))
  for path in DOCUMENTS:
    text = path.read_text(encoding='utf-8')
    named = re.findall(r'(?:^|`|&& |exec )make ([a-z][a-z-]*)', text, re.MULTILINE)
    assert set(named) <= targets, f'{path.name}: {set(named) - targets}'


def test_data_files_are_installed_with_the_package(metadata):
  patterns = ['**/*.py', *metadata['package_data']['vit_jax']]
  taken = {path for pattern in patterns for path in (ROOT / 'vit_jax').glob(pattern)}
  for path in (ROOT / 'vit_jax').rglob('*'):
    if path.is_file() and '__pycache__' not in path.parts:
      assert path in taken, f'{path}: not in package_data'


def _make(folder: Path, *args: str, **variables) -> subprocess.CompletedProcess:
  # Without the variables of a `make test VENV=... PYTHON=...` that may run this.
  theirs = ('MAKEFLAGS', 'MAKELEVEL', 'MAKEOVERRIDES', 'MFLAGS')
  theirs += ('VENV', 'PYTHON', 'ARGS')
  env = {k: v for k, v in os.environ.items() if k not in theirs}
  return subprocess.run(
    [shutil.which('make'), '-f', str(ROOT / 'Makefile'), *args],
    cwd=folder,
    env={**env, **variables},
    capture_output=True,
    text=True,
    check=False,
  )


@pytest.fixture
def clone(tmp_path):
  """Returns a folder with what the Makefile reads, and a Python too old for vit_jax."""
  for name in ('setup.py', 'pyproject.toml', 'vit_jax/version.py'):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
  old = tmp_path / 'python3.9'
  old.write_text('#!/bin/sh\necho 3.9\nexit 1\n')
  old.chmod(0o755)
  return tmp_path


def test_an_old_python_is_one_clear_line(clone):
  result = _make(clone, 'train', 'PYTHON=./python3.9')
  assert result.returncode != 0
  line, verdict = result.stderr.splitlines()
  assert 'needs Python 3.11, 3.12 or 3.13' in line
  assert 'Tried: ./python3.9.' in line
  assert verdict.startswith('make: ***')
  assert not (clone / '.venv').exists()


PYENV = 'versions/3.13.0/bin/python'


@pytest.mark.parametrize(
  ('pythons', 'newest'),
  [
    ({'bin/python3': '3.11'}, 'python3'),
    # As on Debian 12, with a newer one beside the default.
    ({'bin/python3': '3.11', 'bin/python3.12': '3.12'}, 'python3.12'),
    ({'bin/python3': '3.13', 'bin/python3.11': '3.11'}, 'python3'),
    ({'bin/python3': '3.14', 'bin/python3.12': '3.12'}, 'python3.12'),
    # A shim of pyenv fails where its version is not active.
    ({'bin/python3.13': '', 'bin/python3.12': '3.12', PYENV: '3.13'}, PYENV),
  ],
)
def test_make_takes_the_newest_python(clone, pythons, newest):
  (clone / 'bin').mkdir()
  for tool in ('sh', 'sort'):
    (clone / 'bin' / tool).symlink_to(shutil.which(tool))
  for name, version in pythons.items():
    (clone / name).parent.mkdir(parents=True, exist_ok=True)
    (clone / name).write_text(
      '#!/bin/sh\n'
      # As the probe of the Makefile: prints its version, and exits 0 if it fits.
      f'if [ "$1" = -c ]; then echo {version}; '
      f'case "{version}" in 3.1[123]) exit 0;; *) exit 1;; esac; fi\n'
      'echo "made by $0" >&2\n'
    )
    (clone / name).chmod(0o755)
  where = f'SHELL={clone}/bin/sh', f'PYENV_ROOT={clone}'
  result = _make(clone, '.venv/bin/python', *where, PATH=f'{clone}/bin')
  assert result.returncode == 0, result.stderr
  (made,) = re.findall('made by (.*)', result.stderr)
  assert made.endswith(f'/{newest}')


def test_train_after_test_installs_nothing_again(clone):
  (clone / '.venv/bin').mkdir(parents=True)
  for name in ('bin/python', '.installed', '.installed-dev'):
    (clone / '.venv' / name).touch()
  for target in ('train', 'test'):
    commands = _make(clone, '-n', target)
    assert commands.returncode == 0, commands.stderr
    assert 'pip install' not in commands.stdout
  os.utime(clone / 'setup.py', (2**31, 2**31))  # newer than the install
  assert 'pip install' in _make(clone, '-n', 'train').stdout
