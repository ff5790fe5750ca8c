"""Every key of the recipes, set to a wrong value: refused in one line, or legal.

A legal config is started: its data are opened, its model and optimizer built and its
first step traced; nothing else can fail before a device starts to compute.
"""

import copy
import math
from collections.abc import Iterator
from fractions import Fraction

import jax
import numpy as np
import pytest

from tests.support import naming, runs
from vit_jax import config as config_lib
from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.train import run, schema

# A model, optimizer, evaluator and data of each kind that the recipes use.
CONFIGS = ('digits', 'finetune', 'vit_g_jft3b', 'vit_jft', 'convnext_i1k', 'mixer_i1k')
CONFIGS += ('bit_i21k', 'augreg_i1k')

DEEP: list = []
for _ in range(500):
  DEEP = [DEEP]
# Values that are refused at any key: not finite, not JSON, or nested too deeply.
NEVER = {
  'nan': math.nan,
  'inf': math.inf,
  '-inf': -math.inf,
  '10**400': 10**400,
  'bytes': b'x',
  'set': {1},
  'object': Fraction(1, 3),
  'array': np.ones(3),
  'deep': DEEP,
}
PERHAPS = {
  'None': None,
  'True': True,
  '-1': -1,
  '0': 0,
  '3': 3,
  '0.5': 0.5,
  '1e30': 1e30,
  '-1e30': -1e30,
  '10**30': 10**30,
  'numpy': np.float32(0.5),
  'empty text': '',
  'text': 'x',
  'lines': 'a\nb',
  'NUL': 'a\x00b',
  'surrogate': 'a\udcffb',
  'brackets': '((((',
  'long': 'x' * 5000,
  'empty list': [],
  'list': [1, 'x', None],
  'pairs': [['a', 1], ['(', 2]],
  'empty dict': {},
  'dict': {'x': 1},
}


def places(config: dict, path: tuple = ()) -> Iterator[tuple]:
  """Yields the path of every key, sections too."""
  for key, value in config.items():
    yield (*path, key)
    if isinstance(value, dict):
      yield from places(value, (*path, key))


def changed(config: dict, path: tuple, value=None, key: str | None = None) -> dict:
  """Returns the config with another value at a path, or another key for its value."""
  config = copy.deepcopy(config)
  section = config
  for name in path[:-1]:
    section = section[name]
  if key is None:
    section[path[-1]] = value
  else:
    section[key] = section.pop(path[-1])
  return config


def mutations(names=CONFIGS) -> Iterator[tuple[str, dict, bool]]:
  """Yields (name, config, whether it must be refused), each key once."""
  seen = set()
  for name in names:
    config = config_lib.load(f'configs/{name}.py:debug')
    for path in places(config):
      if path in seen:
        continue
      seen.add(path)
      where = f'{name} {".".join(path)}'
      for what, value in {**PERHAPS, **NEVER}.items():
        yield f'{where} = {what}', changed(config, path, value), what in NEVER
      named = path[-2:-1] in (('evals',), ('datasets',))  # their keys are names
      yield f'{where} misspelt', changed(config, path, key=f'{path[-1]}x'), not named
      yield f'{where} gone', changed(config, path, key='\x00'), not named


class Started(Exception):
  """The first step was traced."""


def started(trainer):
  jax.eval_shape(trainer.step, trainer.abstract_state, trainer.spec)
  raise Started


def test_stages_without_widths():
  model = models.build('convnext', 'T', depths=(1, 1))
  with pytest.raises(UserError, match=naming('depths=(1, 1)', 'widths')):
    jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 32, 32, 3), np.float32))


def test_mutations_are_checked():
  """Each key of two recipes: a wrong value is one line, and never another exception."""
  count = 0
  for name, config, must in mutations(('digits', 'augreg_i1k')):
    count += 1
    message = ''
    try:
      schema.check(config)
    except UserError as error:
      message = str(error)
    assert '\n' not in message, name
    assert message or not must, name
  assert count > 1000


@pytest.mark.faults
def test_mutations(faults_table, monkeypatch, tmp_path):
  runs.on_one_device(monkeypatch)
  monkeypatch.chdir(runs.ROOT)
  monkeypatch.setattr(run.Trainer, 'compile', started)
  count = 0
  for name, config, must in mutations():
    count += 1
    workdir = tmp_path / str(count)

    def start(config=config, workdir=workdir):
      try:
        run.train(config, workdir)
      except Started:
        return True

    if faults_table.tried('config mutations', name, start, seconds=120) and must:
      faults_table('config mutations', name, 'silent', 'it started')
  assert count > 2000
