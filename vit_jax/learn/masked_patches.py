"""Masked patch prediction: pre-training without labels, arXiv 2010.11929, B.1.2.

Some patches of each image are corrupted, and predicted from their encoded tokens. The model
does not know about the task: an interceptor corrupts its patch embeddings. All randomness
follows from a key, so that the number of devices does not change the result.
"""

import contextlib
import math
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from vit_jax import models
from vit_jax.check import Fraction
from vit_jax.errors import UserError
from vit_jax.evaluators.base import Metric, OneSplit
from vit_jax.nn.layers import linear_head

# Among the corrupted patches, the share that gets the mask embedding, and the share that
# gets the embedding of another patch. The rest keep their own, as in BERT (arXiv
# 1810.04805, section 3.1).
MASKED, SWAPPED = 0.8, 0.1
LEVELS = 8  # levels of a colour channel: 3 bits
# {target: number of parts along each side of a patch}. The model predicts the mean colour
# of each part; None: it predicts all pixels.
TARGETS = {'mean_color': 1, 'downsized': 4, 'pixels': None}


# -- corruption -----------------------------------------------------------------------


class Corruption(NamedTuple):
  """Which k of the N patches of each image are corrupted, and how."""

  positions: jax.Array  # int32 [..., k], the corrupted patches, in random order
  masked: jax.Array  # bool [..., N], patches that get the mask embedding
  # int32 [..., N], the patch whose embedding each patch gets, in most cases its own.
  source: jax.Array


def draw(key, k: int, shape: tuple[int, ...]) -> Corruption:
  """Draws which k of the N patches of each image are corrupted, for shape (..., N).

  Patches are drawn uniformly. Each image has the same number, so that all images count the
  same in the loss.
  """
  chosen_key, kind_key, other_key = jax.random.split(key, 3)
  N = shape[-1]
  order = jnp.argsort(jax.random.uniform(chosen_key, shape), axis=-1).astype(jnp.int32)
  # The second argsort gives the rank of each patch in `order`.
  corrupted = jnp.argsort(order, axis=-1) < k
  kind = jax.random.uniform(kind_key, shape)
  swapped = corrupted & (kind >= MASKED) & (kind < MASKED + SWAPPED)
  itself = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32), shape)
  other = (itself + jax.random.randint(other_key, shape, 1, N)) % N
  return Corruption(
    order[..., :k], corrupted & (kind < MASKED), jnp.where(swapped, other, itself)
  )


def draw_for_examples(index, k: int, patches: int) -> Corruption:
  """Draws the corruption of examples, int32 [B], the same in every evaluation."""
  key = jax.random.key(0)
  return jax.vmap(lambda i: draw(jax.random.fold_in(key, i), k, (patches,)))(index)


class Predictor(nn.Module):
  """Predicts patches. It holds the parameters that the task adds: `mask` and `head`."""

  outputs: int  # how many numbers to predict for a patch

  @nn.compact
  def __call__(self, tokens):
    """Returns predictions [B, k, outputs] float32 of encoded tokens [B, k, D]."""
    # The parameter `mask`, which `corrupt` uses, starts as large as position embeddings.
    self.param('mask', nn.initializers.normal(0.02), tokens.shape[-1:])
    return linear_head(tokens, self.outputs)


def change_patches(
  layer: tuple[str, ...], change: Callable
) -> contextlib.AbstractContextManager:
  """Returns a context manager in which a model's patch embeddings are changed.

  Args:
    layer: path of the layer that returns the patch embeddings, see `patches_layer`.
    change: maps the embeddings [B, N, D] to others.
  """

  def intercept(call, args, kwargs, context):
    x = call(*args, **kwargs)
    if context.module.path != layer or context.method_name != '__call__':
      return x
    return change(x.reshape(len(x), -1, x.shape[-1])).reshape(x.shape)

  return nn.intercept_methods(intercept)


def patches_layer(family) -> tuple[str, ...]:
  """Returns the path of the layer of a family's models that returns [B, h, w, D]."""
  return tuple(family.patches.split('/')[:-1])


def corrupt(
  layer: tuple[str, ...], mask, drawn: Corruption
) -> contextlib.AbstractContextManager:
  """Returns a context manager in which a model's patch embeddings are corrupted.

  Args:
    layer: see `patches_layer`.
    mask: [D], the mask embedding.
  """

  def change(x):
    x = jnp.take_along_axis(x, drawn.source[..., None], axis=1)
    return jnp.where(drawn.masked[..., None], mask.astype(x.dtype), x)

  return change_patches(layer, change)


# -- targets --------------------------------------------------------------------------


