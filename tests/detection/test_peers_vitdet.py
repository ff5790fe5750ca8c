"""ViTDet with transformers itself, and the head of pixels with PyTorch's own layers."""

import jax
import numpy as np
import pytest

import vit_jax
from tests.support.goldens import path_of
from tests.support.peers import MARKS, images, randomise
from vit_jax import models, trees, weights

pytestmark = MARKS


def nchw(torch, x):
  return torch.from_numpy(np.ascontiguousarray(np.moveaxis(np.asarray(x), -1, 1)))


def map_of(torch, model, x):
  with torch.no_grad():
    (found,) = model.eval()(nchw(torch, x)).feature_maps
  return np.moveaxis(found.numpy(), 1, -1)


def last_map(source, x, **options):
  loaded = vit_jax.load(source, **options)
  _, out = jax.jit(loaded.model.apply)(loaded.variables, x)
  return out[f'block{loaded.model.depth - 1:02d}']


@pytest.mark.parametrize('window', [0, 3])
def test_transformers_vitdet_both_ways(torch, transformers, tmp_path, window):
  config = transformers.VitDetConfig(
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=2,
    image_size=64,
    pretrain_image_size=48,
    patch_size=16,
    window_size=window,
    window_block_indices=[0, 1] if window else [],
    use_relative_position_embeddings=bool(window),
    out_features=['stage3'],
  )
  model = randomise(torch, transformers.VitDetBackbone(config))
  model.save_pretrained(tmp_path / 'hf')
  x = images(64)
  expected = map_of(torch, model, x)
  close = lambda found: np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
  close(last_map(tmp_path / 'hf', x))
  back = tmp_path / 'back'
  weights.write(weights.read(tmp_path / 'hf'), back, 'hf')
  loaded, info = transformers.VitDetBackbone.from_pretrained(
    back, output_loading_info=True
  )
  assert not info['missing_keys']
  assert not info['unexpected_keys']
  close(map_of(torch, loaded, x))


def test_transformers_reads_a_vitdet_that_a_vit_started(torch, transformers, tmp_path):
  vit = vit_jax.load(path_of('vit_timm'))
  fields = {'num_classes': None, 'pretrained_size': vit.image_size, 'window': 2}
  fields |= {f: getattr(vit.model, f) for f in ('patch_size', 'width', 'depth')}
  fields |= {
    f: getattr(vit.model, f) for f in ('mlp_dim', 'num_heads', 'act', 'norm_eps')
  }
  section = dict(name='vitdet', global_blocks=(vit.model.depth - 1,), **fields)
  loaded = vit_jax.load(path_of('vit_timm'), model=section)
  found = weights.Source(
    source='a',
    format='run',
    family='vitdet',
    fields=models.fields_of(loaded.model),
    flat=trees.flatten(loaded.params),
    image_size=loaded.image_size,
    channels=3,
    class_names=None,
    pp=None,
    unused=[],
  )
  weights.write(found, tmp_path / 'a', 'hf')
  theirs = transformers.VitDetBackbone.from_pretrained(tmp_path / 'a')
  x = images(loaded.image_size[0])
  _, out = jax.jit(loaded.model.apply)(loaded.variables, x)
  last = out[f'block{loaded.model.depth - 1:02d}']
  np.testing.assert_allclose(map_of(torch, theirs, x), last, rtol=0, atol=2e-5)


def test_the_head_of_pixels_is_that_of_pytorchs_layers(torch):
  built = models.build(
    'semantic_fpn',
    num_classes=5,
    channels=32,
    backbone=models.family('sfp').tiny[0] | {'name': 'sfp', 'extra_level': False},
  )
  x = images(32)
  shapes = jax.eval_shape(built.init, jax.random.key(0), x)
  rng = np.random.default_rng(0)
  draw = lambda s: rng.normal(0.1, 0.2, s.shape).astype(np.float32)
  variables = jax.tree.map(draw, shapes)
  logits, out = jax.jit(built.apply)(variables, x)
  t = {n: torch.from_numpy(v) for n, v in trees.flatten(variables['params']).items()}
  F, merged = torch.nn.functional, 0
  levels = sorted(name for name in out if name.startswith('p'))
  for level in levels:
    y, steps = nchw(torch, out[level]), levels.index(level)
    for i in range(max(steps, 1)):
      name = f'level{level[1:]}'
      y = F.conv2d(y, t[f'{name}/conv{i}/kernel'].permute(3, 2, 0, 1), padding=1)
      scale, bias = (t[f'{name}/norm{i}/{part}'] for part in ('scale', 'bias'))
      y = F.relu(F.group_norm(y, 32, scale, bias, 1e-5))
      if steps:
        y = F.interpolate(y, scale_factor=2, mode='bilinear', align_corners=False)
    merged = merged + y
  y = F.conv2d(merged, t['head/kernel'].permute(3, 2, 0, 1), t['head/bias'])
  y = F.interpolate(y, size=x.shape[1:3], mode='bilinear', align_corners=False)
  expected = np.moveaxis(y.numpy(), 1, -1)
  scale = np.abs(expected).max()
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * scale)
