"""The train state, and one step of training."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from vit_jax import trees, tune
from vit_jax.optim.optimizers import select

TRAIN_ALL = (('.*', True),)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
  """Everything that changes in a run. With the config, it determines how the run goes on."""

  # int32, number of consumed batches, including skipped ones.
  step: jax.Array
  # float32, the trained parameters.
  params: dict
  # float32, all other parameters; {} if everything is trained.
  frozen: dict
  # float32, running statistics of batch norms; {} if there are none.
  batch_stats: dict
  # State of the optimizer, such as the moments of the gradients.
  opt_state: optax.OptState
  # Average of `averaged_tree(params, batch_stats)`, see `optim.averages`.
  ema: dict | None
  # int32 counts: skipped, skipped_in_a_row, masked.
  counters: dict[str, jax.Array]

  def variables(self, trained: dict | None = None) -> dict:
    """Returns the variables that a task takes, with `trained` in place of `params`."""
    params = self.params if trained is None else trained
    variables = {'params': trees.combine(params, self.frozen)}
    return variables | ({trees.STATS: self.batch_stats} if self.batch_stats else {})

  def average(self) -> 'State':
    """Returns the state with averaged parameters and batch statistics."""
    params = {key: x for key, x in self.ema.items() if key != trees.STATS}
    stats = self.ema.get(trees.STATS, {})
    return dataclasses.replace(self, params=params, batch_stats=stats)


def averaged_tree(params: dict, stats: dict) -> dict:
  """Returns the tree that EMA and SWA average: trained parameters and batch statistics.

  With averaged parameters, the activations differ from those of the last parameters, so an
  evaluation needs averaged statistics too.
  """
  return params | ({trees.STATS: stats} if stats else {})


def init_state(
  task, optimizer, spec: dict, rng, initial: dict, rules=TRAIN_ALL
) -> State:
  """Makes the state at step 0 for batches of `spec`. It can be traced.

  Args:
    initial: {name: array}, variables that replace fresh ones, see
      `trees.flatten_variables`.
    rules: (regex, whether to train), see `vit_jax.tune`.
  """
  variables = task.init(rng, spec)
  flat = {
    name: initial.get(name, x) for name, x in trees.flatten_variables(variables).items()
  }
  variables = trees.unflatten_variables(flat)
  params, frozen = tune.partition(variables['params'], rules)
  stats = variables.get(trees.STATS, {})
  return State(
    step=jnp.zeros((), jnp.int32),
    params=params,
    frozen=frozen,
    batch_stats=stats,
    opt_state=optimizer.tx.init(params),
    ema=jax.tree.map(jnp.copy, averaged_tree(params, stats))
    if optimizer.average
    else None,
    counters={
      key: jnp.zeros((), jnp.int32) for key in ('skipped', 'skipped_in_a_row', 'masked')
    },
  )


def make_step(task, optimizer, on_device, key):
  """Returns `step(state, batch) -> (state, metrics)`, which is to be jitted.

  The random key of a step is `fold_in(key, state.step)`, so that a restored state continues
  as if it had never stopped. A step whose loss or gradient is not finite is counted, but
  does not change parameters, optimizer state, EMA and batch statistics. Neither does a batch
  in which every example is masked: its gradient is zero, but moments and weight decay would
  still act.

  Args:
    task: see `vit_jax.tasks`.
    optimizer: see `optim.build`.
    on_device: the part of preprocessing that is left to the device, batch -> batch.
    key: the run's random key, for mixing and dropout.
  """

  def step(state: State, batch: dict):
    # Neither key depends on `accum`: micro-batches must not change how a batch is mixed.
    step_key = jax.random.fold_in(key, state.step)
    loss_key, prepare_key = (jax.random.fold_in(step_key, i) for i in (0, 1))

    batch, mask = zero_masked(batch)
    batch = on_device(batch)
    # Weights sum to 1 over the whole batch, so that the losses of micro-batches add up.
    batch['weight'] = mask / jnp.maximum(mask.sum(), 1.0)
    batch = task.prepare(batch, prepare_key, state)

    # Gradients with respect to the trained parameters; frozen ones have none. A task may
    # compare with the average of the parameters.
    average = {'average': state.average().variables()['params']} if state.ema else {}

    def loss(params, stats, *args):
      variables = dataclasses.replace(state, batch_stats=stats).variables(params)
      return task.loss(variables | average, *args)

    metrics, grads, stats = gradients(
      loss, state.params, state.batch_stats, batch, loss_key, optimizer.accum
    )
    grad_norm = optax.tree.norm(grads)
    some, finite = mask.any(), jnp.isfinite(metrics['loss']) & jnp.isfinite(grad_norm)
    good, bad = some & finite, some & ~finite

    # The update. `optimizer.tx` clips and applies moments, weight decay and learning rate.
    # After a bad step, it selects the old moments before it computes anything from the new
    # ones, see `optim.optimizers`.
    rate = optimizer.rate(state.step)
    updates, opt_state = optimizer.tx.update(
      grads, state.opt_state, state.params, rate=rate, good=good, step=state.step
    )
    params = select(good, optax.apply_updates(state.params, updates), state.params)
    stats = select(good, stats, state.batch_stats)

    # The moving average of the updated parameters.
    ema = state.ema
    if optimizer.average:
      average = optimizer.average(ema, averaged_tree(params, stats), state.step)
      ema = select(good, average, ema)

    old = state.counters
    counters = {
      'skipped': old['skipped'] + bad,
      'skipped_in_a_row': jnp.where(good, 0, old['skipped_in_a_row'] + bad),
      'masked': old['masked'] + (mask == 0).sum(dtype=jnp.int32),
    }
    metrics = {**metrics, 'grad_norm': grad_norm, 'lr': rate, **counters}
    state = State(state.step + 1, params, state.frozen, stats, opt_state, ema, counters)
    return state, metrics

  return step


def zero_masked(batch: dict) -> tuple[dict, jax.Array]:
  """Sets images and floats of masked examples to zero, and returns (batch, mask).

  A weight of 0 alone would not keep a NaN out, because 0 * nan is nan, nor pixels that are
  mixed into another example.
  """

  batch = dict(batch)
  mask = batch.pop('mask')
  for key, x in batch.items():
    # Images may still be uint8, to be converted by `on_device`. This is intended: on TPUs,
    # selecting floats would copy them to another layout before they are cut into patches.
    if x.dtype == jnp.uint8 or jnp.issubdtype(x.dtype, jnp.floating):
      here = mask.reshape(-1, *[1] * (x.ndim - 1)) > 0
      batch[key] = jnp.where(here, x, jnp.zeros((), x.dtype))
  return batch, mask


def gradients(loss, params, stats: dict, batch: dict, key, accum: int):
  """Returns (metrics, gradients, stats) of a batch, computed in `accum` micro-batches.

  Each micro-batch has its own key, so that dropout masks differ. Without dropout, the sum is
  the gradient of the whole batch. Batch norms see one micro-batch at a time, and update
  their running statistics with each in turn.

  Args:
    loss: `(params, stats, batch, key) -> (loss, (metrics, stats))`.
    params: the tree with respect to which to differentiate.
    stats: running statistics; {} if there are none.
  """

  def micro(stats, key, part):
    grad = jax.value_and_grad(loss, has_aux=True)
    (_, (metrics, stats)), grads = grad(params, stats, part, key)
    return (metrics, grads), stats

  if accum == 1:
    (metrics, grads), stats = micro(stats, key, batch)
    return metrics, grads, stats

  def split(x):
    # [B, ...] -> [A, B/A, ...], strided so that no example leaves its device.
    return x.reshape(-1, accum, *x.shape[1:]).swapaxes(0, 1)

  parts = jax.tree.map(split, batch)
  shapes, _ = jax.eval_shape(micro, stats, key, jax.tree.map(lambda x: x[0], parts))
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

  def add(carry, numbered):
    (total, stats), (i, part) = carry, numbered
    term, stats = micro(stats, jax.random.fold_in(key, i), part)
    return (jax.tree.map(jnp.add, total, term), stats), None

  carry, _ = jax.lax.scan(add, (zeros, stats), (jnp.arange(accum), parts))
  (metrics, grads), stats = carry
  return metrics, grads, stats
