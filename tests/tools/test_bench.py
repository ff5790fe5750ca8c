"""`vit_jax bench` on a tiny model."""

import json
import re

import jax
import pytest

from tests.support import commands, naming
from vit_jax import models
from vit_jax.errors import OutOfMemory
from vit_jax.machine import cores
from vit_jax.tools import bench
from vit_jax.train import runtime

TINY = ('vit:mu/16', '--resolution', '32', '--set', 'num_classes=10')


@pytest.fixture(autouse=True)
def small_products(monkeypatch):
  monkeypatch.setattr(bench, 'SIZES', (64, 128))


def run(capsys, *argv):
  return commands.run(bench.main, capsys, *argv)


def params():
  model = models.build('vit:mu/16', num_classes=10)
  shapes = model.shapes((32, 32, 3))['params']
  return sum(x.size for x in jax.tree.leaves(shapes))


def test_rows(capsys):
  code, out, _ = run(capsys, *TINY, '--steps', '3', '--batch', '2', '--json')
  assert code == 0
  record = json.loads(out)
  assert record['machine']['cores'] == cores()
  assert record['machine']['versions']['jax'] == jax.__version__
  assert [row['mode'] for row in record['rows']] == ['train', 'forward']
  peak = record['peak']['float32']
  for row in record['rows']:
    step = row['step_s']
    assert 0 < step['min'] <= step['median'] <= step['max']
    assert row['images_per_s'] == row['batch'] / step['median']
    assert row['params'] == params()
    # 5 tokens, width 32, MLP 128, one layer; patches of 16 x 16 x 3; 10 classes.
    products = 4 * 768 * 32 + 5 * (4 * 32 * 32 + 2 * 32 * 128) + 2 * 25 * 32 + 320
    assert row['gflops'] == 2 * products / 1e9
    passes = 3 if row['mode'] == 'train' else 1
    rate = passes * 2 * products * row['images_per_s']
    assert row['mfu'] == pytest.approx(rate / peak['flops_per_s'])
  # Parameters and two moments, float32, are among what a training step holds.
  assert record['rows'][0]['memory_bytes'] > 3 * 4 * params()


def test_a_tuned_model_has_no_mfu(capsys):
  argv = (*TINY, '--steps', '1', '--batch', '2', '--mode', 'train')
  argv += ('--tune', 'method=lora', '--tune', 'rank=2', '--json')
  code, out, _ = run(capsys, *argv)
  assert code == 0
  (row,) = json.loads(out)['rows']
  assert row['mfu'] is None
  assert row['params'] > params()


def test_a_model_that_does_not_fit(capsys, monkeypatch):
  def refuse(*args):
    raise OutOfMemory('Out of memory: 9 GiB. Try a smaller batch.')

  monkeypatch.setattr(runtime, 'trace_step', refuse)
  argv = ('--steps', '1', '--batch', '2', '--mode', 'forward')
  code, out, _ = run(capsys, *TINY, *argv)
  assert code == 0
  assert re.search(naming('forward', 'out of memory', '9 GiB'), out)
  assert 'Try' not in out
