"""Weights in a different model: resized, with another head, as the start of another."""

import re
import shutil

import jax
import numpy as np
import pytest
import scipy.ndimage
from safetensors.numpy import save_file

import vit_jax
from tests.support import GOLDEN, naming
from tests.support.goldens import arrays_of, path_of
from vit_jax import models, optim, trees, tune
from vit_jax.errors import UserError
from vit_jax.optim import multipliers
from vit_jax.weights import adapt

# -- closed forms ---------------------------------------------------------------------


@pytest.fixture
def table():
  return np.random.default_rng(0).normal(size=(1, 1 + 14 * 10, 5)).astype(np.float32)


@pytest.mark.parametrize('new', [(14, 10), (24, 24), (7, 5), (14, 20), (1, 1)])
def test_bilinear_is_scipys_zoom_of_order_one(table, new):
  grid = table[0, 1:].reshape(14, 10, 5).astype(np.float64)
  factors = (new[0] / 14, new[1] / 10, 1)
  expected = scipy.ndimage.zoom(grid, factors, order=1)
  result = adapt.resize_positions(table, (14, 10), new)
  assert result.shape == (1, 1 + new[0] * new[1], 5)
  np.testing.assert_array_equal(result[0, 0], table[0, 0])
  # Both in float64; the result is float32 of numbers up to 3.
  np.testing.assert_allclose(result[0, 1:].reshape(expected.shape), expected, atol=3e-7)


@pytest.mark.parametrize('new', [(24, 24), (7, 5), (14, 20)])
def test_bicubic_is_jax_image(table, new):
  grid = table[0, 1:].reshape(14, 10, 5)
  expected = jax.image.resize(grid, (*new, 5), 'bicubic', antialias=True)
  result = adapt.resize_positions(table, (14, 10), new, 'bicubic')
  # jax.image computes its kernel in float32, at positions up to 24.
  np.testing.assert_allclose(result[0, 1:].reshape(expected.shape), expected, atol=2e-5)


@pytest.mark.parametrize(
  ('method', 'theirs'),
  [
    ('bicubic', 'bicubic_antialias'),
    ('bicubic_plain', 'bicubic'),
    ('bicubic_offset', 'dinov2_offset'),
    ('bilinear_plain', 'bilinear'),
    ('bilinear_antialias', 'bilinear_antialias'),
  ],
)
@pytest.mark.parametrize('new', [(6, 3), (7, 7)])
def test_methods_are_pytorchs(method, theirs, new):
  with np.load(GOLDEN / 'positions.npz') as file:
    table, expected = file['pos'], file[f'{theirs}_{new[0]}x{new[1]}']
  result = adapt.resize_positions(table.reshape(1, 16, -1), (4, 4), new, method)
  # PyTorch computes in float32.
  result = result.reshape(expected.shape)
  np.testing.assert_allclose(result, expected, rtol=1e-5, atol=2e-6)


def test_positions_of_no_such_grid(table):
  with pytest.raises(ValueError, match=naming((1, 141, 5), '12x12')):
    adapt.resize_positions(table, (12, 12), (7, 5))


@pytest.mark.parametrize('new', [(16, 16), (12, 24)])
def test_enlarged_patches_have_their_old_embedding(new):
  rng = np.random.default_rng(0)
  kernel = rng.normal(size=(8, 8, 3, 4))
  patch = rng.normal(size=(8, 8, 3))
  larger = np.asarray(jax.image.resize(patch, (*new, 3), 'linear', antialias=False))
  ours = np.einsum('hwc,hwcd->d', larger, adapt.resize_patches(kernel, new))
  # jax.image works in float32, 192 terms.
  np.testing.assert_allclose(ours, np.einsum('hwc,hwcd->d', patch, kernel), atol=1e-4)


