"""Swin, both versions, in the published formats."""

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights import export, layers
from vit_jax.weights import transforms as t
from vit_jax.weights.rename import Rule

_TABLE = '/relative_positions/table'
_FACTOR = '/relative_positions/logit_scale'


class Stage(NamedTuple):
  """What of a stage the shapes of a file do not show by themselves.

  Attributes:
    heads: of attention.
    window: (h, w) that the tables of positions are for; None: there are none (V2).
  """

  heads: int
  window: tuple[int, int] | None


# -- rename tables ----------------------------------------------------------------------


def rules_of(stage: Stage, rules: Sequence[Rule]) -> tuple[Rule, ...]:
  """Returns the rules of a stage, which split heads as it has them."""
  heads = stage.heads
  return tuple(r._replace(transform=t.with_heads(r.transform, heads)) for r in rules)


def table(theirs: str, ours: str, stage: Stage) -> tuple[Rule, ...]:
  """The rule of a table of positions, if the stage has them."""
  if stage.window is None:
    return ()
  return (Rule(theirs, f'{ours}{_TABLE}', t.offsets(stage.window)),)


def position_mlp(theirs: str, ours: str) -> tuple[Rule, ...]:
  """Rules of what V2 has in place of a table; `theirs` is the MLP's name."""
  ours = f'{ours}/relative_positions'
  return (
    *layers.pair(f'{theirs}.0', f'{ours}/Dense_0'),
    Rule(f'{theirs}.2.weight', f'{ours}/Dense_1/kernel', t.dense),
    Rule(f'{theirs.rpartition(".")[0]}.logit_scale', f'{ours}/logit_scale', t.factors),
  )


def merging(theirs: str, ours: str) -> tuple[Rule, ...]:
  """Rules of what leads from one stage to the next."""
  return (
    *layers.norm(f'{theirs}.norm', f'{ours}/norm'),
    Rule(f'{theirs}.reduction.weight', f'{ours}/reduction/kernel', t.dense),
  )


# -- a file's stages --------------------------------------------------------------------


def stages_of(
  arrays: dict[str, np.ndarray], table: str, factor: str, window: Callable
) -> list[Stage]:
  """Returns the stages of a file.

  Args:
    table, factor: regexes of the names of the first block's table of positions (V1) and
      of its factor of cosines (V2), whose group is the number of the stage, from 0.
    window: `(number of the stage, rows of its table) -> (h, w)`.
  """
  found = {}
  for name, x in arrays.items():
    if x.ndim == 2 and (match := re.fullmatch(table, name)):
      s = int(match[1])
      found[s] = Stage(x.shape[1], window(s, x.shape[0]))
    elif match := re.fullmatch(factor, name):
      found[int(match[1])] = Stage(x.size, None)
  return [found[s] for s in sorted(found)]


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
  found = []
  while (key := f'stage{len(found) + 1}_block_0') + '/norm1/scale' in flat:
    known = flat.get(key + _TABLE)
    window = None if known is None else tuple((n + 1) // 2 for n in known.shape[:2])
    found.append(Stage(flat[f'{key}/attention/query/kernel'].shape[1], window))
  return found


# -- the model's fields -----------------------------------------------------------------


def infer(flat: dict[str, np.ndarray]) -> dict:
  """Returns the model's fields that its parameters tell.

  V2's do not tell the sides of the windows, which are None then.
  """
  stages = our_stages(flat)
  width = flat['stem/norm/scale'].size
  second = f'stage1_block_0{_FACTOR}' in flat
  blocks = [re.match(r'stage(\d+)_block_\d+/norm1/scale', name) for name in flat]
  blocks = [int(match[1]) for match in blocks if match]
  return dict(
    version=2 if second else 1,
    width=width,
    depths=tuple(blocks.count(s + 1) for s in range(len(stages))),
    num_heads=tuple(stage.heads for stage in stages),
    windows=None if second else tuple(max(stage.window) for stage in stages),
    patch_size=flat['stem/embedding/kernel'].shape[:2],
    mlp_ratio=flat['stage1_block_0/mlp/Dense_0/kernel'].shape[1] / width,
    num_classes=flat['head/kernel'].shape[1] if 'head/kernel' in flat else None,
  )


def grid(flat: dict[str, np.ndarray], fields: dict) -> tuple[int, int] | None:
  """Returns (h, w) of the last map: one window, in published models of V1."""
  return our_stages(flat)[-1].window


# -- what a format can express ----------------------------------------------------------


def check_plain(fields: dict, format: str) -> None:
  """Raises UserError for what neither timm nor transformers has."""
  export.need(
    fields, 'shift', (0.5,), format, 'its windows shift by half of their side'
  )
  if len(set(fields['patch_size'])) > 1:
    raise UserError(f'{format} has square patches only, not {fields["patch_size"]}.')


def check_one_window(fields: dict, format: str) -> None:
  """Raises UserError unless the windows of all stages are alike."""
  if len(set(fields['windows'])) > 1:
    raise UserError(
      f'{format} has windows of one size here, not {tuple(fields["windows"])}.'
    )


def check_borders(fields: dict, image_size, allowed: tuple[str, ...], format: str):
  """Raises UserError where the format computes something else at the borders of maps.

  Where windows tile all maps, or are as large as they are, it does not matter which.
  """
  if fields['borders'] in allowed:
    return
  for s, side in enumerate(fields['windows']):
    H, W = maps = map_of(fields, image_size, s)
    tiles = not H % side and not W % side and min(maps) > side
    if not tiles and not H == W <= side:
      raise UserError(
        f'{format} cannot express borders={fields["borders"]!r} for images of '
        f'{image_size[0]}x{image_size[1]} px: the map of stage {s + 1}, {H}x{W}, is not '
        f'tiled by windows of {side}, and is padded and shifted in another order there. '
        'Fine-tune with images of a size that windows tile, or with '
        f'model.borders={allowed[0]!r}.'
      )


def map_of(fields: dict, image_size: tuple[int, int], s: int) -> tuple[int, int]:
  """Returns (H, W) of the map of stage s, from 0."""
  return tuple(
    -(-n // (p << s)) for n, p in zip(image_size, fields['patch_size'], strict=True)
  )


FORMATS = ()  # they are in swin_timm and swin_hf
