"""Parameters as a source holds them."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from vit_jax.errors import UserError, one_line


@dataclasses.dataclass(frozen=True)
class Source:
  """Parameters read from a source, and the model they belong to."""

  source: str  # as the user wrote it
  format: (
    str  # google, big_vision, timm, hf, bit, authors, open_clip, detectron2, or run
  )
  family: str  # a key of models.MODELS
  fields: dict  # the model's
  # Our names, see `trees.flatten_variables`, blocks not stacked, float32; batch statistics too.
  flat: dict[str, np.ndarray]
  image_size: tuple[int, int] | None  # (H, W) in pixels; None: unknown
  channels: int  # the images'
  class_names: list[str] | None  # one per class
  pp: str | None  # the evaluation pipeline
  unused: list[str]  # names in the source that are not parameters of the model
  step: int | None = None  # the step that was read from a run
  # The config's section, where tuning added parameters; else {}.
  tune: dict = dataclasses.field(default_factory=dict)
  # Those, 'tune/...', and their batch statistics; None: they start as in training.
  added: dict[str, np.ndarray] | None = dataclasses.field(default_factory=dict)
  # The arrays of a text tower in the same file, a `families.text.TextArrays`, or None.
  text: Any = None
  resize: str = 'bilinear'  # how its code resizes positions, see `adapt.RESIZERS`

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
