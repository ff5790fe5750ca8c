"""A model, an op and a task; docs/guides/extending.md explains each kind."""

import dataclasses

import jax
import jax.numpy as jnp

from vit_jax.data.ops.registry import op
from vit_jax.models import vit
from vit_jax.tasks.classify import Classify


class Edges(vit.ViT):
  """A ViT that sees the differences between neighbouring pixels."""

  def __call__(self, images, **options):
    return super().__call__(images - jnp.roll(images, 1, axis=2), **options)


FAMILY = dataclasses.replace(vit.FAMILY, model=Edges)


@op('negative', keeps_positions=True)
def negative():
  """Turns uint8 images into their negatives."""
  return lambda images, u: 255 - images


class Confident(Classify):
  """Classification, with a reward for large probabilities."""

  def __init__(self, model, spec, *, reward: float = 0.1, **options):
    super().__init__(model, spec, **options)
    self.reward = reward

  def example_losses(self, logits, batch):
    largest = jax.nn.softmax(logits).max(-1)
    return super().example_losses(logits, batch) - self.reward * largest
