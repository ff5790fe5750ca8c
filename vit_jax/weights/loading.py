"""Loads weights with their model: from a source to a header, then arrays, then `Loaded`.

A source is a file (.npz, .safetensors), a hub folder, the folder of a run, a name of the
zoo, or a URL (gs://, https://, hf:OWNER/NAME). RUN stands for the newest step of a run,
RUN@best for the best step by config.checkpoint.best, and RUN@500 for step 500.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import check, models, trees
from vit_jax.check import Named, Size
from vit_jax.data.ops import registry
from vit_jax.errors import UserError
from vit_jax.models import hub
from vit_jax.weights import (
  adapt,
  download,
  formats,
  image_text,
  pipelines,
  readers,
  runs,
  tuned,
  zoo,
)
from vit_jax.weights.configs import Facts
from vit_jax.weights.families import text as families_text
from vit_jax.weights.families import vit_originals
from vit_jax.weights.loaded import Loaded
from vit_jax.weights.rename import Table
from vit_jax.weights.source import Header, Source, name_source


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
    source: see above. A run without labels (task 'dino', 'mae' or 'masked_patches') gives
      the encoder, without a head and without the parameters that the task added.
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
    model: another model that starts from the weights, as a name or a config's section, which
      `complete` fills: the backbone of 'fpn' is the weights' model. For the weights of a ViT
      or of SAM, it may also be 'vitdet:B' or 'sfp:B'. All other parameters have their
      initial values.
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
      section = {'name': model} if isinstance(model, str) else model
      built = models.build(**complete(section, header))
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


# -- the header of a source -------------------------------------------------------------


def read_header(
  source: str,
  *,
  variant: str | None = None,
  ema: bool = False,
  weights: str | None = None,
  **fields,
) -> Header:
  """Returns the header of a source. The arguments are those of `load`."""
  if (run := runs.find(source)) is not None:
    folder, which = run
    return runs.read_header(
      source, folder, which=which, ema=ema, weights=weights, fields=fields
    )
  for key, value in (('ema', ema), ('weights', weights)):
    if value:
      raise UserError(f'{source} is not a run of vit_jax: {key} is for runs only.')
  _check_is_no_model(str(source))
  return _read_file_header(str(source), variant, fields)


def read(source: str, **options) -> Source:
  """Returns the parameters of a source. The arguments are those of `read_header`."""
  return read_header(source, **options).read()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _FileHeader(Header):
  """The header of a file of weights."""

  arrays: Mapping  # the model's arrays, under the file's names
  table: Table  # the table that renames them
  own: list[str]  # names of the task's own parameters, see `Format.own`
  text: families_text.TextArrays | None  # the arrays of a text tower

  def read(self) -> Source:
    """Reads, renames and converts the arrays to float32."""
    with name_source(f'{self.source}, {self.format} {self.family}'):
      arrays = {name: np.asarray(x) for name, x in self.arrays.items()}
      flat = formats.rename_arrays(arrays, self.table)
    flat = {name: np.asarray(x, np.float32) for name, x in flat.items()}
    own = {name: flat.pop(name) for name in self.own}
    return self._add_arrays(flat, own=own, text=self.text)


def _read_file_header(source: str, variant: str | None, overrides: dict) -> _FileHeader:
  entry = zoo.ENTRIES.get(source)
  path = download.locate(entry.url if entry else source, zoo.ENTRIES)
  content = _read_content(source, path)
  config = readers.drop_nulls(content.config)
  with name_source(source):
    if not config:
      config = vit_originals.name_open_clip(content.arrays, source, variant)
    text, arrays = families_text.split(content.arrays, config, path)
    format, arrays, unused = formats.detect(arrays, config, source)
  check.bind(f'model {format.family}', overrides, models.signature(format.family))
  with name_source(f'{source}, {format.name} {format.family}'):
    facts = format.facts(config, entry.url if entry else source)
    if facts.pp:
      registry.parse(facts.pp)  # Report a mistake now, not at the first image.
    if not variant and 'act' not in overrides:
      _check_architecture(facts, format.family)
    sized = _sized(format.family, variant)
    usual = _heads_by_name(facts, source) | sized
    parsed = format.parse(arrays, facts, usual, overrides)
    fields = parsed.fields | sized | overrides
    family = models.family(format.family, **fields)
    size = facts.image_size
    whole = models.complete(format.family, **parsed.fields)
    if size is None and (grid := format.grid(parsed.blanks, whole)):
      stride = family.stride(whole)
      size = grid[0] * stride[0], grid[1] * stride[1]
    elif size is None and entry:
      size = entry.resolution, entry.resolution
    classes = parsed.fields.get('num_classes')
    names = facts.class_names or format.class_names.get(classes)
    names = names or zoo.find_class_names(source, path, config, classes)
    # A model that takes maps instead of images does not depend on the number of channels.
    channels = 3
    if not family.inputs:
      channels = parsed.blanks[family.stem(parsed.blanks)].shape[2]
    pp = facts.pp or pipelines.read_timm(facts.images or {}, size)
  return _FileHeader(
    source=source,
    format=format.name,
    family=format.family,
    fields=fields,
    image_size=size,
    channels=channels,
    class_names=names,
    pp=pp,
    resize=format.resize(fields),
    arrays=arrays,
    table=parsed.table,
    own=parsed.own,
    shapes={name: x.shape for name, x in parsed.blanks.items()},
    unused=[*unused, *parsed.own],
    text=text,
  )


def _read_content(source: str, path: Path) -> readers.Raw:
  """Returns the arrays and the config of a file or of a hub folder."""
  try:
    content = readers.read(path)
  except UserError as error:
    again = f' Remove {path} to download it again.' if download.is_cached(path) else ''
    raise UserError(f'{error}{again}') from None
  if tuned.KEY in content.config:
    raise UserError(
      f'{source} holds only tuned parameters: use load(WEIGHTS, tune={source!r}).'
    )
  return content


def _check_is_no_model(source: str) -> None:
  """Raises UserError if a source is only a model's name, such as 'vit_base_patch16_224'."""
  is_file = Path(source).suffix in readers.SUFFIXES
  if is_file or re.search(r'[/:\\]', source) or source in zoo.ENTRIES:
    return
  family, size, fields = models.parse_name(_strip_tag(source))
  if os.path.exists(source) or family not in models.MODELS or not (size or fields):
    return
  # Google's models use the tanh GELU, so the zoo's files suit a model but for its `act`.
  model = family, size, {key: x for key, x in fields.items() if key != 'act'}
  entries = zoo.ENTRIES.values()
  where = [e.name for e in entries if models.parse_name(e.model) == model]
  classifies = models.MODELS[family].outputs == 'classes'
  # timm's names are in lower case.
  if source.islower() and classifies and not hub.published(source):
    tagged = [
      n for n in models.names(on_hub=True) if n.startswith(f'hf:timm/{source}.')
    ]
    where += tagged or [f'hf:timm/{source}{"" if "." in source else ".TAG"}']
  where = f'its weights are {where}' if where else 'name a file of its weights'
  raise UserError(
    f'{source!r} is a model ({family}{(size and f":{size}") or ""}): {where}.'
  )


