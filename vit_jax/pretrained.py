"""Weights and the model they are of: what `vit_jax.load` returns.

A source is a file (.npz, .safetensors), a hub folder, the folder of a run, a name of the
zoo, or a URL (gs://, https://, hf:OWNER/NAME).
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import models, trees, weights
from vit_jax.checkpoint import checkpoints
from vit_jax.data.ops import registry
from vit_jax.errors import UserError
from vit_jax.weights import adapt
from vit_jax.weights import export as weights_export

# A file says nothing of it: the size at which the published models were trained.
_USUAL_SIZE = (224, 224)

# The kernel [h, w, C, ...] that sees the image; a hybrid's embedding does not.
_STEMS = ('conv_root/kernel', 'root_block/standardized_conv2d/kernel')
_STEMS += ('embedding/kernel', 'stem/kernel')


@dataclasses.dataclass(frozen=True)
class Origin:
  """Parameters as a source holds them, and the model that they are of."""

  source: str
  dialect: str  # google, big_vision, timm, hf, bit, run
  family: str  # a key of models.MODELS
  fields: dict  # of the model
  flat: dict[str, np.ndarray]  # our names, blocks not stacked, float32
  image_size: tuple[int, int] | None  # (H, W); None: the source does not tell
  channels: int
  class_names: list[str] | None
  pp: str | None
  left_out: list[str]  # names in the source that are no parameters of the model


@dataclasses.dataclass(frozen=True)
class Pretrained:
  """A model with its parameters.

  Attributes:
    model: a Linen module; `model.apply({'params': params}, images)`.
    params: nested dict, float32 numpy arrays, in the model's tree.
    image_size: (H, W) in pixels that the parameters are fitted to.
    channels: of the images, 3 or 1.
    pp: the evaluation pipeline of one image, as `data/ops` reads it.
    class_names: one per class, or None where the source does not tell.
    report: a few lines: what was taken, skipped, resized.
  """

  model: Any
  params: dict
  image_size: tuple[int, int]
  channels: int
  pp: str
  class_names: list[str] | None
  source: str
  dialect: str
  report: str


def load(
  source: str,
  *,
  variant: str | None = None,
  image_size: tuple[int, int] | int | None = None,
  resize: str = 'bilinear',
  skip: list[str] = (),
  ema: bool = False,
  **fields,
) -> Pretrained:
  """Returns the model that a source tells of, with its parameters.

  Args:
    source: see the module.
    variant: 'B/16': the model's size, where the source does not tell it.
    image_size: pixels to fit the position embeddings to, (H, W) or one number for both;
      by default what they are for.
    resize: how, 'bilinear' or 'bicubic': see `weights.adapt.resize_positions`.
    skip: regexes of parameters to initialise afresh instead of taking them.
    ema: of a run, the averaged parameters.
    **fields: of the model, over what the source tells: `num_classes=10` gives a new head,
      `patch_size=(32, 32)` resizes the patch embedding.

  Raises:
    UserError: a source that cannot be read or does not fit; nothing is taken silently.
  """
  origin = open(source, variant=variant, ema=ema, **fields)
  model = models.build(origin.family, **origin.fields)
  size = (image_size, image_size) if isinstance(image_size, int) else image_size
  size = tuple(size) if size else origin.image_size or _usual_size(origin)
  params, report = fit(origin, model, size, skip=skip, resize=resize)
  if report.left:
    params |= _fresh(model, (1, *size, origin.channels), report.left)
  moved = origin.image_size and size != origin.image_size
  names = origin.class_names
  if names is not None and getattr(model, 'num_classes', None) != len(names):
    names = None
  return Pretrained(
    model,
    trees.unflatten(params),
    size,
    origin.channels,
    # A pipeline is of one size; at another the image is just brought to that, its
    # pixels standardised as ever.
    _plain_pp(origin, size) if moved or not origin.pp else origin.pp,
    names,
    str(source),
    origin.dialect,
    describe(origin, report),
  )


def _fresh(model, shape, names: list[str]) -> dict[str, np.ndarray]:
  """Returns the initial values of some parameters; of the others nothing is computed."""

  def init(key):
    params = trees.flatten(model.init(key, jnp.zeros(shape))['params'])
    return {name: params[name] for name in names}

  return {name: np.asarray(x) for name, x in jax.jit(init)(jax.random.key(0)).items()}


def open(
  source: str, *, variant: str | None = None, ema: bool = False, **fields
) -> Origin:
  """Reads a source; arguments as those of `load`."""
  if (folder := _run_folder(source)) is not None:
    return _open_run(source, folder, ema, fields)
  if ema:
    raise UserError(f'{source} is no run of vit_jax: ema is of runs only.')
  raw = weights.open(source)
  given = models.resolve(raw.dialect.family, variant)[1] if variant else {}
  heads = fields.get('num_heads') or raw.hints.fields.get('num_heads')
  if raw.needs_heads and not heads:
    heads = given.get('num_heads') or _heads(raw, str(source))
  flat, told = raw.parameters(heads)
  for key in ('width', 'depth', 'mlp_dim'):
    if key in given and told.get(key, given[key]) != given[key]:
      raise UserError(
        f'{source} has {key} {told[key]}; variant {variant!r} has {given[key]}.'
      )
  _check_architecture(raw, variant, fields)
  flat_fields = told | given | fields
  size = raw.hints.image_size or raw.dialect.image_size(flat, told) or raw.usual_size
  stem = next(flat[name] for name in _STEMS if name in flat)
  return Origin(
    str(source),
    raw.dialect.name,
    raw.dialect.family,
    flat_fields,
    flat,
    size,
    stem.shape[2],
    raw.hints.class_names,
    raw.hints.pp,
    raw.left_out,
  )


def fit(
  origin: Origin,
  model,
  image_size: tuple[int, int],
  *,
  skip: list[str] = (),
  resize: str = 'bilinear',
) -> tuple[dict[str, np.ndarray], trees.Merge]:
  """Returns ({name: array} of the model's parameters, report); see `weights.fit`.

  Parameters that `report.left` names are not among them.
  """
  images = jax.ShapeDtypeStruct((1, *image_size, origin.channels), jnp.float32)
  abstract = jax.eval_shape(model.init, jax.random.key(0), images)['params']
  shapes = {name: x.shape for name, x in trees.flatten(abstract).items()}
  try:
    return weights.fit(
      origin.flat,
      shapes,
      fields=dataclasses.asdict(model) if dataclasses.is_dataclass(model) else {},
      old_size=origin.image_size,
      new_size=image_size,
      skip=list(skip),
      resize=resize,
    )
  except UserError as error:
    raise UserError(f'{origin.source}: {error}') from None


def describe(origin: Origin, report: trees.Merge) -> str:
  """Returns what became of the source's parameters, a few lines."""
  what = f'{origin.source} ({origin.dialect} {origin.family})'
  lines = [f'{what}: {len(report.taken)} parameters taken']
  lines += report.notes
  for what, found in (
    ('initialised afresh', report.left),
    ('left out', [*report.skipped, *origin.left_out]),
  ):
    if found:
      more = f' and {len(found) - 4} more' if len(found) > 4 else ''
      lines.append(f'{what}: {", ".join(found[:4])}{more}')
  return '\n  '.join(lines)


def from_section(
  source: str,
  *,
  variant: str | None = None,
  ema: bool = False,
  skip: list[str] = (),
  resize: str = 'bilinear',
) -> Origin:
  """Opens what the config's section `weights` names; arguments as those of `load`."""
  del skip, resize  # of `fit`, once the model is there
  return open(source, variant=variant, ema=ema)


def complete(model: dict, origin: Origin) -> dict:
  """Returns the config's section `model`, by the weights where it names no model.

  The number of classes is left to the data.
  """
  if 'name' in model:
    return model
  told = {k: v for k, v in origin.fields.items() if k != 'num_classes'}
  return {'name': origin.family, **told, **model}


def export(origin: Origin, dest: str | Path, to: str) -> dict:
  """Writes what `open` returned in another format; see `weights.export`.

  Returns:
    {'files': paths, 'to': format, 'params': number}.

  Raises:
    UserError: for what the format cannot express, or a place that is taken.
  """
  model = models.build(origin.family, **origin.fields)
  fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(model)}
  size = origin.image_size or _usual_size(origin)
  if to in ('timm', 'hf') and origin.channels != 3:
    raise UserError(
      f'{origin.source} is of images with {origin.channels} channel; {to} files are '
      'written for 3.'
    )
  flat, _ = fit(origin, model.clone(scan=False) if 'scan' in fields else model, size)
  arrays, config = weights_export.export(
    flat,
    origin.family,
    fields,
    to,
    image_size=size,
    pp=origin.pp,
    class_names=origin.class_names,
  )
  files = weights_export.write(dest, arrays, config)
  params = sum(x.size for x in flat.values())
  return {'files': [str(path) for path in files], 'to': to, 'params': params}


