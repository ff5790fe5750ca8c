"""Masked autoencoders: "Masked Autoencoders Are Scalable Vision Learners", arXiv 2111.06377.

The encoder sees a quarter of the patches of each image. A small decoder sees their encoded
tokens, and a mask token in place of each other patch, and predicts the pixels of the others.
Loss, initial values and positions are those of the authors' code, facebookresearch/mae. The
model does not know about the task: an interceptor leaves patches out after positions are
added. All randomness follows from a key, so that the number of devices does not change the
result.
"""

import contextlib
import functools
import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax import trees
from vit_jax.check import Count, Depth, Share
from vit_jax.learn.masked_patches import check_encoder, cut
from vit_jax.models.vit import EncoderBlock
from vit_jax.nn.layers import LayerNorm, MlpBlock, MultiHeadDotProductAttention
from vit_jax.nn.positions import sincos2d
from vit_jax.nn.stack import stack

# Fields that the model must have: positions are added once, before patches are left out, and
# a patch is embedded from its own pixels only.
FIELDS = {
  'posemb': 'learn',
  'stem_blocks': None,
  'posemb_where': 'stem',
  'attention': 'full',
  'rope': 'none',
  'relpos': 'none',
  'final_norm': 'tokens',
}


# -- the parts ------------------------------------------------------------------------


def draw(key, shape: tuple[int, ...]):
  """Returns int32 [..., N], the N patches of each image in random order."""
  return jnp.argsort(jax.random.uniform(key, shape), axis=-1).astype(jnp.int32)


def draw_for_examples(index, patches: int):
  """Draws the order of patches of examples, int32 [B], the same in every evaluation."""
  key = jax.random.key(0)
  return jax.vmap(lambda i: draw(jax.random.fold_in(key, i), (patches,)))(index)


def keep(patches) -> contextlib.AbstractContextManager:
  """Returns a context manager in which a ViT encodes only these patches, int32 [B, k].

  Its other tokens, such as the class token, stay before the patches.
  """

  def intercept(call, args, kwargs, context):
    out = call(*args, **kwargs)
    if context.method_name != 'add_positions':
      return out
    tokens, added = out
    h, w = args[1]
    others = tokens.shape[1] - h * w
    tokens, x = tokens[:, :others], tokens[:, others:]
    x = jnp.take_along_axis(x, patches[..., None], axis=1)
    return jnp.concatenate([tokens, x], axis=1), added

  return nn.intercept_methods(intercept)


class Decoder(nn.Module):
  """Predicts the pixels of all patches from the tokens of those that were kept.

  Attributes:
    grid: (h, w) of the patches.
    kept: number of patches that were kept.
    outputs: number of pixels of a patch, times their channels.
    act, norm_eps, remat, dtype: as in the encoder.
  """

  width: int
  depth: int
  num_heads: int
  grid: tuple[int, int]
  kept: int
  outputs: int
  act: str
  norm_eps: float
  remat: str
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, tokens, order):
    """Returns predictions [B, N, outputs] in float32.

    Args:
      tokens: [B, P + k, D], the encoded tokens, of which the last are the kept patches.
      order: int32 [B, N]. Its first k entries are the patches of `tokens`.
    """
    B, N = order.shape
    x = nn.Dense(self.width, dtype=self.dtype, name='embed')(tokens)
    others, x = jnp.split(x, [x.shape[1] - self.kept], axis=1)
    mask = self.param('mask', nn.initializers.normal(0.02), (1, 1, self.width))
    masks = jnp.broadcast_to(mask.astype(x.dtype), (B, N - self.kept, self.width))
    x = jnp.concatenate([x, masks], axis=1)
    # The second argsort gives the place of each patch in `order`.
    x = jnp.take_along_axis(x, jnp.argsort(order)[..., None], axis=1)
    x = jnp.concatenate([others, x], axis=1)
    table = functools.partial(positions, self.grid, x.shape[1:])
    x = x + self.param('positions', lambda _: table()).astype(x.dtype)

    norm = functools.partial(LayerNorm, eps=self.norm_eps)
    block = functools.partial(
      EncoderBlock,
      attention=functools.partial(
        MultiHeadDotProductAttention, self.num_heads, dtype=self.dtype
      ),
      mlp=functools.partial(MlpBlock, 4 * self.width, act=self.act, dtype=self.dtype),
      norm=functools.partial(norm, self.dtype),
      dropout=0.0,
      grid=self.grid,
    )
    rates = (0.0,) * self.depth
    x, _ = stack(block, x, name='encoderblock', rates=rates, remat=self.remat)
    x = norm(name='encoder_norm')(x)
    return nn.Dense(self.outputs, name='pred')(x[:, -N:])


def positions(grid: tuple[int, int], shape: tuple[int, int]):
  """Returns the fixed positions [1, N, D] of N tokens, of which the last form a grid."""
  tokens, width = shape
  table = sincos2d(*grid, width, 'sincos2d_mae')
  return jnp.pad(table, ((0, 0), (tokens - table.shape[1], 0), (0, 0)))


def initial_value(name: str, x, key):
  """Draws the initial value of a parameter whose layers are not stacked.

  Kernels are Xavier uniform. Queries, keys and values are drawn as one matrix [D, 3 D], and
  patches as [ph pw C, D].
  """
  if name.endswith('kernel'):
    attends = re.search('(query|key|value)/kernel', name)
    inputs = x.shape[0] if attends else x.size // x.shape[-1]
    outputs = 3 * x.size // inputs if attends else x.shape[-1]
    limit = math.sqrt(6 / (inputs + outputs))
    return jax.random.uniform(key, x.shape, minval=-limit, maxval=limit)
  if name.endswith('bias'):
    return jnp.zeros_like(x)
  if name.endswith(('scale', 'gamma')):
    return x
  return 0.02 * jax.random.normal(key, x.shape)


