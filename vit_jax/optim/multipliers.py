"""Weight decay and learning rates by path rules.

A rule is (regex, factor). The regex is matched in full against a parameter's path, and the
first match wins (see `vit_jax.trees`).
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax import trees
from vit_jax.errors import UserError

# Only kernels decay, as in big_vision: not biases, norms, tokens or position embeddings.
WD_RULES = (('.*/kernel', 1.0), ('.*', 0.0))


def clip_groups(clip: float, regex: str) -> optax.GradientTransformation:
  """Returns a transformation that clips groups of gradients, each by its own norm.

  Parameters belong to the same group if the regex's groups match the same text in their
  paths. As in PyTorch, a norm above `clip` becomes clip * norm / (norm + 1e-6).
  """

  def group_of(name: str):
    if not trees.matches(regex, name):
      raise UserError(f'config.optim.clip_by={regex!r} does not match {name!r}.')
    return re.fullmatch(regex, name).groups()

  def update(updates, state, params=None):
    squares = {}
    for name, x in trees.flatten(updates).items():
      group = group_of(name)
      squares[group] = squares.get(group, 0.0) + jnp.sum(jnp.square(x))
    factors = {
      group: jnp.minimum(1.0, clip / (jnp.sqrt(square) + 1e-6))
      for group, square in squares.items()
    }
    scale = lambda name, x: x * factors[group_of(name)].astype(x.dtype)
    return trees.map_named(scale, updates), state

  return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def add_weight_decay(wd, rules) -> optax.GradientTransformationExtraArgs:
  """Returns a transformation that adds `wd * factor * parameter`; rules give the factor.

  Args:
    wd: a number, or a function of the step, which `update` then takes as a keyword.
  """

  def update(updates, state, params, *, step=None, **_):
    now = wd(step) if callable(wd) else wd
    factors = trees.select(rules, params)
    decay = lambda u, p, f: u + (now * f * p).astype(u.dtype) if f else u
    return jax.tree.map(decay, updates, params, factors), state

  init = lambda params: optax.EmptyState()
  return optax.GradientTransformationExtraArgs(init, update)


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


def scale_by_rate(rules, layer_decay: float | None, family=None, starts=()):
  """Returns the last transformation, `-rate * factor * update`.

  Its `update` takes the keyword `rate`, the learning rate of the step. If both `rules` and
  `layer_decay` (which needs the `family`) are given, their factors multiply.

  Args:
    starts: (regex, step): the factor is 0 before this step, for which `update` takes the
      keyword `step`.
  """

  def factors(params, step):
    layers = {} if layer_decay is None else layer_factors(family, params, layer_decay)

    def factor(name, p):
      by_layer = jnp.asarray(layers.get(name, 1.0), jnp.float32)
      by_layer = by_layer.reshape(by_layer.shape + (1,) * (p.ndim - by_layer.ndim))
      by_layer *= trees.first_match(rules, name) if rules else 1.0
      late = next((at for regex, at in starts if trees.matches(regex, name)), 0)
      return by_layer * (step >= late) if late else by_layer

    return trees.map_named(factor, params)

  def update(updates, state, params, *, rate, step=None, **_):
    if not rules and layer_decay is None and not starts:
      return jax.tree.map(lambda u: -(rate * u), updates), state
    scales = factors(params, step)
    return jax.tree.map(lambda u, f: -(rate * f * u), updates, scales), state

  init = lambda params: optax.EmptyState()
  return optax.GradientTransformationExtraArgs(init, update)
