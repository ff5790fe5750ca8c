"""Our parameters to the formats of others, with the config that they need."""

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax import buckets, imagenet
from vit_jax.errors import UserError, choose
from vit_jax.weights import rename

TO = ('google', 'timm', 'hf', 'authors', 'detectron2')


def export(
  flat: dict[str, np.ndarray],
  family: str,
  fields: dict[str, Any],
  to: str,
  *,
  image_size: tuple[int, int],
  pp: str | None = None,
  class_names: list[str] | None = None,
) -> tuple[dict[str, np.ndarray], dict]:
  """Returns ({their name: array}, config) of a model in a format.

  Args:
    flat: parameters under our names, blocks not stacked.
    family: a key of `models.MODELS`.
    fields: all fields of the model.
    to: one of TO.
    image_size: (H, W) that the parameters are for.
    pp: evaluation pipeline, kept with the weights.
    class_names: one per class.

  Raises:
    UserError: for what the format cannot express; a file that computes something else
      is never written.
  """
  from vit_jax.weights import formats  # whose families say how they are written

  choose('format', to, TO)
  written = {f.to: f for f in formats.all_formats() if f.family == family and f.to}
  if to not in written:
    raise UserError(
      f'{to} has no model like {family!r}; it can be written as {list(written)}.'
    )
  found = written[to]
  config = found.write_config(fields, image_size, class_names)
  rules = found.write_rules(flat) if found.write_rules else found.rules({}, {})
  arrays = rename.to_theirs(flat, rules, fields.get('num_heads'), to)
  arrays |= found.buffers(flat)
  if pp and (to != 'google' or config or class_names):
    config.setdefault('vit_jax', {})['pp'] = pp
  return arrays, config


# -- for the families -------------------------------------------------------------------


def google_config(**published):
  """Returns the writer of what a reader of the arrays alone would get wrong.

  It gives {} for published models.

  Args:
    **published: fields that a file without config stands for.
  """

  def config(fields, image_size, class_names) -> dict:
    differ = {k: fields[k] for k, v in published.items() if fields[k] != v}
    ours = {'fields': differ} if differ else {}
    if class_names:  # a list that this library has is said by its name
      ours['class_names'] = imagenet.list_of(class_names) or class_names
    if ours or image_size[0] != image_size[1]:
      ours['image_size'] = list(image_size)
    return {'vit_jax': ours} if ours else {}

  return config


def timm_config(architecture, pool, args, fields, image_size, class_names) -> dict:
  """Returns the config.json of a timm model.

  Args:
    architecture: the function of timm that builds it.
    pool: its `global_pool`.
    args: more arguments of that function.
  """
  classes = fields['num_classes'] or 0
  config = {
    'architecture': architecture,
    'num_classes': classes,
    'global_pool': pool,
    'model_args': args,
    'pretrained_cfg': {
      'num_classes': classes,
      'input_size': [3, *image_size],
      'interpolation': 'bilinear',
      'crop_pct': 1.0,
      'mean': [0.5, 0.5, 0.5],
      'std': [0.5, 0.5, 0.5],
    },
  }
  return config | ({'label_names': class_names} if class_names else {})


def hf_config(name, model_type, args, fields, image_size, class_names) -> dict:
  """Returns the config.json of a transformers model.

  Args:
    name: of its classes, 'ViT'.
    args: more keys.
  """
  classes = fields['num_classes']
  labels = class_names or [f'LABEL_{i}' for i in range(classes or 0)]
  H, W = image_size
  return {
    'architectures': [f'{name}{"ForImageClassification" if classes else "Model"}'],
    'model_type': model_type,
    'image_size': H if H == W else [H, W],
    'num_channels': 3,
    'hidden_act': {'gelu_erf': 'gelu', 'gelu_tanh': 'gelu_pytorch_tanh'}[fields['act']],
    **args,
    'id2label': {str(i): name for i, name in enumerate(labels)},
    'label2id': {name: i for i, name in enumerate(labels)},
  }


def timm_transformer(fields, image_size) -> dict:
  """Returns timm's arguments for image, patch and width."""
  size, patch = list(image_size), list(fields['patch_size'])
  if len(set(size)) == len(set(patch)) == 1:
    size, patch = size[0], patch[0]
  return {'img_size': size, 'patch_size': patch, 'embed_dim': fields['width']}


def timm_ratio(part: int, width: int) -> float:
  """Returns r with int(width * r) == part, which is how timm computes it."""
  ratio = part / width
  return ratio if int(width * ratio) == part else float(np.nextafter(ratio, np.inf))


def need(fields: dict, key: str, allowed: tuple, format: str, why: str) -> None:
  """Raises UserError unless the field has one of the values that the format knows.

  Args:
    why: the reason, a clause that ends the message.
  """
  if fields.get(key) not in allowed:
    raise UserError(
      f'{format} cannot express {key}={fields.get(key)!r}; it knows {list(allowed)}: '
      f'{why}.'
    )


def write(
  dest: str | Path,
  arrays: dict[str, np.ndarray],
  config: dict,
  beside: dict[str, dict] | None = None,
) -> list[Path]:
  """Writes a file or a hub folder, whole or not at all; returns what was written.

  Args:
    dest: FILE.npz; FILE.safetensors, with config.json beside it; or a folder, for
      model.safetensors and config.json.
    arrays: float arrays by name.
    config: kept in the zip's comment, or in the metadata and config.json.
    beside: more files of JSON, by name; not with an .npz.

  Raises:
    UserError: another suffix, files that are there already, a folder that is not.
  """
  dest = buckets.on_disk(dest, 'Cannot write')
  if dest.suffix == '.npz':
    files = {dest: _npz(arrays, config)}
  else:
    from safetensors.numpy import save

    if dest.suffix not in ('', '.safetensors'):
      raise UserError(
        f'{dest}: write to FILE.npz, FILE.safetensors or a folder (no suffix).'
      )
    file = dest if dest.suffix else dest / 'model.safetensors'
    text = json.dumps(config, indent=1)
    metadata = {'format': 'pt', 'config': json.dumps(config)}
    files = {file: save(arrays, metadata), file.parent / 'config.json': text.encode()}
    for name, value in (beside or {}).items():
      files[file.parent / name] = json.dumps(value, indent=1).encode()
  for path in files:
    if path.exists():
      raise UserError(f'{path} is there already: choose another place, or remove it.')
    if dest.suffix and not path.parent.is_dir():
      raise UserError(f'{path.parent} is not a folder: make it first.')
  for path, data in files.items():
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f'{path.name}.{os.getpid()}.part')
    try:
      partial.write_bytes(data)
      partial.replace(path)
    finally:
      partial.unlink(missing_ok=True)
  return list(files)


def _npz(arrays: dict[str, np.ndarray], config: dict) -> bytes:
  """As np.savez writes it, byte for byte; config in the comment if there is any."""
  out, comment = io.BytesIO(), json.dumps(config).encode() if config else b''
  if len(comment) > zipfile.ZIP_MAX_COMMENT:
    raise UserError(
      f'An .npz has room for {zipfile.ZIP_MAX_COMMENT:,} bytes of config beside the '
      f'arrays; with its class names this one has {len(comment):,}. Convert to a folder '
      '(--to timm, --to hf), which has no such limit.'
    )
  np.savez(out, **arrays)
  if comment:
    with zipfile.ZipFile(out, 'a') as archive:
      archive.comment = comment
  return out.getvalue()
