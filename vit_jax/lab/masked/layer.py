"""Masked patches: corrupted embeddings of a model that does not know of the task."""

import contextlib

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.nn.layers import linear_head


class MaskedPatches(nn.Module):
  """The parameters that masked patch prediction adds to a model: `mask`, `head`.

  Attributes:
    outputs: numbers that are predicted for a patch.
  """

  outputs: int

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

  Args:
    layer: path of the layer whose output is the embeddings [B, h, w, D], N = h w in a row.
    mask: [D], in place of the masked ones.
    masked, source: bool and int [B, N], see `corruption.Corruption`.
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
