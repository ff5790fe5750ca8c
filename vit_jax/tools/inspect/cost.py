"""What a model costs, from its config's section: parameters and operations."""

import functools
import json
from collections.abc import Sequence
from typing import NamedTuple

import jax

from vit_jax import models
from vit_jax.tools.inspect import activations, flops


class Cost(NamedTuple):
  """Of one model.

  Attributes:
    parameters: their number.
    operations: of the forward pass of one image, see `flops`.
  """

  parameters: int
  operations: int


def of(model: dict, image_shape: Sequence[int]) -> Cost:
  """Returns the cost of a model; nothing runs.

  Args:
    model: a config's section, with `num_classes`.
    image_shape: [H, W, C].

  Raises:
    UserError: where the model cannot be, or does not take such images.
  """
  return _cost(json.dumps(model, sort_keys=True), *image_shape)


@functools.cache  # of many runs, as of seeds, few differ
def _cost(model: str, *shape: int) -> Cost:
  forward, params, images = activations.trace(models.build(**json.loads(model)), shape)
  size = sum(x.size for x in jax.tree.leaves(params))
  return Cost(size, flops.count(forward, params, images))
