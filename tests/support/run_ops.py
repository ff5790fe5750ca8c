"""Ops of the image pipeline, applied to arrays."""

import numpy as np
import tensorflow as tf

from vit_jax.data.ops import registry


def run(text, images, u=()):
  """Applies the ops of `text` to images with numbers u, as NumPy."""
  u = tf.constant(np.asarray(u, np.float32))
  return run_graph(text, tf.constant(images), u).numpy()


def run_graph(text, images, u):
  """As `run`, of tensors: also within a `tf.function`."""
  start = 0
  for op in registry.parse(text):
    images = op({'image': images}, u[..., start : start + op.draws])['image']
    start += op.draws
  return images
