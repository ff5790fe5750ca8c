"""How many modules, and steps between them, a reader follows on three walks.

A walk is measured as it runs. A module counts once any of its functions is called. A
crossing is a function that calls a function of another module, perhaps through another
library: a reader then turns to another file. It counts once, however often it is taken;
a function within a function counts as the outer one. Each walk is taken twice and the
second time counts, because imports and tables that are built once are no part of it.
"""

import sys

import jax
import pytest

import vit_jax
from tests.support.goldens import path_of
from vit_jax import config as config_lib
from vit_jax import sharding
from vit_jax.data.pipeline import TrainBatches
from vit_jax.train import schema
from vit_jax.train.trainer import Trainer

if sys.version_info < (3, 12):
  pytest.skip('sys.monitoring is new in Python 3.12', allow_module_level=True)

_TOOL = 4  # A number of sys.monitoring that no profiler or coverage tool has.


class Walk:
  """Records the calls between modules of vit_jax while it is entered, in any thread."""

  def __init__(self):
    self.modules: set[str] = set()
    self.crossings: set[tuple] = set()

  def __enter__(self):
    events = sys.monitoring.events.PY_START
    sys.monitoring.use_tool_id(_TOOL, 'walk')
    sys.monitoring.register_callback(_TOOL, events, self._record)
    sys.monitoring.set_events(_TOOL, events)
    return self

  def __exit__(self, *_):
    sys.monitoring.set_events(_TOOL, 0)
    sys.monitoring.free_tool_id(_TOOL)

  def _record(self, code, offset):
    frame = sys._getframe(1)
    if (callee := _function(frame)) is None:
      return
    self.modules.add(callee[0])
    outer = frame.f_back
    while outer is not None and (caller := _function(outer)) is None:
      outer = outer.f_back
    if outer is not None and caller[0] != callee[0]:
      self.crossings.add((caller, callee))


def _function(frame) -> tuple[str, str] | None:
  """Returns (module, function) of a frame of vit_jax, None for any other."""
  module = frame.f_globals.get('__name__', '')
  if not module.startswith('vit_jax.') or module == 'vit_jax.data.lazy_tf':
    return None  # What looks up `tf.NAME` is no step of a walk.
  if frame.f_code.co_filename == '<string>':  # A method that `dataclasses` wrote.
    return None
  return module, frame.f_code.co_qualname.partition('.<locals>')[0]


def make_trainer() -> tuple[TrainBatches, Trainer]:
  config = schema.check(config_lib.load('configs/digits.py:debug'))
  data = TrainBatches(**config['data'])
  mesh = sharding.make_mesh()
  trainer = Trainer({**config, 'steps': 10}, data.spec, mesh, data.finish_on_device)
  return data, trainer


def take_step(data: TrainBatches, trainer: Trainer) -> None:
  batches = data.iterate()
  batch = next(sharding.prefetch(batches, trainer.mesh))
  jax.eval_shape(trainer.step, trainer.abstract_state, batch)
  batches.close()


def load_file() -> None:
  vit_jax.load(path_of('vit_timm'))


# Walk -> (what it starts from, the walk, most modules, most crossings). The numbers may
# only fall.
WALKS = {
  'file to parameters': (tuple, load_file, 27, 98),
  'config to trainer': (tuple, make_trainer, 41, 142),
  'image to loss': (make_trainer, take_step, 31, 65),
}


@pytest.mark.parametrize('name', WALKS)
def test_walks_get_no_longer(name):
  start, take, modules, crossings = WALKS[name]
  take(*start())
  jax.clear_caches()
  arguments = start()
  with Walk() as walk:
    take(*arguments)
  measured = len(walk.modules), len(walk.crossings)
  steps = sorted(f'{a[0]}:{a[1]} -> {b[0]}:{b[1]}' for a, b in walk.crossings)
  text = '\n'.join([f'{name}: {measured}, at most {(modules, crossings)}', *steps])
  assert measured[0] <= modules, text
  assert measured[1] <= crossings, text
