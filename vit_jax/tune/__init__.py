"""What a run trains of its model, and what it adds: the config's `tune` section.

A method says by path rules (regex, whether it trains; see `vit_jax.trees`) which of the
model's parameters are trained, and may add parameters of its own, which always are. What
does not train is frozen: it has no gradient, no moments and no average, and checkpoints
do not hold it, because it can be read again from the weights that the run started from.

No model knows of this. What is added works by interception of the model's layers, see
`tuned.Tuned`; a model's `Family` tells where its blocks are and end.
"""

from typing import NamedTuple

import flax.linen as nn

from vit_jax import trees
from vit_jax.errors import UserError, did_you_mean
from vit_jax.nn.batch_norm import BatchNorm
from vit_jax.registry import Registry
from vit_jax.tune.backbone import Backbone
from vit_jax.tune.method import Method, Rules
from vit_jax.tune.tuned import ADDED, Tuned

METHODS = Registry(
  'method of config.tune',
  {
    'full': 'vit_jax.tune.full:Full',
    'linear': 'vit_jax.tune.linear:Linear',
    'partial': 'vit_jax.tune.partial:Partial',
    'bias': 'vit_jax.tune.bias:Bias',
    'mlp': 'vit_jax.tune.mlp:Mlp',
    'adapter': 'vit_jax.tune.adapter:Adapter',
    'lora': 'vit_jax.tune.lora:Lora',
    'side': 'vit_jax.tune.side:Side',
    'vpt': 'vit_jax.tune.vpt:Vpt',
    'rules': 'vit_jax.tune.by_rules:ByRules',
  },
)


class Tuning(NamedTuple):
  """A model as it is tuned.

  Attributes:
    model: the one to train: itself, or with what is added (`Tuned`).
    rules: which of its parameters are trained.
  """

  model: nn.Module
  rules: Rules


def attach(
  model, family, image_shape: tuple[int, int, int], method: str = 'full', **options
) -> Tuning:
  """Returns a model as the config's `tune` section says to tune it.

  Args:
    model: a Linen module.
    family: its `models.family.Family`.
    image_shape: (H, W, C) of its images.
    method: a key of METHODS.
    **options: of the method, the fields of its class.

  Raises:
    UserError: for an unknown method, or one that this model cannot take.
  """
  chosen = build(method, **options)
  backbone = Backbone(model, family, tuple(image_shape))
  if chosen.by_block and getattr(model, 'scan', False):
    raise UserError(
      f'config.tune.method={method} treats each block on its own, and '
      'config.model.scan=True makes them one: leave scan out.'
    )
  rules, added = chosen.rules(backbone), chosen.added(backbone)
  if added is not None:
    rules = [(f'{ADDED}/.*', True), *rules]
  norms = _frozen_norms(backbone, rules) if chosen.trains_backbone else ()
  if added is None and chosen.trains_backbone and not norms:
    return Tuning(model, rules)
  return Tuning(Tuned(model, added, chosen.trains_backbone, norms), rules)


def _frozen_norms(backbone: Backbone, rules: Rules) -> tuple[str, ...]:
  """Returns the paths of batch norms of which no parameter is trained.

  Their statistics stay what the frozen parameters were trained with. Those of a model's
  frozen norms, which have no parameters, do so anyway.
  """
  if all(trains for _, trains in rules):
    return ()
  norms = {
    p for p, layer in backbone.layers.items() if issubclass(layer.kind, BatchNorm)
  }
  of = lambda name: name.rpartition('/')[0]
  trained = {of(name) for name in backbone.shapes if trees.first_match(rules, name)}
  return tuple(sorted(norms & {of(name) for name in backbone.shapes} - trained))


def build(method: str = 'full', **options) -> Method:
  """Returns the method of a `tune` section; arguments as of `attach`."""
  options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
  return METHODS[method](**options)


def by_block(method: str) -> bool:
  """Whether a method treats each block on its own, which scanned blocks do not allow."""
  return METHODS[method].by_block


def is_added(name: str) -> bool:
  """Returns whether a name of `trees.named` is of what a method added to the model."""
  return name.startswith((f'{ADDED}/', f'{trees.STATS}/{ADDED}/'))


def partition(params: dict, rules: Rules) -> tuple[dict, dict]:
  """Returns (trained, frozen), see `trees.partition`.

  Raises:
    UserError: for a rule that trains none of the parameters.
  """
  names = list(trees.flatten(params))
  for regex, trains in rules:
    if trains and not any(trees.matches(regex, name) for name in names):
      raise UserError(
        f'config.tune trains {regex!r}, which none of the {len(names)} parameters '
        f'matches in full; the last are {names[-3:]}.{did_you_mean(regex, names)}'
      )
  return trees.partition(params, rules)
