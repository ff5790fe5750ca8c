"""A source of weights, whatever it is, to parameters under our names.

A source is a file (.npz, .safetensors), a hub folder, the folder of a run, a name of the
zoo, or a URL (gs://, https://, hf:OWNER/NAME). RUN is the newest step of a run, RUN@best
the best by config.checkpoint.best, RUN@500 that of this number.
"""

import contextlib
import math
import os
import re
from pathlib import Path

from vit_jax import models
from vit_jax.check import bind
from vit_jax.data.ops import registry
from vit_jax.errors import UserError
from vit_jax.models import hub
from vit_jax.weights import download, formats, pipelines, readers, runs, tuned, zoo
from vit_jax.weights.adapt import Method, fit
from vit_jax.weights.configs import Facts, drop_nulls
from vit_jax.weights.families import text as families_text
from vit_jax.weights.source import Source, errors_of

# Far beyond every published model; a config that says more would exhaust memory.
_MOST_TOKENS = 1 << 16


def read(
  source: str,
  *,
  variant: str | None = None,
  ema: bool = False,
  weights: str | None = None,
  **fields,
) -> Source:
  """Returns the parameters of a source; arguments as those of `load`."""
  if (run := runs.find(source)) is not None:
    return runs.read(source, *run, ema, weights, fields, _of_weights)
  for key, value in (('ema', ema), ('weights', weights)):
    if value:
      raise UserError(f'{source} is not a run of vit_jax: {key} is for runs only.')
  _check_is_no_model(str(source))
  return _read_file(str(source), variant, fields)


def from_section(
  source: str,
  *,
  variant: str | None = None,
  ema: bool = False,
  skip: list[str] = (),
  resize: Method = 'origin',
) -> Source:
  """Returns the parameters that the config's section `weights` names.

  Parameters that tuning added are merged. `skip` and `resize` are for `fit`, later.
  """
  del skip, resize
  return tuned.folded(read(source, variant=variant, ema=ema))


# Fields of a head, and the dtype: as a backbone, a model has those of the one around it.
_OF_HEAD = ('num_classes', 'representation_size', 'head_bias_init', 'dtype')


def complete(model: dict, source: Source) -> dict:
  """Returns the section `model`, by the weights where it names none, without classes.

  A model that is built on a backbone, and names none, gets the model of the weights.
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
  """Whether a section `model` with a name is built on a backbone, and names none."""
  name, fields = models.resolve(**model)
  if 'backbone' not in models.signature(name).parameters:
    return False
  inside = fields.get('backbone')
  return not inside or lacks_backbone(inside)


def _of_weights(section: dict, model, image_size: tuple[int, int]) -> dict:
  """Returns {name: array} of a model's variables, by the section `weights` of a run."""
  options = {k: v for k, v in section.items() if k in ('skip', 'resize')}
  return fit(from_section(**section), model, image_size, **options)[0]


def _read_file(source: str, variant: str | None, overrides: dict) -> Source:
  entry = zoo.ENTRIES.get(source)
  path = download.locate(entry.url if entry else source, zoo.ENTRIES)
  try:
    raw = readers.read(path)
  except UserError as error:
    again = f' Remove {path} to download it again.' if download.is_cached(path) else ''
    raise UserError(f'{error}{again}') from None
  if tuned.KEY in raw.config:
    raise UserError(f'{source} is tuned_only: load(WEIGHTS, tune={source!r}).')
  config = drop_nulls(raw.config)
  with errors_of(source):
    text, arrays = families_text.split(raw.arrays, config, path)
    format, arrays, unused = formats.detect(arrays, config, source)
  bind(f'model {format.family}', overrides, models.signature(format.family))
  with errors_of(f'{source}, {format.name} {format.family}'):
    facts = format.facts(config, source)
    if facts.pp:
      registry.parse(facts.pp)  # a mistake is reported here, not at the first image
    if not variant and 'act' not in overrides:
      _check_architecture(facts)
    sized = models.resolve(format.family, variant)[1] if variant else {}
    usual = _heads_by_name(facts, source) | sized
    facts = facts._replace(fields=_needed(format, arrays, facts, usual, overrides))
    section, flat = format.read(arrays, facts)
    section.pop('name')
    fields = section | sized | overrides
    family = models.family(format.family, **fields)
    size = _image_size(format, facts, flat, section, family)
    names = facts.class_names
    names = names or zoo.class_names(source, path, config, section.get('num_classes'))
    # A model without an image takes maps, of images of any number of channels.
    channels = 3 if family.inputs else flat[family.stem(flat)].shape[2]
  size = size or (entry and (entry.resolution,) * 2)
  arguments = (format.name, format.family, fields, flat, size, channels, names)
  pp = facts.pp or pipelines.read_timm(facts.images or {}, size)
  more = {'resize': format.resize(fields), 'text': text}
  return Source(source, *arguments, pp, unused, **more)


