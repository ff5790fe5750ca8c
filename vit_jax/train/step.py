"""The train state and one step of training."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from vit_jax import trees


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
  """All that changes in a run; with the config it is the run."""

  step: jax.Array  # int32: batches consumed, skipped ones included
  params: dict  # float32
  opt_state: optax.OptState
  ema: dict | None  # an average of params (see optim.averages), or None
  counters: dict[str, jax.Array]  # int32: skipped, skipped_in_a_row, masked


def init_state(task, optimizer, spec: dict, rng, given: dict) -> State:
  """Returns the state at step 0 for batches of `spec`; traceable.

  Args:
    given: {name: array}, parameters in place of freshly initialised ones.
  """
  params = trees.map_named(lambda n, x: given.get(n, x), task.init(rng, spec))
  return State(
    step=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=optimizer.tx.init(params),
    ema=jax.tree.map(jnp.copy, params) if optimizer.average else None,
    counters={
      key: jnp.zeros((), jnp.int32) for key in ('skipped', 'skipped_in_a_row', 'masked')
    },
  )


def make_step(task, optimizer, on_device, key):
  """Returns `step(state, batch) -> (state, metrics)`, to be jitted.

  The rng of a step is `fold_in(key, state.step)`, so that a restored state goes on as
  if it had never stopped. A step whose loss or gradient is not finite changes neither
  params nor optimizer state nor EMA, and is counted.

  Args:
    task: see `vit_jax.tasks`.
    optimizer: see `optim.build`.
    on_device: the part of preprocessing that is left to the device, batch -> batch.
    key: of dropout, for the whole run.
  """

  def step(state: State, batch: dict):
    batch = on_device(batch)
    mask = batch.pop('mask')
    # Normalised over the whole batch, so that losses of micro-batches just add up.
    batch['weight'] = mask / jnp.maximum(mask.sum(), 1.0)
    rng = jax.random.fold_in(key, state.step)
    # The micro-batches' keys are 0 to accum - 1.
    batch = task.prepare(batch, jax.random.fold_in(rng, optimizer.accum))
    point = optimizer.gradient_point(state.params, state.opt_state)
    metrics, grads = gradients(task, point, batch, rng, optimizer.accum)

    grad_norm = optax.tree.norm(grads)
    ok = jnp.isfinite(metrics['loss']) & jnp.isfinite(grad_norm)
    rate = optimizer.rate(state.step)
    updates, opt_state = optimizer.tx.update(
      grads, state.opt_state, state.params, rate=rate
    )
    params = optax.apply_updates(state.params, updates)
    ema = state.ema
    if ema is not None:
      ema = optimizer.average(ema, params, state.step)
    params, opt_state, ema = jax.tree.map(
      lambda new, old: jnp.where(ok, new, old),
      (params, opt_state, ema),
      (state.params, state.opt_state, state.ema),
    )
    old = state.counters
    counters = {
      'skipped': old['skipped'] + jnp.where(ok, 0, 1),
      'skipped_in_a_row': jnp.where(ok, 0, old['skipped_in_a_row'] + 1),
      'masked': old['masked'] + (mask == 0).sum(dtype=jnp.int32),
    }
    metrics = {**metrics, 'grad_norm': grad_norm, 'lr': rate, **counters}
    return State(state.step + 1, params, opt_state, ema, counters), metrics

  return step


def gradients(task, params, batch: dict, rng, accum: int):
  """Returns (metrics, gradients) of a batch, computed in `accum` micro-batches.

  Each micro-batch has its own rng, so that dropout masks differ; without dropout the
  sum is the gradient of the whole batch.
  """

  def micro(i, part):
    grad = jax.value_and_grad(task.loss, has_aux=True)
    (_, metrics), grads = grad(params, part, jax.random.fold_in(rng, i))
    return metrics, grads

  if accum == 1:
    return micro(0, batch)

  def split(x):  # [B, ...] -> [A, B/A, ...], strided: no example leaves its device
    return x.reshape(-1, accum, *x.shape[1:]).swapaxes(0, 1)

  parts = jax.tree.map(split, batch)
  shapes = jax.eval_shape(micro, 0, jax.tree.map(lambda x: x[0], parts))
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
  add = lambda total, xs: (jax.tree.map(jnp.add, total, micro(*xs)), None)
  return jax.lax.scan(add, zeros, (jnp.arange(accum), parts))[0]
