"""Heads of two-stage detectors, on maps and on features pooled from boxes.

Initial values are detectron2's.
"""

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.nn.batch_norm import BatchNorm
from vit_jax.nn.layers import Dense, LayerNorm

NORMS = ('none', 'layer', 'batch')
# Name -> number of convolutions, and of the dense layers after them.
HEADS = {'2fc': (0, 2), '4conv1fc': (4, 1)}
_normal = nn.initializers.normal
_MSRA = nn.initializers.variance_scaling(2.0, 'fan_out', 'normal')
_XAVIER = nn.initializers.variance_scaling(1.0, 'fan_in', 'uniform')


class RPN(nn.Module):
  """Region proposal network, arXiv 1506.01497, section 3.1: one head for all levels.

  Attributes:
    convs: number of 3 x 3 convolutions, each followed by ReLU.
    number: A, the number of anchors at a position.
  """

  convs: int
  number: int
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, maps: list[jax.Array]):
    """Maps [B, h, w, C] of each level to logits [B, h w A] and offsets [B, h w A, 4]."""
    conv = lambda width, size, dtype, name: nn.Conv(
      width, (size, size), kernel_init=_normal(0.01), dtype=dtype, name=name
    )
    width = maps[0].shape[-1]
    layers = [conv(width, 3, self.dtype, f'conv{i}') for i in range(self.convs)]
    objectness = conv(self.number, 1, jnp.float32, 'objectness')
    deltas = conv(4 * self.number, 1, jnp.float32, 'deltas')

    logits, offsets = [], []
    for x in maps:
      for layer in layers:
        x = nn.relu(layer(x))
      logits.append(objectness(x).reshape(x.shape[0], -1))
      offsets.append(deltas(x).reshape(x.shape[0], -1, 4))
    return logits, offsets


class Convs(nn.Module):
  """3 x 3 convolutions of [B, R, s, s, C], each followed by a norm, if any, and ReLU."""

  number: int
  width: int
  norm: str
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, *, train: bool):
    for i in range(self.number):
      x = nn.Conv(
        self.width,
        (3, 3),
        use_bias=self.norm == 'none',
        kernel_init=_MSRA,
        dtype=self.dtype,
        name=f'conv{i}',
      )(x)
      if self.norm == 'layer':
        x = LayerNorm(self.dtype, name=f'norm{i}')(x)
      elif self.norm == 'batch':
        x = BatchNorm(dtype=self.dtype, name=f'norm{i}')(x, train=train)
      x = nn.relu(x)
    return x


class BoxHead(nn.Module):
  """Predicts classes and offsets from pooled features; fields as in `RCNN`."""

  head: Literal[tuple(HEADS)]
  norm: Literal[NORMS]
  conv_width: int
  fc_width: int
  num_classes: int
  class_agnostic: bool
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, *, train: bool):
    """Maps [B, R, s, s, C] to logits [B, R, K + 1] and offsets [B, R, K or 1, 4]."""
    convs, dense = HEADS[self.head]
    x = Convs(convs, self.conv_width, self.norm, self.dtype, name='convs')(
      x, train=train
    )
    x = x.reshape(*x.shape[:2], -1)
    for i in range(dense):
      x = Dense(self.fc_width, kernel_init=_XAVIER, dtype=self.dtype, name=f'dense{i}')(
        x
      )
      x = nn.relu(x)
    K, N = self.num_classes, 1 if self.class_agnostic else self.num_classes
    logits = Dense(K + 1, kernel_init=_normal(0.01), name='classes')(x)
    offsets = Dense(4 * N, kernel_init=_normal(0.001), name='deltas')(x)
    return logits, offsets.reshape(*x.shape[:2], N, 4)


class MaskHead(nn.Module):
  """Predicts the mask of each box for its class: Mask R-CNN, arXiv 1703.06870, figure 4.

  The last layer computes only the mask of that class, not all K masks.
  """

  norm: Literal[NORMS]
  width: int
  num_classes: int
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, label: jax.Array, *, train: bool):
    """Maps [B, R, s, s, C] and classes [B, R] to logits [B, R, 2 s, 2 s]."""
    x = Convs(4, self.width, self.norm, self.dtype, name='convs')(x, train=train)
    x = nn.ConvTranspose(
      self.width, (2, 2), (2, 2), kernel_init=_MSRA, dtype=self.dtype, name='deconv'
    )(x)
    x = nn.relu(x).astype(jnp.float32)
    shape = x.shape[-1], self.num_classes
    kernel = self.param('kernel', _normal(0.001), shape, jnp.float32)
    bias = self.param('bias', nn.initializers.zeros_init(), shape[1:], jnp.float32)
    logits = jnp.einsum('brhwc,brc->brhw', x, jnp.take(kernel.T, label, 0))
    return logits + jnp.take(bias, label)[..., None, None]
