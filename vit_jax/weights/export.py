"""Writes parameters in the formats of other libraries, with the config that they need."""

import contextlib
import io
import json
import zipfile
from pathlib import Path

import numpy as np

from vit_jax import files, models, trees
from vit_jax.errors import UserError, choose
from vit_jax.weights import adapt, configs, formats, pipelines, timm_options, tuned
from vit_jax.weights.adapt import fit
from vit_jax.weights.families import text
from vit_jax.weights.source import Source, name_source

TO = ('google', 'timm', 'hf', 'authors', 'open_clip', 'detectron2')


def write(source: Source, dest: str | Path, to: str) -> tuple[list[Path], int]:
  """Writes a source in the format `to` of another library, or raises UserError.

  Returns:
    (files, number of parameters). The files are those that `save` wrote.
  """
  choose('format', to, TO)
  source = tuned.merge(source)
  built = models.build(source.family, **source.fields).change(scan=False)
  fields, size = built.fields(), source.usual_size()
  flat, _ = fit(source, built, size)
  params = sum(x.size for name, x in flat.items() if not trees.is_statistic(name))
  model = source.family, flat, source.own, fields, size, source.class_names
  with name_source(source.source):
    if to in ('timm', 'hf') and source.channels != 3:
      raise ValueError(
        f'the model takes images with {source.channels} channel(s), but {to} files need 3'
      )
    try:
      arrays, config = _convert(to, *model)
    except ValueError as error:
      able = [other for other in TO if other != to and _can_write(other, *model)]
      raise ValueError(f'{error}; formats that can: {able or "none"}') from None
    if source.pp and (to != 'google' or config or source.class_names):
      config.setdefault('vit_jax', {})['pp'] = source.pp
    beside, pp = {}, pipelines.build(source, size)
    if to in ('timm', 'hf', 'open_clip'):
      # Also write the pipeline in the other library's terms. If they cannot express our
      # geometry, write a plain resize; the key `pp` keeps the whole pipeline.
      plain = pipelines.build(source, size, plain=True)
      preprocessor = pipelines.describe(pp) or pipelines.describe(plain)
      if preprocessor is None:
        raise ValueError(f'{to} cannot express the value range of {pp!r}')
      if to == 'timm':
        config['pretrained_cfg'] |= preprocessor.timm()
      elif to == 'hf':
        beside['preprocessor_config.json'] = preprocessor.hf()
      else:
        arrays |= _add_text(config['open_clip'], source, preprocessor)
        beside['open_clip_config.json'] = config.pop('open_clip')
  return save(dest, arrays, config, beside), params


def _add_text(config: dict, source: Source, preprocessor) -> dict[str, np.ndarray]:
  """Adds the text tower and the preprocessing to a config; returns the text tower's arrays."""
  if source.text is None:
    raise ValueError('open_clip files have a text tower, but the source has none')
  tower, model = text.read(source.text, source.fields), config['model_cfg']
  acts = {'quick_gelu': True, 'gelu_erf': False}
  # A ResNet has no such field, and a ViT has the text tower's activation.
  act = source.fields.get('act')
  configs.need(tower.fields, 'open_clip', act=(act,) if act else tuple(acts))
  model['quick_gelu'] = acts[tower.fields['act']]
  arrays, model['text_cfg'] = text.open_clip(tower)
  config['preprocess_cfg'] = preprocessor.open_clip()
  return arrays


def _convert(to, family, flat, own, fields, size, class_names) -> tuple[dict, dict]:
  """Returns (arrays, config) in the format `to`; raises ValueError if that is impossible."""
  key = next((name.partition('/')[0] for name in own), '')
  format = formats.find_writer(family, to, key)
  # Only Google's format has sine-cosine positions, as files without a table. Other formats
  # need a table, but AIMv2's of transformers.
  if to != 'google' and not (to == 'hf' and fields.get('posemb') == 'sincos2d_mae'):
    flat, fields = adapt.tabulate_positions(
      flat, fields, models.family(family), size, class_row=to != 'timm'
    )
  if to == 'timm' and family == 'vit':
    flat, fields = timm_options.adapt(flat, fields, size)
  flat = {**flat, **own} if format.own else flat
  return format.write(flat, fields, size, class_names)


def _can_write(*arguments) -> bool:
  with contextlib.suppress(ValueError):
    return bool(_convert(*arguments))


def save(
  dest: str | Path,
  arrays: dict[str, np.ndarray],
  config: dict,
  beside: dict[str, dict] | None = None,
) -> list[Path]:
  """Writes a file or a hub folder, and returns the files. Each is written whole or not at all.

  Args:
    dest: FILE.npz; FILE.safetensors, with config.json beside it; or a folder, with
      model.safetensors and config.json.
    arrays: float arrays by name.
    config: stored in the zip's comment of an .npz, and otherwise in the file's metadata and in
      config.json.
    beside: further JSON files, {name: content}. An .npz has none.
  """
  dest = files.local_path(dest, 'Cannot write')
  if dest.suffix == '.npz':
    contents = {dest: _pack_npz(arrays, config)}
  else:
    from safetensors.numpy import save as to_bytes

    if dest.suffix not in ('', '.safetensors'):
      raise UserError(f'{dest}: expected FILE.npz, FILE.safetensors or a folder.')
    file = dest if dest.suffix else dest / 'model.safetensors'
    metadata = {'format': 'pt', 'config': json.dumps(config)}
    contents = {file: to_bytes(arrays, metadata)}
    for name, value in {'config.json': config, **(beside or {})}.items():
      contents[file.parent / name] = json.dumps(value, indent=1).encode()
  for path in contents:
    if path.exists():
      raise UserError(f'{path} is there already: choose another place, or remove it.')
    if dest.suffix and not path.parent.is_dir():
      raise UserError(f'{path.parent} is not a folder: make it first.')
  for path, data in contents.items():
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, data)
  return list(contents)


def _pack_npz(arrays: dict[str, np.ndarray], config: dict) -> bytes:
  """Returns the bytes of an .npz file with a config, if any, in the zip's comment."""
  out, comment = io.BytesIO(), json.dumps(config).encode() if config else b''
  if len(comment) > zipfile.ZIP_MAX_COMMENT:
    raise UserError(
      f'An .npz has room for {zipfile.ZIP_MAX_COMMENT:,} bytes of config and class names, '
      f'not for {len(comment):,}: convert to a folder (--to timm, --to hf).'
    )
  np.savez(out, **arrays)
  if comment:
    with zipfile.ZipFile(out, 'a') as archive:
      archive.comment = comment
  return out.getvalue()
