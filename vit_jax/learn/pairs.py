"""Images and texts: SigLIP (arXiv 2303.15343), CLIP (2103.00020) and LiT (2111.07991).

An image and a text tower map to unit vectors x and y. The logit of a pair is
exp(logit_scale) x . y + logit_bias. Both losses compare each image with all texts of the
global batch. They are those of big_vision, and see a chunk of the texts at a time, so that
memory does not grow with the square of the batch.
"""

import math
from collections.abc import Callable
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from vit_jax import trees
from vit_jax.check import Count, Range, Section
from vit_jax.models.text import TextTransformer
from vit_jax.nn.layers import unit

# Texts in a chunk, at most. A device holds the logits of its images and of one chunk.
CHUNK = 1024
# CLIP's largest scale. SigLIP has none.
_MOST_SCALE = math.log(100)


# -- losses -----------------------------------------------------------------------------


def sigmoid_loss(image, text, scale, bias, weight, chunk: int = CHUNK):
  """Returns sum_i w_i sum_j -log sigmoid(z_ij logit_ij), z = 1 for pairs and -1 for others.

  Args:
    image, text: unit vectors [B, E].
    scale, bias: numbers; logits are scale x . y + bias.
    weight: [B], sums to 1. An example of weight 0 is left out, its text too.
    chunk: number of texts that are compared at a time, at most.
  """

  def add(losses, logits, is_pair, real):
    each = jax.nn.softplus(jnp.where(is_pair, -1, 1) * (logits + bias))
    return losses + jnp.where(real, each, 0).sum(1), None

  losses, _ = _scan(add, jnp.zeros(len(image)), image, text, scale, weight, chunk)
  return jnp.sum(weight * losses)


def softmax_loss(image, text, scale, bias, weight, chunk: int = CHUNK):
  """Returns the mean of two cross entropies: of texts given an image, and the reverse.

  The arguments are those of `sigmoid_loss`. The bias is not used.
  """
  # Not -inf, of which a row without any text would have the gradient NaN.
  least = jnp.finfo(jnp.float32).min

  def add(of_images, logits, is_pair, real):
    of_images = jnp.logaddexp(
      of_images, jax.nn.logsumexp(jnp.where(real, logits, least), axis=1)
    )
    logits = jnp.where(weight[:, None] > 0, logits, least)
    return of_images, jax.nn.logsumexp(logits, axis=0)

  start = jnp.full(len(image), least)
  of_images, of_texts = _scan(add, start, image, text, scale, weight, chunk)
  pairs = scale * (image * text).sum(-1)
  of_texts = of_texts.swapaxes(0, 1).reshape(-1)
  return jnp.sum(weight * (of_images / 2 + of_texts / 2 - pairs))


LOSSES = {'sigmoid': sigmoid_loss, 'softmax': softmax_loss}