def test_smaller_patches_are_the_least_squares_answer():
  kernel = np.random.default_rng(0).normal(size=(8, 8, 1, 1))
  small = adapt.resize_patches(kernel, (4, 4))
  # The matrix that halves a patch, from the images of its basis.
  basis = np.eye(64).reshape(64, 8, 8)
  halves = jax.vmap(lambda p: jax.image.resize(p, (4, 4), 'linear', antialias=False))
  matrix = np.asarray(halves(basis)).reshape(64, 16)  # patch -> small patch, transposed
  expected = np.linalg.lstsq(matrix, kernel.ravel(), rcond=None)[0]
  np.testing.assert_allclose(small.ravel(), expected, atol=1e-5)


def test_stack_and_unstack_are_inverse():
  vit, block = models.family('vit'), 'Transformer/encoderblock'
  flat = {f'{block}_{i}/k': np.full(2, i) for i in range(11)} | {'cls': np.ones(1)}
  stacked = adapt.stack(flat, vit)
  np.testing.assert_array_equal(stacked[f'{block}/k'][:, 0], np.arange(11))
  again = adapt.unstack(stacked, vit)
  assert again.keys() == flat.keys()
  assert all(np.array_equal(again[n], flat[n]) for n in flat)


# -- other classes, sizes, patches ----------------------------------------------------


def test_another_number_of_classes_gets_a_new_head():
  loaded = vit_jax.load(path_of('vit_google_token'), num_classes=3)
  assert loaded.params['head']['kernel'].shape == (48, 3)
  assert not loaded.params['head']['kernel'].any()
  assert re.search(naming('head/bias', 'head/kernel'), loaded.report)


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused_by_name(tmp_path, value):
  arrays = arrays_of('vit_google_token')
  arrays['head/kernel'][3, 4] = value
  np.savez(tmp_path / 'a.npz', **arrays)
  with pytest.raises(UserError, match=naming(tmp_path / 'a.npz', 'head/kernel')):
    vit_jax.load(tmp_path / 'a.npz')
  vit_jax.load(tmp_path / 'a.npz', num_classes=3)


def test_another_size_resizes_the_positions():
  loaded = vit_jax.load(path_of('vit_google_token'), image_size=(48, 64))
  old = arrays_of('vit_google_token')['Transformer/posembed_input/pos_embedding']
  new = loaded.params['Transformer']['posembed_input']['pos_embedding']
  assert new.shape == (1, 1 + 6 * 8, 48)
  np.testing.assert_array_equal(new[:, 0], old[:, 0])  # the class token's
  corners = new[0, 1:].reshape(6, 8, 48)[[0, 0, -1, -1], [0, -1, 0, -1]]
  expected = old[0, 1:].reshape(4, 4, 48)[[0, 0, -1, -1], [0, -1, 0, -1]]
  np.testing.assert_allclose(corners, expected, rtol=1e-6)
  assert re.search(naming((4, 4), (6, 8), 'bilinear'), loaded.report)


def test_another_patch_size_keeps_the_grid():
  model, params = vit_jax.load(
    path_of('vit_google_token'), patch_size=(16, 16), image_size=64
  )
  assert params['embedding']['kernel'].shape == (16, 16, 3, 48)
  expected = np.load(GOLDEN / 'vit_google_token.expected.npz')
  # An image enlarged as its patches are (each on its own) has the same embeddings.
  x = expected['image'].reshape(2, 4, 8, 4, 8, 3).swapaxes(2, 3)
  x = jax.image.resize(x, (2, 4, 4, 16, 16, 3), 'linear', antialias=False)
  x = x.swapaxes(2, 3).reshape(2, 64, 64, 3)
  logits, _ = jax.jit(model.apply)({'params': params}, x)
  np.testing.assert_allclose(logits, expected['logits'], rtol=0, atol=2e-5)


# -- strictness -----------------------------------------------------------------------


