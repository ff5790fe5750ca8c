"""Weight decay and learning rates by path rules.

A rule is (regex, factor). The regex is matched in full against a parameter's path, and the
first match wins (see `vit_jax.trees`).
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax import trees

# Only kernels decay, as in big_vision: not biases, norms, tokens or position embeddings.
WD_RULES = (('.*/kernel', 1.0), ('.*', 0.0))


def add_weight_decay(wd: float, rules) -> optax.GradientTransformation:
  """Returns a transformation that adds `wd * factor * parameter`; rules give the factor."""

  def update(updates, state, params):
    factors = trees.select(rules, params)
    decay = lambda u, p, f: u + (wd * f * p).astype(u.dtype) if f else u
    return jax.tree.map(decay, updates, params, factors), state

  return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def layer_factors(family, params, decay: float) -> dict[str, np.ndarray]:
  """Returns {name: factor} of layer-wise learning-rate decay (arXiv 2106.08254, 3.2).

  The factor is decay^(L + 1 - depth). The depth is 0 for the embedding, the class token and
  the positions, 1 to L for the blocks, and L + 1 for all that follows. If layers are
  stacked, the factor is an array with one entry per layer.

  Args:
    decay: 0 < decay <= 1; 0.65 to 0.75 in fine-tuning recipes.
  """
  shapes = {name: x.shape for name, x in trees.flatten(params).items()}
  depths, blocks = family.depths(shapes)
  return {n: decay ** (blocks + 1.0 - np.asarray(depth)) for n, depth in depths.items()}


def scale_by_rate(rules, layer_decay: float | None, family=None):
  """Returns the last transformation, `-rate * factor * update`.

  Its `update` takes the keyword `rate`, the learning rate of the step. If both `rules` and
  `layer_decay` (which needs the `family`) are given, their factors multiply.
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
