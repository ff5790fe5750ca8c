"""What a source's parameters become in a model."""

import jax
import numpy as np

from vit_jax import models, trees, weights
from vit_jax.errors import UserError
from vit_jax.pretrained.source import Source
from vit_jax.weights.merge import Merge


def fit(
  found: Source,
  model,
  image_size: tuple[int, int],
  *,
  skip: list[str] = (),
  resize: str = 'bilinear',
) -> tuple[dict[str, np.ndarray], Merge]:
  """Returns ({name: array} of the model's parameters, report); see `weights.fit`.

  Parameters that `report.reinitialized` names are not among them.
  """
  images = models.inputs_of(model, (*image_size, found.channels))
  with weights.arrays_that_do_not_fit(f'{found.source} cannot be loaded:'):
    abstract = jax.eval_shape(model.init, jax.random.key(0), images)['params']
  shapes = {name: x.shape for name, x in trees.flatten(abstract).items()}
  try:
    return weights.fit(
      found.flat,
      shapes,
      family=models.family_of(model),
      fields=models.fields_of(model),
      old_size=found.image_size,
      new_size=image_size,
      skip=list(skip),
      resize=resize,
    )
  except UserError as error:
    raise UserError(f'{found.source}: {error}') from None


def describe(found: Source, report: Merge) -> str:
  """Returns what became of the source's parameters, a few lines."""
  what = f'{found.source} ({found.origin})'
  lines = [f'{what}: {len(report.taken)} parameters taken']
  lines += report.notes
  for what, names in (
    ('initialised afresh', report.reinitialized),
    ('unused', [*report.unused, *found.unused]),
  ):
    if names:
      more = f' and {len(names) - 4} more' if len(names) > 4 else ''
      lines.append(f'{what}: {", ".join(names[:4])}{more}')
  return '\n  '.join(lines)
