"""Saliency by gradients, for any differentiable score.

A `score` maps images [B, H, W, C] to [B], one number for each image. The number depends on
that image alone.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def gradient_times_input(score: Callable, images: jax.Array) -> jax.Array:
  """Returns gradient x image, summed over channels, as signed float32 [B, H, W].

  If the score is linear in the image, this is the contribution of each pixel.

  Args:
    score: see the module.
    images: float32 [B, H, W, C].
  """
  return (images * _gradient(score, images)).sum(-1)


def integrated_gradients(
  score: Callable, images: jax.Array, baseline: jax.Array | float = 0.0, steps: int = 32
) -> jax.Array:
  """Returns the contribution of each pixel to score(image) - score(baseline).

  "Axiomatic Attribution for Deep Networks" (arXiv 1703.01365, equation 1). The contribution
  is the difference between image and baseline, times the mean gradient on the straight line
  between them. The midpoint rule gives the mean. The contributions add up to the difference
  of the scores, except for the error of that rule.

  Args:
    score: see the module.
    images: float32 [B, H, W, C].
    baseline: an image, or a value for all its pixels.
    steps: number of gradients in the mean.

  Returns:
    float32 [B, H, W], summed over channels, with signs.
  """
  if steps < 1:
    raise ValueError(f'steps={steps}: expected 1 or more')
  way = images - baseline

  def add(total, share):
    return total + _gradient(score, baseline + share * way), None

  shares = (jnp.arange(steps, dtype=jnp.float32) + 0.5) / steps
  total, _ = jax.lax.scan(add, jnp.zeros_like(images), shares)
  return (way * total / steps).sum(-1)


def _gradient(score, images):
  return jax.grad(lambda x: score(x).sum())(images)
