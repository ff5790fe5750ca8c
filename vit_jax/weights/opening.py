"""Published weights: files to our parameters and back. The model is built elsewhere.

`open_file` reads a file and says whose format it is; `Weights.parameters` renames; `fit`
brings the parameters to another resolution, patch size or layout. What differs between
families is asked of a `models.family.Family`, which the caller passes.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

from vit_jax.errors import UserError, one_line
from vit_jax.weights import (
  adapt,
  download,
  formats,
  hints,
  published,
  readers,
  rename,
  zoo,
)
from vit_jax.weights.merge import Merge, merge

# Far beyond every published model; a file that says more would exhaust time or memory.
_MOST_TOKENS = 1 << 16
_LARGEST_NUMBER = 9_999  # in the name of an array
# In the config of a file of what a run tuned alone, see `tuned`.
TUNED_ONLY = 'vit_jax_tuned'


@contextlib.contextmanager
def arrays_that_do_not_fit(what: str) -> Iterator[None]:
  """Turns errors that a file's names and shapes cause inside into a UserError.

  Args:
    what: the beginning of the message, such as 'FILE cannot be loaded:'.
  """
  try:
    yield
  except UserError:
    raise
  except (ValueError, TypeError, KeyError, IndexError, ArithmeticError) as error:
    why = one_line(f'{type(error).__name__}: {error}')
    raise UserError(f'{what} its arrays do not fit together: {why}.') from None


@dataclasses.dataclass(frozen=True)
class Weights:
  """A file's arrays, and what it says about its model.

  Attributes:
    arrays: by the file's names, blocks possibly stacked.
    rules: the rename table.
    unused: names in the file that are not parameters of the model.
    usual_size: (H, W) in pixels by the zoo, for files without positions.
    published: what else their publisher says of them.
  """

  source: str
  format: formats.Format
  arrays: dict[str, np.ndarray]
  rules: tuple[rename.Rule, ...]
  hints: hints.Hints
  unused: list[str]
  usual_size: tuple[int, int] | None
  published: published.Published

  def parameters(
    self, family, heads: int | None = None
  ) -> tuple[dict[str, np.ndarray], dict]:
    """Returns ({our name: float32 array}, the model's fields that the file tells).

    Blocks stacked by a scan come back one by one.

    Args:
      family: a `models.family.Family`, that of `format.family`.
      heads: number of attention heads, where `format.flat_heads`.

    Raises:
      UserError: for arrays that no rule knows: another architecture.
    """
    what = f'{self.source} looks like {self.format.name} {self.format.family!r}, but'
    with arrays_that_do_not_fit(what):
      arrays = adapt.unstack(self.arrays, family)
      flat, unknown = rename.to_ours(arrays, self.rules, heads)
    if unknown:
      raise UserError(
        f'{what} {len(unknown)} of its {len(arrays)} arrays are not part of that '
        f'architecture: {unknown[:4]}.'
      )
    for name, x in flat.items():
      if x.dtype.kind in 'biu':
        raise UserError(f'{self.source}: {name} is {x.dtype}; parameters are floats.')
    flat = {name: np.asarray(x, np.float32) for name, x in flat.items()}
    with arrays_that_do_not_fit(what):
      fields = _over(self.hints.fields, self.format.infer(flat))
    body = fields.get('backbone') or fields
    layers = body.get('depth') or sum(body.get('blocks') or body.get('depths') or ())
    if layers > adapt.MOST_LAYERS:
      raise UserError(
        f'{what} has {layers:,} layers; up to {adapt.MOST_LAYERS:,} are read.'
      )
    return flat, fields

  def image_size(self, flat, fields: dict, family) -> tuple[int, int] | None:
    """Returns (H, W) in pixels that the parameters are for, None if nothing tells."""
    if size := self.hints.image_size:
      tokens = math.prod(
        n // s for n, s in zip(size, family.stride(fields), strict=True)
      )
      if tokens > _MOST_TOKENS:
        raise UserError(
          f'{self.source}: its config says images of {size[0]} x {size[1]} pixels, '
          f'{tokens:,} tokens; up to {_MOST_TOKENS:,} are read.'
        )
      return size
    with arrays_that_do_not_fit(f'{self.source} cannot be loaded:'):
      grid = self.format.grid(flat, fields)
    if grid:
      return tuple(n * s for n, s in zip(grid, family.stride(fields), strict=True))
    return self.usual_size


def _over(told: dict, inferred: dict) -> dict:
  """Returns {field: value}, those told before those inferred, also of a backbone."""
  found = inferred | told
  if isinstance(inferred.get('backbone'), dict):
    found['backbone'] = inferred['backbone'] | told.get('backbone', {})
  return found


def open_file(source: str) -> Weights:
  """Opens a file, a hub folder, a URL (gs://, https://, hf:) or a name of the zoo.

  Raises:
    UserError: for what cannot be found or is not of a known format.
  """
  entry = zoo.find(source)
  path = download.locate(entry.url if entry else source)
  try:
    raw = readers.read(path)
  except UserError as error:
    again = f' Remove {path} to download it again.' if download.is_cached(path) else ''
    raise UserError(f'{error}{again}') from None
  if TUNED_ONLY in raw.config:
    raise UserError(
      f'{source} holds what a run tuned, and no more: load the weights that the run '
      f'started from, and this on top, vit_jax.load(WEIGHTS, tune={str(source)!r}).'
    )
  found, arrays, unused = formats.detect(raw.arrays, str(source))
  for name in arrays:
    if any(int(n) > _LARGEST_NUMBER for n in re.findall(r'\d{1,9}', name)):
      raise UserError(
        f'{source}: array {name[:80]!r} is numbered beyond {_LARGEST_NUMBER}.'
      )
  with arrays_that_do_not_fit(f'{source} cannot be loaded:'):
    rules = found.rules(arrays, raw.config)
  told = found.hints(raw.config, str(source))
  usual = (entry.resolution,) * 2 if entry else None
  known = published.find(str(source), path, raw.config)
  return Weights(str(source), found, arrays, rules, told, unused, usual, known)


def fit(
  flat: dict[str, np.ndarray],
  shapes: dict[str, tuple[int, ...]],
  *,
  family,
  fields: dict,
  old_size: tuple[int, int] | None,
  new_size: tuple[int, int] | None,
  skip: list[str] = (),
  resize: str = 'bilinear',
) -> tuple[dict[str, np.ndarray], Merge]:
  """Returns the parameters of a model that can be taken from `flat`, and a report.

  Args:
    flat: variables by the names of `trees.named`, blocks not stacked.
    shapes: of every variable of the model.
    family: the model's `models.family.Family`.
    fields: the model's.
    old_size: (H, W) of the images that `flat` is for, None: unknown, taken as square.
    new_size: (H, W) of the model's images.
    skip: regexes of parameters to leave as the model initialises them, besides a head
      of another number of classes, which always is.
    resize: of position embeddings, see `adapt.resize_positions`.

  Raises:
    UserError: for shapes that differ, parameters missing or left over.
  """
  adapt.check_method(resize)
  flat, notes = adapt.as_variables(flat, shapes), []
  old_fields = fields
  kernel, wanted = flat.get(family.patches), shapes.get(family.patches, ())
  if kernel is not None and len(wanted) == 4 and kernel.shape[:2] != wanted[:2]:
    old_fields = _with_patches(fields, kernel.shape[:2])
    flat[family.patches] = adapt.resize_patches(kernel, wanted[:2])
    notes.append(f'{family.patches} resized from {kernel.shape[:2]} to {wanted[:2]}')
  resized, changes = _offsets(flat, shapes, family)
  flat |= resized
  notes += changes
  if new_size:
    grid = lambda size, fields: tuple(
      n // s for n, s in zip(size, family.stride(fields), strict=True)
    )
    old = grid(old_size, old_fields) if old_size else None
    resized, changes = _positions(
      flat, shapes, family, old, grid(new_size, fields), resize
    )
    flat |= resized
    notes += changes
  if any(family.is_stacked(name) for name in shapes):
    flat = adapt.stack(flat, family)
  if _classes({n: x.shape for n, x in flat.items()}) != _classes(shapes):
    skip = [*skip, 'head/.*']
  taken, report = merge(shapes, flat, skip)
  return taken, report._replace(notes=notes)


def _with_patches(fields: dict, size: tuple[int, int]) -> dict:
  """Returns a model's fields with patches of another size, its own or its backbone's."""
  if 'patch_size' in fields:
    return fields | {'patch_size': size}
  return fields | {'backbone': _with_patches(fields['backbone'], size)}


def _offsets(flat, shapes, family) -> tuple[dict, list[str]]:
  """Returns ({name: table of offsets of the shape wanted}, what was resized, as text)."""
  resized, notes = {}, {}
  for name, table in flat.items():
    wanted = shapes.get(name, table.shape)
    if not re.fullmatch(family.offsets or '', name) or len(wanted) != table.ndim:
      continue
    if (before := table.shape[:-1]) != (after := wanted[:-1]):
      resized[name] = adapt.resize_offsets(table, after)
      old, new = ('x'.join(str((n + 1) // 2) for n in x) for x in (before, after))
      what = 'windows' if len(after) == 2 else 'sides of maps'
      how = 'bicubic' if len(after) == 2 else 'linear'
      notes[f'position tables of {what} resized from {old} to {new}, {how}'] = None
  return resized, list(notes)


def _positions(flat, shapes, family, old, new, method) -> tuple[dict, list[str]]:
  """Returns ({name: position table for the grid `new`}, what was resized, as text).

  Args:
    old: (h, w) of the grid that `flat` is for; None: unknown, taken as square.
  """
  rows = {n: shape[-2] for n, shape in shapes.items() if len(shape) > 2}
  resized, notes = {}, {}
  for name, table in flat.items():
    axes = family.position_axes(name)
    wanted = rows.get(name) or rows.get((family.stacked(name) or ('',))[0])
    if axes is None or wanted is None or table.ndim != 3:
      continue
    if axes == 'hw':
      side = math.isqrt(max(table.shape[1] - (wanted - math.prod(new)), 0))
      before, after = old or (side, side), new
    else:  # a table of the grid's rows, or of its columns, knows their number
      before, after = (table.shape[1], 1), (new['hw'.index(axes)], 1)
    if before != after:
      resized[name] = adapt.resize_positions(table, before, after, method)
      what = {'hw': '', 'h': ' of rows', 'w': ' of columns'}[axes]
      notes[what] = f'from {before} to {after}, {method}'
  return resized, [f'position embeddings{w} resized {n}' for w, n in notes.items()]


def _classes(shapes: dict[str, tuple[int, ...]]) -> int | None:
  """Returns the number of classes of a head's kernel; None without a head."""
  kernels = [s for n, s in shapes.items() if re.fullmatch(r'head/(.*/)?kernel', n)]
  return kernels[0][-1] if kernels else None
