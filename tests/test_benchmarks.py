"""Benchmarks start, and our side of them runs."""

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / 'benchmarks'


@pytest.fixture
def vs_timm():
  spec = importlib.util.spec_from_file_location('vs_timm', FOLDER / 'vs_timm.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.parametrize('mode', ['forward', 'train'])
def test_our_side_runs(vs_timm, mode):
  args = argparse.Namespace(model='mu/32', mode=mode, batch=2, cores=1)
  run, versions, count = vs_timm.jax_arm(args)
  run(2)
  assert count > 0
  assert 'jax' in versions


def test_timm_is_asked_for():
  result = subprocess.run(
    [sys.executable, FOLDER / 'vs_timm.py'], capture_output=True, text=True
  )
  assert result.returncode == 2
  assert '--torch-python' in result.stderr
