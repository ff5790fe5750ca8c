"""Adam's moments and momentum: optax's to the bit, and never copied."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vit_jax import optim
from vit_jax.optim.optimizers import adam, select, sgd
from vit_jax.train import runtime

RNG = np.random.default_rng(0)
PARAMS, *GRADS = (
  {'a': jnp.asarray(RNG.standard_normal((5, 3)), jnp.float32)} for _ in range(4)
)


@pytest.mark.parametrize(
  ('ours', 'optaxs'),
  [
    (adam(b1=0.9, b2=0.999, eps=1e-8), optax.scale_by_adam(0.9, 0.999, 1e-8)),
    (
      adam(b1=0.9, b2=0.95, eps=1e-6, moment_dtype='bfloat16'),
      optax.scale_by_adam(0.9, 0.95, 1e-6, mu_dtype='bfloat16'),
    ),
    (sgd(momentum=0.9), optax.trace(0.9)),
    (
      sgd(momentum=0.9, nesterov=True, moment_dtype='bfloat16'),
      optax.trace(0.9, True, 'bfloat16'),
    ),
  ],
)
def test_equal_to_optax(ours, optaxs):
  a, b = ours.init(PARAMS), optaxs.init(PARAMS)
  for grads in GRADS:
    x, a = ours.update(grads, a)
    y, b = optaxs.update(grads, b)
    jax.tree.map(np.testing.assert_array_equal, (x, a), (y, b))
  jax.tree.map(lambda x, y: np.testing.assert_equal(x.dtype, y.dtype), a, b)


@pytest.mark.parametrize('name', ['adamw', 'sgd'])
def test_no_moment_is_copied(name):
  tx = optim.build(name, 0.01, 10, wd=0.1).tx
  params = {'head': {'kernel': jnp.zeros((256, 256))}}

  def step(params, state, grads, good):
    updates, state = tx.update(grads, state, params, rate=0.01, good=good)
    new = optax.apply_updates(params, updates)
    return select(good, new, params), state

  step = jax.jit(step, donate_argnums=(0, 1), compiler_options=runtime.options())
  program = step.lower(params, tx.init(params), params, True).compile()
  assert program.memory_analysis().temp_size_in_bytes < 256 * 256
