"""Small train states with all that real ones hold: making, saving, comparing."""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax import sharding
from vit_jax.checkpoint import checkpoints


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
  step: Any
  params: Any
  opt_state: Any
  ema: Any
  skipped: Any
  frozen: Any = dataclasses.field(default_factory=dict)
  batch_stats: Any = dataclasses.field(default_factory=dict)


# bf16 moments, masked and empty optax containers, as real optimizers store them.
TX = optax.chain(
  optax.clip_by_global_norm(1.0),
  optax.masked(
    optax.adamw(1e-3, mu_dtype=jnp.bfloat16), {'cls': True, 'head': True, 'pos': False}
  ),
)


def make_state(step=0, ema=True, width=16):
  rng = np.random.default_rng(step)
  params = {
    'cls': jnp.asarray(rng.normal(size=(1, 1, width)), jnp.float32),
    'head': {
      'kernel': jnp.asarray(rng.normal(size=(width, 24)), jnp.float32),
      'bias': jnp.zeros(24),
    },
    'pos': jnp.asarray(rng.normal(size=(8, width)), jnp.bfloat16),
  }
  opt_state = jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), TX.init(params)
  )
  return State(
    step=jnp.int32(step),
    params=params,
    opt_state=opt_state,
    ema=jax.tree.map(lambda x: x * 0.5, params) if ema else None,
    skipped={'total': jnp.int32(step % 3), 'consecutive': jnp.int32(0)},
  )


def abstract_of(state, mesh=None, rules='replicate'):
  shapes = jax.eval_shape(lambda s: s, state)
  if mesh is None:
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
  shardings = sharding.state_shardings(shapes, mesh, rules)
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
  )


def assert_same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def write(directory, steps=(1, 2, 3), ema=True):
  """Saves states in a folder; returns its `Checkpoints`, closed."""
  saved = checkpoints.Checkpoints(directory)
  for step in steps:
    assert saved.save(make_state(step, ema), {'position': step * 10})
  saved.close()
  return saved


def steps_in(path):
  return sorted(int(name) for name in os.listdir(path) if name.isdecimal())


def files_of(step_dir):
  return sorted(p for p in step_dir.rglob('*') if p.is_file())
