"""Image classification with one or several labels per image."""

import jax
import jax.numpy as jnp

from vit_jax import losses
from vit_jax.errors import UserError
from vit_jax.tasks.mixing import Mixing


class Classify:
  """Cross entropy of a model's logits; the task of the paper."""

  def __init__(
    self,
    model,
    num_classes: int,
    *,
    loss: str = 'softmax',
    label_smoothing: float = 0.0,
    mixup: float = 0.0,
    cutmix: float = 0.0,
    switch: float = 0.5,
    per: str = 'batch',
  ):
    """Takes a model and what its logits are compared with.

    Args:
      loss, label_smoothing: see `vit_jax.losses`.
      mixup, cutmix, switch, per: see `vit_jax.tasks.mixing.Mixing`.

    Raises:
      UserError: for an unknown loss or a value out of range.
    """
    if not 0 <= label_smoothing < 1:
      raise UserError(f'config.task.label_smoothing={label_smoothing}: not in [0, 1).')
    self.model = model
    self.num_classes = num_classes
    self.loss_name = loss
    self.loss_fn = losses.get(loss)
    self.label_smoothing = label_smoothing
    self.mixing = Mixing(mixup, cutmix, switch, per)

  def init(self, rng, spec: dict) -> dict:
    """Returns params for batches of `spec`: {'image': ShapeDtypeStruct, ...}."""
    image = jnp.zeros((1, *spec['image'].shape[1:]), jnp.float32)
    return self.model.init(rng, image)['params']

  def prepare(self, batch: dict, rng) -> dict:
    """Returns a whole batch, before it is cut into micro-batches, as `loss` takes it.

    Args:
      batch: 'image' [B, H, W, C] in [-1, 1], 'label' [B] int or [B, K] float,
        'weight' [B].
      rng: of mixing.
    """
    label = batch['label']
    targets = label if label.ndim == 2 else jax.nn.one_hot(label, self.num_classes)
    if self.label_smoothing:
      targets = losses.smooth(targets, self.label_smoothing, self.loss_name)
    images = batch['image']
    if self.mixing:
      images, targets = self.mixing(images, targets, batch['weight'], rng)
    return {**batch, 'image': images, 'target': targets}

  def loss(self, params, batch: dict, rng):
    """Returns (loss, metrics) of a prepared batch.

    `accuracy` compares with the examples' own labels, also where images are mixed.

    Args:
      rng: of dropout and stochastic depth.
    """
    logits, _ = self.model.apply(
      {'params': params},
      batch['image'],
      train=True,
      features=False,
      rngs={'dropout': rng},
    )
    top, label = logits.argmax(-1), batch['label']
    if label.ndim == 2:
      right = jnp.take_along_axis(label, top[:, None], axis=-1)[:, 0] > 0
    else:
      right = top == label
    loss = jnp.sum(batch['weight'] * self.loss_fn(logits, batch['target']))
    return loss, {'loss': loss, 'accuracy': jnp.sum(batch['weight'] * right)}

  def predict(self, params, batch: dict) -> dict:
    """Returns 'logits' [B, K] and every named feature of the model, in evaluation."""
    logits, features = self.model.apply({'params': params}, batch['image'], train=False)
    return {**features, 'logits': logits}
