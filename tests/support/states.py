"""Small train states with all that real ones hold: making, saving, comparing."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax import sharding
from vit_jax.checkpoint import checkpoints
from vit_jax.train.step import State

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
    frozen={},
    batch_stats={},
    opt_state=opt_state,
    ema=jax.tree.map(lambda x: x * 0.5, params) if ema else None,
    counters={'skipped': jnp.int32(step % 3)},
  )


def abstract_of(state, mesh=None, rules='replicate'):
  """Returns the shapes of a state with shardings, by default on one device."""
  mesh = mesh or sharding.make_mesh(devices=jax.devices()[:1])
  return sharding.abstract(jax.eval_shape(lambda: state), mesh, rules)


def restore_params(saved, abstract, **options):
  """Returns (params, meta) of a checkpoint."""
  variables, meta = saved.restore_variables({'params': abstract}, **options)
  return variables['params'], meta


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
