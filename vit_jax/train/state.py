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
  params: dict  # float32: those that are trained
  frozen: dict  # float32: the others, {} when everything is trained
  batch_stats: dict  # float32: running statistics of batch norms, {} without any
  opt_state: optax.OptState  # of params
  ema: (
    dict | None
  )  # an average of what `averaged` returns (see optim.averages), or None
  counters: dict[str, jax.Array]  # int32: skipped, skipped_in_a_row, masked

  def variables(self, trained: dict | None = None) -> dict:
    """Returns what a task's functions take; `trained` in the place of `params`."""
    params = self.params if trained is None else trained
    variables = {'params': trees.combine(params, self.frozen)}
    return variables | ({trees.STATS: self.batch_stats} if self.batch_stats else {})

  def average(self) -> 'State':
    """Returns the state with its average in the place of what is averaged."""
    params = {key: x for key, x in self.ema.items() if key != trees.STATS}
    stats = self.ema.get(trees.STATS, {})
    return dataclasses.replace(self, params=params, batch_stats=stats)


def averaged(params: dict, stats: dict) -> dict:
  """Returns what EMA and SWA average: trained parameters, and batch statistics.

  Averaged parameters make other activations than the last ones do, whose statistics
  evaluation would otherwise take: timm averages both as well.
  """
  return params | ({trees.STATS: stats} if stats else {})


def init_state(task, optimizer, spec: dict, rng, given: dict, rules=TRAIN_ALL) -> State:
  """Returns the state at step 0 for batches of `spec`; traceable.

  Args:
    given: {name: array}, variables in place of freshly initialised ones, see
      `trees.named`.
    rules: which parameters are trained, see `vit_jax.tune`.
  """
  variables = task.init(rng, spec)
  flat = {name: given.get(name, x) for name, x in trees.named(variables).items()}
  variables = trees.variables(flat)
  params, frozen = tune.partition(variables['params'], rules)
  stats = variables.get(trees.STATS, {})
  return State(
    step=jnp.zeros((), jnp.int32),
    params=params,
    frozen=frozen,
    batch_stats=stats,
    opt_state=optimizer.tx.init(params),
    ema=jax.tree.map(jnp.copy, averaged(params, stats)) if optimizer.average else None,
    counters={
      key: jnp.zeros((), jnp.int32) for key in ('skipped', 'skipped_in_a_row', 'masked')
    },
  )
