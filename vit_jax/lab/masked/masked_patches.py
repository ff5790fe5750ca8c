"""Masked patch prediction: pre-training without labels, arXiv 2010.11929, B.1.2."""

import dataclasses
import math
from typing import Annotated

import jax
import jax.numpy as jnp

from vit_jax import models
from vit_jax.check import Choice, Fraction
from vit_jax.errors import UserError
from vit_jax.lab.masked import corruption
from vit_jax.lab.masked.layer import MaskedPatches as Added
from vit_jax.lab.masked.layer import corrupted
from vit_jax.lab.masked.patch_targets import TARGETS


class MaskedPatches:
  """Predicts patches whose embeddings were corrupted, from their encoded tokens.

  The model is a ViT or hybrid without a head. The task's own parameters, the mask
  embedding and the layer that predicts, stand beside the model's, below `OWN`.
  """

  CLASSES = None
  OUTPUTS = 'classes'
  OWN = 'masked_patches'

  def __init__(
    self,
    model,
    spec: dict,
    *,
    target: Annotated[str, Choice(TARGETS)] = 'mean_color',
    rate: Fraction = 0.5,
  ):
    """Checks the model against the spec of batches with images.

    Args:
      target: 'mean_color', in 3 bits a channel, which the paper reports; 'downsized',
        the colours of the patch resized to 4 x 4 pixels; 'pixels', by regression.
      rate: share of the patches of each image that are corrupted. 80 % of them get the
        mask embedding, 10 % another patch's embedding, and 10 % keep theirs.
    """
    if models.core(model) is not model:
      raise ValueError('masked_patches needs config.tune.method=full, or rules')
    family = models.family_of(model)
    fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(model)}
    if family.patches is None:
      allowed = [name for name in models.MODELS if models.family(name).patches]
      raise ValueError(f'{type(model).__name__} has no patches: choose of {allowed}')
    for field in ('num_classes', 'representation_size', 'classifier'):
      value = fields.get(field)
      if value == 'map' if field == 'classifier' else value is not None:
        raise ValueError(
          f'config.model.{field}={value!r} is a layer after the encoder: leave it out '
          'until the model is fine-tuned'
        )
    H, W, C = spec['image'].shape[1:]
    patch = family.stride(fields)  # in pixels of the image, also of hybrids
    self.patches = math.prod(n // s for n, s in zip((H, W), patch, strict=True))
    self.corrupted = round(rate * self.patches)
    if self.patches < 2 or self.corrupted < 1:
      raise ValueError(
        f'rate={rate} corrupts {self.corrupted} of {self.patches} patches: expected at '
        'least 1 of 2'
      )
    self.model = model
    self.layer = tuple(family.patches.split('/')[:-1])
    self.target = TARGETS[target](patch, C)
    self.added = Added(self.target.outputs)

  def init(self, rng, spec: dict) -> dict:
    """Returns variables for batches of `spec`: the model's, and the task's below `OWN`."""
    image = jnp.zeros((1, *spec['image'].shape[1:]), jnp.float32)
    (_, features), variables = self.model.init_with_output(rng, image)
    if 'encoded' not in features:
      name = type(self.model).__name__
      raise UserError(f'config.task: {name} has no tokens. Choose a ViT or a Mixer.')
    added = self.added.init(jax.random.fold_in(rng, 0), features['encoded'])
    return {'params': {**variables['params'], self.OWN: added['params']}}

  def prepare(self, batch: dict, rng) -> dict:
    """Returns a whole batch with the corruption of its images, for `loss`."""
    shape = (len(batch['image']), self.patches)
    return batch | corruption.draw(rng, self.corrupted, shape)._asdict()

  def loss(self, variables, batch: dict, rng):
    """Returns (loss, (metrics, {})) of a prepared batch: means over corrupted patches."""
    drawn = corruption.Corruption(
      *(batch[key] for key in corruption.Corruption._fields)
    )
    measured = self._measure(
      variables['params'], batch['image'], drawn, train=True, rngs={'dropout': rng}
    )
    sums = {key: jnp.sum(batch['weight'] * x) for key, x in measured.items()}
    return sums['loss'], (sums, {})

  def predict(self, variables, batch: dict) -> dict:
    """Returns every named feature of the model, of images that are not corrupted.

    Besides 'masked_loss' and, where answers are right or wrong, 'masked_accuracy' [B], of
    images corrupted as `corruption.of_examples` says by batch['index'].
    """
    params = variables['params']
    _, features = self.model.apply(
      {'params': self._encoder(params)}, batch['image'], train=False
    )
    drawn = corruption.of_examples(batch['index'], self.corrupted, self.patches)
    measured = self._measure(params, batch['image'], drawn, train=False)
    return features | {f'masked_{key}': x for key, x in measured.items()}

  def _measure(self, params, images, drawn: corruption.Corruption, **call) -> dict:
    """Returns {'loss': [B], maybe 'accuracy': [B]}, of the corrupted patches alone."""
    own = params[self.OWN]
    with corrupted(self.layer, own['mask'], drawn.masked, drawn.source):
      _, features = self.model.apply({'params': self._encoder(params)}, images, **call)
    tokens = features['encoded'][:, -self.patches :]  # [B, N, D], without a class token
    at = drawn.positions[..., None]  # [B, k, 1]
    tokens = jnp.take_along_axis(tokens, at, axis=1)
    targets = jnp.take_along_axis(self.target.of(images), at, axis=1)
    predictions = self.added.apply({'params': own}, tokens)
    loss, right = self.target.measure(predictions, targets)
    measured = {'loss': loss, 'accuracy': right}
    return {key: x.mean(-1) for key, x in measured.items() if x is not None}

  def _encoder(self, params) -> dict:
    return {name: x for name, x in params.items() if name != self.OWN}