# -- what the source does not say -------------------------------------------------------


def _heads(raw: weights.Weights, source: str) -> int:
  """The number of heads by the name of the model, or by its width."""
  for name in (raw.hints.architecture, Path(source).name):
    try:
      _, fields = models.resolve(_plain(name or ''))
    except UserError:
      continue
    if 'num_heads' in fields:
      return fields['num_heads']
  width = next(
    (x.shape[-1] for n, x in raw.arrays.items() if n.endswith('norm1.weight')), None
  ) or next(
    (x.shape[-1] for n, x in raw.arrays.items() if 'layernorm_before' in n), None
  )
  raise UserError(
    f'{source} is of width {width}, and neither a config.json nor its name tells the '
    "number of attention heads: give variant='B/16' (the model's size) or num_heads."
  )


def _plain(architecture: str) -> str:
  """'vit_base_patch16_224.augreg_in21k' without timm's tag."""
  return architecture.removesuffix('.safetensors').split('.')[0]


def _check_architecture(raw: weights.Weights, variant, fields) -> None:
  """Refuses timm's models that have a ViT's parameters and compute something else."""
  name = raw.hints.architecture
  if not name or variant or 'act' in fields:
    return
  try:
    models.resolve(_plain(name))
  except UserError:
    raise UserError(
      f'{raw.source} says that it is {name!r}, which is not known here: it may compute '
      'something else with the same parameters. If it is a plain model, say its size, '
      "variant='B/16', or its activation, act='gelu_erf'."
    ) from None


