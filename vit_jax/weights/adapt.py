"""Fits the parameters of a source to a model. None may be missing, and none may be left over.

Arrays are resized for other sizes of images, patches and windows, and stacked for scanned
blocks.
"""

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from vit_jax import resample, trees
from vit_jax.errors import UserError, choose
from vit_jax.models.base import Family
from vit_jax.models.vit_later import has_cls
from vit_jax.nn.positions import SINES, sincos2d
from vit_jax.registry import Registry
from vit_jax.weights import rename
from vit_jax.weights.rename import Arrays
from vit_jax.weights.source import Source, name_source

_STATS = f'{trees.STATS}/'
_MOST_HINTS = 8  # regexes in a message
Shapes = Mapping[str, tuple[int, ...]]
MOST_LAYERS = 1_000  # maximum number of layers, far above that of every published model
# Maximum number of tokens, far above that of every published model. More would exhaust memory.
_MOST_TOKENS = 1 << 16

_pixels = functools.partial(functools.partial, resample.matrix)
# Methods to resize one axis of position embeddings: (old, new) -> matrix [new, old].
RESIZERS = {
  # Google's code aligns the corners.
  'bilinear': resample.align_corners,
  # timm, open_clip and DINOv2 with registers align the centres of pixels.
  'bicubic': _pixels(method='bicubic', antialias=True),
  # transformers, MAE and EVA do the same without antialiasing.
  'bicubic_plain': resample.bicubic_of_edges,
  # DINOv2 without registers scales by (new + 0.1) / old.
  'bicubic_offset': lambda a, b: resample.bicubic_of_edges(a, b, (b + 0.1) / a),
  # For the Perception Encoder, and for BEiT in transformers.
  'bilinear_plain': _pixels(method='bilinear', antialias=False),
  # For SigLIP 2 NaFlex and TIPS.
  'bilinear_antialias': _pixels(method='bilinear', antialias=True),
}
# 'origin' stands for the method of the publisher's code, see `Format.resize`.
Method = Literal[('origin', *RESIZERS)]


def _resize(x: np.ndarray, new: tuple[int, int], matrix) -> np.ndarray:
  """Resizes the first two axes of x, each with the matrix `matrix(old, new)`."""
  rows, columns = map(matrix, x.shape[:2], new)
  return resample.apply(x, rows, columns).astype(x.dtype)


def resize_positions(
  table: np.ndarray,
  old: tuple[int, int],
  new: tuple[int, int],
  method: str = 'bilinear',
) -> np.ndarray:
  """Resizes a grid of position embeddings. Rows before the grid (class token) do not change.

  Args:
    table: [1, R + h w, D], of which the last h w rows are the grid `old` = (h, w).
    method: one of RESIZERS.
  """
  matrix = choose('resize', method, RESIZERS)
  extra = table.shape[1] - old[0] * old[1]
  if extra < 0:
    raise ValueError(
      f'position embeddings {table.shape} do not belong to a {old[0]}x{old[1]} grid'
    )
  if old == new:
    return table
  grid = _resize(table[0, extra:].reshape(*old, -1), new, matrix)
  grid = grid.reshape(1, -1, table.shape[-1])
  return np.concatenate([table[:, :extra], grid], axis=1)


