"""Stochastic depth that does not compute the branches it drops (arXiv 2304.07193, section 5)."""

import contextlib
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models.vit import EncoderBlock
from vit_jax.nn.stack import StochasticDepth

# The number of images of which a branch skips a fixed share. In the authors' code it is the
# batch of a device. Devices with whole groups do not exchange images.
GROUP = 64


def skip_branches(share: float) -> contextlib.AbstractContextManager:
  """Returns a context manager in which each residual branch of a ViT skips a share of images.

  Of each group of g successive images [g, N, D], a branch computes k = int(g (1 - share)), at
  least one, and multiplies them by g / k; for the others it is 0. It draws the places of the k
  images anew, the same in all groups. A branch begins with a norm of its block, which is
  given k images of each group, and ends with `StochasticDepth`, which puts them back.
  """
  if not share:
    return contextlib.nullcontext()
  size, places = (
    0,
    None,
  )  # of the group, and of the images that the present branch computes

  def intercept(call, args, kwargs, context):
    nonlocal size, places
    module = context.module
    if context.method_name != '__call__' or not isinstance(module.parent, EncoderBlock):
      return call(*args, **kwargs)
    x, shape = args[0], args[0].shape[1:]
    if module.name.startswith('LayerNorm_'):
      size = math.gcd(len(x), GROUP)
      places = jax.random.permutation(module.parent.make_rng('dropout'), size)
      places = places[: max(int(size * (1 - share)), 1)]
      return call(x.reshape(-1, size, *shape)[:, places].reshape(-1, *shape))
    if isinstance(module, StochasticDepth):
      computed = x.reshape(-1, len(places), *shape) * (size / len(places))
      whole = jnp.zeros((len(computed), size, *shape), x.dtype)
      return whole.at[:, places].set(computed, unique_indices=True).reshape(-1, *shape)
    return call(*args, **kwargs)

  return nn.intercept_methods(intercept)
