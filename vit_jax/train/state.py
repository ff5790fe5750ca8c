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
