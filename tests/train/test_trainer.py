"""A Trainer alone: the noun of runs, benchmarks and notebooks."""

import jax
import numpy as np
import pytest

from tests.support import naming
from vit_jax import errors, losses, sharding, trees
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


def test_a_trainer_makes_and_steps_the_state_that_it_describes():
  rng = np.random.default_rng(0)
  batch = {
    'image': rng.uniform(-1, 1, SPEC['image'].shape).astype(np.float32),
    'label': rng.integers(0, 5, 8).astype(np.int32),
    'mask': np.ones(8, np.float32),
  }
  mesh = sharding.make_mesh(2, 4)
  with jax.set_mesh(mesh):
    trainer = Trainer(CONFIG, SPEC, mesh)
    state = trainer.init()
    facts = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)
    assert facts(state) == facts(trainer.abstract_state)
    losses, step = [], trainer.compile()
    for _ in range(3):
      state, metrics = step(state, sharding.global_batch(batch, mesh))
      losses.append(float(metrics['loss']))
  assert losses[2] < losses[0]
  # Given variables take the place of fresh ones; frozen parameters stay as they are.
  kernel = np.full((16, 5), 0.5, np.float32)
  with jax.set_mesh(mesh):
    frozen = Trainer({**CONFIG, 'tune': {'method': 'linear'}}, SPEC, mesh)
    state = frozen.init({'head/kernel': kernel})
  np.testing.assert_array_equal(state.params['head']['kernel'], kernel)
  trained = set(trees.flatten(state.params)), set(trees.flatten(frozen.abstract_params))
  assert trained[0] == {'head/kernel', 'head/bias'} < trained[1]


def test_a_loss_of_another_shape_is_refused(monkeypatch):
  table = losses.LOSSES.data | {'mean': lambda logits, targets: logits.mean()}
  monkeypatch.setattr(losses.LOSSES, 'data', table)
  config = {**CONFIG, 'task': {'name': 'classify', 'loss': 'mean'}}
  with pytest.raises(errors.UserError, match=naming('config.task', "'mean'", (), (2,))):
    Trainer(config, SPEC, sharding.make_mesh())
