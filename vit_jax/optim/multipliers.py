"""What path rules decide in an update: weight decay and learning rates.

A rule is (regex, factor), matched in full against a parameter's path, the first match
wins (see `vit_jax.trees`).
"""

import math
import re

import jax
import jax.numpy as jnp
import optax

from vit_jax import trees
from vit_jax.errors import UserError

# Kernels only: no biases, norms, tokens or position embeddings (as big_vision).
WD_RULES = (('.*/kernel', 1.0), ('.*', 0.0))

# The blocks of a Transformer or Mixer; without a number they are stacked by a scan, and
# their parameters have a leading axis of layers.
_BLOCK = re.compile(r'(?:.*/)?(?:encoderblock|MixerBlock)(?:_(?P<layer>\d+))?/.*')
_EMBEDDING = r'embedding/.*|cls|stem/.*|conv_root/.*|gn_root/.*|block\d+/.*'
_EMBEDDING = rf'{_EMBEDDING}|(?:.*/)?(?:posembed_input/)?pos_embedding'


def is_stacked(name: str) -> bool:
  """Whether a parameter has a leading axis of layers, by its path."""
  match = _BLOCK.fullmatch(name)
  return bool(match) and match['layer'] is None


def decayed_weights(wd: float, rules) -> optax.GradientTransformation:
  """Adds `wd * factor * parameter` to each update, factors by path rules."""

  def update(updates, state, params):
    factors = trees.select(rules, params)
    decay = lambda u, p, f: u + (wd * f * p).astype(u.dtype) if f else u
    return jax.tree.map(decay, updates, params, factors), state

  return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def layer_rules(params, decay: float) -> list[tuple[str, float | list[float]]]:
  """Returns rules of layer-wise learning-rate decay (arXiv 2106.08254, section 3.2).

  The factor is decay^(L + 1 - i): i is 0 for the embedding, with whatever stands before
  it, class token and positions, 1 to L for the blocks, L + 1 for what follows.

  Args:
    params: of a model with numbered or stacked blocks.
    decay: 0 < decay <= 1; 0.65 to 0.75 in fine-tuning recipes.

  Raises:
    UserError: for a model without such blocks.
  """
  depth = 0
  for name, leaf in trees.flatten(params).items():
    if match := _BLOCK.fullmatch(name):
      layers = leaf.shape[0] if match['layer'] is None else int(match['layer']) + 1
      depth = max(depth, layers)
  if not depth:
    raise UserError(
      'config.optim.layer_decay is for models of numbered blocks (vit, mixer); for '
      "others write config.optim.lr_rules=[('block1/.*', 0.5), ('.*', 1.0)]."
    )
  of_layer = [decay ** (depth - i) for i in range(depth)]
  block = r'(?:.*/)?(?:encoderblock|MixerBlock)'
  rules: list[tuple[str, float | list[float]]] = [(rf'{block}/.*', of_layer)]
  rules += [(rf'{block}_{i}/.*', factor) for i, factor in enumerate(of_layer)]
  return [*rules, (_EMBEDDING, decay ** (depth + 1)), ('.*', 1.0)]


def scaled_by_rate(rules, layer_decay: float | None):
  """Returns the last transformation: `-rate * factor * update`.

  Its `update` takes the keyword `rate`, the learning rate of the step. Where both
  `rules` and `layer_decay` are given, the factors multiply.
  """

  def factors(params):
    sets = [rules] if rules else []
    if layer_decay is not None:
      sets.append(layer_rules(params, layer_decay))
    product = lambda name, p: math.prod(_factor(chosen, name, p) for chosen in sets)
    return trees.map_named(product, params)

  def update(updates, state, params, *, rate, **_):
    if not rules and layer_decay is None:
      return jax.tree.map(lambda u: -(rate * u), updates), state
    return jax.tree.map(lambda u, f: -(rate * f * u), updates, factors(params)), state

  init = lambda params: optax.EmptyState()
  return optax.GradientTransformationExtraArgs(init, update)


def _factor(rules, name: str, leaf):
  """Returns a rule's factor as an array that broadcasts against the parameter."""
  factor = jnp.asarray(trees.first_match(rules, name), jnp.float32)
  return factor.reshape(factor.shape + (1,) * (leaf.ndim - factor.ndim))


def trust_ratio() -> optax.GradientTransformation:
  """Scales each update to the norm of its parameter (LAMB, arXiv 1904.00962).

  ||p|| / ||u||, and 1 where either is 0 (algorithm 2 with the identity for phi). Layers
  stacked in one array have a ratio each.
  """

  def scale(name, u, p):
    axes = tuple(range(int(is_stacked(name)), u.ndim))
    norm = lambda x: jnp.sqrt(jnp.sum(jnp.square(x), axes, keepdims=True))
    of_p, of_u = norm(p), norm(u)
    known = (of_p > 0) & (of_u > 0)
    return u * jnp.where(known, of_p / jnp.where(known, of_u, 1.0), 1.0)

  def update(updates, state, params):
    return trees.map_named(scale, updates, params), state

  return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