def cut(images, patch: tuple[int, int]):
  """Cuts images [B, H, W, C] into patches [B, N, ph * pw * C], row by row."""
  B, H, W, C = images.shape
  ph, pw = patch
  h, w = H // ph, W // pw
  x = images[:, : h * ph, : w * pw].reshape(B, h, ph, w, pw, C).swapaxes(2, 3)
  return x.reshape(B, h * w, ph * pw * C)


def color_code(color):
  """Encodes colours [..., C] in [-1, 1] as int32 [...], with 3 bits per channel.

  The code is sum_c floor(8 m_c) << 3 c, where m = (color + 1) / 2. If m is 1, it belongs to
  the last level.
  """
  levels = jnp.floor((color + 1) / 2 * LEVELS).astype(jnp.int32)
  levels = levels.clip(0, LEVELS - 1)
  return jnp.sum(levels << (3 * jnp.arange(color.shape[-1])), -1)


class Target:
  """Computes targets: for each part of a patch, one of 8 ** C colours; or the patch's pixels.

  Attributes:
    patch: (height, width) of a patch in pixels.
    parts: parts along each side of a patch, or None for pixels.
    outputs: how many numbers to predict for a patch.
  """

  def __init__(self, name: str, patch: tuple[int, int], channels: int):
    self.patch, self.parts = patch, TARGETS[name]
    if self.parts and any(size % self.parts for size in patch):
      raise ValueError(
        f'target={name!r} cuts patches into {self.parts} x {self.parts} parts, which does not '
        f'divide {patch[0]} x {patch[1]}'
      )
    self.classes = LEVELS**channels
    pixels = math.prod(patch) * channels
    self.outputs = self.parts**2 * self.classes if self.parts else pixels

  def compute(self, images):
    """Computes the targets of images [B, H, W, C] in [-1, 1], patches row by row.

    Targets are int32 [B, N, parts ** 2], or for pixels float32 [B, N, ph * pw * C].
    """
    x = cut(images, self.patch)
    if (n := self.parts) is None:
      return x
    (ph, pw), (B, N, _), C = self.patch, x.shape, images.shape[-1]
    x = x.reshape(B, N, n, ph // n, n, pw // n, C).mean((3, 5))
    return color_code(x.reshape(B, N, n * n, C))

  def measure(self, predictions, targets) -> dict:
    """Compares predictions with targets: 'loss' [...], for colours also 'accuracy' [...].

    The loss of colours is cross entropy, averaged over parts; that of pixels is the mean
    squared error.
    """
    if self.parts is None:
      return {'loss': jnp.square(predictions - targets).mean(-1)}
    logits = predictions.reshape(*targets.shape, self.classes)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    right = logits.argmax(-1) == targets
    return {'loss': loss.mean(-1), 'accuracy': right.astype(jnp.float32).mean(-1)}


# -- task and evaluator ---------------------------------------------------------------


def check_encoder(task: str, model) -> None:
  """Raises ValueError unless a model has patches, and no layers after its encoder."""
  if model.untuned is not model:
    raise ValueError(f'{task} needs config.tune.method=full or rules')
  if model.family.patches is None:
    allowed = [name for name in models.MODELS if models.family(name).patches]
    raise ValueError(f'{type(model).__name__} has no patches: choose one of {allowed}')
  fields = model.fields()
  for field in ('num_classes', 'representation_size', 'classifier'):
    value = fields.get(field)
    if value in ('map', 'query') if field == 'classifier' else value is not None:
      raise ValueError(
        f'config.model.{field}={value!r} adds a layer after the encoder: set it when the '
        'model is fine-tuned'
      )


class MaskedPatches:
  """Predicts patches whose embeddings were corrupted, from their encoded tokens.

  The model is a ViT or hybrid without a head. The task's own parameters, a mask embedding
  and a linear layer, are stored with the model's, under `OWN`.
  """

  CLASSES = None
  OUTPUTS = 'classes'
  OWN = 'masked_patches'

  def __init__(
    self,
    model,
    spec: dict,
    *,
    target: Literal[tuple(TARGETS)] = 'mean_color',
    rate: Fraction = 0.5,
  ):
    """Checks the model against the spec of batches with images.

    Args:
      model: a model without a head.
      target: 'mean_color', with 3 bits per channel, as the paper reports; 'downsized', the
        colours of the patch resized to 4 x 4 pixels; or 'pixels', by regression.
      rate: share of each image's patches that are corrupted. 80 % of these get the mask
        embedding, 10 % get another patch's embedding, and 10 % keep their own.
    """
    check_encoder(self.OWN, model)
    family = model.family
    H, W, C = spec['image'].shape[1:]
    # The patch size is in pixels of the image, even for hybrids.
    patch = family.stride(model.fields())
    self.patches = math.prod(n // s for n, s in zip((H, W), patch, strict=True))
    self.corrupted = round(rate * self.patches)
    if self.patches < 2 or self.corrupted < 1:
      raise ValueError(
        f'rate={rate} corrupts {self.corrupted} of {self.patches} patches: expected at '
        'least 1 of 2'
      )
    self.model = model
    self.layer = patches_layer(family)
    self.target = Target(target, patch, C)
    self.added = Predictor(self.target.outputs)

  def init(self, rng, spec: dict) -> dict:
    """Returns the variables of model and task; the task's are under the key `OWN`."""
    image = jnp.zeros((1, *spec['image'].shape[1:]), jnp.float32)
    (_, features), variables = self.model.init_with_output(rng, image)
    if 'encoded' not in features:
      name = type(self.model).__name__
      raise UserError(f'config.task: {name} has no tokens. Choose a ViT or a Mixer.')
    added = self.added.init(jax.random.fold_in(rng, 0), features['encoded'])
    return {'params': {**variables['params'], self.OWN: added['params']}}

  def prepare(self, batch: dict, rng, state) -> dict:
    """Adds the corruption of images to a whole batch."""
    shape = (len(batch['image']), self.patches)
    return batch | draw(rng, self.corrupted, shape)._asdict()

  def loss(self, variables, batch: dict, rng):
    """Returns (loss, (metrics, {})) of a prepared batch, as means over corrupted patches."""
    drawn = Corruption(*(batch[key] for key in Corruption._fields))
    measured = self._measure(
      variables['params'], batch['image'], drawn, train=True, rngs={'dropout': rng}
    )
    sums = {key: jnp.sum(batch['weight'] * x) for key, x in measured.items()}
    return sums['loss'], (sums, {})

  def predict(self, variables, batch: dict) -> dict:
    """Returns the model's features, and how well it predicts corrupted patches.

    The features are those of uncorrupted images. 'masked_loss' [B], and for colours also
    'masked_accuracy' [B], are measured on images that `draw_for_examples` corrupts, given
    batch['index'].
    """
    params = variables['params']
    _, features = self.model.apply(
      {'params': self._encoder(params)}, batch['image'], train=False
    )
    drawn = draw_for_examples(batch['index'], self.corrupted, self.patches)
    measured = self._measure(params, batch['image'], drawn, train=False)
    return features | {f'masked_{key}': x for key, x in measured.items()}

  def _measure(self, params, images, drawn: Corruption, **call) -> dict:
    """Returns 'loss' [B], and for colours 'accuracy' [B], of the corrupted patches."""
    own = params[self.OWN]
    with corrupt(self.layer, own['mask'], drawn):
      _, features = self.model.apply({'params': self._encoder(params)}, images, **call)
    tokens = features['encoded'][:, -self.patches :]  # [B, N, D], without a class token
    at = drawn.positions[..., None]  # [B, k, 1]
    tokens = jnp.take_along_axis(tokens, at, axis=1)
    targets = jnp.take_along_axis(self.target.compute(images), at, axis=1)
    predictions = self.added.apply({'params': own}, tokens)
    measured = self.target.measure(predictions, targets)
    return {key: x.mean(-1) for key, x in measured.items()}

  def _encoder(self, params) -> dict:
    return {name: x for name, x in params.items() if name != self.OWN}


class Evaluation(OneSplit):
  """Averages the loss of masked patches, and the accuracy of colours, over a split.

  Every evaluation masks the same patches of an image.
  """

  TASKS = ('mae', 'masked_patches')
  METRICS: ClassVar = {
    'accuracy': Metric(percent=True, larger_is_better=True),
    'loss': Metric(larger_is_better=False),
    'examples': Metric(),
    'bad_images': Metric(),
  }

  def run(self, predict: Callable, variables) -> dict[str, float]:
    """Returns loss, accuracy (of colours), examples, and bad_images if there are any."""
    totals = {'examples': 0.0}
    for sums in self.run_steps(predict, variables):
      totals = {name: float(x) + totals.get(name, 0) for name, x in sums.items()}
    examples = totals.pop('examples')
    means = {name: total / examples for name, total in totals.items() if examples}
    return self.add_counts(means, examples, examples)

  def measure(self, predict, variables, batch) -> dict:
    """Returns sums over a batch."""
    batch = self.batches.finish_on_device(batch)
    out = predict(variables, batch)
    real = batch['mask'] > 0
    # Not a product: a padded row may be NaN, and 0 times NaN is NaN.
    sums = {
      name: jnp.where(real, out[f'masked_{name}'], 0).sum()
      for name in ('loss', 'accuracy')
      if f'masked_{name}' in out
    }
    return sums | {'examples': real.sum(dtype=jnp.float32)}
