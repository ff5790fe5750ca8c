"""Masked patches: corrupted embeddings of a model that does not know of the task."""

import contextlib

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.nn.layers import linear_head


class MaskedPatches(nn.Module):
  """The parameters that masked patch prediction adds to a model: `mask`, `head`."""

  outputs: int  # Numbers that are predicted for a patch.

  @nn.compact
  def __call__(self, tokens):
    """Returns predictions [B, k, outputs] float32 of encoded tokens [B, k, D]."""
    # `corrupted` puts it in place of embeddings: as large as position embeddings.
    self.param('mask', nn.initializers.normal(0.02), tokens.shape[-1:])
    return linear_head(tokens, self.outputs)


def corrupted(
  layer: tuple[str, ...], mask, masked, source
) -> contextlib.AbstractContextManager:
  """Returns the context in which a model's patch embeddings are corrupted.

  `mask` replaces them, or the embeddings of `source`, see `corruption.Corruption`. They
  are the output [B, h, w, D] of the layer with the path `layer`.
  """

  def intercept(call, args, kwargs, context):
    x = call(*args, **kwargs)
    if context.module.path != layer or context.method_name != '__call__':
      return x
    B, h, w, D = x.shape
    x = jnp.take_along_axis(x.reshape(B, h * w, D), source[..., None], axis=1)
    x = jnp.where(masked[..., None], mask.astype(x.dtype), x)
    return x.reshape(B, h, w, D)

  return nn.intercept_methods(intercept)
