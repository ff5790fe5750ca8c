"""One step of training."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from vit_jax.optim.guard import kept
from vit_jax.train.gradients import gradients
from vit_jax.train.state import State, averaged


def make_step(task, optimizer, on_device, key):
  """Returns `step(state, batch) -> (state, metrics)`, to be jitted.

  The rng of a step is `fold_in(key, state.step)`, so that a restored state continues as
  if it had never stopped. A step whose loss or gradient is not finite changes neither
  params nor optimizer state, EMA or batch statistics, and is counted. Neither does a batch in which every
  example is masked: it holds nothing to learn from, and weight decay and moments would
  act all the same. Frozen parameters have no gradient: what is clipped and logged is the
  norm of the trained ones' alone.

  Args:
    task, optimizer: see `vit_jax.tasks`, `optim.build`.
    on_device: the part of preprocessing that is left to the device, batch -> batch.
    key: of dropout, for the whole run.
  """

  def step(state: State, batch: dict):
    batch, mask = without_masked(batch)
    batch = on_device(batch)
    # Normalised over the whole batch, so that losses of micro-batches just add up.
    batch['weight'] = mask / jnp.maximum(mask.sum(), 1.0)
    rng = jax.random.fold_in(key, state.step)
    # Two keys that do not know `accum`: cutting a batch must not change how it is mixed.
    loss_rng, prepare_rng = (jax.random.fold_in(rng, i) for i in (0, 1))
    batch = task.prepare(batch, prepare_rng)
    point = optimizer.gradient_point(state.params, state.opt_state)

    def loss(params, stats, *args):
      variables = dataclasses.replace(state, batch_stats=stats).variables(params)
      return task.loss(variables, *args)

    metrics, grads, stats = gradients(
      loss, point, state.batch_stats, batch, loss_rng, optimizer.accum
    )

    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(metrics['loss']) & jnp.isfinite(grad_norm)
    some = mask.any()
    learns, bad = some & finite, some & ~finite
    rate = optimizer.rate(state.step)
    updates, opt_state = optimizer.tx.update(
      grads, state.opt_state, state.params, rate=rate, learns=learns
    )
    # Each is kept before another is computed from it, see `optim.moments`.
    params = kept(learns, optax.apply_updates(state.params, updates), state.params)
    stats = kept(learns, stats, state.batch_stats)
    ema = state.ema
    if optimizer.average:
      average = optimizer.average(ema, averaged(params, stats), state.step)
      ema = kept(learns, average, ema)
    old = state.counters
    counters = {
      'skipped': old['skipped'] + bad,
      'skipped_in_a_row': jnp.where(learns, 0, old['skipped_in_a_row'] + bad),
      'masked': old['masked'] + (mask == 0).sum(dtype=jnp.int32),
    }
    metrics = {**metrics, 'grad_norm': grad_norm, 'lr': rate, **counters}
    state = State(state.step + 1, params, state.frozen, stats, opt_state, ema, counters)
    return state, metrics

  return step


def without_masked(batch: dict) -> tuple[dict, jax.Array]:
  """Returns (batch, mask), the batch with zeros for images and floats of masked examples.

  A weight of 0 keeps neither a NaN out, 0 * nan is nan, nor pixels that are mixed into
  another example.
  """

  batch = dict(batch)
  mask = batch.pop('mask')
  for key, x in batch.items():
    # Images may be bytes: `on_device` makes floats of them later, as selected floats would
    # be copied to another layout on TPUs before patches are cut.
    if x.dtype == jnp.uint8 or jnp.issubdtype(x.dtype, jnp.floating):
      here = mask.reshape(-1, *[1] * (x.ndim - 1)) > 0
      batch[key] = jnp.where(here, x, jnp.zeros((), x.dtype))
  return batch, mask
