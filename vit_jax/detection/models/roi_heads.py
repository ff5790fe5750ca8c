"""Heads of two-stage detectors, on maps and on features pooled from boxes.

Initial values are detectron2's.
"""

import re
from typing import Annotated, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.detection.models.pyramid import MSRA, NORMS, normalise
from vit_jax.errors import UserError
from vit_jax.nn.layers import Dense

_normal = nn.initializers.normal
_XAVIER = nn.initializers.variance_scaling(1.0, 'fan_in', 'uniform')


def _check_head(where: str, value: str, section=None) -> None:
  if not _HEAD.fullmatch(value):
    raise UserError(f"{where}={value!r}: expected '2fc', '4conv1fc' or the like.")


_HEAD = re.compile(r'(?:([1-9]\d?)conv)?([1-9])fc')
# The convolutions and dense layers of a box head, '2fc' or '4conv1fc'.
Head = Annotated[str, _check_head]


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
  def __call__(self, x, *, train: bool, valid):
    for i in range(self.number):
      x = nn.Conv(
        self.width,
        (3, 3),
        use_bias=self.norm == 'none',
        kernel_init=MSRA,
        dtype=self.dtype,
        name=f'conv{i}',
      )(x)
      x = normalise(x, self.norm, self.dtype, f'norm{i}', train=train, mask=valid)
      x = nn.relu(x)
    return x


class BoxHead(nn.Module):
  """Predicts classes and offsets from pooled features; fields as in `RCNN`."""

  head: Head
  norm: Literal[NORMS]
  conv_width: int
  fc_width: int
  num_classes: int
  class_agnostic: bool
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, *, train: bool, valid=None):
    """Maps [B, R, s, s, C] to logits [B, R, K + 1] and offsets [B, R, K or 1, 4].

    `valid` bool [B, R] are the boxes that count for the statistics of batch norms.
    """
    convs, dense = _HEAD.fullmatch(self.head).groups(default=0)
    x = Convs(int(convs), self.conv_width, self.norm, self.dtype, name='convs')(
      x, train=train, valid=valid
    )
    x = x.reshape(*x.shape[:2], -1)
    for i in range(int(dense)):
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

  convs: int
  norm: Literal[NORMS]
  width: int
  num_classes: int  # 1 if all classes share a mask
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, label: jax.Array, *, train: bool, valid=None):
    """Maps [B, R, s, s, C] and classes [B, R] to logits [B, R, 2 s, 2 s].

    `valid` as in `BoxHead`.
    """
    x = Convs(self.convs, self.width, self.norm, self.dtype, name='convs')(
      x, train=train, valid=valid
    )
    x = nn.ConvTranspose(
      self.width, (2, 2), (2, 2), kernel_init=MSRA, dtype=self.dtype, name='deconv'
    )(x)
    x = nn.relu(x).astype(jnp.float32)
    label = jnp.minimum(label, self.num_classes - 1)
    shape = x.shape[-1], self.num_classes
    kernel = self.param('kernel', _normal(0.001), shape, jnp.float32)
    bias = self.param('bias', nn.initializers.zeros_init(), shape[1:], jnp.float32)
    logits = jnp.einsum('brhwc,brc->brhw', x, jnp.take(kernel.T, label, 0))
    return logits + jnp.take(bias, label)[..., None, None]
