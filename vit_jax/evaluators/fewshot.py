"""Few-shot linear regression on frozen features, the paper's cheap probe of quality."""

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar, Literal

import jax
import numpy as np

from vit_jax import sharding
from vit_jax.check import Count, Seed, distinct, nonempty
from vit_jax.errors import UserError
from vit_jax.evaluators import lsr
from vit_jax.evaluators.base import Metric
from vit_jax.evaluators.probe import Probe

# Protocol -> ridge penalties to choose from.
PROTOCOLS = {'fixed': (lsr.FIXED_L2,), 'sweep': lsr.SWEEP_L2}


class FewShot(Probe):
  """Test accuracy of a linear model that is fitted to a few examples per class.

  Protocol 'fixed' has one ridge penalty, 2^10, as in today's big_vision. Protocol 'sweep'
  chooses, for each data set, the penalty of 2^-10 ... 2^19 with the best mean accuracy over
  the *other* data sets: "leave-self-out", as in the older code of the ViT paper.
  """

  METRICS: ClassVar = {
    r'.+_\d+shot(_sweep)?': Metric(percent=True, larger_is_better=True, std='_std'),
    r'.+_\d+shot(_sweep)?_std': Metric(percent=True, detail=True),
    r'.+_\d+shot(_sweep)?_seed\d+': Metric(percent=True, detail=True),
    r'.+_\d+shot_sweep_log2_l2': Metric(),
  }

  def __init__(
    self,
    mesh,
    check_stop,
    model=None,
    *,
    shots: Annotated[Sequence[Count], nonempty] = (1, 5, 10, 25),
    seeds: Annotated[Sequence[Seed], distinct] = (0, 1, 2),
    protocol: Literal[tuple(PROTOCOLS)] = 'fixed',
    **options,
  ):
    """Opens the data; `options` are those of `Probe`.

    Args:
      shots: numbers of examples per class.
      seeds: seeds for choosing the examples.
      protocol: 'fixed' or 'sweep'.
    """
    self.protocol, self.l2 = protocol, PROTOCOLS[protocol]
    self.shots, self.seeds = tuple(shots), tuple(seeds)
    if protocol == 'sweep' and len(options['datasets']) < 2:
      raise UserError(
        "few-shot protocol 'sweep' chooses the ridge penalty of a data set on the other data "
        f"sets, but there is only {list(options['datasets'])}: use protocol='fixed'."
      )
    super().__init__(mesh, check_stop, model, **options)
    for name, splits in self.datasets.items():
      train = splits['train']
      if train.source.labels is not None:
        self._check_counts(name, train, np.asarray(train.source.labels))

  def run(self, predict: Callable, variables) -> dict[str, float]:
    """Returns accuracies, as fractions, and their spread.

    For every data set and number of shots, `NAME_5shot` is the mean over the seeds,
    `NAME_5shot_std` the sample standard deviation (with two seeds or more), and
    `NAME_5shot_seed0` the accuracy of one seed. With protocol 'sweep', the names have
    `5shot_sweep` in place of `5shot`, and `NAME_5shot_sweep_log2_l2` is the chosen ridge.
    """
    grid = super().run(predict, variables)  # {'NAME_5': [seeds, R]}
    suffix = '_sweep' if self.protocol == 'sweep' else ''
    metrics = {}
    for key, accuracies in grid.items():
      name, _, shots = key.rpartition('_')
      key = f'{name}_{shots}shot{suffix}'
      best = 0
      if self.protocol == 'sweep':
        others = [grid[f'{other}_{shots}'] for other in self.datasets if other != name]
        best = int(np.mean([a.mean(0) for a in others], axis=0).argmax())
        metrics[f'{key}_log2_l2'] = float(np.log2(self.l2[best]))
      per_seed = [float(a) for a in accuracies[:, best]]
      metrics[key] = statistics.fmean(per_seed)
      if len(per_seed) > 1:
        metrics[f'{key}_std'] = float(np.std(per_seed, ddof=1))
      for seed, value in zip(self.seeds, per_seed, strict=True):
        metrics[f'{key}_seed{seed}'] = value
    return metrics

  def measure(self, name, splits, extract) -> dict[int, np.ndarray]:
    """Returns {shots: accuracies [seeds, R]} of one data set."""
    train, test = splits['train'], splits['test']
    train_x, train_y = extract(train)
    self._check_counts(name, train, train_y)
    # The problem is small and dense, so every host solves it by itself.
    own = sharding.make_mesh(devices=self.mesh.local_devices[:1])
    place = functools.partial(jax.device_put, device=sharding.replicated_sharding(own))
    test_xy = place(extract(test))
    results = {shots: [] for shots in self.shots}
    for seed in self.seeds:
      chosen = lsr.draw(train_y, train.num_classes, self.shots, seed)
      for shots, rows in chosen.items():
        self.check_stop()
        few, l2 = place((train_x[rows], train_y[rows])), place(np.float32(self.l2))
        with jax.set_mesh(own):
          right = lsr.accuracies(*few, *test_xy, l2, num_classes=train.num_classes)
        results[shots].append(right)
    return {shots: np.stack(jax.device_get(rows)) for shots, rows in results.items()}

  def _check_counts(self, name, train, labels) -> None:
    counts = np.bincount(labels, minlength=train.num_classes)
    few = np.flatnonzero(counts < max(self.shots))
    if len(few):
      c = int(few[0])
      label = f'{c} ({train.class_names[c]})' if train.class_names else str(c)
      raise UserError(
        f'few-shot {name}: class {label} has {counts[c]} training examples, fewer than '
        f'{max(self.shots)} shots. That holds for {len(few)} of the classes.'
      )
