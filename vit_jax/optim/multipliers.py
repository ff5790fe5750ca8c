"""Weight decay and learning rates by path rules.

A rule is (regex, factor), matched in full against a parameter's path, the first match
wins (see `vit_jax.trees`).
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax import trees

# Kernels only: no biases, norms, tokens or position embeddings (as big_vision).
WD_RULES = (('.*/kernel', 1.0), ('.*', 0.0))


def decayed_weights(wd: float, rules) -> optax.GradientTransformation:
  """Adds `wd * factor * parameter` to each update, factors by path rules."""

  def update(updates, state, params):
    factors = trees.select(rules, params)
    decay = lambda u, p, f: u + (wd * f * p).astype(u.dtype) if f else u
    return jax.tree.map(decay, updates, params, factors), state

  return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def layer_factors(family, params, decay: float) -> dict[str, np.ndarray]:
  """Returns {name: factor} of layer-wise learning-rate decay (arXiv 2106.08254, 3.2).

  The factor is decay^(L + 1 - depth): the depth is 0 for the embedding with whatever
  stands before it, class token and positions, 1 to L for the blocks, L + 1 for what
  follows. It is an array of one factor per layer where layers are stacked.

  Args:
    family: the model's, see `models.base.Family.depths`.
    decay: 0 < decay <= 1; 0.65 to 0.75 in fine-tuning recipes.
  """
  shapes = {name: x.shape for name, x in trees.flatten(params).items()}
  depths, blocks = family.depths(shapes)
  return {n: decay ** (blocks + 1.0 - np.asarray(depth)) for n, depth in depths.items()}


def scaled_by_rate(rules, layer_decay: float | None, family=None):
  """Returns the last transformation: `-rate * factor * update`.

  Its `update` takes the keyword `rate`, the learning rate of the step. Where both
  `rules` and `layer_decay` (which needs the `family`) are given, the factors multiply.
  """

  def factors(params):
    layers = {} if layer_decay is None else layer_factors(family, params, layer_decay)

    def factor(name, p):
      by_layer = jnp.asarray(layers.get(name, 1.0), jnp.float32)
      by_layer = by_layer.reshape(by_layer.shape + (1,) * (p.ndim - by_layer.ndim))
      return by_layer * (trees.first_match(rules, name) if rules else 1.0)

    return trees.map_named(factor, params)

  def update(updates, state, params, *, rate, **_):
    if not rules and layer_decay is None:
      return jax.tree.map(lambda u: -(rate * u), updates), state
    return jax.tree.map(lambda u, f: -(rate * f * u), updates, factors(params)), state

  init = lambda params: optax.EmptyState()
  return optax.GradientTransformationExtraArgs(init, update)
