"""Image classification with one or several labels per image."""

import jax
import jax.numpy as jnp

from vit_jax import losses
from vit_jax.errors import UserError


class Classify:
  """Cross entropy of a model's logits; the task of the paper."""

  def __init__(
    self,
    model,
    num_classes: int,
    *,
    loss: str = 'softmax',
    label_smoothing: float = 0.0,
  ):
    if not 0 <= label_smoothing < 1:
      raise UserError(f'config.task.label_smoothing={label_smoothing}: not in [0, 1).')
    self.model = model
    self.num_classes = num_classes
    self.loss_name = loss
    self.loss_fn = losses.get(loss)
    self.label_smoothing = label_smoothing

  def init(self, rng, spec: dict) -> dict:
    """Returns params for batches of `spec`: {'image': ShapeDtypeStruct, ...}."""
    image = jnp.zeros((1, *spec['image'].shape[1:]), jnp.float32)
    return self.model.init(rng, image)['params']

  def loss(self, params, batch: dict, rng):
    """Returns (loss, metrics) of a batch.

    Args:
      batch: 'image' [B, H, W, C] in [-1, 1], 'label' [B] int or [B, K] float,
        'weight' [B].
      rng: of dropout and stochastic depth.
    """
    logits, _ = self.model.apply(
      {'params': params}, batch['image'], train=True, rngs={'dropout': rng}
    )
    label = batch['label']
    targets = label if label.ndim == 2 else jax.nn.one_hot(label, self.num_classes)
    right = jnp.take_along_axis(targets, logits.argmax(-1)[:, None], axis=-1)[:, 0] > 0
    if self.label_smoothing:
      targets = losses.smooth(targets, self.label_smoothing, self.loss_name)
    loss = jnp.sum(batch['weight'] * self.loss_fn(logits, targets))
    return loss, {'loss': loss, 'accuracy': jnp.sum(batch['weight'] * right)}

  def predict(self, params, batch: dict) -> dict:
    """Returns 'logits' [B, K] and every named feature of the model, in evaluation."""
    logits, features = self.model.apply({'params': params}, batch['image'], train=False)
    return {**features, 'logits': logits}
