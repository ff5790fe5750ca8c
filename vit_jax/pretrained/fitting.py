"""What a source's parameters become in a model."""

import dataclasses

import jax
import jax.numpy as jnp
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
  """Returns ({name: array} of the model's variables, report); see `weights.fit`.

  Names are those of `trees.named`; what `report.reinitialized` names is not among them.
  """
  images = jax.ShapeDtypeStruct((1, *image_size, found.channels), jnp.float32)
  with weights.arrays_that_do_not_fit(f'{found.source} cannot be loaded:'):
    abstract = jax.eval_shape(model.init, jax.random.key(0), images)
  shapes = {name: x.shape for name, x in trees.named(abstract).items()}
  try:
    return weights.fit(
      found.flat,
      shapes,
      family=models.family(found.family),
      fields=fields_of(model),
      old_size=found.image_size,
      new_size=image_size,
      skip=list(skip),
      resize=resize,
    )
  except UserError as error:
    raise UserError(f'{found.source}: {error}') from None


def fields_of(model) -> dict:
  """Returns {field: value} of a model; of a tuned one, of that to which was added."""
  model = models.core(model)
  return {f.name: getattr(model, f.name) for f in dataclasses.fields(model)}


def describe(found: Source, report: Merge) -> str:
  """Returns what became of the source's parameters, a few lines."""
  what = f'{found.source} ({found.origin})'
  stats = sum(map(trees.is_statistic, report.taken))
  with_stats = f' and {stats} batch statistics' if stats else ''
  lines = [f'{what}: {len(report.taken) - stats} parameters{with_stats} taken']
  lines += report.notes
  for what, names in (
    ('initialised afresh', report.reinitialized),
    ('unused', [*report.unused, *found.unused]),
  ):
    if names:
      more = f' and {len(names) - 4} more' if len(names) > 4 else ''
      lines.append(f'{what}: {", ".join(names[:4])}{more}')
  return '\n  '.join(lines)
