"""timm and transformers compute what we compute, with weights converted both ways.

Run by `make peer`; models are small or on random weights, every parameter random.
"""

import numpy as np
import pytest

import vit_jax
from tests.support import GOLDEN
from tests.support.peers import (
  MARKS,
  RESNETS,
  ROUNDING,
  TOKENS,
  agree,
  images,
  ours,
  randomise,
  save_timm,
  theirs,
)
from tests.tools.test_convert import logits_of, random_source
from vit_jax import weights

pytestmark = MARKS

TIMM_VITS = {
  'token': dict(global_pool='token'),
  'gap': dict(class_token=False, global_pool='avg', fc_norm=False),
  'map': dict(class_token=False, global_pool='map'),
  'no_embed_class': dict(no_embed_class=True),
  'no positions': dict(class_token=False, global_pool='map', pos_embed='none'),
  'tanh': dict(act_layer='gelu_tanh'),
}


@pytest.mark.parametrize('kind', TIMM_VITS)
def test_timm_vit_both_ways(torch, timm, tmp_path, kind):
  args = dict(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=4)
  args |= dict(num_classes=10, mlp_ratio=2.0) | TIMM_VITS[kind]
  model = randomise(torch, timm.models.VisionTransformer(**args))
  folder = save_timm(tmp_path / 'timm', model, 'vit_tiny_patch16_224', **args)
  x = images(32)
  expected = theirs(torch, model, x)
  agree(ours(folder, x), expected, TOKENS)

  back = tmp_path / 'back'
  weights.write(weights.read(folder), back, 'timm')
  loaded = timm.create_model(f'local-dir:{back}', pretrained=True).eval()
  agree(theirs(torch, loaded, x), expected, TOKENS)


@pytest.mark.parametrize(
  ('name', 'tolerance'),
  [
    ('vit_tiny_r_s16_p8_224', RESNETS),
    ('vit_small_r26_s32_224', RESNETS),
    ('mixer_s32_224', TOKENS),
    ('resnetv2_50x1_bit', RESNETS),
    ('mvitv2_tiny', ROUNDING),
    ('mvitv2_small_cls', ROUNDING),
  ],
)
def test_timm_models_by_name_both_ways(torch, timm, tmp_path, name, tolerance):
  model = timm.create_model(name, num_classes=10)
  model = randomise(torch, model, scale=0.02)
  folder = save_timm(tmp_path / 'timm', model, name)
  x = images(224, batch=1)
  expected = theirs(torch, model, x)
  agree(ours(folder, x), expected, tolerance)

  back = tmp_path / 'back'
  weights.write(weights.read(folder), back, 'timm')
  loaded = timm.create_model(f'local-dir:{back}', pretrained=True).eval()
  for key, tensor in model.state_dict().items():
    assert torch.equal(tensor, loaded.state_dict()[key]), key
  agree(theirs(torch, loaded, x), expected, tolerance)


@pytest.mark.parametrize('golden_name', ['vit_google_token', 'vit_bigvision_map'])
def test_timm_loads_google_weights_that_we_exported(torch, timm, tmp_path, golden_name):
  source = GOLDEN / f'{golden_name}.npz'
  weights.write(weights.read(source), tmp_path / 'out', 'timm')
  model = timm.create_model(f'local-dir:{tmp_path / "out"}', pretrained=True).eval()
  expected = np.load(GOLDEN / f'{golden_name}.expected.npz')
  agree(theirs(torch, model, expected['image']), expected['logits'], TOKENS)


