"""Notebooks: stripped, short, and their code runs."""

import json
import shutil
from pathlib import Path

import pytest
import runs

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / 'colabs').glob('*.ipynb'))


def test_there_are_notebooks():
  assert NOTEBOOKS


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_runs(path, tmp_path, monkeypatch):
  cells = json.loads(path.read_text())['cells']
  assert len(cells) < 20
  code = [''.join(c['source']) for c in cells if c['cell_type'] == 'code']
  assert not any(c.get('outputs') or c.get('execution_count') for c in cells)
  shutil.copytree(ROOT / 'configs', tmp_path / 'configs')
  monkeypatch.chdir(tmp_path)
  runs.on_one_device(monkeypatch)
  names: dict = {}
  for source in code:
    if not source.startswith('%'):  # installation
      exec(compile(source, path.name, 'exec'), names)
  if path.stem == 'first_steps':  # trains configs/digits.py:debug
    evals = names['digits']['evals']
    runs.assert_finished(names['status'], names['rows'], evals)