def _check_architecture(facts: Facts, family: str) -> None:
  """Raises ValueError for an unknown architecture of timm."""
  if _resolve_name(facts.architecture or 'vit') is None:
    hint = "variant='B/16', or act='gelu_erf'" if family == 'vit' else 'variant=...'
    raise ValueError(
      f'{facts.architecture!r} is unknown and may compute something else with the same '
      f'parameters as {family}. If it does not, pass its size, such as {hint}'
    )


def _sized(family: str, variant: str | None) -> dict:
  """Returns the fields of a variant such as 'B/16', or of a published name, but not its classes."""
  if not variant:
    return {}
  is_name = models.parse_name(variant)[0] == family
  _, fields = models.resolve(variant) if is_name else models.resolve(family, variant)
  return {k: v for k, v in fields.items() if k != 'num_classes'}


def _heads_by_name(facts: Facts, source: str) -> dict:
  """Returns {'num_heads': number} if timm knows the model's or the file's name, else {}."""
  for name in (facts.architecture or '', Path(source).name):
    if heads := (_resolve_name(name) or {}).get('num_heads'):
      return {'num_heads': heads}
  return {}


def _resolve_name(architecture: str) -> dict | None:
  with contextlib.suppress(UserError):
    return models.resolve(_strip_tag(architecture))[1]


