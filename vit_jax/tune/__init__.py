"""Tuning methods, the config's `tune` section: which parameters a run trains and adds.

A method has path rules (regex, whether to train; see `vit_jax.trees`) for the parameters of
the model. It may add parameters of its own, which are always trained. All other parameters
are frozen: they have no gradient, no moments and no average. Checkpoints do not hold them,
because they can be read again from the weights that the run started from.

Models know nothing of tuning. Added parameters act by intercepting the model's layers, see
`tuned.Tuned`. The `Family` of a model says where its blocks are.
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

# Rule of the added parameters.
ADDED = f'{SCOPE}/.*'


def attach(
  model, family, image_shape: tuple[int, int, int], method: str = 'full', **options
) -> tuple[nn.Module, Rules]:
  """Attaches the method of a config's `tune` section to a model.

  Args:
    image_shape: (H, W, C) of the model's images.
    method: a key of METHODS.
    **options: the fields of the method's class.

  Returns:
    (the model itself or a `Tuned` with the added parameters, the rules for which parameters
    are trained).

  Raises:
    UserError: for an unknown method, or a method that does not fit this model.
  """
  chosen = build(method, **options)
  backbone = Backbone(model, family, tuple(image_shape))
  with prefix_errors('config.tune'):
    if chosen.by_block and getattr(model, 'scan', False):
      raise ValueError(
        f'method={method} treats each block separately, but config.model.scan=True makes '
        'them one: leave scan out'
      )
    rules, added = chosen.rules(backbone), chosen.make_added(backbone)
  if added is not None:
    rules = [(ADDED, True), *rules]
  norms = _frozen_norms(backbone, rules) if chosen.trains_backbone else ()
  if added is None and chosen.trains_backbone and not norms:
    return model, rules
  return Tuned(model, added, chosen.trains_backbone, norms), rules


def _frozen_norms(backbone: Backbone, rules: Rules) -> tuple[str, ...]:
  """Returns the paths of the batch norms that have no trained parameter.

  Their running statistics do not change in training: they belong to the frozen parameters.
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
  """Returns the method of a `tune` section; takes the same arguments as `attach`."""
  cls = METHODS[method]
  bind('config.tune', options, cls)
  options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
  return cls(**options)


def is_added(name: str) -> bool:
  """Whether a name of `trees.flatten_variables` is an added parameter or statistic."""
  return name.startswith((f'{SCOPE}/', f'{trees.STATS}/{SCOPE}/'))


def partition(params: dict, rules: Rules) -> tuple[dict, dict]:
  """Splits parameters into (trained, frozen), see `trees.partition`.

  Raises:
    UserError: for a rule that trains, but matches no parameter.
  """
  names = list(trees.flatten(params))
  with prefix_errors('config.tune'):
    for regex, trains in rules:
      # An addition may have statistics alone.
      if regex == ADDED or not trains:
        continue
      if not any(trees.matches(regex, name) for name in names):
        raise ValueError(
          f'{regex!r} matches none of the {len(names)} parameters in full; the last are '
          f'{names[-3:]}.{did_you_mean(regex, names)}'
        )
  return trees.partition(params, rules)
