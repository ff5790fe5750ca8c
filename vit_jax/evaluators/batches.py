"""Opening the data of an evaluator."""

from jax.sharding import Mesh

from vit_jax import sharding
from vit_jax.data import pipeline
from vit_jax.errors import UserError


def open_batches(mesh: Mesh, **data) -> pipeline.EvalBatches:
  """Returns `pipeline.evaluate(**data)`.

  Raises:
    UserError: its errors, and a batch size that the mesh cannot split.
  """
  divisor, size = sharding.batch_divisor(mesh), data.get('batch_size')
  if isinstance(size, int) and size % divisor:
    raise UserError(
      f'Evaluation batch_size={size} must be a multiple of {divisor}, data x fsdp of '
      f'the mesh. Nearest: {max(1, round(size / divisor)) * divisor}.'
    )
  return pipeline.evaluate(**sharding.host_of_batch(mesh), **data)
