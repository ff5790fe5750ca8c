"""RoIAlign: the mean of bilinear samples in each bin of a box (arXiv 1703.06870).

It computes what detectron2's `ROIAlignV2` and `torchvision.ops.roi_align` compute, edge
rules included. Interpolation along y does not depend on that along x, so the bins of a box
are exactly Wy F Wx^T, with one matrix of weights per axis. Matrix products need neither
gather nor scatter, and cost the same for any number of samples.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.detection.regions.bins import bin_weights
from vit_jax.detection.regions.origins import ORIGINS
from vit_jax.kernels import allows, tpus


def roi_align(
  maps: Sequence[jax.Array],
  boxes: jax.Array,
  strides: Sequence[float],
  size: int,
  samples: int = 0,
  aligned: bool = True,
  levels: jax.Array | None = None,
) -> jax.Array:
  """Pools each box from its level into size x size bins.

  Uses the fused kernel on TPUs, see `tpu_roi_align`. No gradient reaches the boxes.

  Args:
    maps: one [B, h, w, C] for each level.
    boxes: corners [B, R, 4] in pixels.
    strides: pixels per cell of each map.
    size: bins along each axis.
    samples: samples along each axis of a bin. 0 means adaptive: one per cell that a bin
      covers, rounded up; a box without area then gives 0.
    aligned: whether pixel centres are at half pixels. If not, every box is off by half a
      cell, and made at least one cell long.
    levels: int [B, R], the map of each box, see `level_of`. None: the first map.

  Returns:
    [B, R, size, size, C] in the dtype of the maps.
  """
  boxes = jax.lax.stop_gradient(boxes.astype(jnp.float32))
  if levels is None:
    levels = jnp.zeros(boxes.shape[:2], jnp.int32)
  options = dict(strides=tuple(strides), size=size, samples=samples, aligned=aligned)
  if maps[0].dtype == jnp.bfloat16 and tpus(boxes.shape[0]) is not None:
    from vit_jax.detection.regions import tpu_roi_align

    pooling = tpu_roi_align.Pooling(**options)
    pooling = tpu_roi_align.plan(maps, boxes.shape[1], pooling)
    again = functools.partial(_pool_random_boxes, count=boxes.shape[1], **options)
    if pooling and allows('tpu_roi_align', again, *maps):
      return tpu_roi_align.roi_align(tuple(maps), boxes, levels, pooling)
  return _products(maps, boxes, levels, **options)


def _products(maps, boxes, levels, strides, size, samples, aligned):
  total = 0
  # bfloat16 maps are accurate to 2**-9 only, so the weights may be rounded likewise.
  precision = 'default' if maps[0].dtype == jnp.bfloat16 else 'highest'
  product = functools.partial(jnp.einsum, precision=precision)
  for level, (x, stride) in enumerate(zip(maps, strides, strict=True)):
    low, high = jnp.split(boxes * (1 / stride), 2, -1)  # x and y of both corners
    columns, rows = (
      bin_weights(low[..., i], high[..., i], x.shape[2 - i], size, samples, aligned)
      for i in range(2)
    )
    rows = jnp.where((levels == level)[..., None, None], rows, 0)
    pooled = product('brph,bhwc->brpwc', rows, x.astype(jnp.float32))
    total += product('brqw,brpwc->brpqc', columns, pooled)
  return total.astype(maps[0].dtype)


def _pool_random_boxes(*maps, count, strides, **options):
  """Pools random boxes of many sizes: this call verifies the kernel on the device."""
  rng = np.random.default_rng(0)
  image = strides[0] * np.array(maps[0].shape[2:0:-1])
  sides = image * np.exp(rng.uniform(-4, 0, (count, 2)))
  low = rng.uniform(size=(count, 2)) * (image - sides)
  boxes = np.concatenate([low, low + sides], -1).astype(np.float32)
  boxes = jnp.broadcast_to(boxes, (len(maps[0]), *boxes.shape))
  levels = level_of(boxes, 0, len(maps) - 1, (4 * strides[0] * options['size'], 1))
  return roi_align(maps, boxes, strides, **options, levels=levels)


def level_of(
  boxes: jax.Array,
  finest: int,
  coarsest: int,
  canonical: tuple[float, int] = (224, 4),
  origin: str = 'detectron2',
) -> jax.Array:
  """Returns the level of each box as int [...], 0 for the finest.

  This is floor(level + log2(sqrt(area) / size)), clipped to the given levels: FPN, arXiv
  1612.03144, equation 1. It compares the side with powers of two, because a logarithm
  would round.

  Args:
    boxes: corners [..., 4].
    canonical: (size, level): boxes of size x size pixels belong to that level.
    origin: a key of `ORIGINS`, whose epsilons guard against rounding.
  """
  size, level = canonical
  details = ORIGINS[origin]
  powers = 2.0 ** (np.arange(finest + 1, coarsest + 1) - level - details.late_epsilon)
  sides = (size * (powers - details.level_epsilon)).astype(np.float32)
  lengths = jnp.maximum(boxes[..., 2:] - boxes[..., :2], 0)
  side = jnp.sqrt(lengths[..., 0] * lengths[..., 1])
  return jnp.sum(side[..., None] >= sides, -1, dtype=jnp.int32)
