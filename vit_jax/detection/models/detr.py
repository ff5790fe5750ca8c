"""DETR: "End-to-End Object Detection with Transformers", arXiv 2005.12872.

A Transformer turns the last map of a backbone into a set of boxes, one per learned query.
Norms follow the sums (post-norm), as in arXiv 1706.03762. Initial values differ from the
authors' code: all layers, heads included, start like those of a Transformer.
"""

import functools
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.check import Count, Depth, Share
from vit_jax.detection.models.pyramid import maps_of, nearest
from vit_jax.errors import UserError, choose
from vit_jax.kernels import place
from vit_jax.models.base import Family, Model
from vit_jax.nn.layers import (
  Dense,
  Dropout,
  LayerNorm,
  MlpBlock,
  MultiHeadDotProductAttention,
)
from vit_jax.nn.positions import sine_of_mask
from vit_jax.nn.stack import REMAT, stack

# PyTorch's default for norms.
_EPS = 1e-5

# Name -> the ResNet's number of layers and its output stride. DC5 dilates the last stage.
VARIANTS = {
  'R50': ('50', 32),
  'R101': ('101', 32),
  'R50-DC5': ('50', 16),
  'R101-DC5': ('101', 16),
}


def variant(name: str) -> dict:
  """Returns the fields of 'R50', 'R101', 'R50-DC5' or 'R101-DC5'."""
  layers, stride = choose('DETR variant', name, VARIANTS)
  resnet = dict(name='resnet', variant=layers, output_stride=stride, frozen_norm=True)
  return dict(backbone=resnet)


class Layer(nn.Module):
  """A layer of the encoder, or of the decoder if it gets a memory; fields as in `DETR`."""

  num_heads: int
  mlp_dim: int
  dropout: float
  attention_dropout: float
  dtype: jnp.dtype

  @nn.compact
  def __call__(
    self,
    x,
    rate=None,
    *,
    train: bool,
    positions,
    mask=None,
    memory=None,
    memory_positions=None,
  ):
    """Maps [B, N, D] to [B, N, D].

    Args:
      rate: not used, because there is no stochastic depth.
      positions: [B, N, D] or [N, D], added to queries and keys, not to values.
      mask: bool [B, S], False for padding in the memory, or in x if there is no memory.
      memory: [B, S, D], the output of the encoder.
      memory_positions: [B, S, D], added to the keys from the memory.
    """
    keys = None if mask is None else mask[:, None, None]  # [B, M, N, S]
    x = place(x)

    def add(x, branch, number):
      branch = Dropout(self.dropout)(branch, deterministic=not train)
      return LayerNorm(self.dtype, _EPS, name=f'LayerNorm_{number}')(x + branch)

    attention = lambda number: MultiHeadDotProductAttention(
      self.num_heads,
      self.attention_dropout,
      dtype=self.dtype,
      name=f'MultiHeadDotProductAttention_{number}',
    )
    own, own_mask = x + positions, keys if memory is None else None
    x = add(x, attention(0)(own, x, inputs_k=own, mask=own_mask, train=train), 0)
    if memory is not None:
      theirs = memory + memory_positions
      y = attention(1)(x + positions, memory, inputs_k=theirs, mask=keys, train=train)
      x = add(x, y, 1)
    mlp = MlpBlock(self.mlp_dim, self.dropout, 'relu', self.dtype, name='MlpBlock_0')
    return add(x, mlp(x, train=train), 1 if memory is None else 2)


class Layers(nn.Module):
  """The layers of the encoder, or of the decoder.

  Attributes:
    layer: a function `layer(name=...)` that makes a layer.
    norm: whether the outputs of layers are normalised, in float32. The next layer still
      reads the output before the norm.
  """

  layer: functools.partial
  depth: int
  remat: str
  norm: bool

  @nn.compact
  def __call__(self, x, *, train: bool, **arguments):
    """Returns the outputs [B, N, D] of all layers; `arguments` go to every `Layer`."""
    _, blocks = stack(
      self.layer,
      x,
      name='layer',
      rates=[0.0] * self.depth,
      remat=self.remat,
      train=train,
      more=lambda i: arguments,
    )
    norm = LayerNorm(jnp.float32, _EPS, name='norm') if self.norm else lambda x: x
    return [norm(x) for x in blocks.values()]


class BoxHead(nn.Module):
  """Three dense layers with ReLU between them, then a sigmoid: [..., D] -> [..., 4]."""

  @nn.compact
  def __call__(self, x):
    init = nn.initializers.xavier_uniform()
    for i, width in enumerate((x.shape[-1], x.shape[-1], 4)):
      x = Dense(width, kernel_init=init, name=f'Dense_{i}')(jax.nn.relu(x) if i else x)
    return jax.nn.sigmoid(x)