def _scan(add: Callable, start, image, text, scale, weight, chunk: int):
  """Runs `add(carry, logits [B, c], is_pair [B, c], real [c])` over chunks of the texts.

  The backward pass computes the logits again. Chunks are strided, so that each has texts of
  every device.
  """
  B = len(image)
  n = next(n for n in range(1, B + 1) if B % n == 0 and B // n <= chunk)
  cut = lambda x: x.reshape(-1, n, *x.shape[1:]).swapaxes(0, 1)

  @jax.checkpoint
  def step(carry, part):
    text, index, weight = part
    logits = scale * jnp.dot(image, text.T, precision='highest')
    return add(carry, logits, jnp.arange(B)[:, None] == index, weight > 0)

  return jax.lax.scan(step, start, (cut(text), cut(jnp.arange(B)), cut(weight)))


# -- the task -----------------------------------------------------------------------------


class Pairs:
  """Trains an image tower, which is the model, and a text tower on images with captions.

  The model's outputs are the vectors of images: its head is the projection of CLIP
  (`config.model.num_classes` is then its width), or it has none. The text tower, 'text', and
  the numbers 'logit_scale' and 'logit_bias' are stored with the model, under `OWN`.
  """

  CLASSES = None
  OUTPUTS = 'classes'
  OWN = 'pairs'

  def __init__(
    self,
    model,
    spec: dict,
    *,
    text: Annotated[dict, Section(TextTransformer, ('dtype', 'parent', 'name'))]
    | None = None,
    loss: Literal[tuple(LOSSES)] = 'sigmoid',
    bias: Annotated[float, Range(-100, 100)] = -10.0,
    parts: Count = 1,
  ):
    """Checks the towers against each other and the spec of batches.

    Args:
      text: fields of the text tower; None: they come from the weights. `length` and `outputs`
        are by default those of the captions and of the model.
      loss: 'sigmoid' or 'softmax'.
      bias: initial value of logit_bias, which only the sigmoid loss has.
      parts: number of parts in which the towers embed a batch. The backward pass embeds each
        part again, so that memory is that of one part. The loss is that of the whole batch.
    """
    if 'text' not in spec:
      raise ValueError(
        'the examples have no captions: choose a source with captions, and add tokenize to '
        'config.data.pp'
      )
    if text is None:
      raise ValueError(
        'config.weights has no text tower: set config.task.text, or use --config=lit'
      )
    batch = spec['image'].shape[0]
    if batch % parts:
      raise ValueError(f'parts={parts} does not divide the batch of {batch}')
    image = jax.ShapeDtypeStruct((1, *spec['image'].shape[1:]), jnp.float32)
    make = lambda image: model.init_with_output(jax.random.key(0), image)[0]
    (vectors, _) = jax.eval_shape(make, image)
    width = vectors.shape[-1]
    length = spec['text'].shape[-1]
    fields = {'length': length, 'outputs': width, **text}
    if (outputs := fields['outputs'] or fields.get('width')) != width:
      raise ValueError(
        f'the text tower gives vectors of width {outputs}, but the model of {width}'
      )
    if fields['length'] < length:
      raise ValueError(
        f'captions have {length} tokens, but the text tower takes {fields["length"]}: set '
        'tokenize(length=...) in config.data.pp'
      )
    self.model = model
    self.tower = TextTransformer(**fields, dtype=model.untuned.fields()['dtype'])
    self.sigmoid = loss == 'sigmoid'
    self.loss_fn, self.bias, self.parts = LOSSES[loss], bias, parts

  def init(self, rng, spec: dict) -> dict:
    """Returns the variables of both towers, and the initial scale and bias."""
    image = jnp.zeros((1, *spec['image'].shape[1:]), jnp.float32)
    variables = self.model.init(rng, image)
    ids = jnp.zeros((1, spec['text'].shape[-1]), jnp.int32)
    text = self.tower.init(jax.random.fold_in(rng, 0), ids)['params']
    own = {'text': text, 'logit_scale': jnp.log(10.0 if self.sigmoid else 1 / 0.07)}
    if self.sigmoid:
      own['logit_bias'] = jnp.float32(self.bias)
    return {**variables, 'params': {**variables['params'], self.OWN: own}}

  def prepare(self, batch: dict, rng, state) -> dict:
    """Returns the batch as it is."""
    del rng, state
    return batch

  def loss(self, variables, batch: dict, rng):
    """Returns (loss, (metrics, batch statistics)) of a whole batch."""

    def embed(part):
      i, images, ids = part
      (image, _), updated = self.model.apply(
        self._image(variables),
        images,
        train=True,
        features=False,
        rngs={'dropout': jax.random.fold_in(rng, i)},
        mutable=[trees.STATS],
      )
      return unit(image), self._embed(variables, ids), updated.get(trees.STATS, {})

    # Strided, so that no example leaves its device.
    cut = lambda x: x.reshape(-1, self.parts, *x.shape[1:]).swapaxes(0, 1)
    join = lambda x: x.swapaxes(0, 1).reshape(-1, x.shape[-1])
    if self.parts == 1:
      image, text, stats = embed((0, batch['image'], batch['text']))
    else:
      parts = jnp.arange(self.parts), cut(batch['image']), cut(batch['text'])
      image, text, stats = jax.lax.map(jax.checkpoint(embed), parts)
      image, text = join(image), join(text)
      stats = jax.tree.map(lambda x: x.mean(0), stats)
    scale, bias = self._scale(variables)
    loss = self.loss_fn(image, text, scale, bias, batch['weight'])
    return loss, ({'loss': loss, 'logit_scale': scale, 'logit_bias': bias}, stats)

  def predict(self, variables, batch: dict) -> dict:
    """Returns the model's features, and vectors of the images and texts of a batch.

    'image' is [B, E], 'text' has the shape of batch['text'] with E in place of the tokens.
    A batch of texts alone also gives the numbers 'scale' and 'bias'.
    """
    out = {}
    if 'image' in batch:
      vectors, out = self.model.apply(
        self._image(variables), batch['image'], train=False
      )
      out = {**out, 'image': unit(vectors)}
    else:
      out['scale'], out['bias'] = self._scale(variables)
    if 'text' in batch:
      ids = batch['text']
      vectors = self._embed(variables, ids.reshape(-1, ids.shape[-1]))
      out['text'] = vectors.reshape(*ids.shape[:-1], -1)
    return out

  def _image(self, variables) -> dict:
    params = {n: x for n, x in variables['params'].items() if n != self.OWN}
    return {**variables, 'params': params}

  def _embed(self, variables, ids):
    """Returns the unit vectors [B, E] of texts, given by ids [B, N]."""
    params = variables['params'][self.OWN]['text']
    return unit(self.tower.apply({'params': params}, ids)[0])

  def _scale(self, variables) -> tuple:
    """Returns (scale, bias) of logits."""
    own = variables['params'][self.OWN]
    log = own['logit_scale']
    if self.sigmoid:
      return jnp.exp(log), own['logit_bias']
    # The gradient passes the limit, so that the scale can come back.
    log += jax.lax.stop_gradient(jnp.minimum(log, _MOST_SCALE) - log)
    return jnp.exp(log), jnp.zeros(())
