"""Extracts frozen features of whole splits, the input of every probe of a representation."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import contracts, distributed, sharding, terminal
from vit_jax.check import Count, Section, Size, nonempty
from vit_jax.data import pipeline, sources
from vit_jax.data.ops import registry
from vit_jax.data.sources import subset
from vit_jax.errors import UserError, did_you_mean
from vit_jax.evaluators.base import open_batches, run_steps


@dataclasses.dataclass(frozen=True)
class DataSet:
  """A data set: a source, and the splits to fit on and to test on."""

  source: str
  train: str
  test: str
  # For these three, see `data.pipeline.EvalBatches`.
  num_classes: Count | None = None
  source_options: Annotated[dict | None, sources.check_options] = None
  classes: subset.Classes = None


# The type of a probe's `datasets`, {name: fields of a `DataSet`}.
DataSets = Annotated[dict[str, Annotated[dict, Section(DataSet)]], nonempty]


class Probe(contracts.Evaluator):
  """Base class of evaluators that fit to the features of one split and test on another.

  A subclass has `measure(name, splits, extract)`, which returns the numbers of one data
  set. It calls `extract(batches)` for features float32 [N, D] and labels int32 [N].

  Attributes:
    datasets: {name: {split: its batches}}.
  """

  # The class that holds a section of `datasets`.
  DATA: ClassVar[type] = DataSet

  def __init__(
    self,
    mesh: jax.sharding.Mesh,
    check_stop: Callable[[], None],
    model=None,
    *,
    datasets: DataSets,
    pp: Annotated[str, registry.check_pipeline],
    batch_size: Size,
    feature: str = 'pre_logits',
  ):
    """Opens the data.

    Args:
      datasets: {name of a data set: fields of `DATA`, such as source, train and test}.
      pp: preprocessing; 'decode|resize(256)|central_crop(224)|value_range(-1, 1)' in the
        reference code.
      batch_size: number of images in a batch, over all devices.
      feature: name of an output [B, D] of `predict`.
    """
    super().__init__(mesh, check_stop, model)
    self._feature = feature
    self.datasets: dict[str, dict[str, pipeline.EvalBatches]] = {}
    for name, section in datasets.items():
      data = dataclasses.asdict(self.DATA(**section))
      data |= {'pp': pp, 'batch_size': batch_size}
      named = {x: data.pop(x) for x in ('train', 'val', 'test') if x in data}
      self.datasets[name] = {
        split: open_batches(mesh, split=expression, **data)
        for split, expression in named.items()
        if expression is not None
      }
      splits = self.datasets[name].items()
      classes = {k: batches.classes_of('label')[0] for k, batches in splits}
      if len(set(classes.values())) > 1:
        raise UserError(
          f'Data set {name!r} has different numbers of classes, {classes}: set num_classes.'
        )
    self._step = jax.jit(
      self._select,
      static_argnums=(0, 1),
      out_shardings=sharding.replicated_sharding(mesh),
      compiler_options=sharding.compiler_options(mesh),
    )
    # {kind of images: preprocessing on the device}. It depends on `pp`, which all data sets
    # have in common, and on the images that the host sends. Data sets with the same kind of
    # images therefore share a compilation.
    self._on_device: dict[tuple, Callable] = {}

  def run(self, predict: Callable, variables) -> dict[str, float]:
    """Returns {'NAME_KEY': number} for every data set NAME and KEY of `measure`."""
    extract = lambda batches: self._extract(batches, predict, variables)
    every, noun = self.datasets.items(), type(self).__name__
    # The batches of a single data set have a bar of their own.
    quiet = len(every) == 1 or not distributed.is_first()
    return {
      f'{name}_{key}': value
      for name, splits in terminal.progress(every, len(every), noun, 'data sets', quiet)
      for key, value in self.measure(name, splits, extract).items()
    }

  def _extract(
    self, batches: pipeline.EvalBatches, predict: Callable, variables
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns (features, labels) in the order of the split, the same on every host."""
    kind = (batches.spec['image'].shape[1:], batches.spec['image'].dtype)
    on_device = self._on_device.setdefault(kind, batches.finish_on_device)
    step = lambda batch: self._step(predict, on_device, variables, batch)
    features, n = None, 0
    # Allocate arrays for the whole split, because joining parts would need twice the memory.
    labels = np.empty(batches.num_examples, np.int32)
    for x, y, mask in run_steps(step, batches.iterate(), self.mesh, self.check_stop):
      if features is None:
        features = np.empty((len(labels), x.shape[1]), np.float32)
      read = mask > 0
      stop = n + np.count_nonzero(read)
      features[n:stop], labels[n:stop], n = x[read], y[read], stop
    if not n:
      raise UserError(
        f'No image of {batches.source.name}, {batches.split}, could be read.'
      )
    return features[:n], labels[:n]

  def _select(self, predict, on_device, variables, batch):
    if batch['label'].ndim != 1:
      raise UserError('A probe needs one label per image; the data has several.')
    out = predict(variables, on_device(batch))
    usable = [name for name, x in out.items() if x.ndim == 2]
    name = self._feature
    if name not in usable:
      shape = (
        f'has the shape {list(out[name].shape)}' if name in out else 'does not exist'
      )
      raise UserError(
        f'feature {name!r} {shape}; features of shape [B, D] are {usable}.'
        f'{did_you_mean(name, usable)}'
      )
    return out[name].astype(jnp.float32), batch['label'], batch['mask']
