"""Opening the data of an evaluator."""

import math
from collections.abc import Callable

from jax.sharding import Mesh

from vit_jax import machine, sharding
from vit_jax.data import pipeline
from vit_jax.errors import UserError


def open_batches(
  mesh: Mesh, check: Callable | None = None, **data
) -> pipeline.EvalBatches:
  """Returns `pipeline.evaluate(**data)`.

  Args:
    check: called with the source before its examples are preprocessed; raises UserError
      for one that the evaluator cannot use.

  Raises:
    UserError: its errors, and for a batch size that the mesh cannot split, or that is
      larger than the split or the host's memory.
  """
  divisor, size = sharding.batch_divisor(mesh), data.get('batch_size')
  if isinstance(size, int) and size % divisor:
    raise UserError(
      f'Evaluation batch_size={size} must be a multiple of {divisor}, data x fsdp of '
      f'the mesh. Nearest: {max(1, round(size / divisor)) * divisor}.'
    )
  place = sharding.host_of_batch(mesh)
  batches = pipeline.evaluate(**place, **data)
  if check:
    check(batches.source)
  whole = -(-batches.num_examples // divisor) * divisor
  if batches.batch_size > max(whole, _PADDED):
    raise UserError(
      f'Evaluation batch_size={batches.batch_size} for {batches.num_examples} examples: '
      f'the rest would be padding. At most {max(whole, _PADDED)}.'
    )
  _check_memory(batches, data.get('prefetch', 2), place['hosts'])
  return batches


# Batches up to this size, as in recipes, may be larger than the split.
_PADDED = 4096


def _check_memory(batches: pipeline.EvalBatches, prefetch: int, hosts: int) -> None:
  """Raises UserError if the prefetched batches and two in use exceed the host's memory."""
  size = sum(math.prod(x.shape) * x.dtype.itemsize for x in batches.spec.values())
  memory = machine.memory()
  if (wanted := size // hosts * (prefetch + 2)) > memory:
    raise UserError(
      f'Evaluation batch_size={batches.batch_size}: {prefetch + 2} batches in memory '
      f'need {wanted / 2**30:,.1f} GiB, of which this machine has '
      f'{memory / 2**30:,.1f}. Lower batch_size, or prefetch={prefetch}.'
    )
