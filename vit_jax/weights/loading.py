"""Weights and the model they belong to: what `vit_jax.load` returns.

A source is a file (.npz, .safetensors), a hub folder, the folder of a run, a name of the
zoo, or a URL (gs://, https://, hf:OWNER/NAME). Of a run the newest step is read, of
RUN@best the best by config.checkpoint.best, of RUN@500 that of this number.
"""

import dataclasses
import os
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import models, trees
from vit_jax.data import single_image
from vit_jax.data.ops import registry
from vit_jax.errors import UserError
from vit_jax.weights import inferred, opening, runs, tuned
from vit_jax.weights.fitting import describe, fit
from vit_jax.weights.source import Source


@dataclasses.dataclass(frozen=True, repr=False)
class Loaded:
  """A model with its parameters, also as a pair: `model, params = load(...)`.

  Attributes:
    model: a Linen module; `model.apply(variables, images)`.
    variables: {'params': nested dict of float32 numpy arrays}, and any other
      collections of the model.
    image_size: (H, W) in pixels that the parameters are fitted to.
    channels: of the images, 3 or 1.
    pp: the evaluation pipeline of one image, as `data/ops` reads it.
    class_names: one per class, or None where the source has none.
    source, format: where the weights come from, and in what format.
    report: a few lines: what was taken, skipped, resized.
    step: of a run, the one that was read.
    tune: the config's section `tune`, where it added parameters; else {}.
  """

  model: Any
  variables: dict
  image_size: tuple[int, int]
  channels: int
  pp: str
  class_names: list[str] | None
  source: str
  format: str
  report: str
  step: int | None = None
  tune: dict = dataclasses.field(default_factory=dict)

  @property
  def params(self) -> dict:
    """`variables['params']`."""
    return self.variables['params']

  def __iter__(self) -> Iterator:
    return iter((self.model, self.params))

  def __repr__(self) -> str:
    H, W = self.image_size
    total = sum(x.size for x in jax.tree.leaves(self.params))
    step = '' if self.step is None else f', step {self.step}'
    tuned = f' with {self.tune["method"]}' if self.tune else ''
    return (
      f'<{type(models.core(self.model)).__name__}{tuned} of {self.source} ({self.format}{step}): '
      f'{total:,} parameters, images {H} x {W} x {self.channels}>'
    )

  def preprocess(self, images: Iterable) -> np.ndarray:
    """Returns images preprocessed by `pp` for `model.apply`, float32 [B, H, W, C].

    Args:
      images: paths, bytes, PIL images or uint8 arrays; raises as
        `data.single_image.batch`.
    """
    found = single_image.batch(images, self.pp)
    self._check_shape(found.shape[1:])
    return found

  def inputs(self, images: Iterable) -> dict:
    """Returns the arguments of a detector: `model.apply(variables, **loaded.inputs(...))`.

    They are 'images' float32 [B, H, W, C] and, where `pp` pads images on a canvas, 'mask'
    bool [B, H, W], False for padding.

    Args:
      images: as of `preprocess`.
    """
    from vit_jax.detection.tasks import detect  # brings optax

    found = single_image.features(images, self.pp)
    self._check_shape(found['image'].shape[1:])
    return detect.arguments(found)

  def _check_shape(self, found: tuple[int, int, int]) -> None:
    wanted = (*self.image_size, self.channels)
    if found != wanted:
      raise UserError(f'{self.pp!r} makes images {found}, the model takes {wanted}.')


