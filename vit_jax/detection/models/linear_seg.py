"""Linear segmentation: one linear layer on every patch, resized to the image.

This is DINOv2's protocol for frozen features, arXiv 2304.07193, section 7.4: a batch norm
and a linear layer on the patch tokens of the last block, or of the last four concatenated.
The logits are resized bilinearly. The model does not freeze its backbone: set config.tune.
"""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.check import Count
from vit_jax.detection.models.pyramid import bilinear, maps_of
from vit_jax.errors import UserError
from vit_jax.models.base import Family, Model
from vit_jax.nn.batch_norm import BatchNorm
from vit_jax.nn.layers import check_images


class LinearSeg(Model):
  """A linear segmentation head on a backbone."""

  # None: there is no head, and the output is out['joined'].
  num_classes: Count | None = None
  backbone: nn.Module | None = None
  # How many last blocks of a ViT, or last stages of another backbone, are concatenated.
  layers: Count = 1
  # Dtype of a backbone that does not set one. The head is float32.
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, images, *, train: bool = False, features: bool = True):
    """Classifies every pixel.

    Args:
      images: [B, H, W, C] in [-1, 1]; H and W are multiples of the backbone's stride.
      train: whether to normalise by the batch's statistics, and to apply the backbone's
        stochastic depth, which needs the 'dropout' rng.
      features: whether the caller reads more of `out` than 'joined'.

    Returns:
      (logits [B, H, W, K] float32, out): 'joined' [B, h, w, D], the input of the linear
      layer, and the features of the backbone.
    """
    check_images(images)
    if self.backbone is None:
      raise UserError(
        "A linear_seg needs a backbone: backbone={'name': 'vit', ...}, or weights."
      )
    size, backbone = images.shape[1:3], self.backbone
    stride = backbone.family.stride(backbone.fields())
    if any(n % s for n, s in zip(size, stride, strict=True)):
      raise UserError(
        f'Images have {size} pixels, but a linear_seg takes multiples of the stride of its '
        f'backbone, {stride}: resize them.'
      )
    maps, out = maps_of(backbone, images, train=train)
    x = BatchNorm(name='norm')(self._join(maps), train=train)
    out = {**(out if features else {}), 'joined': x}
    if self.num_classes is None:
      return x, out
    zeros = nn.initializers.zeros_init()
    logits = nn.Dense(self.num_classes, kernel_init=zeros, name='head')(x)
    return bilinear(logits, size), out

  def _join(self, maps: dict) -> jax.Array:
    """Returns the last map, or the last ones concatenated, float32 [B, h, w, D].

    A single map of a ViT has passed its final norm. Several maps are standardised, but get
    no scale and bias, because the batch norm and the linear layer would undo them.
    """
    if 'encoded' in maps and self.layers == 1:
      return maps['encoded'].astype(jnp.float32)
    kind = 'block' if 'encoded' in maps else 'stage'
    names = [name for name in maps if re.fullmatch(rf'{kind}\d+', name)]
    if len(names) < self.layers:
      raise UserError(
        f'Model field layers={self.layers}: the backbone has only {names}.'
      )
    last = [maps[name].astype(jnp.float32) for name in names[-self.layers :]]
    standardized = (jax.nn.standardize(x, epsilon=1e-6) for x in last)
    return jnp.concatenate([bilinear(x, last[0].shape[1:3]) for x in standardized], -1)


_TINY = dict(name='vit', patch_size=(8, 8), width=16, depth=2, mlp_dim=32, num_heads=2)

FAMILY = Family(
  LinearSeg,
  variant=lambda name: dict(backbone={'name': name}),  # 'vit:S/16'
  # Unlike a pyramid, it takes no maps in place of a backbone.
  inputs=lambda fields, size: {},
  outputs='pixels',
  tiny=(dict(backbone=_TINY), dict(backbone=_TINY, layers=2)),
)
