"""Swin, both versions: what the formats of timm and transformers share."""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vit_jax.weights import config_writers, layers
from vit_jax.weights import transforms as t
from vit_jax.weights.families.vit import columns
from vit_jax.weights.rename import Rule, Table, table

_TABLE = '/relative_positions/table'
_FACTOR = '/relative_positions/logit_scale'


class Stage(NamedTuple):
  """Facts of a stage that the shapes of a file do not show by themselves.

  Attributes:
    heads: of attention.
    window: (h, w) that the tables of positions are for; None: there are none (V2).
  """

  heads: int
  window: tuple[int, int] | None


# -- rename tables --------------------------------------------------------------------


class Names(NamedTuple):
  """Names of a block's parts in a format."""

  norms: tuple[str, str]
  out: str
  mlp: tuple[str, str]
  table: str  # the table of positions (V1)
  position_mlp: str  # the MLP that V2 has in place of a table


def block(theirs: str, ours: str, stage: Stage, names: Names) -> Table:
  """Returns the rules of a block but for its queries, keys and values."""
  positions, mlp = f'{ours}/relative_positions', f'{theirs}.{names.position_mlp}'
  if stage.window is None:
    position_rules = table(
      layers.dense(f'{mlp}.0', f'{positions}/Dense_0'),
      Rule(f'{mlp}.2.weight', f'{positions}/Dense_1/kernel', t.dense),
      Rule(f'{mlp.rpartition(".")[0]}.logit_scale', f'{ours}{_FACTOR}', t.factors),
    )
  else:
    name = f'{theirs}.{names.table}'
    position_rules = [Rule(name, f'{ours}{_TABLE}', t.offsets(stage.window))]
  return table(
    [
      layers.norm(f'{theirs}.{x}', f'{ours}/norm{k + 1}')
      for k, x in enumerate(names.norms)
    ],
    layers.out_of_heads(f'{theirs}.{names.out}', f'{ours}/attention/out', stage.heads),
    [
      layers.dense(f'{theirs}.{x}', f'{ours}/mlp/Dense_{k}')
      for k, x in enumerate(names.mlp)
    ],
    position_rules,
  )


def around(
  embedding: str, norm: str, downsample: str, into: str, last: str, head: str
) -> Table:
  """Returns the rules of all but the blocks.

  Args:
    downsample: the module between two stages, with a number {s}.
    into: the number of the stage that it leads to, '{s+1}' or '{s+2}'.
  """
  ours = f'stage{into}_downsample'
  return table(
    layers.conv(embedding, 'stem/embedding'),
    layers.norm(norm, 'stem/norm'),
    layers.norm(f'{downsample}.norm', f'{ours}/norm'),
    layers.dense(f'{downsample}.reduction', f'{ours}/reduction'),
    layers.norm(last, 'norm'),
    layers.dense(head, 'head'),
  )


# -- a file's stages ------------------------------------------------------------------


def stages_of(
  arrays: dict[str, np.ndarray], table: str, factor: str, window: Callable
) -> list[Stage]:
  """Returns the stages of a file.

  Args:
    table, factor: regexes of the names of the first block's table of positions (V1) and
      of its factor of cosines (V2), whose group is the number of the stage, from 0.
    window: `(number of the stage, rows of its table) -> (h, w)`.
  """
  stages = {}
  for name, x in arrays.items():
    if x.ndim == 2 and (match := re.fullmatch(table, name)):
      s = int(match[1])
      stages[s] = Stage(x.shape[1], window(s, x.shape[0]))
    elif match := re.fullmatch(factor, name):
      stages[int(match[1])] = Stage(x.size, None)
  return [stages[s] for s in sorted(stages)]


def square(s: int, rows: int) -> tuple[int, int]:
  """Returns the window whose table has so many rows.

  Raises:
    ValueError: for a table that is not of a square window.
  """
  side = (math.isqrt(rows) + 1) // 2
  if (2 * side - 1) ** 2 != rows:
    raise ValueError(
      f'the position tables of stage {s + 1} have {rows} rows, which does not fit '
      'a square window, and no config beside them gives the sizes of image and windows'
    )
  return side, side