def load(
  source: str,
  *,
  variant: str | None = None,
  image_size: tuple[int, int] | int | None = None,
  resize: str = 'bilinear',
  skip: list[str] = (),
  ema: bool = False,
  weights: str | None = None,
  tune: dict | str | None = None,
  model: dict | str | None = None,
  **fields,
) -> Loaded:
  """Returns the model of a source, with its parameters.

  Args:
    source: see the module. Of a run without labels (`tasks.masked_patches`) it is the
      encoder, without a head and without the parameters that the task added.
    variant: 'B/16': the model's size, where the source does not say it.
    image_size: pixels to fit the position embeddings to, (H, W) or one number for both;
      by default what they are for.
    resize: how, 'bilinear' or 'bicubic': see `weights.adapt.resize_positions`.
    skip: regexes of parameters to initialise afresh instead of taking them.
    ema: of a run, the averaged parameters.
    weights: of a run that trained a part of its model, where the rest is now; by
      default where it was, `config.weights.source`.
    tune: what to add to the model, a `tune` section such as {'method': 'lora', 'rank': 4},
      whose parameters start as in training; or a file that `vit_jax convert RUN FILE
      --tuned_only` wrote, whose parameters were tuned on these weights: the model, its
      classes and the size of its images are then those of that run. Parameters that are
      added are `variables['params']['tune']`.
    model: another model to start from the weights, a name or a config's section: one that
      is built on theirs, {'name': 'fpn', 'backbone': {'name': 'swin', ...}}, or for a ViT
      'vitdet:B' or 'sfp:B'. Its other parameters start from initial values.
    **fields: of the model, overriding what the source says: `num_classes=10` gives a new
      head, `patch_size=(32, 32)` resizes the patch embedding. Those of another `model` are
      keys of its section.

  Raises:
    UserError: a source that cannot be read or does not fit; nothing is taken silently.
  """
  if model is not None and fields:
    raise UserError(
      f'load has model={model!r} and fields {sorted(fields)}: put these into the section, '
      "model={'name': ..., ...}."
    )
  found = read(source, variant=variant, ema=ema, weights=weights, **fields)
  if isinstance(tune, str | os.PathLike):
    found = tuned.apply(found, tune)
  elif tune is not None:
    found = tuned.asked(found, tune)
  if model is None:
    model = models.build(found.family, **found.fields | fields)
  else:
    model = models.build(**{'name': model} if isinstance(model, str) else model)
  size = (image_size, image_size) if isinstance(image_size, int) else image_size
  size = tuple(size) if size else found.image_size or inferred.usual_size(found)
  flat, report = fit(found, model, size, skip=skip, resize=resize)
  shape = (*size, found.channels)
  if report.reinitialized:
    flat |= _fresh(model, shape, report.reinitialized)
  if found.tune:
    model, flat = tuned.attached(model, found, shape, flat)
  moved = found.image_size and size != found.image_size
  names = found.class_names
  if names is not None and getattr(model, 'num_classes', None) != len(names):
    names = None
  return Loaded(
    model,
    trees.variables(flat),
    size,
    found.channels,
    # A pipeline is for one size. For another, images are resized to that, and their
    # pixels standardised as the pipeline does.
    inferred.plain_pp(found, size) if moved or not found.pp else found.pp,
    names,
    str(source),
    found.format,
    describe(found, report),
    found.step,
    found.tune,
  )


def _fresh(model, shape, names: list[str]) -> dict[str, np.ndarray]:
  """Returns the initial values of some variables; the others are not computed."""

  def init(key):
    inputs = jax.tree.map(jnp.zeros_like, models.inputs_of(model, shape))
    flat = trees.named(model.init(key, inputs))
    return {name: flat[name] for name in names}

  return {name: np.asarray(x) for name, x in jax.jit(init)(jax.random.key(0)).items()}


def read(
  source: str,
  *,
  variant: str | None = None,
  ema: bool = False,
  weights: str | None = None,
  **fields,
) -> Source:
  """Reads a source; arguments as those of `load`."""
  if (run := runs.find(source)) is not None:
    return runs.read(source, *run, ema, weights, fields)
  for key, value in (('ema', ema), ('weights', weights)):
    if value:
      raise UserError(f'{source} is not a run of vit_jax: {key} is for runs only.')
  inferred.refuse_name_of_a_model(str(source))
  return _read_file(source, variant, fields)


def _read_file(source: str, variant: str | None, fields: dict) -> Source:
  raw = opening.open_file(source)
  inferred.check_architecture(raw, variant, fields)
  if raw.hints.pp:
    registry.parse(raw.hints.pp)  # a mistake is reported here, not at the first image
  family = models.family(raw.format.family)
  overrides = models.resolve(raw.format.family, variant)[1] if variant else {}
  heads = fields.get('num_heads') or raw.hints.fields.get('num_heads')
  if raw.format.flat_heads and not heads:
    heads = overrides.get('num_heads') or inferred.heads(raw, family, str(source))
  flat, found = raw.parameters(family, heads)
  for key in ('width', 'depth', 'mlp_dim'):
    if key in overrides and found.get(key, overrides[key]) != overrides[key]:
      raise UserError(
        f'{source} has {key} {found[key]}; variant {variant!r} has {overrides[key]}.'
      )
  told = found | overrides | fields
  family = models.family(raw.format.family, **told)
  inferred.check_fields(raw, told)
  return Source(
    str(source),
    raw.format.name,
    raw.format.family,
    told,
    flat,
    raw.image_size(flat, found, family),
    _channels(raw, flat, family),
    raw.hints.class_names or raw.published.class_names(found.get('num_classes')),
    raw.hints.pp,
    raw.unused,
  )


def from_section(
  source: str,
  *,
  variant: str | None = None,
  ema: bool = False,
  skip: list[str] = (),
  resize: str = 'bilinear',
) -> Source:
  """Opens what the config's section `weights` names; arguments as those of `load`.

  What tuning added to a run's model is worked into its parameters, or refused.
  """
  del skip, resize  # of `fit`, once the model is there
  return tuned.folded(read(source, variant=variant, ema=ema))


def complete(model: dict, found: Source) -> dict:
  """Returns the config's section `model`, by the weights where it names no model.

  The number of classes is left to the data.
  """
  if 'name' in model:
    return model
  told = {k: v for k, v in found.fields.items() if k != 'num_classes'}
  return {'name': found.family, **told, **model}


def _channels(raw: opening.Weights, flat, family) -> int:
  if family.inputs is not None:  # it takes maps, of images of any number
    return 3
  with opening.arrays_that_do_not_fit(f'{raw.source} cannot be loaded:'):
    return flat[family.stem(flat)].shape[2]
