"""The contracts between the parts of vit_jax.

A task needs no base class: it has the attributes and methods of `Task`. An evaluator has the
base class `Evaluator`. Other parts have a class that says the same: a model is a
`models.base.Model`, a source a `data.sources.base.Source`, a tuning method a
`tune.method.Method`, a published format a `weights.formats.Format`; an op is a function, see
`data.ops.registry.op`. `tests/test_contracts.py` checks every entry of every table, and
docs/guides/extending.md shows an example of each.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Protocol

# {'params': ...}, and with batch norms 'batch_stats'.
Variables = Mapping[str, Any]
# {feature: array of B rows}.
Batch = dict[str, Any]


class Task(Protocol):
  """The objective of a run. Its keyword-only arguments are the config's `task` section.

  `batch['weight']` [B] sums to 1 over the global batch, and is 0 for masked examples.
  Losses and metrics are sums weighted by it, so that they add up over micro-batches.

  A task may also have `find_problem(metrics) -> str`: why a run ends after a step with these
  metrics, or ''.
  """

  # The label feature whose classes the model's head predicts; None: the model has no head.
  CLASSES: ClassVar[str | None]
  # The kind of outputs that the model must have, see `models.base.Family`.
  OUTPUTS: ClassVar[Literal['classes', 'maps', 'pixels', 'boxes', 'regions']]
  # The key in `params` under which the task's own parameters stand, next to those of the
  # model; None if the task has no parameters.
  OWN: ClassVar[str | None]

  def __init__(self, model, spec: dict, **options):
    """Takes a `models.base.Model` and the spec of its batches, {feature: ShapeDtypeStruct}."""

  def init(self, rng, spec: dict) -> Variables:
    """Initialises the variables of the model and of the task."""

  def prepare(self, batch: Batch, rng, state) -> Batch:
    """Changes a whole batch, such as by mixup, before it is cut into micro-batches.

    It can add the targets of a teacher, such as the average of the parameters or frozen
    ones. What it computes has no gradient.

    Args:
      state: the `train.step.State` before the step.
    """

  def loss(self, variables: Variables, batch: Batch, rng):
    """Returns (loss, (metrics {name: scalar}, new batch statistics)) in training.

    If the run averages its parameters, `variables['average']` are the averaged ones.
    """

  def predict(self, variables: Variables, batch: Batch) -> dict[str, Any]:
    """Returns the outputs and named features in evaluation."""


class Evaluator:
  """A measurement. Its keyword-only arguments are a section of the config's `evals`.

  It opens its data when it is built, so that mistakes end a run before training. Its
  numbers are exact: padding and broken images are masked, the device returns sums and
  counts, and the host divides.

  Attributes:
    METRICS: {regex of metric names: their `evaluators.base.Metric`}.
    TASKS: names of the tasks whose `predict` it can read; None: those of every task.
    batches: the batches of its split; None if it has no split, or several.
    note: a sentence for the user on its data, or ''.
    predictions: arrays of the last run for the run's page, or None.
  """

  METRICS: ClassVar[dict[str, Any]] = {}
  TASKS: ClassVar[tuple[str, ...] | None] = None
  batches: Any = None
  note: str = ''
  predictions: dict | None = None

  def __init__(self, mesh, check_stop: Callable[[], None], model: Any = None):
    """Opens the data.

    Args:
      check_stop: called before every batch; may raise an exception to stop.
      model: the `evaluators.class_match.Classes` of the model, or None if they are unknown.
    """
    self.mesh, self.check_stop = mesh, check_stop

  def run(self, predict: Callable, variables: Variables) -> dict[str, float]:
    """Returns {metric: number}; `predict(variables, batch)` is the task's, not jitted."""
    raise NotImplementedError
