"""Loads weights with the model that they belong to: from a source to `Loaded`."""

import os
from collections.abc import Sequence
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import check, models, trees
from vit_jax.check import Named, Size
from vit_jax.errors import UserError
from vit_jax.weights import adapt, image_text, pipelines, tuned
from vit_jax.weights.loaded import Loaded
from vit_jax.weights.reading import read_header
from vit_jax.weights.source import Source, name_source


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
    source: see `reading`. A run without labels (task 'masked_patches') gives the encoder,
      without a head and without the parameters that the task added.
    variant: the model's size, such as 'B/16', if the source does not say it.
    image_size: the size of images, (H, W) or one number for both, to which position
      embeddings are resized. The pipeline keeps the source's interpolation, crop ratio and
      crop mode.
    resize: the method by which position embeddings are resized, a key of
      `weights.adapt.RESIZERS`. The default is that of the publisher's code. Other methods
      change tokens by up to a tenth.
    skip: regexes of parameters to initialise afresh instead of taking them.
    ema: whether to take the averaged parameters of a run.
    weights: the new location of the parameters that a run did not train, if they have
      moved.
    tune: parameters to add to the model. A `tune` section such as {'method': 'lora', 'rank':
      4} adds parameters with their initial values. A file that `convert RUN FILE --tuned_only`
      wrote adds parameters that were tuned on these weights; the model, its classes and the
      image size are then those of RUN. Added parameters are `variables['params']['tune']`.
    model: another model that starts from the weights, as a name or a config's section. Its
      backbone is the weights' model, as in {'name': 'fpn', 'backbone': {'name': 'swin', ...}}.
      For the weights of a ViT, it may also be 'vitdet:B' or 'sfp:B'. All other parameters have
      their initial values.
    **fields: fields of the model, which win over those of the source. `num_classes=10` gives
      a new head, and `patch_size=(32, 32)` resizes the patch embedding.

  Returns:
    A `Loaded`. For a file that also has a text tower, it is an `image_text.ImageText`, unless
    `model`, `tune` or `num_classes` asks for another model on its image tower.
  """
  tune = os.fspath(tune) if isinstance(tune, os.PathLike) else tune
  options = {
    'variant': variant,
    'image_size': image_size,
    'resize': resize,
    'skip': skip,
    'ema': ema,
    'weights': weights,
    'tune': tune,
    'model': model,
  }
  check.bind('load', options, load, provided=('source', 'fields'))
  if model is not None and fields:
    raise UserError(f'model={model!r}: put {sorted(fields)} into its section.')
  header = read_header(source, variant=variant, ema=ema, weights=weights, **fields)
  if isinstance(tune, str):
    # The file says with which fields and image size the weights were tuned.
    header = tuned.apply(header.read(), tune)
  # Build the model first, to report a wrong field before gigabytes of arrays are read.
  with name_source(source):
    if model is None:
      built = models.build(header.family, **header.fields | fields)
    else:
      built = models.build(**{'name': model} if isinstance(model, str) else model)
  size = (image_size, image_size) if isinstance(image_size, int) else image_size
  size = tuple(size) if size else header.usual_size()
  origin = header.read()
  if isinstance(tune, dict):
    origin = tuned.add_section(origin, tune)
  loaded = _place(origin, built, size, skip, resize)
  if origin.text is None or model or tune or 'num_classes' in fields:
    return loaded
  with name_source(source):
    return image_text.pair(loaded, origin)


def _place(
  origin: Source, model, size: tuple[int, int], skip: Sequence[str], resize: str
) -> Loaded:
  """Returns a model with the parameters of a source, and initialises all others."""
  flat, report = adapt.fit(origin, model, size, skip=skip, resize=resize)
  shape = (*size, origin.channels)
  if report.reinitialized:
    flat |= _initialize(model, shape, report.reinitialized)
  if origin.tune:
    model, flat = tuned.attach(model, origin, shape, flat)
  names = origin.class_names
  if names is not None and getattr(model, 'num_classes', None) != len(names):
    names = None
  return Loaded(
    model=model,
    variables=trees.unflatten_variables(flat),
    image_size=size,
    channels=origin.channels,
    pp=pipelines.build(origin, size),
    class_names=names,
    source=origin.source,
    format=origin.format,
    report=report.describe(origin),
    step=origin.step,
    tune=origin.tune,
  )


def _initialize(model, shape, names: list[str]) -> dict[str, np.ndarray]:
  """Returns the initial values of some variables without computing the others."""

  def init(key):
    inputs = jax.tree.map(jnp.zeros_like, model.inputs(shape))
    flat = trees.flatten_variables(model.init(key, inputs))
    return {name: flat[name] for name in names}

  return {name: np.asarray(x) for name, x in jax.jit(init)(jax.random.key(0)).items()}
