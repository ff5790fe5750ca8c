"""The train state."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from vit_jax import trees, tune

TRAIN_ALL = (('.*', True),)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
  """All that changes in a run; with the config it is the run."""

  step: jax.Array  # int32: batches consumed, skipped ones included
  params: dict  # float32: the trained parameters
  frozen: dict  # float32: all other parameters, {} when everything is trained
  batch_stats: dict  # float32: running statistics of batch norms, {} without any
  opt_state: optax.OptState  # moments of params
  ema: dict | None  # average of `averaged(params, stats)`, see optim.averages
  counters: dict[str, jax.Array]  # int32: skipped, skipped_in_a_row, masked

  def variables(self, trained: dict | None = None) -> dict:
    """Returns the variables that a task takes, with `trained` in place of `params`."""
    params = self.params if trained is None else trained
    variables = {'params': trees.combine(params, self.frozen)}
    return variables | ({trees.STATS: self.batch_stats} if self.batch_stats else {})

  def average(self) -> 'State':
    """Returns the state whose parameters and batch statistics are their averages."""
    params = {key: x for key, x in self.ema.items() if key != trees.STATS}
    stats = self.ema.get(trees.STATS, {})
    return dataclasses.replace(self, params=params, batch_stats=stats)


def averaged_tree(params: dict, stats: dict) -> dict:
  """Returns the tree that EMA and SWA average: trained parameters and batch statistics.

  Averaged parameters give other activations than the last ones, so evaluation needs
  averaged statistics with them.
  """
  return params | ({trees.STATS: stats} if stats else {})


def init_state(
  task, optimizer, spec: dict, rng, initial: dict, rules=TRAIN_ALL
) -> State:
  """Returns the state at step 0 for batches of `spec`; traceable.

  Args:
    initial: {name: array}, variables in place of fresh ones, see `trees.flatten_variables`.
    rules: (regex, whether it trains), see `vit_jax.tune`.
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
