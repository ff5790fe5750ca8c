"""How well masked patches of held-out images are predicted."""

from collections.abc import Callable
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp

from vit_jax.data import pipeline
from vit_jax.evaluators.base import Metric, OneSplit


class MaskedPatches(OneSplit):
  """Means over the images of a split of the loss and accuracy of `masked_patches`.

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
    """Opens the data, `data.pipeline.evaluate(**data)`."""
    super().__init__(mesh, check_stop, data)

  def run(self, predict: Callable, variables) -> dict[str, float]:
    """Returns loss, accuracy (not of pixels), examples; bad_images if there are any."""
    totals = {'examples': 0.0}
    for sums in self.stepped(predict, variables):
      totals = {name: float(x) + totals.get(name, 0) for name, x in sums.items()}
    examples = totals.pop('examples')
    means = {name: total / examples for name, total in totals.items() if examples}
    return self.with_counts(means, examples, examples)

  def measure(self, predict, variables, batch) -> dict:
    """Returns sums over a batch."""
    batch = self.batches.on_device(batch)
    out = predict(variables, batch)
    real = batch['mask'] > 0
    # `where`, since 0 x nan of a padded row would be nan
    sums = {
      name: jnp.where(real, out[f'masked_{name}'], 0).sum()
      for name in ('loss', 'accuracy')
      if f'masked_{name}' in out
    }
    return sums | {'examples': real.sum(dtype=jnp.float32)}
