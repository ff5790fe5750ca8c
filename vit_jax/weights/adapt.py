"""Arrays for a model of another resolution, patch or layout."""

from typing import Literal, get_args

import numpy as np

from vit_jax import resample, trees
from vit_jax.errors import choose
from vit_jax.models.family import Family
from vit_jax.nn.positions import sincos2d

MOST_LAYERS = 1_000  # far beyond every published model
Method = Literal['bilinear', 'bicubic']


def resize_positions(
  table: np.ndarray,
  old: tuple[int, int],
  new: tuple[int, int],
  method: Method = 'bilinear',
) -> np.ndarray:
  """Resizes a grid of position embeddings; rows before the grid (cls) stay as they are.

  Args:
    table: [1, R + h w, D], of the grid `old`, (h, w).
    method: 'bilinear', corners on corners, as the Google code does; 'bicubic', pixel
      centres on pixel centres and antialiased, as timm does. They differ: by up to 0.8
      on standard normal tables of 14 x 14 brought to 24 x 24.
  """
  choose('resize', method, get_args(Method))
  extra = table.shape[1] - old[0] * old[1]
  if extra not in (0, 1):
    raise ValueError(f'position embeddings {table.shape} are no {old[0]}x{old[1]} grid')
  if old == new:
    return table
  matrix = resample.align_corners
  if method == 'bicubic':
    matrix = lambda a, b: resample.matrix(a, b, 'bicubic', antialias=True)
  rows, columns = (matrix(a, b) for a, b in zip(old, new, strict=True))
  grid = resample.apply(table[0, extra:].reshape(*old, -1), rows, columns)
  grid = grid.reshape(1, -1, table.shape[-1]).astype(table.dtype)
  return np.concatenate([table[:, :extra], grid], axis=1)


def learned_positions(
  flat: dict[str, np.ndarray], fields: dict, family: Family, image_size: tuple[int, int]
) -> tuple[dict[str, np.ndarray], dict]:
  """Returns (parameters, fields) of a model of equal outputs with a learned table.

  Sine-cosine positions become a table of their numbers, for images of this size. Models
  with other positions, or that add them before every block, come back as they are.
  """
  if (fields.get('posemb'), fields.get('posemb_where')) != ('sincos2d', 'stem'):
    return flat, fields
  (H, W), (down, across) = image_size, family.stride(fields)
  table = sincos2d(H // down, W // across, fields['width'])
  if fields['classifier'] == 'token':  # the class token has no position
    table = np.pad(table, ((0, 0), (1, 0), (0, 0)))
  return {**flat, family.position: table}, {**fields, 'posemb': 'learn'}


def resize_offsets(table: np.ndarray, new: tuple[int, ...]) -> np.ndarray:
  """Resizes a table by offset to that of another window or map, as PyTorch does.

  The same numbers then stand for other distances. Windows of Swin, [2 h - 1, 2 w - 1, M],
  are resized bicubic, as by its authors; sides of an MViT's maps, [2 n - 1, Dh], linearly,
  as by timm and detectron2. `new` is the shape without the last axis.
  """
  if len(new) == 1:
    matrix = resample.matrix(len(table), *new, 'bilinear', antialias=False)
    return (matrix @ table).astype(table.dtype)
  rows, columns = (
    resample.bicubic_of_edges(a, b) for a, b in zip(table.shape[:2], new, strict=True)
  )
  return resample.apply(table, rows, columns).astype(table.dtype)


def resize_patches(kernel: np.ndarray, new: tuple[int, int]) -> np.ndarray:
  """Resizes a patch embedding's kernel [ph, pw, C, D] to patches of `new` pixels.

  By the pseudo-inverse of resizing the patch (FlexiViT, arXiv 2212.08013, section 3.4):
  the bilinear enlargement of a patch has its embedding, exactly.
  """
  rows, columns = (
    np.linalg.pinv(resample.matrix(a, b, 'bilinear', antialias=False).T)
    for a, b in zip(kernel.shape[:2], new, strict=True)
  )
  return resample.apply(kernel, rows, columns).astype(kernel.dtype)


def as_variables(
  flat: dict[str, np.ndarray], shapes: dict[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
  """Returns arrays by the names that a model has for them.

  Frozen norms keep among the batch statistics, 'batch_stats/a/scale', the numbers that
  are the parameters 'a/scale' of others.
  """

  def name(own):
    prefix = f'{trees.STATS}/'
    other = own.removeprefix(prefix) if trees.is_statistic(own) else prefix + own
    return other if other in shapes and own not in shapes else own

  return {name(own): x for own, x in flat.items()}


def stack(flat: dict[str, np.ndarray], family: Family) -> dict[str, np.ndarray]:
  """Stacks the blocks' parameters, '..._0/x', ..., into '.../x' [L, ...]."""
  layers = {}
  for name, x in flat.items():
    stacked, layer = family.stacked(name) or (name, None)
    layers.setdefault(stacked, {})[layer] = x
  return {
    name: parts[None] if None in parts else np.stack([parts[i] for i in sorted(parts)])
    for name, parts in layers.items()
  }


def unstack(flat: dict[str, np.ndarray], family: Family) -> dict[str, np.ndarray]:
  """The inverse of `stack`; names without layers stay as they are."""
  out = {}
  for name, x in flat.items():
    if not family.is_stacked(name):
      out[name] = x
      continue
    if not x.ndim > 0 or len(x) > MOST_LAYERS:
      raise ValueError(f'{name} {x.shape} is no stack of up to {MOST_LAYERS:,} layers')
    for i, layer in enumerate(x):
      out[family.unstacked(name, i)] = layer
  return out
