"""Frozen features of whole splits: what every probe of a representation starts from."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import machine, sharding
from vit_jax.check import INT32, Count, Range
from vit_jax.data import pipeline, sources
from vit_jax.data.sources import subset
from vit_jax.errors import UserError, did_you_mean
from vit_jax.evaluators.batches import open_batches


@dataclasses.dataclass(frozen=True)
class DataSet:
  """A data set: a source, and the splits to fit on and to test on."""

  source: str
  train: str
  test: str
  num_classes: Count | None = None  # this and the rest as in `data.pipeline.evaluate`
  source_options: Annotated[dict | None, sources.check_options] = None
  classes: Annotated[
    list[Annotated[int, Range(0, INT32)] | str] | None, subset.check
  ] = None


def open_splits(
  datasets: dict, mesh, kind: type = DataSet, splits=('train', 'test'), **options
) -> dict[str, dict[str, pipeline.EvalBatches]]:
  """Returns {name: {split: its batches}}, in the order of `splits`.

  Args:
    datasets: {name: arguments of `kind`}.
    kind: `DataSet`, or a subclass with more splits.
    splits: names of the fields that are splits; one that is None is left out.
    **options: of `pipeline.evaluate`, the same for all: pp, batch_size.

  Raises:
    UserError: for unknown keys, data that is not there, or splits of one data set with
      different numbers of classes.
  """
  opened = {}
  for name, section in datasets.items():
    data = dataclasses.asdict(kind(**section)) | options
    named = {split: data.pop(split) for split in splits}
    opened[name] = {
      split: open_batches(mesh, split=expression, **data)
      for split, expression in named.items()
      if expression is not None
    }
    classes = {split: batches.num_classes for split, batches in opened[name].items()}
    if len(set(classes.values())) > 1:
      raise UserError(
        f'Data set {name!r} has different numbers of classes, {classes}. Set '
        'num_classes, or choose other splits.'
      )
  return opened


class Extractor:
  """Computes one feature of every image of a split, on all devices of a mesh."""

  def __init__(self, what: str, feature: str, mesh, check_stop: Callable[[], None]):
    """Compiles nothing yet.

    Args:
      what: the evaluator, in messages: 'few-shot'.
      feature: name of a [B, D] output of `predict`.
      mesh: over which batches are spread.
      check_stop: called before every batch; raises to leave.
    """
    self._what, self._feature = what, feature
    self._mesh, self._check_stop = mesh, check_stop
    self._extract = jax.jit(
      self._features, static_argnums=(0, 1), out_shardings=sharding.replicated(mesh)
    )
    # What remains to be done to a batch on the device depends on the one pp and on the
    # images that the host sends: data sets of the same kind share a compilation.
    self._on_device: dict[tuple, Callable] = {}

  def __call__(
    self, batches: pipeline.EvalBatches, predict: Callable, variables
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns features [N, D] float32 and labels int32 [N] of all that could be read.

    In the order of the split, the same on every host.

    Raises:
      UserError: if the model has no such feature, images have several labels, none could
        be read, or the features would not fit in memory.
    """
    kind = (batches.spec['image'].shape[1:], batches.spec['image'].dtype)
    on_device = self._on_device.setdefault(kind, batches.on_device)
    rows, pending = _Rows(self._what, batches), None
    with contextlib.closing(batches.iterate()) as local:
      for batch in local:  # one batch behind, so that host and device overlap
        self._check_stop()
        batch = sharding.global_batch(batch, self._mesh)
        pending, done = self._extract(predict, on_device, variables, batch), pending
        if done:
          rows.add(*jax.device_get(done))
    if pending:
      rows.add(*jax.device_get(pending))
    return rows.result()

  def _features(self, predict, on_device, variables, batch):
    if batch['label'].ndim != 1:
      raise UserError(f'{self._what} needs one label per image; the data has several.')
    out = predict(variables, on_device(batch))
    usable = [name for name, x in out.items() if x.ndim == 2]
    name = self._feature
    if name not in usable:
      shape = list(out[name].shape) if name in out else 'not there'
      raise UserError(
        f'{self._what} feature {name!r} is {shape}; the model has these of shape '
        f'[B, D]: {usable}.{did_you_mean(name, usable)}'
      )
    return out[name].astype(jnp.float32), batch['label'], batch['mask']


class _Rows:
  """Gathers rows in arrays of the split's size: joined chunks would take twice that."""

  def __init__(self, what: str, batches: pipeline.EvalBatches):
    self._what, self._batches, self._n = what, batches, 0

  def add(self, features, labels, mask) -> None:
    if not self._n:
      self._allocate(features.shape[1])
    read = mask > 0
    stop = self._n + np.count_nonzero(read)
    self._features[self._n : stop] = features[read]
    self._labels[self._n : stop] = labels[read]
    self._n = stop

  def result(self) -> tuple[np.ndarray, np.ndarray]:
    if not self._n:
      raise UserError(
        f'{self._what}: no image of {self._batches.source.name}, '
        f'{self._batches.split}, could be read.'
      )
    return self._features[: self._n], self._labels[: self._n]

  def _allocate(self, width: int) -> None:
    N = self._batches.num_examples
    if 4 * N * width > machine.memory():
      raise UserError(
        f'{self._what}: {N:,} features of {width} numbers, of '
        f'{self._batches.source.name}, {self._batches.split}, need '
        f'{4 * N * width / 2**30:,.1f} GiB, of which this machine has '
        f'{machine.memory() / 2**30:,.1f}. Choose a part of the split.'
      )
    self._features = np.empty((N, width), np.float32)
    self._labels = np.empty(N, np.int32)


def spread(x: np.ndarray, multiple: int, mesh) -> jax.Array:
  """Returns rows [N, ...] over the mesh's devices as a batch is, zeros after the last.

  Args:
    x: the same on every host.
    multiple: each device gets the same multiple of it.
  """
  step = multiple * sharding.batch_divisor(mesh)
  total = -(-len(x) // step) * step

  def part(index):
    rows = x[index[0]]
    missing = len(range(*index[0].indices(total))) - len(rows)
    return np.pad(rows, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) if missing else rows

  shape = (total, *x.shape[1:])
  return jax.make_array_from_callback(shape, sharding.batch_sharding(mesh), part)
