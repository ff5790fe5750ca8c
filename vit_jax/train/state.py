"""The train state, and where its first values come from."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from vit_jax import pretrained, trees, tune
from vit_jax.errors import UserError
from vit_jax.train.runtime import run_once

TRAIN_ALL = (('.*', True),)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
  """All that changes in a run; with the config it is the run."""

  step: jax.Array  # int32: batches consumed, skipped ones included
  params: dict  # float32: those that are trained
  frozen: dict  # float32: the others, {} when everything is trained
  opt_state: optax.OptState  # of params
  ema: dict | None  # an average of params (see optim.averages), or None
  counters: dict[str, jax.Array]  # int32: skipped, skipped_in_a_row, masked


def init_state(task, optimizer, spec: dict, rng, given: dict, rules=TRAIN_ALL) -> State:
  """Returns the state at step 0 for batches of `spec`; traceable.

  Args:
    given: {name: array}, parameters in place of freshly initialised ones.
    rules: which parameters are trained, see `vit_jax.tune`.
  """
  params = trees.map_named(lambda n, x: given.get(n, x), task.init(rng, spec))
  params, frozen = tune.partition(params, rules)
  return State(
    step=jnp.zeros((), jnp.int32),
    params=params,
    frozen=frozen,
    opt_state=optimizer.tx.init(params),
    ema=jax.tree.map(jnp.copy, params) if optimizer.average else None,
    counters={
      key: jnp.zeros((), jnp.int32) for key in ('skipped', 'skipped_in_a_row', 'masked')
    },
  )


def first_state(init, key, abstract: State, given: dict) -> State:
  """Returns `init(key, given)` on the devices where `abstract` says its leaves are."""
  places = trees.flatten(trees.combine(abstract.params, abstract.frozen))
  given = {name: jax.device_put(x, places[name].sharding) for name, x in given.items()}
  return run_once(init, abstract, key, given)


def from_weights(source, model, config, frozen) -> dict:
  """Returns {name: array} of the parameters that a run takes from its weights.

  Args:
    source: the weights that it starts from. None: there are none, or it resumes: then
      they are opened again if any parameters are frozen, which checkpoints do not hold.

  Raises:
    UserError: for frozen parameters that the weights do not provide.
  """
  names = list(trees.flatten(frozen))
  if names and source is None and config['weights']:
    try:
      source = pretrained.from_section(**config['weights'])
    except UserError as error:
      raise UserError(
        f'{error} The run resumes with frozen parameters, which only config.weights.'
        'source holds: set it to where those weights are now.'
      ) from error
  given = _fit_weights(source, model, config) if source else {}
  if lost := [name for name in names if name not in given]:
    raise UserError(
      f'config.tune freezes {lost[0]} (one of {len(lost)}), which config.weights does '
      'not provide: no resumed run could find its values again. Train it, or set '
      'config.weights.source to weights that have it.'
    )
  return given


def _fit_weights(source, model, config) -> dict:
  """Returns {name: array} of the parameters that the run starts from."""
  *size, channels = config['resolved']['image_shape']
  if channels != source.channels:
    raise UserError(
      f'{source.source} is of images with {source.channels} channels, config.data.pp '
      f"gives {channels}: begin it with 'decode({source.channels})'."
    )
  options = {k: v for k, v in config['weights'].items() if k in ('skip', 'resize')}
  given, merge = pretrained.fit(source, model, tuple(size), **options)
  print(pretrained.describe(source, merge), flush=True)
  return given
