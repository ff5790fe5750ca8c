"""A model with its parameters, the result of `vit_jax.load`."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from vit_jax.data import single_image
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Loaded:
  """A model with its parameters. It unpacks as a pair: `model, params = load(...)`."""

  model: Any
  variables: dict  # {'params': nested dict of float32 arrays}, and other collections
  image_size: tuple[int, int]  # (H, W) in pixels for which the parameters are fitted
  channels: int
  pp: str  # the evaluation pipeline of one image, in the ops of `data/ops`
  class_names: list[str] | None
  source: str
  format: str
  report: str  # lines on the parameters that were taken, skipped or resized
  step: int | None = None  # the step that was read from a run
  # The config's section `tune` if it added parameters, else {}.
  tune: dict = dataclasses.field(default_factory=dict)

  @property
  def params(self) -> dict:
    return self.variables['params']

  def __iter__(self) -> Iterator:
    if others := sorted(self.variables.keys() - {'params'}):
      raise UserError(
        f'{self.source} has {others[0]!r} besides its parameters, which `model, params = '
        '...` would drop: use `loaded.model` and `loaded.variables`.'
      )
    return iter((self.model, self.params))

  def __repr__(self) -> str:
    H, W = self.image_size
    total = sum(x.size for x in jax.tree.leaves(self.params))
    step = '' if self.step is None else f', step {self.step}'
    tuned = f' with {self.tune["method"]}' if self.tune else ''
    return (
      f'<{type(self.model.untuned).__name__}{tuned} of {self.source} '
      f'({self.format}{step}): {total:,} parameters, images {H} x {W} x {self.channels}>'
    )

  def preprocess(self, images: Iterable) -> np.ndarray:
    """Returns images preprocessed by `pp` for `model.apply`, float32 [B, H, W, C].

    Args:
      images: paths, bytes, PIL images or uint8 arrays, see `data.single_image.batch`.
    """
    batch = single_image.batch(images, self.pp)
    self.check_shape(batch.shape[1:])
    return batch

  def check_shape(self, shape: tuple, pp: str | None = None) -> None:
    """Raises UserError if images of `shape` (H, W, C), made by `pp`, do not fit the model."""
    expected = (*self.image_size, self.channels)
    if shape != expected:
      raise UserError(
        f'{pp or self.pp!r} makes images {shape}, but the model takes {expected}.'
      )
