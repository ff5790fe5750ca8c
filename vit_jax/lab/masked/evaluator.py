"""How well masked patches of held-out images are predicted."""

import contextlib
from collections.abc import Callable
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp

from vit_jax import sharding
from vit_jax.data import pipeline
from vit_jax.errors import UserError
from vit_jax.evaluators.batches import open_batches
from vit_jax.evaluators.metric import Metric


class MaskedPatches:
  """Means over the images of a split of what `tasks.masked_patches` predicts of each.

  The same patches of an image are corrupted, in the same way, in every evaluation.
  """

  TASK = 'masked_patches'
  METRICS: ClassVar = {
    'accuracy': Metric(percent=True, larger_is_better=True),
    'loss': Metric(larger_is_better=False),
    'examples': Metric(),
    'bad_images': Metric(),
  }

  def __init__(
    self,
    mesh: jax.sharding.Mesh,
    check_stop: Callable[[], None],
    *,
    data: Annotated[dict, pipeline.check_evaluate],
  ):
    """Opens the data.

    Args:
      data: the arguments of `data.pipeline.evaluate`.

    Raises:
      UserError: for data that cannot be read.
    """
    self.batches = open_batches(mesh, **data)
    self._mesh, self._check_stop = mesh, check_stop
    # `predict` is static: one compilation for all runs of one evaluator.
    self._step = jax.jit(
      self._measure, static_argnums=0, out_shardings=sharding.replicated(mesh)
    )

  def run(self, predict: Callable, variables) -> dict[str, float]:
    """Returns loss, accuracy (not of pixels), examples; bad_images if there are any.

    The loss is that of training, without dropout; examples is the number that both are
    means over; bad_images could not be read and are not in it.
    """
    totals: dict[str, float] = {}
    pending = None  # one batch behind, so that the host reads while the device works
    with contextlib.closing(self.batches.iterate()) as batches:
      for batch in batches:
        self._check_stop()
        done = self._step(predict, variables, sharding.global_batch(batch, self._mesh))
        _add(totals, pending)
        pending = done
    _add(totals, pending)
    examples = totals.pop('examples')
    bad = self.batches.num_examples - examples
    if not examples:
      raise UserError(f'Evaluation could read none of {bad:g} images.')
    metrics = {name: total / examples for name, total in totals.items()}
    metrics['examples'] = examples
    return metrics | ({'bad_images': bad} if bad else {})

  def _measure(self, predict, variables, batch) -> dict:
    """Returns sums over a batch."""
    batch = self.batches.on_device(batch)
    out = predict(variables, batch)
    real = batch['mask'] > 0
    measured = {
      name: out[f'masked_{name}']
      for name in ('loss', 'accuracy')
      if f'masked_{name}' in out
    }
    # `where`, since 0 x nan of a padded row would be nan
    sums = {name: jnp.where(real, x, 0).sum() for name, x in measured.items()}
    return sums | {'examples': real.sum(dtype=jnp.float32)}


def _add(totals: dict, sums: dict | None) -> None:
  for name, value in jax.device_get(sums or {}).items():
    totals[name] = totals.get(name, 0) + float(value)