def _usual_size(origin: Origin) -> tuple[int, int]:
  if origin.fields.get('posemb') == 'learn':
    raise UserError(
      f'{origin.source} has position embeddings of a grid that is not square: give '
      'image_size=(height, width), the size that they are for.'
    )
  return _USUAL_SIZE


def _plain_pp(origin: Origin, size) -> str:
  """Evaluates as the Google code: it resizes to floats, and rounds nothing."""
  text = str(size[0]) if size[0] == size[1] else f'({size[0]}, {size[1]})'
  decode = 'decode' if origin.channels == 3 else f'decode({origin.channels})'
  ops = registry.parse(origin.pp or '')
  levels = [op.text for op in ops if op.name == 'value_range'] or ['value_range(-1, 1)']
  return f"{decode}|resize({text}, rounding='none')|{levels[0]}"


# -- runs -------------------------------------------------------------------------------


def _run_folder(source) -> Path | None:
  folder = Path(str(source)).expanduser()
  if not (folder / 'checkpoints').is_dir() or not (folder / 'config.json').is_file():
    return None
  return folder


def _open_run(source, folder: Path, ema: bool, fields: dict) -> Origin:
  try:
    config = json.loads((folder / 'config.json').read_text())
    resolved, section = config['resolved'], dict(config['model'])
  except (ValueError, KeyError, TypeError):
    raise UserError(
      f'{folder}/config.json is not what a run writes: this is no run of vit_jax.'
    ) from None
  name, variant = section.pop('name'), section.pop('variant', None)
  family, told = models.resolve(name, variant, **section)
  H, W, C = resolved['image_shape']
  model = models.build(family, **told)
  images = jax.ShapeDtypeStruct((1, H, W, C), jnp.float32)
  abstract = jax.eval_shape(model.init, jax.random.key(0), images)['params']
  saved = checkpoints.Checkpoints(folder / 'checkpoints')
  try:
    params, _ = saved.restore_params(abstract, ema=ema)
  finally:
    saved.close()
  flat = {name: np.asarray(x) for name, x in trees.flatten(params).items()}
  return Origin(
    str(source),
    'run',
    family,
    told | fields,
    adapt.unstack(flat),
    (H, W),
    C,
    resolved.get('class_names'),
    _run_pp(config, (H, W)),
    [],
  )


def _run_pp(config: dict, size) -> str | None:
  """The pipeline of the run's first classification of images of its own size."""
  for section in config.get('evals', {}).values():
    if section['type'] == 'classification':
      return _as_file(section['data']['pp'], config['resolved']['image_shape'][-1])
  return None


def _as_file(pp: str, channels: int) -> str:
  """The same pipeline for an image in a file."""
  if re.match(r'\s*decode\b', pp):
    return pp
  return f'decode({channels})|{pp}'
