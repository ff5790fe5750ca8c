"""Image classification with one or several labels per image."""

from typing import Annotated, Literal

import jax.numpy as jnp

from vit_jax import losses
from vit_jax.check import Range, Share
from vit_jax.tasks.mixing import MODES, Mixing


class Classify:
  """Classification, the task of the paper: cross entropy of a model's logits."""

  # The label feature whose classes the head predicts.
  CLASSES = 'label'
  # The kind of outputs that its models must have, a key of `models.base.OUTPUTS`.
  OUTPUTS = 'classes'
  # The task has no parameters besides the model's.
  OWN = None

  def __init__(
    self,
    model,
    spec: dict,
    *,
    loss: Annotated[str, losses.check_loss] = 'softmax',
    label_smoothing: Share = 0.0,
    mixup: Annotated[float, Range(0, 1e3)] = 0.0,
    cutmix: Annotated[float, Range(0, 1e3)] = 0.0,
    mixup_mode: Literal[MODES] = 'batch',
    class_weights: losses.ClassWeights = None,
  ):
    """Builds the task from a classifier and the spec of its batches.

    Args:
      loss, label_smoothing: see `vit_jax.losses`.
      mixup, cutmix, mixup_mode: see `vit_jax.tasks.mixing.Mixing`.
      class_weights: a weight for each class in the loss, or 'balanced' or
        'effective(beta=0.999)', by which a run computes them from its training data, see
        `vit_jax.losses`. As in PyTorch, the loss of a batch is divided by the sum of the
        weights of its labels; if images are mixed, by their number.

    Raises:
      ValueError: for labels that cannot be compared with the model's logits, or a loss
        that does not return one number per example.
    """
    losses.check_labels(spec['label'], model.num_classes)
    self.model = model
    self.loss_fn = losses.build(loss, model.num_classes)
    self.label_smoothing = label_smoothing
    self.mixing = Mixing(mixup, cutmix, mixup_mode)
    if isinstance(class_weights, str):
      raise ValueError(f'{class_weights=} needs training data: list the weights')
    if class_weights and len(class_weights) != model.num_classes:
      raise ValueError(
        f'{len(class_weights)} class_weights for {model.num_classes} classes'
      )
    self.class_weights = class_weights and jnp.float32(class_weights)

  def init(self, rng, spec: dict) -> dict:
    """Initialises the variables for batches of `spec`, {'image': ShapeDtypeStruct, ...}."""
    image = jnp.zeros((1, *spec['image'].shape[1:]), jnp.float32)
    return self.model.init(rng, image)

  def prepare(self, batch: dict, rng, state) -> dict:
    """Adds targets to a whole batch, and mixes it, before it is cut into micro-batches.

    Args:
      batch: 'image' [B, H, W, C] in [-1, 1], 'label' [B] int or [B, K] float,
        'weight' [B].
      rng: the random key for mixing.
    """
    targets = losses.targets_of(batch['label'], self.model.num_classes)
    if self.label_smoothing:
      targets = losses.smooth(targets, self.label_smoothing, self.loss_fn)
    images = batch['image']
    if self.mixing:
      images, targets = self.mixing(images, targets, batch['weight'], rng)
    if self.class_weights is not None:
      # Losses of exclusive classes are linear in their targets.
      targets *= self.class_weights
      if not self.mixing and batch['label'].ndim == 1:
        weights = self.class_weights[batch['label']]
        targets /= jnp.maximum(jnp.sum(batch['weight'] * weights), 1e-30)
    return {**batch, 'image': images, 'target': targets}

  def example_losses(self, logits, batch: dict):
    """Returns the losses [B] of a prepared batch; a subclass may add terms."""
    return self.loss_fn(logits, batch['target'])

  def loss(self, variables, batch: dict, rng):
    """Returns (loss, (metrics, batch statistics)) of a prepared batch.

    `accuracy` compares with an example's own label, even if images are mixed.

    Args:
      rng: the random key for dropout and stochastic depth.
    """
    (logits, _), stats = apply_student(self.model, variables, batch['image'], rng)
    right = losses.is_label(logits.argmax(-1), batch['label'])
    loss = jnp.sum(batch['weight'] * self.example_losses(logits, batch))
    metrics = {'loss': loss, 'accuracy': jnp.sum(batch['weight'] * right)}
    return loss, (metrics, stats)

  def predict(self, variables, batch: dict) -> dict:
    """Returns 'logits' [B, K] and all named features of the model, in evaluation."""
    logits, features = self.model.apply(variables, batch['image'], train=False)
    return {**features, 'logits': logits}


def apply_student(model, variables, images, rng):
  """Returns ((logits, {'pre_logits': ..., ...}), new batch statistics), in training."""
  outputs, updated = model.apply(
    variables,
    images,
    train=True,
    features=False,
    rngs={'dropout': rng},
    mutable=['batch_stats'],
  )
  return outputs, updated.get('batch_stats', {})
