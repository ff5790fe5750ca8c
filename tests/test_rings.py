"""The rings around the core can be deleted, and an installed package can add another."""

import ast
import json
import os
import re

import pytest

from tests.support import ROOT, commands, naming
from vit_jax import registry

# The core's own tests of loading, predicting and inspecting, and of training.
TESTS = (
  'tests/weights/test_goldens.py::test_golden_loads_by_its_path_and_agrees[vit_timm]',
  'tests/tools/test_predict.py::test_table_and_json',
  'tests/tools/test_inspect.py::test_a_file_of_weights',
  'tests/tools/test_inspect.py::test_every_config[digits]',
)
TRAINS = 'tests/test_extending.py::test_a_config_file_registers_its_parts'
RING = ROOT / 'tests' / 'support' / 'third_ring'


def run_python(*args, path: str = '') -> str:
  done = commands.python(*args, PYTHONPATH=os.pathsep.join([str(ROOT), path]))
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


@pytest.mark.parametrize(
  ('missing', 'tests'),
  [
    ('vit_jax.detection', TESTS[2:]),
    ('vit_jax.learn', TESTS[2:]),
    ('vit_jax.lab', TESTS[2:]),
    ('vit_jax.detection,vit_jax.learn,vit_jax.lab', [TRAINS, *TESTS]),
  ],
)
def test_the_core_works_without(missing, tests):
  run_python('-m', 'tests.support.without', missing, *tests)


def test_a_name_of_a_missing_ring_says_so():
  code = """
import sys
from tests.support.without import Missing
sys.meta_path.insert(0, Missing(['vit_jax.detection']))
from vit_jax import errors, tasks
try:
  tasks.TASKS['detect']
except errors.UserError as error:
  print(error)
"""
  assert 'vit_jax.detection, which may have more, is missing' in run_python('-c', code)


def test_only_the_list_of_rings_names_them():
  named = []
  for path in sorted((ROOT / 'vit_jax').rglob('*.py')):
    module = '.'.join(path.relative_to(ROOT).with_suffix('').parts)
    if module.startswith(registry.RINGS):
      continue
    text = path.read_text(encoding='utf-8')
    if not any(ring in text for ring in registry.RINGS):
      continue
    for node in ast.walk(ast.parse(text)):
      names = [getattr(node, 'module', None) or '', getattr(node, 'value', None)]
      if isinstance(node, ast.Import):
        names += [alias.name for alias in node.names]
      for name in names:
        if isinstance(name, str) and any(ring in name for ring in registry.RINGS):
          named.append((module, name))
  assert named == [('vit_jax.registry', ring) for ring in registry.RINGS]


def test_every_table_of_the_core_is_listed():
  tables = set()
  for path in (ROOT / 'vit_jax').rglob('*.py'):
    text = path.read_text(encoding='utf-8')
    tables |= {*re.findall(r" = Registry\(\s*'([^']+)'", text)}
  assert tables == {*registry.TABLES}


def test_a_ring_that_misspells_a_table_is_an_error(tmp_path, monkeypatch):
  (tmp_path / 'misspelt_ring.py').write_text("ENTRIES = {'tasks': {'a': 'b:c'}}")
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(registry, 'RINGS', ('misspelt_ring',))
  with pytest.raises(ValueError, match=naming('misspelt_ring', "'tasks'", "'task'")):
    registry.rings.__wrapped__()


def test_an_installed_package_is_a_ring(tmp_path):
  # As pip writes it: the package, and a folder with its entry points.
  (tmp_path / 'third_ring').symlink_to(RING)
  info = tmp_path / 'third_ring-1.0.dist-info'
  info.mkdir()
  (info / 'METADATA').write_text(
    'Metadata-Version: 2.1\nName: third-ring\nVersion: 1.0\n'
  )
  (info / 'entry_points.txt').write_text('[vit_jax.rings]\nthird_ring = third_ring\n')
  run = tmp_path / 'run'
  keys = {
    'model.depth': 1,
    'log.report': False,
    'model.name': 'edges',
    'task': "{'name': 'confident', 'reward': 0.01}",
    'data.pp': 'negative|value_range(-1, 1)',
    'evals': "{'test': {'type': 'classification', 'data': {'source': 'digits', "
    "'split': 'test', 'pp': 'negative|value_range(-1, 1)', 'batch_size': 360}}}",
  }
  assignments = [f'--config.{key}={value}' for key, value in keys.items()]
  command = ['train', '--config=digits:debug', f'--workdir={run}', *assignments]
  run_python('-m', 'vit_jax', *command, path=str(tmp_path))
  record = json.loads((run / 'config.json').read_text())
  assert (record['model']['name'], record['task']['name']) == ('edges', 'confident')
  assert json.loads((run / 'status.json').read_text())['state'] == 'finished'
