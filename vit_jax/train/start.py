"""Where the first values of a run's parameters come from: weights, or initialisers."""

import jax

from vit_jax import pretrained, trees
from vit_jax.errors import UserError
from vit_jax.train import schema
from vit_jax.train.runtime import run_once
from vit_jax.train.state import State


def open_weights(config: dict) -> tuple[dict, pretrained.Source]:
  """Returns (config with the model that the weights are of, the weights)."""
  source = pretrained.from_section(**config['weights'])
  told = {} if 'name' in config['model'] else pretrained.complete({}, source)
  return schema.with_model(config, told), source


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


def first_state(init, key, abstract: State, given: dict) -> State:
  """Returns `init(key, given)` on the devices where `abstract` says its leaves are."""
  places = trees.flatten(trees.combine(abstract.params, abstract.frozen))
  given = {name: jax.device_put(x, places[name].sharding) for name, x in given.items()}
  return run_once(init, abstract, key, given)
