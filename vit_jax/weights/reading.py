"""Opens a source of weights: its header first, then its parameters under our names.

A source is a file (.npz, .safetensors), a hub folder, the folder of a run, a name of the
zoo, or a URL (gs://, https://, hf:OWNER/NAME). RUN stands for the newest step of a run,
RUN@best for the best step by config.checkpoint.best, and RUN@500 for step 500.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from vit_jax import models
from vit_jax.check import bind
from vit_jax.data.ops import registry
from vit_jax.errors import UserError
from vit_jax.models import hub
from vit_jax.weights import download, formats, pipelines, readers, runs, tuned, zoo
from vit_jax.weights.adapt import Method, fit
from vit_jax.weights.configs import Facts
from vit_jax.weights.families import text as families_text
from vit_jax.weights.rename import Table
from vit_jax.weights.source import Header, Source, name_source


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


def from_section(
  source: str,
  *,
  variant: str | None = None,
  ema: bool = False,
  skip: list[str] = (),
  resize: Method = 'origin',
) -> Header:
  """Returns the header of the weights that the config's section `weights` names.

  `skip` and `resize` are not used here. `fit_section` reads them.
  """
  del skip, resize
  return read_header(source, variant=variant, ema=ema)


def fit_section(
  header: Header, section: dict, model, image_size: tuple[int, int]
) -> tuple[dict, str]:
  """Reads the arrays and fits them to a model with the options of the section `weights`.

  Parameters that tuning added to the weights are merged into their own.

  Returns:
    ({name: array} of the model's variables, lines). The lines say what became of the
    parameters.
  """
  source = tuned.merge(header.read())
  options = {key: section[key] for key in ('skip', 'resize') if key in section}
  taken, report = fit(source, model, image_size, **options)
  return taken, report.describe(source)


# Fields of the head, and the dtype. A backbone takes them from the model around it.
_OF_HEAD = ('num_classes', 'representation_size', 'head_bias_init', 'dtype')


def complete(model: dict, source: Header) -> dict:
  """Fills a section `model` from weights if it names no model or no backbone.

  The classes of the weights are not copied.
  """
  if 'name' not in model:
    fields = {k: v for k, v in source.fields.items() if k != 'num_classes'}
    return {'name': source.family, **fields, **model}
  if not lacks_backbone(model):
    return model
  if inside := model.get('backbone'):
    return {**model, 'backbone': complete(inside, source)}
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


# -- files ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _FileHeader(Header):
  """The header of a file of weights."""

  arrays: Mapping  # the model's arrays, under the file's names
  table: Table  # the table that renames them
  text: families_text.TextArrays | None  # the arrays of a text tower

  def read(self) -> Source:
    """Reads, renames and converts the arrays to float32."""
    with name_source(f'{self.source}, {self.format} {self.family}'):
      arrays = {name: np.asarray(x) for name, x in self.arrays.items()}
      flat = formats.rename_arrays(arrays, self.table)
    flat = {name: np.asarray(x, np.float32) for name, x in flat.items()}
    return self._add_arrays(flat, text=self.text)


def _read_file_header(source: str, variant: str | None, overrides: dict) -> _FileHeader:
  entry = zoo.ENTRIES.get(source)
  path = download.locate(entry.url if entry else source, zoo.ENTRIES)
  content = _read_content(source, path)
  config = readers.drop_nulls(content.config)
  with name_source(source):
    text, arrays = families_text.split(content.arrays, config, path)
    format, arrays, unused = formats.detect(arrays, config, source)
  bind(f'model {format.family}', overrides, models.signature(format.family))
  with name_source(f'{source}, {format.name} {format.family}'):
    facts = format.facts(config, source)
    if facts.pp:
      registry.parse(facts.pp)  # Report a mistake now, not at the first image.
    if not variant and 'act' not in overrides:
      _check_architecture(facts, format.family)
    sized = models.resolve(format.family, variant)[1] if variant else {}
    usual = _heads_by_name(facts, source) | sized
    facts = format.complete_facts(arrays, facts, usual, overrides)
    parsed = format.parse(arrays, facts)
    fields = parsed.fields | sized | overrides
    family = models.family(format.family, **fields)
    size = facts.image_size
    if size is None and (grid := format.grid(parsed.blanks, parsed.fields)):
      stride = family.stride(parsed.fields)
      size = grid[0] * stride[0], grid[1] * stride[1]
    elif size is None and entry:
      size = entry.resolution, entry.resolution
    names = facts.class_names or zoo.find_class_names(
      source, path, config, parsed.fields.get('num_classes')
    )
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
    shapes={name: x.shape for name, x in parsed.blanks.items()},
    unused=unused,
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
  # Name the zoo's files only if no field but `act` is set: Google's models use the tanh GELU.
  where = [e.name for e in zoo.ENTRIES.values() if e.model == f'{family}:{size}']
  where = [] if fields.keys() - {'act'} else where
  if source.islower() and not hub.published(source):  # timm's names are in lower case.
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