def _strip_tag(architecture: str) -> str:
  """Removes timm's tag: 'vit_base_patch16_224' from 'vit_base_patch16_224.augreg_in21k'."""
  return architecture.removesuffix('.safetensors').split('.')[0]


# -- the weights of a run's config ------------------------------------------------------


def from_section(
  source: str,
  *,
  variant: str | None = None,
  ema: bool = False,
  skip: list[str] = (),
  resize: adapt.Method = 'origin',
) -> Header:
  """Returns the header of the weights that the config's section `weights` names.

  `skip` and `resize` are not used here. `fit_section` reads them.
  """
  del skip, resize
  return read_header(source, variant=variant, ema=ema)


def fit_section(
  header: Header,
  section: dict,
  model,
  image_size: tuple[int, int],
  own: adapt.Shapes | None = None,
) -> tuple[dict, str]:
  """Reads the arrays and fits them to a model with the options of the section `weights`.

  Parameters that tuning added to the weights are merged into their own.

  Args:
    own: {name: shape} of the task's own parameters, which weights of the same task have too.

  Returns:
    ({name: array} of the variables, lines). The lines say what became of the parameters.
  """
  source = tuned.merge(header.read())
  options = {key: section[key] for key in ('skip', 'resize') if key in section}
  taken, report = adapt.fit(source, model, image_size, **options)
  if own:
    key = next(iter(own)).partition('/')[0]
    with name_source(source.source):
      if source.text is not None and f'{key}/logit_scale' in own:
        more = image_text.own_parameters(source, key)
        source = dataclasses.replace(source, own=more)
      more, report = adapt.fit_own(source, own, options.get('skip', ()), report)
    taken |= more
  return taken, report.describe(source)


# Fields of the head, SAM's neck included, and the dtype. A backbone takes them from the model
# around it.
_OF_HEAD = ('num_classes', 'representation_size', 'head_bias_init', 'neck', 'dtype')


def complete(model: dict, source: Header) -> dict:
  """Fills a section `model` from weights if it names no model or no backbone.

  The classes of the weights are not copied. A model of their family takes the fields in
  `Family.of_weights`.
  """
  if 'name' not in model:
    fields = {k: v for k, v in source.fields.items() if k != 'num_classes'}
    return {'name': source.family, **fields, **model}
  name, own = models.resolve(**model)
  if name == source.family and (keys := models.family(name).of_weights):
    return {key: source.fields[key] for key in keys if key in source.fields} | model
  if 'backbone' not in models.signature(name).parameters:
    return model
  if inside := own.get('backbone'):
    whole = complete(inside, source)
    return model if whole == inside else {**model, 'backbone': whole}
  fields = {k: v for k, v in source.fields.items() if k not in _OF_HEAD}
  backbone = fields.get('backbone') or {'name': source.family, **fields}
  return {**model, 'backbone': backbone}


def lacks_backbone(model: dict) -> bool:
  """Whether a section `model` lacks the backbone that its model needs."""
  name, fields = models.resolve(**model)
  if 'backbone' not in models.signature(name).parameters:
    return False
  inside = fields.get('backbone')
  return not inside or lacks_backbone(inside)