def _needed(format, arrays, facts: Facts, usual: dict, given: dict) -> dict:
  """Returns fields with those that a format needs; ValueError if nothing tells them."""
  fields = {key: usual[key] for key in format.needs if key in usual}
  fields |= format.tells(arrays) | facts.fields
  fields |= {key: given[key] for key in format.needs if key in given}
  if missing := [key for key in format.needs if key not in fields]:
    sized = "variant='B/16' or " if missing == ['num_heads'] else ''
    raise ValueError(
      f"neither arrays nor the file's name tell {' and '.join(missing)}: pass {sized}"
      f'{", ".join(f"{key}=..." for key in missing)}, or keep the published name'
    )
  return fields


def _image_size(format, facts: Facts, flat, fields: dict, family):
  """Returns (H, W) in pixels that the parameters are for, None if nothing tells."""
  stride = family.stride(fields)
  if facts.image_size:
    check_size(facts.image_size, stride)
    return facts.image_size
  grid = format.grid(flat, fields)
  return grid and (grid[0] * stride[0], grid[1] * stride[1])


def check_size(image_size: tuple[int, int], strides: tuple[int, int]) -> None:
  """Raises UserError for images of more tokens than fit into memory."""
  if math.prod(n // s for n, s in zip(image_size, strides, strict=True)) > _MOST_TOKENS:
    raise UserError(f'image_size={image_size}: up to {_MOST_TOKENS:,} tokens.')


def usual_size(source: Source) -> tuple[int, int]:
  """Returns (H, W) of a source's images in pixels: 224, where it does not say."""
  if source.image_size:
    return source.image_size
  family = models.family(source.family, **source.fields)
  if family.position in source.flat:
    raise UserError(
      f'{source.source}: its positions are not of a square: pass image_size=(H, W).'
    )
  return 224, 224


def _check_is_no_model(source: str) -> None:
  """Raises UserError for a model's name, 'vit_base_patch16_224', in place of weights."""
  is_file = Path(source).suffix in readers.SUFFIXES
  if is_file or re.search(r'[/:\\]', source) or source in zoo.ENTRIES:
    return
  family, size, fields = models.parse_name(_plain(source))
  if os.path.exists(source) or family not in models.MODELS or not (size or fields):
    return
  # Google's weights are of models without further fields; their GELU is another.
  where = [e.name for e in zoo.ENTRIES.values() if e.model == f'{family}:{size}']
  where = [] if fields.keys() - {'act'} else where
  if source.islower() and not hub.published(source):  # a name of timm
    tagged = [
      n for n in models.names(on_hub=True) if n.startswith(f'hf:timm/{source}.')
    ]
    where += tagged or [f'hf:timm/{source}{"" if "." in source else ".TAG"}']
  where = f'its weights are {where}' if where else 'name a file of its weights'
  raise UserError(
    f'{source!r} is a model ({family}{(size and f":{size}") or ""}): {where}.'
  )


def _check_architecture(facts: Facts) -> None:
  """Raises ValueError for a model of timm that is not known here by name."""
  if _resolved(facts.architecture or 'vit') is None:
    raise ValueError(
      f'{facts.architecture!r} is not known and may compute something else with the same '
      "parameters: if it does not, pass its size, variant='B/16', or act='gelu_erf'"
    )


def _heads_by_name(facts: Facts, source: str) -> dict:
  """Returns {'num_heads': number} by timm's name of a model or of its file, else {}."""
  for name in (facts.architecture or '', Path(source).name):
    if heads := (_resolved(name) or {}).get('num_heads'):
      return {'num_heads': heads}
  return {}


def _resolved(architecture: str) -> dict | None:
  with contextlib.suppress(UserError):
    return models.resolve(_plain(architecture))[1]


def _plain(architecture: str) -> str:
  """'vit_base_patch16_224.augreg_in21k' without timm's tag."""
  return architecture.removesuffix('.safetensors').split('.')[0]
