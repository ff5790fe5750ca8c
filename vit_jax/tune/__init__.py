"""Tuning: the parameters that a run trains, and those that it adds; the `tune` section.

A method says by path rules (regex, whether it trains; see `vit_jax.trees`) which of the
model's parameters are trained, and may add parameters of its own, which always are. All
others are frozen: they have no gradient, no moments and no average, and checkpoints do
not hold them, because they can be read again from the weights that the run started from.

No model knows of this. Added parameters act by interception of the model's layers, see
`tuned.Tuned`; a model's `Family` tells where its blocks are.
"""

import flax.linen as nn

from vit_jax import trees
from vit_jax.check import bind, prefix_errors
from vit_jax.errors import did_you_mean
from vit_jax.nn.batch_norm import BatchNorm
from vit_jax.registry import Registry
from vit_jax.tune.backbone import Backbone
from vit_jax.tune.method import Method, Rules
from vit_jax.tune.tuned import SCOPE, Tuned

METHODS = Registry(
  'method of config.tune',
  {
    'full': 'vit_jax.tune.subsets:Full',
    'linear': 'vit_jax.tune.subsets:Linear',
    'partial': 'vit_jax.tune.subsets:Partial',
    'bias': 'vit_jax.tune.subsets:Bias',
    'rules': 'vit_jax.tune.subsets:ByRules',
    'mlp': 'vit_jax.tune.mlp:Mlp',
    'adapter': 'vit_jax.tune.adapter:Adapter',
    'lora': 'vit_jax.tune.lora:Lora',
    'vpt': 'vit_jax.tune.vpt:Vpt',
  },
)


def attach(
  model, family, image_shape: tuple[int, int, int], method: str = 'full', **options
) -> tuple[nn.Module, Rules]:
  """Attaches the method of a config's `tune` section to a model.

  Args:
    model: a Linen module.
    family: its `models.base.Family`.
    image_shape: (H, W, C) of its images.
    method: a key of METHODS.
    **options: the fields of the method's class.

  Returns:
    (the model itself, or a `Tuned` with added parameters; which parameters are trained).

  Raises:
    UserError: for an unknown method, or one that this model cannot take.
  """
  chosen = build(method, **options)
  backbone = Backbone(model, family, tuple(image_shape))
  with prefix_errors('config.tune'):
    if chosen.by_block and getattr(model, 'scan', False):
      raise ValueError(
        f'method={method} treats each block on its own, and config.model.scan=True makes '
        'them one: leave scan out'
      )
    rules, added = chosen.rules(backbone), chosen.make_added(backbone)
  if added is not None:
    rules = [(f'{SCOPE}/.*', True), *rules]
  norms = _frozen_norms(backbone, rules) if chosen.trains_backbone else ()
  if added is None and chosen.trains_backbone and not norms:
    return model, rules
  return Tuned(model, added, chosen.trains_backbone, norms), rules


def _frozen_norms(backbone: Backbone, rules: Rules) -> tuple[str, ...]:
  """Returns the paths of batch norms without a trained parameter.

  Their running statistics stay those that the frozen parameters were trained with.
  """
  if all(trains for _, trains in rules):
    return ()
  norms = {
    p for p, layer in backbone.layers.items() if issubclass(layer.kind, BatchNorm)
  }
  parent = lambda name: name.rpartition('/')[0]
  trained = {parent(name) for name in backbone.shapes if trees.first_match(rules, name)}
  return tuple(sorted(norms & {parent(name) for name in backbone.shapes} - trained))


def build(method: str = 'full', **options) -> Method:
  """Returns the method of a `tune` section; arguments as of `attach`."""
  bind('config.tune', options, METHODS.signature(method))
  options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
  return METHODS[method](**options)


def is_added(name: str) -> bool:
  """Whether a name of `trees.flatten_variables` is that of an added parameter or statistic."""
  return name.startswith((f'{SCOPE}/', f'{trees.STATS}/{SCOPE}/'))


def partition(params: dict, rules: Rules) -> tuple[dict, dict]:
  """Returns (trained, frozen), see `trees.partition`.

  Raises:
    UserError: for a rule that trains none of the parameters.
  """
  names = list(trees.flatten(params))
  with prefix_errors('config.tune'):
    for regex, trains in rules:
      if trains and not any(trees.matches(regex, name) for name in names):
        raise ValueError(
          f'{regex!r} matches none of the {len(names)} parameters in full; the last are '
          f'{names[-3:]}.{did_you_mean(regex, names)}'
        )
  return trees.partition(params, rules)
