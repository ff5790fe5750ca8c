"""Parameters as a source holds them."""

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np

from vit_jax.errors import UserError, one_line


@dataclasses.dataclass(frozen=True)
class Source:
  """Parameters read from a source, and the model they belong to.

  Attributes:
    source: as the user wrote it.
    format: google, big_vision, timm, hf, bit, authors, detectron2, or run.
    family: a key of models.MODELS.
    fields: of the model.
    flat: our names, blocks not stacked, float32; the model's batch statistics too, see
      `trees.named`.
    image_size: (H, W) in pixels; None: unknown.
    channels: of the images.
    class_names: one per class, or None.
    pp: the evaluation pipeline, or None.
    unused: names in the source that are not parameters of the model.
    step: of a run, the one that was read.
    tune: the config's section, where tuning added parameters; else {}.
    added: those parameters, 'tune/...', and their batch statistics, 'batch_stats/tune/...';
      None: they start as in training.
  """

  source: str
  format: str
  family: str
  fields: dict
  flat: dict[str, np.ndarray]
  image_size: tuple[int, int] | None
  channels: int
  class_names: list[str] | None
  pp: str | None
  unused: list[str]
  step: int | None = None
  tune: dict = dataclasses.field(default_factory=dict)
  added: dict[str, np.ndarray] | None = dataclasses.field(default_factory=dict)

  @property
  def origin(self) -> str:
    """'timm vit'; of a run also the step: 'run vit, step 500'."""
    step = '' if self.step is None else f', step {self.step}'
    return f'{self.format} {self.family}{step}'


@contextlib.contextmanager
def errors_of(source: str) -> Iterator[None]:
  """Turns errors of odd names, shapes and configs into a line that begins with `source`."""
  try:
    yield
  except UserError:
    raise
  except ValueError as error:
    raise UserError(f'{source}: {one_line(error, 600)}.') from None
  except (KeyError, TypeError, IndexError, AttributeError, ArithmeticError) as error:
    why = one_line(f'{type(error).__name__}: {error}')
    raise UserError(f'{source} does not fit together: {why}.') from None
