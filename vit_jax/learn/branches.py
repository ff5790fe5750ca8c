"""Stochastic depth that does not compute the branches it drops (arXiv 2304.07193, section 5)."""

import contextlib
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models.vit import EncoderBlock
from vit_jax.nn.stack import StochasticDepth

# Images among which a branch skips a fixed number, as the authors' code does in the batch of a
# device. Devices with whole groups do not exchange images.
GROUP = 64


def skip_images(share: float) -> contextlib.AbstractContextManager:
  """Returns a context manager in which each residual branch of a ViT skips a share of images.

  A branch begins with a norm of its block, and ends with `StochasticDepth`. It draws the images
  that it keeps, the same in each group of successive images, and multiplies their outputs by
  group / kept.
  """
  if not share:
    return contextlib.nullcontext()
  kept = None

  def group(x):
    return x.reshape(-1, math.gcd(len(x), GROUP), *x.shape[1:])

  def intercept(call, args, kwargs, context):
    nonlocal kept
    module = context.module
    if isinstance(module.parent, EncoderBlock) and context.method_name == '__call__':
      x = args[0]
      if module.name.startswith('LayerNorm_'):
        size = group(x).shape[1]
        key = module.parent.make_rng('dropout')
        rows = jax.random.permutation(key, size)[: max(int(size * (1 - share)), 1)]
        kept = rows, group(x).shape
        return call(group(x)[:, rows].reshape(-1, *x.shape[1:]))
      if isinstance(module, StochasticDepth):
        rows, shape = kept
        y = x.reshape(shape[0], -1, *x.shape[1:]) * (shape[1] / len(rows))
        whole = jnp.zeros((*shape[:2], *x.shape[1:]), x.dtype)
        return whole.at[:, rows].set(y, unique_indices=True).reshape(-1, *x.shape[1:])
    return call(*args, **kwargs)

  return nn.intercept_methods(intercept)