def test_a_part_can_be_left_out():
  source = path_of('vit_google_prelogits')
  loaded = vit_jax.load(source, skip=['pre_logits/.*'])
  old = arrays_of('vit_google_prelogits')['pre_logits/kernel']
  assert not np.array_equal(loaded.params['pre_logits']['kernel'], old)
  names = ('pre_logits/bias', 'pre_logits/kernel')
  with pytest.raises(UserError, match=naming(*names, 'skip')):
    vit_jax.load(source, representation_size=None, skip=['head/.*'])
  skip = ['pre_logits/.*', 'head/.*']
  without = vit_jax.load(source, representation_size=None, skip=skip)
  assert 'pre_logits' not in without.params
  assert re.search(naming('head/bias', *names[:1]), without.report)


@pytest.mark.parametrize(
  ('name', 'fields', 'facts'),
  [
    ('vit_google_token', dict(mlp_dim=64), ('Dense_0/kernel', (48, 96), (48, 64))),
    ('vit_google_token', dict(depth=4), ('encoderblock_3/LayerNorm_0/bias',)),
    ('mixer_google', dict(image_size=48), ('Dense_0/kernel', (16, 24), (36, 24))),
  ],
)
def test_shapes_that_differ_are_named_with_both(name, fields, facts):
  with pytest.raises(UserError, match=naming(path_of(name), *facts)):
    vit_jax.load(path_of(name), **fields)


def test_weights_of_another_architecture_are_refused(tmp_path):
  arrays = arrays_of('vit_timm') | {'blocks.0.more.gamma': np.ones(48, np.float32)}
  save_file(arrays, tmp_path / 'model.safetensors')
  shutil.copy(GOLDEN / 'vit_timm' / 'config.json', tmp_path)
  with pytest.raises(
    UserError, match=naming(tmp_path, 'timm', "'blocks.0.more.gamma'")
  ):
    vit_jax.load(tmp_path)


@pytest.mark.parametrize('head', ['bias', 'kernel'])
def test_a_head_that_does_not_fit_itself_is_refused(tmp_path, head):
  # Not one of another number of classes, which would be initialised afresh.
  arrays = arrays_of('vit_google_token')
  if head == 'kernel':
    del arrays['head/kernel']
  else:
    arrays['head/bias'] = arrays['head/bias'][:5]
  np.savez(tmp_path / 'a.npz', **arrays)
  with pytest.raises(UserError, match=naming('head/bias')):
    vit_jax.load(tmp_path / 'a.npz')


# -- the start of another model -------------------------------------------------------


def vitdet_like(name, **fields):
  """Returns a golden ViT, and the section of a ViTDet of its sizes."""
  vit = vit_jax.load(path_of(name))
  same = ('patch_size', 'width', 'depth', 'mlp_dim', 'num_heads', 'act', 'norm_eps')
  return vit, dict(
    name='vitdet',
    global_blocks=tuple(range(vit.model.depth)),
    pretrained_size=vit.image_size,
    **{field: vit.model.fields()[field] for field in same},
    **fields,
  )


@pytest.mark.parametrize('name', ['vit_bigvision_map', 'vit_timm', 'vit_hf'])
def test_a_vit_of_any_source_starts_a_vitdet(name):
  vit, section = vitdet_like(name)
  loaded = vit_jax.load(path_of(name), model=section)
  afresh = 'initialised afresh: Transformer/encoderblock_0/relative_positions'
  assert afresh in loaded.report
  params, theirs = trees.flatten(loaded.params), trees.flatten(vit.params)
  for n, x in params.items():
    if 'relative_positions' in n:
      assert not x.any()
    elif 'posembed' not in n:
      np.testing.assert_array_equal(x, theirs[n])
  assert {'Transformer/encoder_norm/scale'} <= set(theirs) - set(params)


