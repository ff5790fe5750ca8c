"""Summarises the attention weights of all layers, in pure functions of arrays."""

import jax
import jax.numpy as jnp

from vit_jax.errors import choose

FUSIONS = {'mean': jnp.mean, 'max': jnp.max, 'min': jnp.min}


def rollout(attention: jax.Array, fusion: str = 'mean', residual: bool = True):
  """Returns the share of each input token in each token of the last layer.

  "Quantifying Attention Flow in Transformers" (arXiv 2005.00928, section 3), as the ViT
  paper uses it (appendix D.8): weights are averaged over heads and multiplied through the
  layers. A_l = (weights + identity) / 2 with rows that sum to 1, R_1 = A_1,
  R_l = A_l R_(l-1). The identity stands for the residual branch. The ViT paper does not
  mention the identity, but the article that it cites has it.

  Args:
    attention: [L, B, M, N, N], rows of weights that sum to 1; first layer first.
    fusion: how the heads are combined, 'mean', 'max' or 'min'.
    residual: whether the identity is added.

  Returns:
    float32 [B, N, N]. Row i has the shares of the input tokens in output token i; it sums
    to 1.
  """
  fuse = choose('fusion', fusion, FUSIONS)
  a = fuse(jnp.asarray(attention, jnp.float32), axis=2)  # [L, B, N, N]
  if residual:
    a = (a + jnp.eye(a.shape[-1])) / 2
  a = a / a.sum(-1, keepdims=True)
  result = a[0]
  for layer in a[1:]:
    result = jnp.matmul(layer, result, precision='highest')
  return result


def class_rollout(attention: jax.Array, gradients: jax.Array) -> jax.Array:
  """Returns the relevance of each input token for a class, through each output token.

  "Generic Attention-model Explainability" (arXiv 2103.15679, equations 5 and 6) for
  self-attention. A_l is the mean over heads of the positive part of gradient times weight,
  R_0 = identity, and R_l = R_(l-1) + A_l R_(l-1).

  Args:
    attention: [L, B, M, N, N], first layer first.
    gradients: gradients of the class's score with respect to the weights; same shape.

  Returns:
    float32 [B, N, N], not normalised, including the identity.
  """
  a = positive_part(attention, gradients)  # [L, B, N, N]
  result = jnp.broadcast_to(jnp.eye(a.shape[-1]), a.shape[1:])
  for layer in a:
    result = result + jnp.matmul(layer, result, precision='highest')
  return result


def positive_part(attention: jax.Array, gradients: jax.Array) -> jax.Array:
  """Averages max(gradient x weight, 0) over heads: [..., M, N, S] -> [..., N, S]."""
  a, g = (jnp.asarray(x, jnp.float32) for x in (attention, gradients))
  return jnp.maximum(a * g, 0).mean(-3)


def attention_distance(
  attention: jax.Array, grid: tuple[int, int], patch: int | tuple[int, int]
) -> jax.Array:
  """Returns the mean attention distance of each head in pixels (ViT paper, figure 7 right).

  It is the mean over query patches of a sum over key patches: the attention weight times the
  distance between the centres. Tokens before the patches, such as the class token, are left
  out as queries and as keys, and the weights on patches are divided by their sum. The paper
  does not mention this. Uniform attention over 14 x 14 patches of 16 pixels gives 116.5.

  Args:
    attention: [L, B, M, N, N]; the last h * w tokens are patches, row by row.
    grid: (h, w) of patches.
    patch: (height, width) in pixels, or one number for both.

  Returns:
    float32 [L, B, M]. In the paper's figure, dots are means over images and bars standard
    deviations.
  """
  h, w = grid
  assert attention.shape[-1] >= h * w, (attention.shape, grid)
  a = jnp.asarray(attention, jnp.float32)[..., -h * w :, -h * w :]
  a = a / a.sum(-1, keepdims=True)
  y, x = jnp.mgrid[:h, :w]
  at = jnp.stack([y.ravel(), x.ravel()], -1) * jnp.asarray(patch, jnp.float32)
  distance = jnp.linalg.norm(at[:, None] - at[None], axis=-1)  # [N, N]
  return (a * distance).sum(-1).mean(3)
