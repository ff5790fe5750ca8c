"""A Trainer alone: the noun of runs, benchmarks and notebooks."""

import functools
import re
from unittest import mock

import jax
import numpy as np
import pytest

from tests.support import naming
from vit_jax import errors, losses, sharding, trees
from vit_jax.train import flops, runtime
from vit_jax.train.trainer import Trainer

SPEC = {
  'image': jax.ShapeDtypeStruct((8, 8, 8, 3), np.float32),
  'label': jax.ShapeDtypeStruct((8,), np.int32),
  'mask': jax.ShapeDtypeStruct((8,), np.float32),
}
CONFIG = {
  'model': dict(name='vit:mu/4', num_classes=5, depth=1, width=16),
  'optim': dict(name='adamw', lr=1e-2),
  'steps': 10,
}


def test_a_trainer_makes_and_steps_the_state_that_it_describes(monkeypatch):
  rng = np.random.default_rng(0)
  batch = {
    'image': rng.uniform(-1, 1, SPEC['image'].shape).astype(np.float32),
    'label': rng.integers(0, 5, 8).astype(np.int32),
    'mask': np.ones(8, np.float32),
  }
  mesh, kernel = sharding.make_mesh(2, 4), np.full((16, 5), 0.5, np.float32)
  with jax.set_mesh(mesh):
    trainer = Trainer(CONFIG, SPEC, mesh)
    state = trainer.init({'head/kernel': kernel})  # in place of a fresh one
    np.testing.assert_array_equal(state.params['head']['kernel'], kernel)
    facts = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)
    assert facts(state) == facts(trainer.abstract_state)
    losses, step = [], trainer.compile()
    for _ in range(2):
      state, metrics = step(state, sharding.global_batch(batch, mesh))
      losses.append(float(metrics['loss']))
  assert losses[1] < losses[0]
  # A step that does not fit is refused before it runs.
  monkeypatch.setattr(trainer, 'lower', lambda: mock.Mock(compile=lambda _: step))
  monkeypatch.setattr(runtime, 'device_memory', lambda device: 2**10)
  with pytest.raises(
    errors.OutOfMemory, match=naming('config.data.batch_size')
  ) as error:
    trainer.compile()
  needed, there = re.findall(r'([\d.]+) GiB', str(error.value))
  assert float(needed) >= float(there) == 0


def test_frozen_parameters_are_apart():
  trainer = Trainer(
    {**CONFIG, 'tune': {'method': 'linear'}}, SPEC, sharding.make_mesh(2, 4)
  )
  trained = set(trees.flatten(trainer.abstract_state.params))
  assert trained == {'head/kernel', 'head/bias'}
  assert trained < set(trees.flatten(trainer.abstract_params))


def test_a_loss_of_another_shape_is_refused(monkeypatch):
  table = losses.LOSSES.data | {'mean': lambda logits, targets: logits.mean()}
  monkeypatch.setattr(losses.LOSSES, 'data', table)
  config = {**CONFIG, 'task': {'name': 'classify', 'loss': 'mean'}}
  with pytest.raises(errors.UserError, match=naming('config.task', "'mean'", (), (2,))):
    Trainer(config, SPEC, sharding.make_mesh())


def test_utilisation_is_the_share_of_the_peak(monkeypatch):
  mesh = sharding.make_mesh(2, 4)
  with jax.set_mesh(mesh):
    trainer = Trainer(CONFIG, SPEC, mesh)
    assert trainer.utilisation() is None  # the peak of a CPU is unknown
    monkeypatch.setitem(runtime.PEAKS, 'cpu', 1e9)
    share = trainer.utilisation()
    variables = {'params': trainer.abstract_params}
    apply = functools.partial(trainer.model.apply, features=False)  # as in a step
    forward = flops.count(apply, variables, SPEC['image'])
  # The backward pass has two products for each of the forward pass.
  assert share == pytest.approx(3 * forward / 8 / (8 * 1e9))
  repeats = {**CONFIG, 'model': {**CONFIG['model'], 'remat': 'full'}}
  with jax.set_mesh(mesh):
    assert Trainer(repeats, SPEC, mesh).utilisation() == share


@pytest.mark.parametrize(
  ('kind', 'peak'),
  [('TPU v5 lite', 197e12), ('TPU v5p', 459e12), ('NVIDIA H100 80GB HBM3', 989e12)],
)
def test_peaks_go_by_the_longest_name(kind, peak):
  assert runtime.peak(mock.Mock(device_kind=kind)) == peak