def tabulate_positions(
  flat: Arrays,
  fields: dict,
  family: Family,
  image_size: tuple[int, int],
  class_row: bool = False,
) -> tuple[Arrays, dict]:
  """Turns position embeddings into a learned table, without a change of the outputs.

  Sine-cosine positions become a table of their values for images of this size. With
  `class_row`, a class token without a position gets a row of zeros. A model with other
  positions, or one that adds them before every block, is returned unchanged.

  Returns:
    (parameters, fields).
  """
  if fields.get('posemb_where') != 'stem':
    return flat, fields
  table, has_class = flat.get(family.position), has_cls(fields)
  if fields['posemb'] in SINES:
    (H, W), (down, across) = image_size, family.stride(fields)
    table = sincos2d(H // down, W // across, fields['width'], fields['posemb'])
    tokens = 'patches' if has_class else 'prefix'
    fields = {**fields, 'posemb': 'learn', 'posemb_tokens': tokens}
  if table is None:
    return flat, fields
  if class_row and has_class and fields['posemb_tokens'] == 'patches':
    table = np.pad(table, ((0, 0), (1, 0), (0, 0)))
    tokens = 'cls' if fields.get('registers') else 'prefix'
    fields = {**fields, 'posemb_tokens': tokens}
  return {**flat, family.position: table}, fields


def resize_offsets(
  table: np.ndarray, new: tuple[int, ...], matrix=resample.bicubic_of_edges
) -> np.ndarray:
  """Resizes a table of relative positions for another size of window or map.

  Tables of MViT, [2 n - 1, Dh], are resized linearly, as timm and detectron2 do.

  Args:
    new: the new shape without the last axis.
    matrix: for tables of Swin, [2 h - 1, 2 w - 1, M], the matrix of an axis; bicubic, as
      Swin's authors resize them, or `resample.geometric`, as timm does.
  """
  if len(new) == 1:
    matrix = resample.matrix(len(table), *new, 'bilinear', antialias=False)
    return (matrix @ table).astype(table.dtype)
  return _resize(table, new, matrix)


def resize_pairs(
  table: np.ndarray,
  old: tuple[int, int],
  new: tuple[int, int],
  matrix=RESIZERS['bilinear_plain'],
) -> np.ndarray:
  """Resizes a table of pairs of patches (see `Family.pairs`) for another grid.

  Args:
    matrix: the matrix of an axis; bilinear, as in transformers' BEiT, or
      `resample.geometric`, as in timm.
  """
  before, after = ([2 * n - 1 for n in grid] for grid in (old, new))
  pairs, rest = np.split(table, [math.prod(before)])
  pairs = _resize(pairs.reshape(*before, -1), after, matrix)
  return np.concatenate([pairs.reshape(-1, table.shape[1]), rest])


def resize_patches(kernel: np.ndarray, new: tuple[int, int]) -> np.ndarray:
  """Resizes a patch embedding's kernel [ph, pw, C, D] to patches of `new` pixels.

  The kernel is multiplied by the pseudo-inverse of the matrix that resizes a patch (FlexiViT,
  arXiv 2212.08013, section 3.4). A patch that is enlarged bilinearly then has exactly the
  embedding of the original.
  """
  enlarged = RESIZERS['bilinear_plain']
  return _resize(kernel, new, lambda a, b: np.linalg.pinv(enlarged(a, b).T))


def _rename_frozen_norms(flat: Arrays, shapes: Shapes) -> Arrays:
  """Moves scale and bias of norms to where the model has them.

  A frozen norm has them among the batch statistics, any other norm among the parameters.
  """

  def name(own):
    other = own.removeprefix(_STATS) if own.startswith(_STATS) else _STATS + own
    return other if other in shapes and own not in shapes else own

  return {name(own): x for own, x in flat.items()}


def stack(flat: Arrays, family: Family) -> Arrays:
  """Stacks the parameters of the blocks: '..._0/x', '..._1/x', ... into '.../x' [L, ...]."""
  layers = {}
  for name, x in flat.items():
    stacked, layer = family.stacked(name) or (name, None)
    layers.setdefault(stacked, {})[layer] = x
  return {
    name: parts[None] if None in parts else np.stack([parts[i] for i in sorted(parts)])
    for name, parts in layers.items()
  }


def unstack(flat: Arrays, family: Family) -> Arrays:
  """Undoes `stack`, without copies."""
  out = {}
  for name, x in flat.items():
    if not family.is_stacked(name):
      out[name] = x
      continue
    for i, layer in enumerate(x):
      out[family.unstacked(name, i)] = layer
  return out


# -- a source and a model ---------------------------------------------------------------

# For each (family of the weights, family of a model that can start from them): a function
# (source, model, resize) that returns the same as `_start_from`.
STARTS = Registry('start', {})


class Merge(NamedTuple):
  """A report on what `fit` did with each parameter."""

  taken: list[str]
  reinitialized: list[str]  # variables of the model that keep their initial values
  unused: list[str]  # names in the source that the model does not use
  notes: list[str]  # lines about arrays that were changed

  def describe(self, source: Source) -> str:
    """Returns lines for the user: how many parameters were taken, and which were not."""
    stats = sum(name.startswith(_STATS) for name in self.taken)
    with_stats = f' and {stats} batch statistics' if stats else ''
    taken = f'{len(self.taken) - stats} parameters{with_stats} taken'
    lines = [f'{source.source} ({source.origin}): {taken}', *self.notes]
    unused = [name for name in self.unused if name not in self.reinitialized]
    lines += _format_names({'initialised afresh': self.reinitialized, 'unused': unused})
    return '\n  '.join(lines)


def _format_names(names: dict[str, list[str]], most: int = 4) -> list[str]:
  """Returns a line for each list that is not empty: 'heading: a, b, c and 5 more'."""
  more = lambda n: f' and {n - most} more' if n > most else ''
  return [
    f'{heading}: {", ".join(some[:most])}{more(len(some))}'
    for heading, some in names.items()
    if some
  ]


def fit(
  source: Source,
  model,
  image_size: tuple[int, int],
  *,
  skip: list[str] = (),
  resize: Method = 'origin',
) -> tuple[Arrays, Merge]:
  """Fits the weights of a source to a model; returns ({name: array}, report).

  The names are those of `trees.flatten_variables`. The arrays do not include the variables
  in `report.reinitialized`.

  Args:
    source: weights of the same model, or of one that this model can start from, see
      `_start_from`.
    skip: regexes of parameters that keep their initial values. Heads for another number of
      classes always keep them.
    resize: the method for position embeddings, see RESIZERS.
  """
  resize = source.resize if resize == 'origin' else resize
  with name_source(source.source):
    family, fields = model.family, model.fields()
    _check_size(image_size, family.stride(fields))
    source, new, notes = _start_from(source, model, resize)
    abstract = model.shapes((*image_size, source.channels))
    shapes = {name: x.shape for name, x in trees.flatten_variables(abstract).items()}
    flat = _rename_frozen_norms(source.flat, shapes)
    resized, changes = _resize_all(
      source, flat, family, fields, shapes, image_size, resize
    )
    flat |= resized
    if any(family.is_stacked(name) for name in shapes):
      flat = stack(flat, family)
    skip = [*skip, *new]
    if _count_classes({n: x.shape for n, x in flat.items()}) != _count_classes(shapes):
      skip.append('head/.*')
    skip += [
      re.escape(n)
      for n, shape in shapes.items()
      if n in flat and re.fullmatch(family.heads, n) and not _fits(flat[n], shape)
    ]
    taken, report = merge(shapes, flat, skip)
    check_finite(taken)
  names = dict.fromkeys([*source.unused, *source.own])
  unused = [n for n in names if n not in report.unused]
  return taken, report._replace(
    notes=[*notes, *changes], unused=[*report.unused, *unused]
  )


def fit_own(
  source: Source, shapes: Shapes, skip: Iterable[str], report: Merge
) -> tuple[Arrays, Merge]:
  """Fits a task's own parameters, of `shapes`; returns ({name: array}, the whole report).

  Weights of another task have none of them, so all keep their initial values. If a file does
  not say the number of heads, its kernels have one head.
  """
  flat = dict(source.own)
  for name in flat.keys() & shapes.keys():
    if 1 in flat[name].shape and flat[name].size == math.prod(shapes[name]):
      flat[name] = flat[name].reshape(shapes[name])
  if not flat.keys() & shapes.keys():
    flat, skip = {}, ['.*']
  taken, own = merge(shapes, flat, skip)
  check_finite(taken)
  return taken, report._replace(
    taken=[*report.taken, *own.taken],
    reinitialized=[*report.reinitialized, *own.reinitialized],
    unused=[name for name in report.unused if name not in taken],
  )


def _check_size(image_size: tuple[int, int], strides: tuple[int, int]) -> None:
  """Raises UserError for an image size that gives more than _MOST_TOKENS tokens."""
  if math.prod(n // s for n, s in zip(image_size, strides, strict=True)) > _MOST_TOKENS:
    raise UserError(
      f'image_size={image_size}: expected at most {_MOST_TOKENS:,} tokens.'
    )


def check_finite(arrays: Arrays) -> None:
  """Raises ValueError for parameters that hold NaN or infinity."""
  if odd := [name for name, x in arrays.items() if not np.isfinite(x).all()]:
    names = _format_names({'NaN or infinity in': odd}, 3)[0]
    raise ValueError(f'{names}: take other weights, or pass skip={odd[:1]}')


def merge(
  shapes: Shapes, arrays: dict[str, Any], skip: Iterable[str] = ()
) -> tuple[dict[str, Any], Merge]:
  """Takes every parameter from `arrays`. None may be missing, and none may be left over.

  Args:
    skip: regexes that match the full names of parameters to ignore, in the source and in
      the model. Statistics of a batch norm are matched without their prefix.

  Raises:
    ValueError: for names or shapes that differ.
  """
  rules = [(regex, True) for regex in skip] + [('.*', False)]
  is_skipped = lambda name: trees.first_match(rules, name.removeprefix(_STATS))
  taken = {n: arrays[n] for n in shapes if n in arrays and not is_skipped(n)}
  missing = [n for n in shapes if n not in arrays and not is_skipped(n)]
  extra = [n for n in arrays if n not in shapes and not is_skipped(n)]
  differ = [
    f'{n} is {tuple(x.shape)} in the source, {tuple(shapes[n])} in the model'
    for n, x in taken.items()
    if not _fits(x, shapes[n])
  ]
  problems = {'only in the model': missing, 'only in the source': extra}
  problems = _format_names({**problems, 'shapes that differ': differ}, 3)
  if problems:
    wrong = {*missing, *extra, *(n for n in taken if not _fits(taken[n], shapes[n]))}
    plain = lambda names: {n.removeprefix(_STATS) for n in names}
    hint = list(_group_names(plain(wrong), plain({*shapes, *arrays})))
    skipped = f', or add {hint} to skip' if len(hint) <= _MOST_HINTS else ''
    raise ValueError(f'{"; ".join(problems)}: change the model{skipped}')
  reinitialized = [n for n in shapes if is_skipped(n)]
  unused = [n for n in arrays if is_skipped(n)]
  return taken, Merge(list(taken), reinitialized, unused, [])


def _fits(x, shape) -> bool:
  return tuple(x.shape) == tuple(shape)


def _group_names(some: set[str], every: set[str], within: str = '') -> Iterator[str]:
  """Yields regexes that match exactly `some` of the names of parameters, sorted.

  Args:
    within: the common start of the names.
  """
  for part in sorted({n.removeprefix(within).split('/')[0] for n in some}):
    name = f'{within}{part}'
    inside = {n for n in every if n.startswith(f'{name}/')}
    if not inside:
      yield name
    elif inside <= some:
      yield f'{name}/.*'
    else:
      yield from _group_names(some & inside, inside, f'{name}/')


def _count_classes(shapes: Shapes) -> int | None:
  """Returns the number of classes, read from the head's kernel; None without a head."""
  kernels = [s for n, s in shapes.items() if re.fullmatch(r'head/(.*/)?kernel', n)]
  return kernels[0][-1] if kernels else None


# -- patches, positions, offsets ------------------------------------------------------


def _resize_all(
  source, flat, family, fields, shapes, image_size, method
) -> tuple[dict, list[str]]:
  """Resizes the patch embedding and tables of positions.

  Returns:
    ({name: array of the model's shape}, lines on what was resized).
  """
  resized, notes, old_fields = {}, [], fields
  grid = lambda size, fields: tuple(map(operator.floordiv, size, family.stride(fields)))
  kernel, shape = flat.get(family.patches), shapes.get(family.patches, ())
  if kernel is not None and len(shape) == 4 and kernel.shape[:2] != shape[:2]:
    resized[family.patches] = resize_patches(kernel, shape[:2])
    notes.append(f'{family.patches} resized from {kernel.shape[:2]} to {shape[:2]}')
    old_fields = _set_patches(fields, kernel.shape[:2])
  new = grid(image_size, fields)
  old = grid(source.image_size, old_fields) if source.image_size else None
  # timm resizes tables of two dimensions alike, whatever the family.
  own = {'matrix': resample.geometric} if source.format == 'timm' else {}
  for name, x in flat.items():
    stacked, _ = family.stacked(name) or ('', 0)
    shape = shapes.get(name) or shapes.get(stacked, ())[1:]
    axes, before, after = family.position_axes(name), x.shape[:-1], shape[:-1]
    if len(shape) != x.ndim:
      continue
    if before != after and re.fullmatch(family.offsets or '', name):
      resized[name] = resize_offsets(x, after, **own)
      a, b = ('x'.join(str((n + 1) // 2) for n in side) for side in (before, after))
      kind = ('windows', 'geometric' if own else 'bicubic')
      kind = kind if len(after) == 2 else ('sides of maps', 'linear')
      notes.append(f'position tables of {kind[0]} resized from {a} to {b}, {kind[1]}')
    elif before != after and re.fullmatch(family.pairs or '', name):
      side = (math.isqrt(len(x)) + 1) // 2  # An unknown grid is assumed to be square.
      before = old or (side, side)
      resized[name] = resize_pairs(x, before, new, **own)
      kind = 'geometric' if own else 'bilinear'
      notes.append(f'tables of pairs of patches resized from {before} to {new}, {kind}')
    elif axes and x.ndim == 3:
      if axes == 'hw':  # An unknown grid is assumed to be square.
        side = math.isqrt(max(x.shape[1] - (shape[1] - math.prod(new)), 0))
        before, after = old or (side, side), new
      else:  # A table of rows or columns has the length of the grid.
        before, after = (x.shape[1], 1), (new['hw'.index(axes)], 1)
      if before != after:
        resized[name] = resize_positions(x, before, after, method)
        notes.append(
          f'position embeddings ({axes}) resized from {before} to {after}, {method}'
        )
  return resized, list(dict.fromkeys(notes))


def _set_patches(fields: dict, size: tuple[int, int]) -> dict:
  """Sets the patch size in a model's fields, or in those of its backbone."""
  if 'patch_size' in fields:
    return fields | {'patch_size': size}
  return fields | {'backbone': _set_patches(fields['backbone'], size)}


# -- weights of another model ---------------------------------------------------------


def _start_from(
  source: Source, model, resize: str
) -> tuple[Source, list[str], list[str]]:
  """Converts the weights of one model for another model that can start from them.

  The weights are of the model's family, of its backbone's family, or of one that STARTS
  lists for it.

  Returns:
    (the source, regexes of parameters that keep their initial values, notes).
  """
  name, inside = model.family_name, model.backbone
  if source.family != name and inside is not None:
    source, new, notes = _start_from(source, inside, resize)
    source = drop_parameters(source, r'(head|head_dist|pre_logits)/.*')
    flat = {rename.nest_name(n, 'backbone/'): x for n, x in source.flat.items()}
    new = [rf'(?!({_STATS})?backbone/).*', *(f'backbone/(?:{r})' for r in new)]
    return dataclasses.replace(source, family=name, flat=flat), new, notes
  if (source.family, name) in STARTS:
    return STARTS[source.family, name](source, model, resize)
  if getattr(model, 'map_norms', False) and not source.fields.get('map_norms'):
    return drop_parameters(source, r'norm/.*'), [r'stage\d+_norm/.*'], []
  return source, [], []  # The same model, or one that `merge` will reject.


def drop_parameters(source: Source, regex: str) -> Source:
  """Moves the parameters that a regex matches to `unused`."""
  unused = [n for n in source.flat if re.fullmatch(regex, n)]
  flat = {n: x for n, x in source.flat.items() if n not in unused}
  return dataclasses.replace(source, flat=flat, unused=[*unused, *source.unused])
