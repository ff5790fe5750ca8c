"""What a source's parameters become in a model."""

import numpy as np

from vit_jax import models, trees
from vit_jax.errors import UserError
from vit_jax.weights import opening
from vit_jax.weights.merge import Merge
from vit_jax.weights.source import Source
from vit_jax.weights.started import started


def fit(
  found: Source,
  model,
  image_size: tuple[int, int],
  *,
  skip: list[str] = (),
  resize: str = 'bilinear',
) -> tuple[dict[str, np.ndarray], Merge]:
  """Returns ({name: array} of the model's variables, report); see `weights.fit`.

  Names are those of `trees.named`; what `report.reinitialized` names is not among them.
  The source may be of another model that this can start from, see `started`.
  """
  found, new, notes = started(found, model, resize)
  with opening.arrays_that_do_not_fit(f'{found.source} cannot be loaded:'):
    abstract = models.shapes_of(model, (*image_size, found.channels))
  shapes = {name: x.shape for name, x in trees.named(abstract).items()}
  try:
    taken, report = opening.fit(
      found.flat,
      shapes,
      family=models.family_of(model),
      fields=models.fields_of(model),
      old_size=found.image_size,
      new_size=image_size,
      skip=[*skip, *new],
      resize=resize,
    )
  except UserError as error:
    raise UserError(f'{found.source}: {error}') from None
  unused = [n for n in found.unused if n not in report.unused]
  return taken, report._replace(
    notes=[*notes, *report.notes], unused=[*report.unused, *unused]
  )


def describe(found: Source, report: Merge) -> str:
  """Returns what became of the source's parameters, a few lines."""
  what = f'{found.source} ({found.origin})'
  stats = sum(map(trees.is_statistic, report.taken))
  with_stats = f' and {stats} batch statistics' if stats else ''
  lines = [f'{what}: {len(report.taken) - stats} parameters{with_stats} taken']
  lines += report.notes
  for what, names in (
    ('initialised afresh', report.reinitialized),
    ('unused', report.unused),
  ):
    if names:
      more = f' and {len(names) - 4} more' if len(names) > 4 else ''
      lines.append(f'{what}: {", ".join(names[:4])}{more}')
  return '\n  '.join(lines)