def test_it_computes_what_a_vit_without_a_class_token_does():
  # All of its blocks attend to all, and relative positions start at zero.
  vit, section = vitdet_like('vit_bigvision_map')
  assert vit.model.classifier == 'map'
  loaded = vit_jax.load(path_of('vit_bigvision_map'), model=section)
  images = np.random.default_rng(0).uniform(-1, 1, (1, *vit.image_size, 3))
  _, expected = jax.jit(vit.model.apply)(vit.variables, images)
  _, out = jax.jit(loaded.model.apply)(loaded.variables, images)
  last = f'block{vit.model.depth - 1:02d}'
  tokens = out[last].reshape(expected[last].shape)
  np.testing.assert_allclose(tokens, expected[last], rtol=0, atol=5e-6)


def test_positions_of_another_grid_and_a_class_row():
  vit, section = vitdet_like('vit_timm')
  side = 2 * vit.image_size[0]
  section['pretrained_size'] = (side, side)
  loaded = vit_jax.load(path_of('vit_timm'), model=section, resize='bicubic')
  name = 'Transformer/posembed_input/pos_embedding'
  table, theirs = (trees.flatten(x.params)[name] for x in (loaded, vit))
  assert table.shape[1] - 1 == 4 * (theirs.shape[1] - 1)
  np.testing.assert_array_equal(table[:, 0], theirs[:, 0])
  assert 'bicubic' in loaded.report
  without = vit_jax.load(path_of('vit_timm'), model=section | {'class_row': False})
  assert trees.flatten(without.params)[name].shape[1] == table.shape[1] - 1
  other = vit_jax.load(path_of('vit_timm'), model=section | {'act': 'gelu_tanh'})
  assert "act='gelu_erf'" in other.report  # the weights have it


def test_a_vit_starts_a_pyramid_and_a_backbone_what_is_built_on_it():
  _, section = vitdet_like('vit_timm')
  loaded = vit_jax.load(path_of('vit_timm'), model=dict(name='sfp', backbone=section))
  alone = vit_jax.load(path_of('vit_timm'), model=section)
  for n, x in trees.flatten(alone.params).items():
    np.testing.assert_array_equal(trees.flatten(loaded.params)[f'backbone/{n}'], x)
  swin = vit_jax.load(path_of('swin_hf'))
  fields = {'name': 'swin', **swin.model.fields(), 'num_classes': None}
  fpn = vit_jax.load(path_of('swin_hf'), model=dict(name='fpn', backbone=fields))
  for n, x in trees.flatten(fpn.params['backbone']).items():
    np.testing.assert_array_equal(x, trees.flatten(swin.params)[n])
  assert 'unused: head/' in fpn.report


def test_a_swin_starts_a_detector_s_with_a_norm_for_each_map():
  own = vit_jax.load(path_of('swin_timm'))
  fields = own.model.fields() | dict(name='swin', map_norms=True)
  fields.pop('num_classes')
  fpn = vit_jax.load(path_of('swin_timm'), model=dict(name='fpn', backbone=fields))
  inside = fpn.variables['params']['backbone']
  stem = own.variables['params']['stem']['embedding']['kernel']
  np.testing.assert_array_equal(inside['stem']['embedding']['kernel'], stem)
  assert (inside['stage1_norm']['scale'] == 1).all()
  assert 'norm' not in inside


