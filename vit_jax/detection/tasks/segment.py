"""Semantic segmentation: a class for every pixel."""

from typing import Annotated

import jax.numpy as jnp
import optax

from vit_jax.check import INT32, Range
from vit_jax.errors import UserError

IGNORED = 255  # of labels of 8 bits, in COCO's, Cityscapes' and ADE20K's files


class Segment:
  """Cross entropy of a model's logits at every pixel that has a label."""

  CLASSES = 'segments'
  OUTPUTS = 'pixels'
  OWN = None

  def __init__(
    self, model, spec: dict, *, ignore: Annotated[int, Range(0, INT32)] = IGNORED
  ):
    """Takes a model that gives logits [B, H, W, K], and the spec of batches.

    Args:
      ignore: label of pixels that count neither in the loss nor in metrics.

    Raises:
      UserError: for batches without 'segments' of the images' size.
    """
    check_spec(spec)
    self.model, self.ignore = model, ignore

  def init(self, rng, spec: dict) -> dict:
    """Returns variables for batches of `spec`: {'image': ShapeDtypeStruct, ...}."""
    image = jnp.zeros((1, *spec['image'].shape[1:]), jnp.float32)
    return self.model.init(rng, image)

  def prepare(self, batch: dict, rng) -> dict:
    """Returns a whole batch with the weights of its pixels, for `loss`.

    All labelled pixels of the whole batch, over all devices and micro-batches, weigh the
    same, and 1 together.

    Args:
      batch: 'image' [B, H, W, C] in [-1, 1], 'segments' int [B, H, W], 'weight' [B].
      rng: not used.
    """
    del rng
    segments = batch['segments'].astype(jnp.int32)
    real = (batch['weight'] > 0)[:, None, None] & (segments != self.ignore)
    weight = real.astype(jnp.float32)
    weight /= jnp.maximum(weight.sum(), 1.0)
    return {**batch, 'segments': segments, 'pixel_weight': weight}

  def loss(self, variables, batch: dict, rng):
    """Returns (loss, (metrics, batch statistics)) of a prepared batch: means over pixels.

    The loss of a batch with a label that is not a class is NaN: such a step is counted as
    bad, as is one of broken numbers.

    Args:
      rng: of dropout and stochastic depth.
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
    K = logits.shape[-1]
    known = (segments >= 0) & (segments < K)
    each = optax.softmax_cross_entropy_with_integer_labels(
      logits, jnp.where(known, segments, 0)
    )
    each = jnp.where(known, each, jnp.nan)
    # `where`, since 0 x nan would be nan
    loss = jnp.where(weight > 0, weight * each, 0).sum()
    right = logits.argmax(-1) == segments
    metrics = {'loss': loss, 'accuracy': jnp.sum(weight * right)}
    return loss, (metrics, updated.get('batch_stats', {}))

  def predict(self, variables, batch: dict) -> dict:
    """Returns 'logits' [B, H, W, K] and every named feature, in evaluation."""
    logits, features = self.model.apply(variables, batch['image'], train=False)
    return {**features, 'logits': logits}


def check_spec(spec: dict) -> None:
  """Raises UserError for batches without a label at every pixel."""
  image, segments = spec['image'], spec.get('segments')
  if segments is None or segments.shape != image.shape[:3]:
    have = {name: list(x.shape) for name, x in spec.items()}
    raise UserError(
      "Segmentation needs 'segments' [B, H, W], a class for every pixel of the images: "
      f'data that declares them, such as digits_canvas with segments=True. The batches '
      f'have {have}.'
    )
  if not jnp.issubdtype(segments.dtype, jnp.integer):
    raise UserError(f"Segmentation needs 'segments' of integers, not {segments.dtype}.")
