"""Code that evaluators share: metrics, opening the data, and one pass over its batches."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

import jax
from jax.sharding import Mesh

from vit_jax import contracts, sharding
from vit_jax.data import pipeline
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Metric:
  """How a metric is displayed and compared.

  Attributes:
    percent: whether it is a fraction to display as a percentage.
    larger_is_better: None if no direction is better, as for a count.
    std: suffix of the name of its standard deviation.
    detail: whether the summary of a run leaves it out.
    of_images: whether it is a fraction of the `examples` images, so that `interval` applies.
      An AP, an IoU or a fraction of pixels is not.
  """

  percent: bool = False
  larger_is_better: bool | None = None
  std: str | None = None
  detail: bool = False
  of_images: bool = False

  def text(self, value: float) -> str:
    """Formats the number: '98.06%', '50,000', '0.0813'."""
    if self.percent:
      return f'{value:.2%}'
    return f'{value:,.0f}' if float(value).is_integer() else f'{value:.4g}'

  def format_with_std(self, values: dict[str, float], name: str, width: int = 0) -> str:
    """Formats a number of `values`, with ± its standard deviation if there is one."""
    text = f'{self.text(values[name]):>{width}}'
    std = values.get(f'{name}{self.std or " "}')
    return text if std is None else f'{text} ± {self.text(std)}'


def interval(share: float, examples: float) -> tuple[float, float]:
  """Returns the 95 % interval of a share of independent examples (Wilson, 1927)."""
  z2 = 1.96**2 / examples
  middle, width = share + z2 / 2, math.sqrt(z2 * (share * (1 - share) + z2 / 4))
  return (middle - width) / (1 + z2), (middle + width) / (1 + z2)


def match_metric(metrics: dict[str, Metric], name: str) -> Metric:
  """Returns the first metric whose regex matches the whole name, or `Metric()`."""
  matches = (m for pattern, m in metrics.items() if re.fullmatch(pattern, name))
  return next(matches, Metric())


def open_batches(mesh: Mesh, **data) -> pipeline.EvalBatches:
  """Opens the data of an evaluation; `data` are the arguments of `pipeline.EvalBatches`."""
  divisor, size = sharding.batch_divisor(mesh), data['batch_size']
  if size % divisor:
    raise UserError(
      f'Evaluation batch_size={size} must be a multiple of {divisor}, the product of '
      f'mesh.data and mesh.fsdp, such as {max(1, round(size / divisor)) * divisor}.'
    )
  return pipeline.EvalBatches(**sharding.host_of_batch(mesh), **data)


def run_steps(
  step: Callable, batches: Iterable[dict], mesh: Mesh, check_stop: Callable[[], None]
) -> Iterator[Any]:
  """Yields the result of `step(batch)` for every batch, on the host.

  It runs one batch ahead: the host reads a result while the device computes the next one.

  Args:
    batches: an iterator of this host's parts of the batches; it is closed at the end.
  """
  pending = None
  with contextlib.closing(batches):
    for batch in batches:
      check_stop()
      done = step(sharding.global_batch(batch, mesh))
      if pending is not None:
        yield jax.device_get(pending)
      pending = done
  if pending is not None:
    yield jax.device_get(pending)


class OneSplit(contracts.Evaluator):
  """Base class of evaluators that pass once over one split.

  A subclass has `measure(predict, variables, batch)`, which is jitted, and returns sums and
  counts over a batch.
  """

  def __init__(
    self,
    mesh: Mesh,
    check_stop: Callable[[], None],
    model: Any = None,
    *,
    data: Annotated[dict, pipeline.check_evaluate],
  ):
    """Opens the data.

    Args:
      mesh, check_stop, model: as in `contracts.Evaluator`.
      data: the arguments of `data.pipeline.EvalBatches`.
    """
    super().__init__(mesh, check_stop, model)
    self.batches = open_batches(mesh, **data)
    # `predict` is static, so that all runs of one evaluator share a compilation.
    self._step = jax.jit(
      self.measure,
      static_argnums=0,
      out_shardings=sharding.replicated_sharding(mesh),
      compiler_options=sharding.compiler_options(mesh),
    )

  def run_steps(self, predict: Callable, variables, batches=None) -> Iterator[Any]:
    """Yields `measure` of every batch of the split, or of `batches`."""
    step = lambda batch: self._step(predict, variables, batch)
    batches = self.batches.iterate() if batches is None else batches
    return run_steps(step, batches, self.mesh, self.check_stop)

  def add_counts(self, numbers: dict, examples: float, read: float) -> dict[str, float]:
    """Adds 'examples' and 'bad_images' to the numbers of an evaluation.

    Args:
      examples: number of images that were read and have a label.
      read: number of images that were read, with a label or without.
    """
    bad = self.batches.num_examples - read
    if not examples:
      raise UserError(
        f'Evaluation: none of {self.batches.num_examples} images has a label; {bad:g} '
        'could not be read.'
      )
    return numbers | {'examples': examples} | ({'bad_images': bad} if bad else {})