def test_a_vit_with_registers_and_scales_starts_a_vitdet(tmp_path):
  fields = dict(patch_size=(8, 8), width=16, depth=2, mlp_dim=32, num_heads=2)
  fields |= dict(layer_scale=0.1)

  def written(**more):
    vit = models.build('vit', num_classes=3, **fields, **more)
    shapes = vit.shapes((32, 32, 3))['params']
    draw = np.random.default_rng(0).normal
    flat = {n: np.float32(draw(size=x.shape)) for n, x in trees.flatten(shapes).items()}
    np.savez(tmp_path / 'vit.npz', **flat)
    return flat

  section = dict(
    name='vitdet', global_blocks=(0, 1), pretrained_size=(32, 32), **fields
  )
  section |= dict(act='gelu_tanh', relative=False)
  start = lambda model: vit_jax.load(
    str(tmp_path / 'vit.npz'), image_size=32, model=model
  )
  flat, images = written(registers=2), np.ones((1, 32, 32, 3), np.float32)
  for name, x in trees.flatten(start(section).params).items():
    if name.endswith('pos_embedding'):  # class token, two registers, patches
      flat[name] = np.delete(flat[name], [1, 2], 1)
    np.testing.assert_array_equal(x, flat[name])
  sfp = dict(name='sfp', backbone=dict(name='vit', registers=2, **fields))
  registers = start(sfp).params['backbone']['registers']
  np.testing.assert_array_equal(registers, flat['registers'])
  # Without tokens before the patches, the blocks of both compute the same.
  written(classifier='gap')
  vit, ours = start(dict(name='vit', classifier='gap', **fields)), start(section)
  maps = [
    x.model.maps(jax.jit(x.model.apply)(x.variables, images)[1]) for x in (vit, ours)
  ]
  expected = maps[0]['block01']
  atol = 1e-5 * np.abs(expected).max()
  np.testing.assert_allclose(maps[1]['stage2'], expected, rtol=0, atol=atol)
  section['layer_scale'] = None
  with pytest.raises(UserError, match=naming('LayerScale_0/gamma')):
    start(section)


@pytest.mark.parametrize(
  ('source', 'model', 'facts'),
  [
    ('hybrid_google', 'vitdet:B', ('stem_blocks', 'vitdet')),
    ('mixer_google', 'vitdet:B', ('MixerBlock_0/LayerNorm_0/bias',)),
    ('vit_timm', 'vitdet:B', (48, 768)),
  ],
)
def test_what_no_vitdet_starts_from_is_refused(source, model, facts):
  with pytest.raises(UserError, match=naming(path_of(source), *facts)):
    vit_jax.load(path_of(source), model=model)


def test_rates_decay_by_the_blocks_of_the_backbone():
  # detectron2: 0 for patches and positions, 1 to L for the blocks, L + 1 for the rest.
  model = models.build('sfp', **models.family('sfp').tiny[0])
  params = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 32, 32, 3)))
  factors = multipliers.layer_factors(model.family, params['params'], 0.7)
  L = model.backbone.depth
  at = lambda start: {float(f) for n, f in factors.items() if n.startswith(start)}
  assert at('backbone/embedding') == {0.7 ** (L + 1)}
  assert at('backbone/Transformer/posembed_input') == {0.7 ** (L + 1)}
  for i in range(L):
    assert at(f'backbone/Transformer/encoderblock_{i}/') == {0.7 ** (L - i)}
  assert at('p') == {1.0}
  optim.build('adamw', 1e-4, 10, layer_decay=0.7, family=model.family)


@pytest.mark.parametrize(
  ('options', 'facts'),
  [
    ({'image_size': 10**6}, ('image_size', '65,536 tokens')),
    ({'image_size': 8.5}, ('image_size=8.5', 'int')),
    ({'skip': [3]}, ('skip=[3]',)),
    ({'skip': 'head/.*'}, ("skip='head/.*'", 'list')),
    ({'model': {}}, ('model={}', 'lacks name')),
    ({'model': 3}, ('model=3',)),
    ({'tune': 3}, ('tune=3',)),
    ({'tune': {'method': 'lora', 'rank': 10**9}}, ('rank=1000000000', '65536')),
    ({'depth': 10**9}, ('depth=1000000000', '1000]')),
    ({'num_classes': 10**8}, ('num_classes=100000000',)),
    ({'num_heads': 'x'}, ("num_heads='x'", 'int')),
  ],
)
def test_arguments_are_checked_as_a_config_is(options, facts):
  with pytest.raises(UserError, match=naming(*facts)):
    vit_jax.load(GOLDEN / 'vit_google_token.npz', **options)


def test_tuning_in_python_is_checked_as_a_config_is():
  with pytest.raises(UserError, match=naming('rank=1000000000', '65536')):
    tune.build('lora', rank=10**9)
