"""Parameters and operations of a config's model."""

import functools
import json
from collections.abc import Sequence
from typing import NamedTuple

import jax

from vit_jax import models
from vit_jax.tools.inspect import flops
from vit_jax.tools.inspect.model import trace


class Cost(NamedTuple):
  """Number of parameters, and operations of one image's forward pass, see `flops`."""

  parameters: int
  operations: int


def of(model: dict, image_shape: Sequence[int]) -> Cost:
  """Returns the cost of a config's section `model`, with `num_classes`; nothing runs.

  Args:
    image_shape: [H, W, C].
  """
  return _cost(json.dumps(model, sort_keys=True), *image_shape)


@functools.cache  # runs of an experiment often share their model
def _cost(model: str, *shape: int) -> Cost:
  forward, variables, images = trace(models.build(**json.loads(model)), shape)
  size = sum(x.size for x in jax.tree.leaves(variables['params']))
  return Cost(size, flops.count(forward, variables, images))
