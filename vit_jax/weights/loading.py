"""Weights with the model they belong to: what `vit_jax.load` returns."""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import check, models, trees
from vit_jax.check import Named, Size
from vit_jax.data import single_image
from vit_jax.errors import UserError
from vit_jax.weights import adapt, pipelines, tuned
from vit_jax.weights.adapt import fit
from vit_jax.weights.reading import check_size, read, usual_size
from vit_jax.weights.source import errors_of


@dataclasses.dataclass(frozen=True, repr=False)
class Loaded:
  """A model with its parameters, also as a pair: `model, params = load(...)`."""

  model: Any
  variables: dict  # {'params': nested dict of float32 arrays}, and other collections
  image_size: tuple[int, int]  # (H, W) in pixels that the parameters are fitted to
  channels: int
  pp: str  # the evaluation pipeline of one image, as `data/ops` reads it
  class_names: list[str] | None
  source: str
  format: str
  report: str  # a few lines: the parameters that were taken, skipped, resized
  step: int | None = None  # the step that was read from a run
  # The config's section `tune`, where it added parameters; else {}.
  tune: dict = dataclasses.field(default_factory=dict)

  @property
  def params(self) -> dict:
    return self.variables['params']

  def __iter__(self) -> Iterator:
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
    """Raises UserError for images (H, W, C) of `pp` that the model does not take."""
    expected = (*self.image_size, self.channels)
    if shape != expected:
      raise UserError(
        f'{pp or self.pp!r} makes images {shape}, the model takes {expected}.'
      )


def load(
  source: str,
  *,
  variant: str | None = None,
  image_size: tuple[Size, Size] | Size | None = None,
  resize: adapt.Method = 'origin',
  skip: Sequence[str] = (),
  ema: bool = False,
  weights: str | None = None,
  tune: dict | str | None = None,
  model: Annotated[dict, Named(models, variant=str | None)] | str | None = None,
  **fields,
) -> Loaded:
  """Returns the model of a source, with its parameters.

  Args:
    source: see `reading`. Of a run without labels (`tasks.masked_patches`) it is the
      encoder, without a head and without the parameters that the task added.
    variant: 'B/16': the model's size, where the source does not say it.
    image_size: pixels to fit the position embeddings to, (H, W) or one number for both.
      The pipeline keeps the source's interpolation, crop ratio and crop mode.
    resize: how, one of `weights.adapt.RESIZERS`; by default as the code that the source
      is written for: other methods move tokens by up to a tenth.
    skip: regexes of parameters to initialise afresh instead of taking them.
    ema: of a run, the averaged parameters.
    weights: where the parameters are that a run did not train, if they have moved.
    tune: what to add to the model, a `tune` section such as {'method': 'lora', 'rank': 4},
      whose parameters start as in training; or a file by `convert RUN FILE --tuned_only`,
      tuned on these weights: model, classes and image size are then those of that run.
      Parameters that are added are `variables['params']['tune']`.
    model: another model to start from the weights, a name or a config's section: one that
      is built on theirs, {'name': 'fpn', 'backbone': {'name': 'swin', ...}}, or for a ViT
      'vitdet:B' or 'sfp:B'. Its other parameters start from initial values.
    **fields: of the model, over those of the source: `num_classes=10` gives a new head,
      `patch_size=(32, 32)` resizes the patch embedding.

  Returns:
    A `Loaded`. Of a file that also has a text tower it is an `image_text.ImageText`, unless
    `model`, `tune` or `num_classes` asks for another model on its image tower.
  """
  tune = os.fspath(tune) if isinstance(tune, os.PathLike) else tune
  check.bind('load', dict(locals()), load, extra={'source': Any, 'fields': dict})
  if model is not None and fields:
    raise UserError(f'model={model!r}: put {sorted(fields)} into its section.')
  whole = model is None and tune is None and 'num_classes' not in fields
  origin = read(source, variant=variant, ema=ema, weights=weights, **fields)
  if isinstance(tune, str):
    origin = tuned.apply(origin, tune)
  elif tune is not None:
    origin = tuned.with_section(origin, tune)
  with errors_of(source):
    if model is None:
      model = models.build(origin.family, **origin.fields | fields)
    else:
      model = models.build(**{'name': model} if isinstance(model, str) else model)
  size = (image_size, image_size) if isinstance(image_size, int) else image_size
  size = tuple(size) if size else usual_size(origin)
  check_size(size, model.family.stride(model.fields()))
  flat, report = fit(origin, model, size, skip=skip, resize=resize)
  shape = (*size, origin.channels)
  if report.reinitialized:
    flat |= _initial(model, shape, report.reinitialized)
  if origin.tune:
    model, flat = tuned.attached(model, origin, shape, flat)
  names = origin.class_names
  if names is not None and getattr(model, 'num_classes', None) != len(names):
    names = None
  pp = pipelines.build(origin, size)
  whence = str(source), origin.format, report.describe(origin), origin.step, origin.tune
  variables = trees.unflatten_variables(flat)
  loaded = Loaded(model, variables, size, origin.channels, pp, names, *whence)
  if origin.text is None or not whole:
    return loaded
  from vit_jax.weights import image_text  # whose class extends `Loaded`

  with errors_of(source):
    return image_text.paired(loaded, origin)


def _initial(model, shape, names: list[str]) -> dict[str, np.ndarray]:
  """Returns the initial values of some variables; the others are not computed."""

  def init(key):
    inputs = jax.tree.map(jnp.zeros_like, model.inputs(shape))
    flat = trees.flatten_variables(model.init(key, inputs))
    return {name: flat[name] for name in names}

  return {name: np.asarray(x) for name, x in jax.jit(init)(jax.random.key(0)).items()}
