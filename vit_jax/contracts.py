"""The contracts between the parts of vit_jax, as Protocols.

A model, task, evaluator or tuning method needs no base class: it has the attributes and
methods below. A source is a subclass of `data.sources.base.Source`, which adds
the rest. `tests/test_contracts.py` checks every entry of every table, and
docs/guides/extending.md shows an example of each.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

# {'params': ..., and 'batch_stats': ... with batch norms}
Variables = Mapping[str, Any]
Batch = dict[str, Any]  # {feature: array of B rows}


class Model(Protocol):
  """A Linen module. `dtype` is that of its body; final norm, head and loss are float32."""

  def __call__(self, images, *, train: bool = False, features: bool = True):
    """Returns (outputs, out).

    `outputs` depends on `Family.outputs`: logits [B, K] float32 of a classifier. `out` is
    a flat dict of named features, the same in training and evaluation, scanned or not.

    Args:
      images: [B, H, W, C] in [-1, 1].
      features: False if the caller reads 'pre_logits' alone from `out`.
    """


class Task(Protocol):
  """The objective of a run. Its keyword-only arguments are the config's `task` section.

  `batch['weight']` [B] sums to 1 over the global batch, and is 0 for masked examples.
  Losses and metrics are sums weighted by it, so that they add up over micro-batches.
  """

  # The feature of the data whose classes the model has a head for; None: no head.
  CLASSES: ClassVar[str | None]
  # The kind of outputs that the model must have, see `models.family.Family`.
  OUTPUTS: ClassVar[Literal['classes', 'maps', 'pixels', 'boxes']]
  # The name above the task's own parameters, beside the model's; None: it has none.
  OWN: ClassVar[str | None]

  def __init__(self, model: Model, spec: dict, **options):
    """Takes a model and the spec of its batches, {feature: ShapeDtypeStruct}."""

  def init(self, rng, spec: dict) -> Variables:
    """Returns new variables."""

  def prepare(self, batch: Batch, rng) -> Batch:
    """Returns a batch before it is cut into micro-batches, as for mixup."""

  def loss(self, variables: Variables, batch: Batch, rng):
    """Returns (loss, (metrics {name: scalar}, new batch statistics)) in training."""

  def predict(self, variables: Variables, batch: Batch) -> dict[str, Any]:
    """Returns the outputs and named features in evaluation."""


class Evaluator(Protocol):
  """A measurement. Its keyword-only arguments are a section of the config's `evals`.

  It opens its data when it is built, so that mistakes end a run before training. Its
  numbers are exact: padding and broken images are masked, sums and counts come back from
  the device, and the host divides.

  It may have `TASK`, the name of the one task whose `predict` it reads; `predictions`, the
  arrays of the last run that a run's page reads; and `note`, a sentence for the user. It may
  take a third argument `model`, the classes of the model.
  """

  # {regex of the numbers' names: how they are read}.
  METRICS: ClassVar[dict[str, Any]]

  def __init__(self, mesh, check_stop: Callable[[], None], **options):
    """Opens the data. `check_stop` raises to leave; it is called before every batch."""

  def run(self, predict: Callable, variables: Variables) -> dict[str, float]:
    """Returns {name: number}; `predict(variables, batch)` is that of the task, not jitted."""


class Source(Protocol):
  """The examples of one split. Its keyword-only arguments are `source_options`."""

  name: str  # as the user wrote it, for messages
  num_classes: int | None
  class_names: list[str] | None
  # {name: the kind of value that an example holds}, see `data.features`.
  features: Mapping[str, Any]
  # Hexadecimal digits, a cheap hash that changes when the examples do: see
  # `data.sources.base.fingerprint`.
  fingerprint: str

  def __init__(self, target: str, split: str, **options):
    """Opens a split of 'scheme:target'."""

  def __len__(self) -> int:
    """Returns the number of examples."""

  def read(self, indices: np.ndarray) -> list[dict]:
    """Returns examples; one that cannot be read has an 'error', the reason."""


class Op(Protocol):
  """An op of a string pipeline: a function made by the factory that `data.ops` names."""

  def __call__(self, images, u):
    """Maps images [..., H, W, C], alone and in a batch alike, given numbers u in [0, 1)."""


class Method(Protocol):
  """A way to tune a model. Its fields are the config's `tune` section."""

  trains_backbone: ClassVar[bool]  # whether it changes parameters of the model itself
  by_block: ClassVar[bool]  # whether it treats each block on its own: not scanned ones

  def rules(self, backbone) -> list[tuple[str, bool]]:
    """Returns the rules for which of the model's parameters are trained."""

  def added(self, backbone):
    """Returns the Linen module that is added, see `tune.tuned`; None: nothing is."""

  def folded(self, params: dict) -> dict:
    """Returns {name: array}, the added parameters merged into the model's own."""


class Format(Protocol):
  """A published format of one family's files, see `weights.formats`."""

  name: str  # the publisher's: google, big_vision, timm, hf, ...
  family: str  # a key of `models.MODELS`
  marker: str | tuple[str, ...]  # regexes of names that every such file has, few others

  def read(self, arrays: dict[str, np.ndarray], facts):
    """Returns (section `model`, {our name: array}), given the facts of its config."""

  def write(self, flat: dict[str, np.ndarray], fields: dict, image_size, class_names):
    """Returns ({their name: array}, config)."""
