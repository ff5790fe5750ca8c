"""Semantic segmentation: a class for every pixel."""

import jax.numpy as jnp
import optax

from vit_jax.tasks.classify import Classify

# The label of pixels that do not count, in the 8-bit files of COCO, Cityscapes and ADE20K.
IGNORED = 255


class Segment(Classify):
  """Cross entropy at every pixel that has a label."""

  CLASSES = 'segments'
  OUTPUTS = 'pixels'

  def __init__(self, model, spec: dict):
    """Builds the task from a model with logits [B, H, W, K] and the spec of its batches.

    Pixels with the label IGNORED count neither in the loss nor in metrics.

    Raises:
      ValueError: batches have no integer 'segments' of the images' size.
    """
    segments = spec.get('segments')
    if (
      segments is None
      or segments.shape != spec['image'].shape[:3]
      or not jnp.issubdtype(segments.dtype, jnp.integer)
    ):
      have = {name: f'{x.dtype}{list(x.shape)}' for name, x in spec.items()}
      raise ValueError(
        "segmentation needs integer 'segments' [B, H, W], a class for every pixel: data "
        f'that declares them, such as digits_canvas with segments=True. Batches: {have}'
      )
    self.model = model

  def prepare(self, batch: dict, rng, state) -> dict:
    """Adds the weights of pixels to a whole batch.

    All labelled pixels of the whole batch, over all devices and micro-batches, have equal
    weights that sum to 1.

    Args:
      batch: 'image' [B, H, W, C] in [-1, 1], 'segments' int [B, H, W], 'weight' [B].
    """
    del rng, state
    segments = batch['segments'].astype(jnp.int32)
    real = (batch['weight'] > 0)[:, None, None] & (segments != IGNORED)
    weight = real.astype(jnp.float32)
    weight /= jnp.maximum(weight.sum(), 1.0)
    return {**batch, 'segments': segments, 'pixel_weight': weight}

  def loss(self, variables, batch: dict, rng):
    """Returns (loss, (metrics, batch statistics)) of a prepared batch, means over pixels.

    The loss is NaN if a label is not a class, so that the step counts as a bad one.
    """
    (logits, _), updated = self.model.apply(
      variables,
      batch['image'],
      train=True,
      features=False,
      rngs={'dropout': rng},
      mutable=['batch_stats'],
    )
    segments, weight = batch['segments'], batch['pixel_weight']
    is_class = (segments >= 0) & (segments < logits.shape[-1])
    each = optax.softmax_cross_entropy_with_integer_labels(
      logits, jnp.where(is_class, segments, 0)
    )
    each = jnp.where(is_class, each, jnp.nan)
    # Use `where`, because 0 times NaN is NaN.
    loss = jnp.where(weight > 0, weight * each, 0).sum()
    right = logits.argmax(-1) == segments
    metrics = {'loss': loss, 'accuracy': jnp.sum(weight * right)}
    return loss, (metrics, updated.get('batch_stats', {}))
