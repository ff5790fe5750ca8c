"""One step of training."""

import jax
import jax.numpy as jnp
import optax

from vit_jax import trees
from vit_jax.train.state import State


def make_step(task, optimizer, on_device, key):
  """Returns `step(state, batch) -> (state, metrics)`, to be jitted.

  The rng of a step is `fold_in(key, state.step)`, so that a restored state continues as
  if it had never stopped. A step whose loss or gradient is not finite changes neither
  params nor optimizer state nor EMA, and is counted. Neither does a batch in which every
  example is masked: it holds nothing to learn from, and weight decay and moments would
  act all the same. Frozen parameters have no gradient: what is clipped and logged is the
  norm of the trained ones' alone.

  Args:
    task: see `vit_jax.tasks`.
    optimizer: see `optim.build`.
    on_device: the part of preprocessing that is left to the device, batch -> batch.
    key: of dropout, for the whole run.
  """

  def step(state: State, batch: dict):
    batch, mask = without_masked(on_device(batch))
    # Normalised over the whole batch, so that losses of micro-batches just add up.
    batch['weight'] = mask / jnp.maximum(mask.sum(), 1.0)
    rng = jax.random.fold_in(key, state.step)
    # Two keys that do not know `accum`: cutting a batch must not change how it is mixed.
    loss_rng, prepare_rng = (jax.random.fold_in(rng, i) for i in (0, 1))
    batch = task.prepare(batch, prepare_rng)
    point = optimizer.gradient_point(state.params, state.opt_state)
    loss = lambda params, *args: task.loss(trees.combine(params, state.frozen), *args)
    metrics, grads = gradients(loss, point, batch, loss_rng, optimizer.accum)

    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(metrics['loss']) & jnp.isfinite(grad_norm)
    some = mask.any()
    learns, bad = some & finite, some & ~finite
    rate = optimizer.rate(state.step)
    updates, opt_state = optimizer.tx.update(
      grads, state.opt_state, state.params, rate=rate
    )
    params = optax.apply_updates(state.params, updates)
    ema = state.ema
    if ema is not None:
      ema = optimizer.average(ema, params, state.step)
    params, opt_state, ema = jax.tree.map(
      lambda new, old: jnp.where(learns, new, old),
      (params, opt_state, ema),
      (state.params, state.opt_state, state.ema),
    )
    old = state.counters
    counters = {
      'skipped': old['skipped'] + bad,
      'skipped_in_a_row': jnp.where(learns, 0, old['skipped_in_a_row'] + bad),
      'masked': old['masked'] + (mask == 0).sum(dtype=jnp.int32),
    }
    metrics = {**metrics, 'grad_norm': grad_norm, 'lr': rate, **counters}
    state = State(state.step + 1, params, state.frozen, opt_state, ema, counters)
    return state, metrics

  return step


def without_masked(batch: dict) -> tuple[dict, jax.Array]:
  """Returns (batch, mask), the batch with zeros for whatever masked examples hold.

  A weight of 0 alone does not keep a NaN out: 0 * nan is nan, in the loss, in the
  gradient, and in the example that mixing gives it to.
  """

  def blank(x):
    if not jnp.issubdtype(x.dtype, jnp.floating):
      return x
    return jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)) > 0, x, 0)

  batch = dict(batch)
  mask = batch.pop('mask')
  return jax.tree.map(blank, batch), mask


def gradients(loss, params, batch: dict, rng, accum: int):
  """Returns (metrics, gradients) of a batch, computed in `accum` micro-batches.

  Each micro-batch has its own rng, so that dropout masks differ; without dropout the
  sum is the gradient of the whole batch.

  Args:
    loss: as `loss` of a task.
    params: those to differentiate by.
  """

  def micro(rng, part):
    grad = jax.value_and_grad(loss, has_aux=True)
    (_, metrics), grads = grad(params, part, rng)
    return metrics, grads

  if accum == 1:
    return micro(rng, batch)

  def split(x):  # [B, ...] -> [A, B/A, ...], strided: no example leaves its device
    return x.reshape(-1, accum, *x.shape[1:]).swapaxes(0, 1)

  parts = jax.tree.map(split, batch)
  shapes = jax.eval_shape(micro, rng, jax.tree.map(lambda x: x[0], parts))
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

  def add(total, numbered):
    i, part = numbered
    return jax.tree.map(jnp.add, total, micro(jax.random.fold_in(rng, i), part)), None

  return jax.lax.scan(add, zeros, (jnp.arange(accum), parts))[0]