def our_stages(flat: dict[str, np.ndarray]) -> list[Stage]:
  """Returns the stages of parameters under our names."""
  stages = []
  while (key := f'stage{len(stages) + 1}_block_0') + '/norm1/scale' in flat:
    offsets = flat.get(key + _TABLE)
    window = None if offsets is None else tuple((n + 1) // 2 for n in offsets.shape[:2])
    stages.append(Stage(flat[f'{key}/attention/query/kernel'].shape[1], window))
  return stages


# -- the model's fields ---------------------------------------------------------------


def depths(flat: dict[str, np.ndarray]) -> tuple[int, ...]:
  """Returns the number of blocks of each stage."""
  blocks = [re.match(r'stage(\d+)_block_\d+/norm1/scale', name) for name in flat]
  numbers = [int(match[1]) for match in blocks if match]
  return tuple(numbers.count(s) for s in range(1, max(numbers, default=0) + 1))


def infer(flat: dict[str, np.ndarray]) -> dict:
  """Returns the model's fields that its parameters determine.

  V2's do not tell the sides of the windows, which are None then.
  """
  stages = our_stages(flat)
  width = flat['stem/norm/scale'].size
  second = f'stage1_block_0{_FACTOR}' in flat
  return dict(
    version=2 if second else 1,
    width=width,
    depths=depths(flat),
    num_heads=tuple(stage.heads for stage in stages),
    windows=None if second else tuple(max(stage.window) for stage in stages),
    patch_size=flat['stem/embedding/kernel'].shape[:2],
    mlp_ratio=flat['stage1_block_0/mlp/Dense_0/kernel'].shape[1] / width,
    num_classes=columns(flat, 'head/kernel'),
  )


def grid(flat: dict[str, np.ndarray], fields: dict) -> tuple[int, int] | None:
  """Returns (h, w) of the last map: one window, in published models of V1."""
  return our_stages(flat)[-1].window


# -- what a format can express --------------------------------------------------------


def check_plain(fields: dict, format: str) -> None:
  """Raises ValueError for what neither timm nor transformers has."""
  config_writers.need(
    fields, 'shift', (0.5,), format, 'its windows shift by half of their side'
  )
  if len(set(fields['patch_size'])) > 1:
    raise ValueError(f'{format} has square patches only, not {fields["patch_size"]}')


def check_one_window(fields: dict, format: str) -> None:
  """Raises ValueError unless the windows of all stages are alike."""
  if len(set(fields['windows'])) > 1:
    raise ValueError(
      f'{format} has windows of one size here, not {tuple(fields["windows"])}'
    )


def check_borders(fields: dict, image_size, allowed: tuple[str, ...], format: str):
  """Raises ValueError where the format computes something else at the borders of maps.

  Where windows tile all maps, or are as large as they are, it does not matter which.
  """
  if fields['borders'] in allowed:
    return
  for s, side in enumerate(fields['windows']):
    H, W = maps = map_of(fields, image_size, s)
    tiles = not H % side and not W % side and min(maps) > side
    if not tiles and not H == W <= side:
      raise ValueError(
        f'{format} cannot express borders={fields["borders"]!r} for images of '
        f'{image_size[0]}x{image_size[1]} px: the map of stage {s + 1}, {H}x{W}, is not '
        f'tiled by windows of {side}, and is padded and shifted in another order there. '
        'Fine-tune with images of a size that windows tile, or with '
        f'model.borders={allowed[0]!r}'
      )


def map_of(fields: dict, image_size: tuple[int, int], s: int) -> tuple[int, int]:
  """Returns (H, W) of the map of stage s, from 0."""
  return tuple(
    -(-n // (p << s)) for n, p in zip(image_size, fields['patch_size'], strict=True)
  )
