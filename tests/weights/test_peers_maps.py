"""Swin and ConvNeXt: timm and transformers read what is written here, and the other way round.

Run by `make peer`, see test_peers.py. Models of other families are checked with theirs by
`test_goldens_are_read_where_they_are_written_for` as well.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest

import vit_jax
from tests.support.goldens import GOLDEN, GOLDENS, LOGITS, path_of
from tests.support.peers import (
  MARKS,
  ROUNDING,
  agree,
  images,
  ours,
  randomise,
  save_timm,
  theirs,
)
from vit_jax import weights

pytestmark = MARKS


def _mixer(models, config):
  return models.MlpMixer(num_classes=config['num_classes'], **config['model_args'])


def _mvit(models, config):
  given = {
    k: tuple(v) if isinstance(v, list) else v for k, v in config['model_args'].items()
  }
  size = given.pop('img_size')
  more = {key: config[key] for key in ('num_classes', 'global_pool')}
  cfg = models.mvitv2.MultiScaleVitCfg(**given)
  return models.MultiScaleVit(cfg, size, **more)


# Architectures whose functions in timm do not take the sizes of small models.
BUILT = {'mixer_s16_224': _mixer, 'mvitv2_tiny': _mvit, 'mvitv2_base_cls': _mvit}


def read_timm(timm, folder):
  """Returns timm's model of a folder; every name and shape must be the model's."""
  config = json.loads((folder / 'config.json').read_text())
  if config['architecture'] not in BUILT:
    return timm.create_model(f'local-dir:{folder}', pretrained=True).eval()
  from safetensors.torch import load_file

  model = BUILT[config['architecture']](timm.models, config)
  model.load_state_dict(load_file(folder / 'model.safetensors'), strict=True)
  return model.eval()


def read_transformers(transformers, folder):
  """Returns transformers' model of a folder; every name must be the model's."""
  read = transformers.AutoModelForImageClassification.from_pretrained
  model, info = read(folder, output_loading_info=True)
  assert not any(info[key] for key in ('missing_keys', 'unexpected_keys'))
  return model.eval()


@pytest.fixture
def read(timm, transformers):
  """Returns (format, folder) -> the model of the library that the format is for."""
  return lambda to, folder: (
    read_timm(timm, folder) if to == 'timm' else read_transformers(transformers, folder)
  )


# -- what is written here -----------------------------------------------------------------

# golden -> formats of other libraries for which it is written.
WRITTEN = {
  name: (dialect,)
  for name, (dialect, family, _) in GOLDENS.items()
  if dialect in ('timm', 'hf') and family not in ('vitdet', 'detr')
}
WRITTEN |= {  # whose maps are tiled by windows: all libraries compute the same
  name: ('timm', 'hf')
  for name in ('swin_timm', 'swin_hf', 'swinv2_timm', 'swinv2_hf', 'convnext_timm')
}


@pytest.mark.parametrize(
  ('name', 'to'), [(name, to) for name, formats in WRITTEN.items() for to in formats]
)
def test_goldens_are_read_where_they_are_written_for(torch, read, tmp_path, name, to):
  weights.write(weights.read(path_of(name)), tmp_path / 'out', to)
  with np.load(GOLDEN / f'{name}.expected.npz') as file:
    x, expected = file['image'], file['logits']
  tolerance = LOGITS.get(name, GOLDENS[name][2])
  agree(theirs(torch, read(to, tmp_path / 'out'), x), expected, tolerance)


RESIZED = {
  'swin_timm': ((96, 96), dict(windows=(6, 6, 6))),
  'swinv2_timm': ((96, 96), dict(windows=(6, 6, 6))),
  'convnext_timm': ((96, 128), {}),
}


@pytest.mark.parametrize('to', ['timm', 'hf'])
@pytest.mark.parametrize('name', RESIZED)
def test_images_and_windows_of_another_size(torch, read, tmp_path, name, to):
  size, fields = RESIZED[name]
  source = weights.read(path_of(name), **fields)
  source = dataclasses.replace(source, image_size=size)
  weights.write(source, tmp_path / 'out', to)
  x = np.random.default_rng(0).uniform(-1, 1, (2, *size, 3)).astype(np.float32)
  loaded = vit_jax.load(path_of(name), image_size=size, **fields)
  expected = np.asarray(jax.jit(loaded.model.apply)(loaded.variables, x)[0])
  agree(theirs(torch, read(to, tmp_path / 'out'), x), expected, ROUNDING)


# -- what they write ----------------------------------------------------------------------

# Grids of 14, 7 and 4 tokens: windows of 4 tile none but the last.
TIMM_ROUNDING = {
  'swin_tiny_patch4_window7_224': {},
  'swinv2_tiny_window8_256': dict(pretrained_window_sizes=(6, 6, 3)),
}


@pytest.mark.parametrize('name', TIMM_ROUNDING)
def test_timm_swin_both_ways(torch, timm, tmp_path, name):
  args = dict(img_size=56, patch_size=4, window_size=4, embed_dim=16)
  args |= (
    dict(depths=(2, 2, 2), num_heads=(1, 2, 4), num_classes=7) | TIMM_ROUNDING[name]
  )
  kind = 'SwinTransformerV2' if 'v2' in name else 'SwinTransformer'
  model = randomise(torch, getattr(timm.models, kind)(**args))
  folder = save_timm(tmp_path / 'timm', model, name, **args)
  x = images(56)
  expected = theirs(torch, model, x)
  agree(ours(folder, x), expected, ROUNDING)

  back = tmp_path / 'back'
  weights.write(weights.read(folder), back, 'timm')
  loaded = timm.create_model(f'local-dir:{back}', pretrained=True).eval()
  agree(theirs(torch, loaded, x), expected, ROUNDING)


@pytest.mark.parametrize('kind', ['Swin', 'Swinv2'])
def test_transformers_swin_both_ways(torch, transformers, tmp_path, kind):
  config = getattr(transformers, f'{kind}Config')(
    image_size=64,
    patch_size=4,
    embed_dim=16,
    depths=[2, 2, 2],
    num_heads=[2, 4, 4],
    window_size=4,
    num_labels=10,
  )
  whole = getattr(transformers, f'{kind}ForImageClassification')
  model = randomise(torch, whole(config))
  model.save_pretrained(tmp_path / 'hf')
  x = images(64)
  expected = theirs(torch, model, x)
  agree(ours(tmp_path / 'hf', x), expected, ROUNDING)

  back = tmp_path / 'back'
  weights.write(weights.read(tmp_path / 'hf'), back, 'hf')
  loaded, info = whole.from_pretrained(back, output_loading_info=True)
  assert not info['missing_keys']
  agree(theirs(torch, loaded.eval(), x), expected, ROUNDING)


@pytest.mark.parametrize('kind', ['timm', 'hf'])
def test_convnexts_both_ways(torch, timm, transformers, read, tmp_path, kind):
  if kind == 'timm':
    args = dict(depths=(1, 1, 2, 1), dims=(12, 24, 48, 96))
    model = timm.create_model('convnext_tiny', num_classes=7, **args)
    folder = save_timm(tmp_path / 'a', randomise(torch, model), 'convnext_tiny', **args)
  else:
    config = transformers.ConvNextConfig(
      depths=[1, 1, 2, 1], hidden_sizes=[12, 24, 48, 96], image_size=64, num_labels=7
    )  # whose final norm has 1e-12
    model = randomise(torch, transformers.ConvNextForImageClassification(config))
    model.save_pretrained(folder := tmp_path / 'a')
  x = images(64)
  expected = theirs(torch, model, x)
  agree(ours(folder, x), expected, ROUNDING)
  weights.write(weights.read(folder), tmp_path / 'back', kind)
  again = read(kind, tmp_path / 'back')
  for key, tensor in model.state_dict().items():
    assert torch.equal(tensor, again.state_dict()[key]), key
  agree(theirs(torch, again, x), expected, ROUNDING)