class DETR(Model):
  """A detector that predicts a set of boxes. `variant` sets `backbone`."""

  backbone: nn.Module | None = None  # gives maps [B, h, w, C]
  # Number of classes, not counting "no object". COCO's ids go up to 90.
  num_classes: Count = 91
  num_queries: int = 100
  width: int = 256
  num_heads: int = 8
  mlp_dim: int = 2048
  encoder_depth: Depth = 6
  decoder_depth: Depth = 6
  # Dropout at the end of every branch and within the MLP; 0.1 in the paper.
  dropout: Share = 0.0
  # Dropout of attention weights; 0.1 in the authors' code.
  attention_dropout: Share = 0.0
  # Values that the backward pass recomputes, see `nn.stack`. A backbone has its own field.
  remat: Literal[REMAT] = 'none'
  # Dtype of the Transformer, and of a backbone that does not set one. The decoder's norm,
  # the heads and all parameters are float32.
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, images, mask=None, *, train: bool = False, features: bool = True):
    """Finds objects in images of any size.

    Args:
      images: [B, H, W, C], standardised, 0 in padding.
      mask: bool or 0/1 [B, H, W], 0 for padding, which lies to the right of an image and
        below it. None: no padding.
      train: whether to apply dropout, which needs the 'dropout' rng.
      features: whether the caller reads more of `out` than the auxiliary outputs.

    Returns:
      ({'logits': [B, Q, K + 1], 'boxes': [B, Q, 4]}, out), in float32. The last class is
      "no object". A box is centre x, centre y, width and height, as fractions of the image
      without its padding. `out` has the outputs of the L - 1 layers before the last,
      'aux_logits' [L - 1, B, Q, K + 1] and 'aux_boxes' [L - 1, B, Q, 4]; the features of
      the backbone; 'projected' and 'encoder00', ... [B, h, w, D]; and 'decoder00', ...
      [B, Q, D], normalised.
    """
    if self.backbone is None:
      raise UserError(
        f"A DETR needs a backbone: a size of {list(VARIANTS)}, such as 'detr:R50', or "
        "backbone={'name': ...}."
      )
    maps, out = maps_of(self.backbone, images, train=train)
    stages = [name for name in maps if name.startswith('stage')]
    x = maps[(stages or list(maps))[-1]]
    B, h, w, _ = x.shape
    shown, keys = jnp.ones((1, h, w), bool), None
    if mask is not None:
      assert mask.shape == images.shape[:3], (mask.shape, images.shape)
      shown = nearest((mask > 0)[..., None], (h, w))[..., 0]
      keys = shown.reshape(B, -1)

    x = nn.Conv(
      self.width,
      (1, 1),
      kernel_init=nn.initializers.xavier_uniform(),
      dtype=self.dtype,
      name='input_projection',
    )(x)
    positions = sine_of_mask(shown, self.width).astype(self.dtype)
    positions = positions.reshape(-1, h * w, self.width)
    query = self.param(
      'query_embedding', nn.initializers.normal(1.0), (self.num_queries, self.width)
    ).astype(self.dtype)
    layer = functools.partial(
      Layer,
      self.num_heads,
      self.mlp_dim,
      self.dropout,
      self.attention_dropout,
      self.dtype,
    )
    out['projected'] = x
    layers = functools.partial(Layers, layer, remat=self.remat)
    encoded = layers(self.encoder_depth, norm=False, name='encoder')(
      x.reshape(B, h * w, self.width), train=train, positions=positions, mask=keys
    )
    decoded = layers(self.decoder_depth, norm=True, name='decoder')(
      jnp.zeros((B, *query.shape), self.dtype),
      train=train,
      positions=query,
      mask=keys,
      memory=encoded[-1],
      memory_positions=positions,
    )
    for i, y in enumerate(encoded):
      out[f'encoder{i:02d}'] = y.reshape(B, h, w, self.width)
    out |= {f'decoder{i:02d}': y for i, y in enumerate(decoded)}
    every = jnp.stack(decoded)  # [L, B, Q, D]
    init = nn.initializers.xavier_uniform()
    logits = Dense(self.num_classes + 1, kernel_init=init, name='head')(every)
    boxes = BoxHead(name='box_head')(every)
    aux = {'aux_logits': logits[:-1], 'aux_boxes': boxes[:-1]}
    outputs = {'logits': logits[-1], 'boxes': boxes[-1]}
    return outputs, {**out, **aux} if features else aux


def _parse_name(layers: str, dilated: str | None) -> tuple[str, dict]:
  return f'R{layers}{"-DC5" if dilated else ""}', {}


_LAYER = r'(encoder|decoder)/layer_\d+'

FAMILY = Family(
  DETR,
  variant,
  outputs='boxes',
  matrices=(
    (rf'{_LAYER}/.*/(query|key|value)/kernel', ((-3,), (-2, -1))),
    (rf'{_LAYER}/MultiHeadDotProductAttention_\d/out/kernel', ((-3, -2), (-1,))),
    (rf'{_LAYER}/MlpBlock_0/Dense_\d/kernel', ((-2,), (-1,))),
  ),
  published=(
    # Names in transformers and torch.hub, such as facebook/detr-resnet-50-dc5 and
    # detr_resnet50_dc5.
    (r'(?:facebook/)?detr-resnet-(50|101)(-dc5)?', _parse_name),
    (r'detr_resnet(50|101)(_dc5)?', _parse_name),
  ),
  tiny=(
    dict(
      backbone=dict(
        name='resnet', depths=(1, 1), widths=(16, 32), stem_width=8, frozen_norm=True
      ),
      num_queries=5,
      width=16,
      num_heads=2,
      mlp_dim=32,
      encoder_depth=1,
      decoder_depth=2,
    ),
  ),
)
