"""Facts about a model that tuning methods need: shapes, layers, blocks."""

import dataclasses
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax import trees
from vit_jax.models.base import Family


@dataclasses.dataclass(frozen=True)
class Layer:
  """One layer of a model, as it is called for one image."""

  kind: type  # the class of its module
  inputs: tuple[int, ...]  # the shape of its first argument
  # The shape of its result, or of the first one if there are several.
  outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Backbone:
  """A model without added parameters, and the shape (H, W, C) of its images."""

  model: nn.Module
  family: Family
  image_shape: tuple[int, int, int]

  @property
  def shapes(self) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters, by name."""
    return _trace(self.model, self.image_shape)[0]

  @property
  def layers(self) -> dict[str, Layer]:
    """Layers by path, 'a/b', including layers without parameters."""
    return _trace(self.model, self.image_shape)[1]

  @functools.cached_property
  def blocks(self) -> list[str]:
    """Paths of the repeated blocks, in the order in which the model runs them."""
    depths, _ = self.family.depths(self.shapes)
    paths = {}
    for name in self.shapes:
      match = re.fullmatch(self.family.blocks, name)
      if match and match['layer'] is not None:
        paths[depths[name]] = name[: match.end('layer')]
    return [paths[depth] for depth in sorted(paths)]

  def head(self, method: str) -> Layer:
    """Returns the head, whose input is [1, D]; raises ValueError if the model has none."""
    if 'head' not in self.layers:
      raise ValueError(
        f'method={method} needs a model with a head: set config.model.num_classes, which '
        'is None'
      )
    return self.layers['head']


@functools.lru_cache(maxsize=16)
def _trace(model, image_shape) -> tuple[dict, dict]:
  """Traces a model and returns the (shapes, layers) of its `Backbone`."""
  layers: dict[str, Layer] = {}

  def record(call, args, kwargs, context):
    result = call(*args, **kwargs)
    if context.method_name == '__call__' and args:
      first = result[0] if isinstance(result, tuple) else result
      path = '/'.join(context.module.path)
      # If an argument or result is a dict of maps, as in composite models, the first map counts.
      sizes = (jax.tree.leaves(x)[0].shape for x in (args[0], first))
      layers[path] = Layer(type(context.module), *sizes)
    return result

  images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
  with nn.intercept_methods(record):
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
  shapes = {n: x.shape for n, x in trees.flatten(variables['params']).items()}
  return shapes, layers