# -- the task -------------------------------------------------------------------------


class MAE:
  """Predicts the pixels of patches that the encoder does not see.

  The model is a ViT without a head, whose positions are fixed to sines and cosines. The
  decoder is stored with the model, under `OWN`. Pixels are normalised by mean and standard
  deviation of their patch.
  """

  CLASSES = None
  OUTPUTS = 'classes'
  OWN = 'mae'

  def __init__(
    self,
    model,
    spec: dict,
    *,
    rate: Share = 0.75,
    decoder_width: Count = 512,
    decoder_depth: Depth = 8,
    decoder_heads: Count = 16,
  ):
    """Checks the model against the spec of batches with images.

    Args:
      model: a model without a head.
      rate: share of each image's patches that the encoder does not see.
      decoder_width, decoder_depth, decoder_heads: size of the decoder.
    """
    check_encoder(self.OWN, model)
    fields = model.fields()
    for name, value in FIELDS.items():
      if name not in fields or fields[name] != value:
        raise ValueError(
          f'mae trains a ViT with {name}={value!r}, not {fields.get(name)!r}: set '
          f'config.model.{name}'
        )
    H, W, C = spec['image'].shape[1:]
    self.patch = model.family.stride(fields)
    self.grid = H // self.patch[0], W // self.patch[1]
    self.patches = math.prod(self.grid)
    self.kept = int(self.patches * (1 - rate))
    if not 0 < self.kept < self.patches:
      raise ValueError(
        f'rate={rate} keeps {self.kept} of {self.patches} patches: expected at least 1, '
        'and not all'
      )
    self.model = model
    self.fixed = (model.family.position, f'{self.OWN}/positions')
    self.decoder = Decoder(
      width=decoder_width,
      depth=decoder_depth,
      num_heads=decoder_heads,
      grid=self.grid,
      kept=self.kept,
      outputs=math.prod(self.patch) * C,
      **{name: fields[name] for name in ('act', 'norm_eps', 'remat', 'dtype')},
    )

  def init(self, rng, spec: dict) -> dict:
    """Returns the variables of model and decoder, with the authors' initial values."""
    image = jnp.zeros((1, *spec['image'].shape[1:]), jnp.float32)
    model_key, decoder_key, key = jax.random.split(rng, 3)
    (_, features), variables = self.model.init_with_output(model_key, image)
    order = jnp.arange(self.patches)[None]
    tokens = features['encoded'][:, : self.kept - self.patches]
    decoder = self.decoder.init(decoder_key, tokens, order)
    flat = trees.flatten({**variables['params'], self.OWN: decoder['params']})
    for i, (name, x) in enumerate(flat.items()):
      draw_value = functools.partial(initial_value, name)
      value_key = jax.random.fold_in(key, i)
      if self.model.family.is_stacked(name):
        flat[name] = jax.vmap(draw_value)(x, jax.random.split(value_key, len(x)))
      elif name in self.fixed:
        flat[name] = positions(self.grid, x.shape[1:])
      else:
        flat[name] = draw_value(x, value_key)
    return {'params': trees.unflatten(flat)}

  def prepare(self, batch: dict, rng, state) -> dict:
    """Adds the random order of patches to a whole batch; the first are kept."""
    return {**batch, 'order': draw(rng, (len(batch['image']), self.patches))}

  def loss(self, variables, batch: dict, rng):
    """Returns (loss, (metrics, {})) of a prepared batch, the mean over masked patches."""
    out = self.reconstruct(
      variables['params'],
      batch['image'],
      batch['order'],
      train=True,
      rngs={'dropout': rng},
    )
    loss = jnp.sum(batch['weight'] * out['masked_loss'])
    return loss, ({'loss': loss}, {})

  def predict(self, variables, batch: dict) -> dict:
    """Returns the model's features of whole images, and those of `reconstruct`.

    Which patches are masked depends only on batch['index'].
    """
    params = variables['params']
    encoder = {key: x for key, x in params.items() if key != self.OWN}
    _, features = self.model.apply({'params': encoder}, batch['image'], train=False)
    order = draw_for_examples(batch['index'], self.patches)
    return features | self.reconstruct(params, batch['image'], order, train=False)

  def reconstruct(self, params, images, order, **call) -> dict:
    """Predicts the patches of images [B, H, W, C] that are masked.

    Args:
      order: int32 [B, N], the patches of each image. The first k are kept.
      **call: arguments of the model.

    Returns:
      'masked_loss' [B]; 'masked' [B, N], whether a patch is masked; and 'reconstruction'
      [B, N, ph * pw * C], the predicted pixels of each patch.
    """
    fix = lambda name, x: jax.lax.stop_gradient(x) if name in self.fixed else x
    encoder = trees.map_named(fix, dict(params))
    decoder = encoder.pop(self.OWN)
    with keep(order[:, : self.kept]):
      _, features = self.model.apply({'params': encoder}, images, **call)
    predicted = self.decoder.apply({'params': decoder}, features['encoded'], order)
    pixels = cut(images, self.patch)
    mean = pixels.mean(-1, keepdims=True)
    # The authors' variance divides by the number of pixels - 1.
    std = jnp.sqrt(pixels.var(-1, ddof=1, keepdims=True) + 1e-6)
    error = jnp.square(predicted - (pixels - mean) / std).mean(-1)  # [B, N]
    masked = jnp.argsort(order) >= self.kept
    return {
      'masked_loss': jnp.where(masked, error, 0).sum(-1) / (self.patches - self.kept),
      'masked': masked,
      'reconstruction': predicted * std + mean,
    }