@pytest.mark.parametrize(
  ('to', 'fields'),
  [
    ('timm', dict(classifier='gap')),  # configs/folder.py
    ('timm', dict(classifier='token')),
    ('hf', dict(classifier='token')),
  ],
)
def test_sine_cosine_positions_are_the_table_that_others_read(
  torch, timm, transformers, tmp_path, to, fields
):
  source = random_source(posemb='sincos2d', **fields)
  weights.write(source, tmp_path / 'out', to)
  if to == 'timm':
    model = timm.create_model(f'local-dir:{tmp_path / "out"}', pretrained=True)
  else:
    from_pretrained = transformers.ViTForImageClassification.from_pretrained
    model = from_pretrained(tmp_path / 'out')
  x = np.random.default_rng(1).uniform(-1, 1, (2, 32, 48, 3)).astype(np.float32)
  mine, _ = logits_of(source, vit_jax.load(tmp_path / 'out'))
  agree(theirs(torch, model.eval(), x), mine, TOKENS)


@pytest.mark.parametrize('act', ['gelu', 'gelu_pytorch_tanh'])
@pytest.mark.parametrize('eps', [1e-6, 1e-12])
def test_transformers_vit_both_ways(torch, transformers, tmp_path, act, eps):
  config = transformers.ViTConfig(
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=96,
    image_size=32,
    patch_size=8,
    hidden_act=act,
    layer_norm_eps=eps,
    num_labels=10,
  )
  model = randomise(torch, transformers.ViTForImageClassification(config))
  model.save_pretrained(tmp_path / 'hf')
  x = images(32)
  expected = theirs(torch, model, x)
  agree(ours(tmp_path / 'hf', x), expected, TOKENS)

  back = tmp_path / 'back'
  weights.write(weights.read(tmp_path / 'hf'), back, 'hf')
  loaded, info = transformers.ViTForImageClassification.from_pretrained(
    back, output_loading_info=True
  )
  assert not any(info[k] for k in ('missing_keys', 'unexpected_keys'))
  agree(theirs(torch, loaded.eval(), x), expected, TOKENS)


def test_transformers_pooler_is_pre_logits(torch, transformers, tmp_path):
  config = transformers.ViTConfig(
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=96,
    image_size=32,
    patch_size=8,
    layer_norm_eps=1e-6,
  )
  model = randomise(torch, transformers.ViTModel(config))
  model.save_pretrained(tmp_path / 'hf')
  x = images(32)
  expected = model(torch.from_numpy(x.transpose(0, 3, 1, 2).copy())).pooler_output
  agree(ours(tmp_path / 'hf', x), expected.numpy(), TOKENS)


def test_transformers_loads_google_weights_that_we_exported(
  torch, transformers, tmp_path
):
  origin = weights.read(GOLDEN / 'vit_google_token.npz')
  weights.write(origin, tmp_path / 'out', 'hf')
  model = transformers.ViTForImageClassification.from_pretrained(tmp_path / 'out')
  expected = np.load(GOLDEN / 'vit_google_token.expected.npz')
  agree(theirs(torch, model.eval(), expected['image']), expected['logits'], TOKENS)


def test_bicubic_positions_are_those_of_timm(torch, timm):
  from timm.layers import resample_abs_pos_embed

  from vit_jax.weights.adapt import resize_positions

  table = np.random.default_rng(0).normal(size=(1, 1 + 14 * 14, 8)).astype(np.float32)
  for new in ((24, 24), (7, 7), (10, 20)):
    timms = resample_abs_pos_embed(
      torch.from_numpy(table), new_size=list(new), num_prefix_tokens=1
    ).numpy()
    result = resize_positions(table, (14, 14), new, 'bicubic')
    # It computes positions up to 24 in float32, 2e-6, times the slope of the kernel and
    # 4 x 4 values near 1. The same call in float64 shows that nothing else differs.
    np.testing.assert_allclose(result, timms, rtol=0, atol=2e-5)
    grid = torch.from_numpy(table[:, 1:].reshape(1, 14, 14, 8)).permute(0, 3, 1, 2)
    exact = torch.nn.functional.interpolate(
      grid.double(), size=new, mode='bicubic', antialias=True, align_corners=False
    )
    exact = exact.permute(0, 2, 3, 1).reshape(1, -1, 8).numpy()
    np.testing.assert_allclose(result[:, 1:], exact, rtol=0, atol=1e-6)
