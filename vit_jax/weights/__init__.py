"""Published weights: files to our parameters and back. The model is built elsewhere.

`open` reads a file and says whose format it is; `Weights.parameters` renames; `fit`
brings the parameters to another resolution, patch size or layout.
"""

import dataclasses

import numpy as np

from vit_jax.errors import UserError
from vit_jax.trees import Merge, merge
from vit_jax.weights import adapt, download, formats, readers, vit, zoo
from vit_jax.weights import rename as names


@dataclasses.dataclass(frozen=True)
class Weights:
  """A file's arrays, and what it tells of its model."""

  source: str
  dialect: formats.Dialect
  arrays: dict[str, np.ndarray]
  rules: tuple[names.Rule, ...]
  hints: formats.Hints
  left_out: list[str]
  usual_size: (
    tuple[int, int] | None
  )  # (H, W) that the zoo tells; files without positions

  @property
  def needs_heads(self) -> bool:
    """Whether the number of heads is not in the shapes: torch keeps them flat."""
    return self.dialect.family == 'vit' and self.dialect.name in ('timm', 'hf')

  def parameters(self, heads: int | None = None) -> tuple[dict[str, np.ndarray], dict]:
    """Returns ({our name: float32 array}, the model's fields that the file tells).

    Raises:
      UserError: for arrays that no rule knows: another architecture.
    """
    flat, unknown = names.to_ours(self.arrays, self.rules, heads)
    if unknown:
      raise UserError(
        f'{self.source} looks like {self.dialect.name} {self.dialect.family!r}, but '
        f'{len(unknown)} of its {len(self.arrays)} arrays are not of that architecture: '
        f'{unknown[:4]}.'
      )
    flat = {name: np.asarray(x, np.float32) for name, x in flat.items()}
    fields = self.dialect.infer(flat)
    if fields.get('posemb') == 'none' and self.dialect.name in ('google', 'big_vision'):
      # The published models in these formats without a table have this one.
      fields['posemb'] = 'sincos2d'
    return flat, fields | self.hints.fields


def open(source: str) -> Weights:
  """Opens a file, a hub folder, a URL (gs://, https://, hf:) or a name of the zoo.

  Raises:
    UserError: for what cannot be found or is of no known format.
  """
  entry = zoo.find(source)
  path = download.locate(entry.url if entry else source)
  raw = readers.read(path)
  dialect, arrays, left_out = formats.detect(raw.arrays, str(source))
  rules = dialect.rules(arrays, raw.config)
  hints = formats.hints(dialect, raw.config, str(source))
  usual = (entry.resolution,) * 2 if entry else None
  return Weights(str(source), dialect, arrays, rules, hints, left_out, usual)


def fit(
  flat: dict[str, np.ndarray],
  shapes: dict[str, tuple[int, ...]],
  *,
  fields: dict,
  old_size: tuple[int, int] | None,
  new_size: tuple[int, int] | None,
  skip: list[str] = (),
  resize: str = 'bilinear',
) -> tuple[dict[str, np.ndarray], Merge]:
  """Returns the parameters of a model that can be taken from `flat`, and a report.

  Args:
    flat: parameters under our names, blocks not stacked.
    shapes: of every parameter of the model.
    fields: the model's, for the pixels per token.
    old_size: (H, W) of the images that `flat` is for, None: unknown, taken as square.
    new_size: (H, W) of the model's images.
    skip: regexes of parameters to leave as the model initialises them, besides a head
      of another number of classes, which always is.
    resize: of position embeddings, see `adapt.resize_positions`.

  Raises:
    UserError: for shapes that differ, parameters missing or left over.
  """
  adapt.check_method(resize)
  flat, notes = dict(flat), []
  if any('/encoderblock/' in n or n.startswith('MixerBlock/') for n in shapes):
    flat = adapt.stack(flat)
  kernel = flat.get('embedding/kernel')
  wanted = shapes.get('embedding/kernel', ())
  if kernel is not None and len(wanted) == 4 and kernel.shape[:2] != wanted[:2]:
    old_stride = vit.stride(fields | {'patch_size': kernel.shape[:2]})
    flat['embedding/kernel'] = adapt.resize_patches(kernel, wanted[:2])
    notes.append(f'embedding/kernel resized from {kernel.shape[:2]} to {wanted[:2]}')
  elif kernel is not None and 'patch_size' in fields:
    old_stride = vit.stride(fields)
  table, wanted = flat.get(vit.POSITIONS), shapes.get(vit.POSITIONS)
  if table is not None and wanted and new_size:
    grid = lambda size, s: (size[0] // s[0], size[1] // s[1])
    new = grid(new_size, vit.stride(fields))
    side = int((table.shape[1] - (wanted[1] - new[0] * new[1])) ** 0.5)
    old = grid(old_size, old_stride) if old_size else (side, side)
    if old != new:
      flat[vit.POSITIONS] = adapt.resize_positions(table, old, new, resize)
      notes.append(f'position embeddings resized from {old} to {new}, {resize}')
  skip = [*skip, *(['head/.*'] if _head_differs(flat, shapes) else [])]
  taken, report = merge(shapes, flat, skip)
  return taken, report._replace(notes=notes)


def _head_differs(flat, shapes) -> bool:
  old = {n: x.shape for n, x in flat.items() if n.startswith('head/')}
  new = {n: tuple(s) for n, s in shapes.items() if n.startswith('head/')}
  return old != new
