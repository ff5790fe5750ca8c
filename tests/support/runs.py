"""A run small enough to repeat: its command line; how to start it and read its results."""

import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.support import ROOT
from vit_jax import config, sharding
from vit_jax.train import run as train

CONFIG = 'configs/digits.py:debug'
STEPS = 30
EVAL_EVERY = 15

# Everything that a state can hold and that resuming could get wrong: dropout, EMA, a bfloat16
# moment, augmentation drawn by position. About 2,800 parameters.
SMALL = [
  *('epochs=None', f'steps={STEPS}', 'data.batch_size=8'),
  'model.patch_size=(2,2)',  # The 8 x 8 pixels as they are
  *('model.width=16', 'model.depth=1', 'model.mlp_dim=32', 'model.num_heads=2'),
  *('model.dropout=0.1', 'optim.ema=0.9', 'optim.moment_dtype=bfloat16'),
  *('optim.lr=0.003', 'optim.schedule.warmup=20'),
  'data.pp=random_affine(15, 0.1, (0.9, 1.1))|value_range(-1, 1)',
  *('log.every=1', 'log.tensorboard=False', 'log.report=False'),
  *('checkpoint.every=5', 'checkpoint.best=test/top1'),
]
TEST = dict(source='digits', split='test', batch_size=120, pp='value_range(-1, 1)')
# Changes for a run of four steps, with checkpoints at 2 and 4.
SHORT = ('steps=4', 'checkpoint.every=2', 'optim.schedule.warmup=2', 'log.every=1')
EVALS = {'test': dict(type='classification', every=EVAL_EVERY, data=TEST)}


def flags(*changes: str) -> list[str]:
  """Returns the arguments of the small run; later ones win."""
  words = [*SMALL, f'evals={EVALS}', *changes]
  return [f'--config={CONFIG}', *(f'--config.{word}' for word in words)]


def small(*changes: str, **sections) -> dict:
  """Returns the small run's config, with `changes` and whole sections replaced."""
  c = config.load(CONFIG)
  config.override(c, [*SMALL, f'evals={EVALS}', *changes])
  return {**c, **sections}


def run(workdir, *changes: str, **sections) -> tuple[dict, list[dict]]:
  """Trains the small run in this process."""
  return train.train(small(*changes, **sections), workdir)


class Started(Exception):
  pass


def until_the_first_step(monkeypatch, config: dict, workdir) -> None:
  """Runs all that comes before the compilation of the first step, which is only traced."""

  def trace(trainer):
    abstract = trainer.abstract_state
    after, values = jax.eval_shape(trainer.step, abstract, trainer.spec)
    assert jax.tree.structure(after) == jax.tree.structure(abstract)
    assert 'loss' in values
    raise Started

  monkeypatch.setattr(train.Trainer, 'compile', trace)
  with pytest.raises(Started):
    train.train(config, workdir)


def on_one_device(monkeypatch) -> None:
  """Lets runs in this process take one device of the eight: they compile sooner."""
  make_mesh = functools.partial(sharding.make_mesh, devices=jax.devices()[:1])
  monkeypatch.setattr(sharding, 'make_mesh', make_mesh)


def run_on_one_device(workdir, *changes: str, **sections) -> tuple[dict, list[dict]]:
  """As `run`, on one device: for fixtures that outlive a test."""
  with pytest.MonkeyPatch.context() as patch:
    on_one_device(patch)
    return run(workdir, *changes, **sections)


def killed(finished: Path, folder: Path, step: int = 2) -> Path:
  """Copies a finished run as a kill after its checkpoint at `step` leaves it."""
  shutil.copytree(finished, folder)
  for name in saved(folder):
    if int(name) > step:
      shutil.rmtree(folder / 'checkpoints' / name)
  (folder / 'status.json').write_text(json.dumps({'step': step, 'state': 'running'}))
  return folder


def one_device() -> str:
  """Returns the XLA_FLAGS of the tests, less the fake devices."""
  flags = os.environ['XLA_FLAGS'].split()
  return ' '.join(f for f in flags if 'device_count' not in f)


_MAIN = "runpy.run_module('vit_jax.main', run_name='__main__', alter_sys=True)"


class Process:
  """`python -m vit_jax.main ARGS` on one device, its lines read one by one.

  Args:
    sabotage: code that is run before.
  """

  def __init__(self, *args: str, sabotage: str = '', **environment: str):
    program = ['-m', 'vit_jax.main']
    if sabotage:
      program = ['-c', f'import runpy, sys\n{sabotage}\n{_MAIN}']
    env = {
      **os.environ,
      'XLA_FLAGS': one_device(),
      'TF_CPP_MIN_LOG_LEVEL': '2',  # as main sets it
      **environment,
    }
    self.popen = subprocess.Popen(
      [sys.executable, *program, *args],
      cwd=ROOT,
      env=env,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )

  def until(self, word: str) -> None:
    """Reads on to the first line that starts with a word."""
    for line in self.popen.stdout:
      if line.startswith(word):
        return
    raise AssertionError(f'ended without {word!r}: {self.end()}')

  def until_step(self, step: int) -> None:
    """Reads on to the first line of that train step, or of a later one."""
    for line in self.popen.stdout:
      match = re.match(r'step (\d+)/', line)
      if match and int(match[1]) >= step:
        return
    raise AssertionError(f'ended before step {step}: {self.end()}')

  def end(self) -> tuple[int, str, str]:
    """Waits; returns the exit code, the rest of stdout, and stderr."""
    out, err = self.popen.communicate()
    return self.popen.returncode, out, err


def assert_finished(status: dict, rows: list[dict], evals: dict) -> None:
  """Asserts that a run reached its end, every number finite and all evaluations done."""
  assert (status['state'], status['exit']) == ('finished', 0)
  for row in rows:
    for key, value in row.items():
      assert math.isfinite(value), (row['step'], key)
  last = [row for row in rows if row['step'] == status['step']]
  names = {key.split('/')[0] for row in last for key in row} - {'step'}
  assert names == {'train', 'time', *evals}
  assert any('train/loss' in row for row in last)


def status(workdir: Path) -> dict:
  return json.loads((workdir / 'status.json').read_text())


def rows(workdir: Path) -> list[dict]:
  """Returns the rows of metrics.jsonl, without the measurements of a clock."""
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [
    {k: v for k, v in json.loads(line).items() if not k.startswith('time/')}
    for line in lines
  ]


def assert_same(one: Path, other: Path) -> None:
  """Asserts that two runs ended with the same bits and the same numbers on the way."""
  assert status(one) == status(other)
  assert rows(one) == rows(other)


def saved(workdir: Path) -> list[str]:
  """Returns the names in the run's checkpoint folder."""
  return sorted(path.name for path in (workdir / 'checkpoints').iterdir())
