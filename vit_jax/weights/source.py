"""The facts about a source of weights, without their arrays (`Header`) and with them."""

import abc
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from vit_jax import models
from vit_jax.errors import UserError, one_line


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header(abc.ABC):
  """The facts about the weights of a file or run, without their arrays."""

  source: str  # the user's text
  # google, big_vision, timm, hf, bit, authors, open_clip, detectron2, or run
  format: str
  family: str  # a key of `models.MODELS`
  fields: dict  # the model's fields
  image_size: tuple[int, int] | None  # (H, W) in pixels; None: unknown
  channels: int  # number of channels of the images
  class_names: list[str] | None = None  # one per class
  pp: str | None = None  # the evaluation pipeline
  # The method by which the publisher's code resizes position embeddings, see
  # `adapt.RESIZERS`.
  resize: str = 'bilinear'
  # Shapes of a file's parameters, under our names; {} for a run.
  shapes: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
  # Names in the source that are not parameters of the model.
  unused: list[str] = dataclasses.field(default_factory=list)

  def usual_size(self) -> tuple[int, int]:
    """Returns (H, W) of the source's images in pixels, 224 x 224 if it is unknown.

    Raises:
      UserError: if the size is unknown and the position embeddings depend on it.
    """
    if self.image_size:
      return self.image_size
    family = models.family(self.family, **self.fields)
    if family.position in self.shapes:
      raise UserError(
        f'{self.source}: its position embeddings are not for square images: pass '
        'image_size=(H, W).'
      )
    return 224, 224

  @abc.abstractmethod
  def read(self) -> 'Source':
    """Reads the arrays."""

  def _add_arrays(self, flat: dict[str, np.ndarray], **more) -> 'Source':
    facts = {f.name: getattr(self, f.name) for f in dataclasses.fields(Header)}
    return Source(**facts, flat=flat, **more)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source(Header):
  """The parameters of a source, and the facts about their model."""

  # Parameters and batch statistics in float32, under our names, see
  # `trees.flatten_variables`. Blocks are not stacked.
  flat: dict[str, np.ndarray]
  step: int | None = None  # the step that was read from a run
  # The config's section `tune` if tuning added parameters, else {}.
  tune: dict = dataclasses.field(default_factory=dict)
  # The added parameters, 'tune/...', and their batch statistics; None: they have their
  # initial values.
  added: dict[str, np.ndarray] | None = dataclasses.field(default_factory=dict)
  # The parameters of the task in the same file or run, such as a decoder's, 'mae/...'.
  own: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
  # The arrays of a text tower in the same file, a `families.text.TextArrays`, or None.
  text: Any = None

  def read(self) -> 'Source':
    return self

  @property
  def origin(self) -> str:
    """Format and family, such as 'timm vit'; for a run also the step: 'run vit, step 500'."""
    step = '' if self.step is None else f', step {self.step}'
    return f'{self.format} {self.family}{step}'


@contextlib.contextmanager
def name_source(source: str) -> Iterator[None]:
  """Context manager that turns errors of names, shapes and configs into one line.

  The line begins with `source`.
  """
  try:
    yield
  except UserError:
    raise
  except ValueError as error:
    raise UserError(f'{source}: {one_line(error, 600)}.') from None
  except (KeyError, TypeError, IndexError, AttributeError, ArithmeticError) as error:
    why = one_line(f'{type(error).__name__}: {error}')
    raise UserError(f'{source} does not fit together: {why}.') from None
