"""The Vision Transformer against closed forms; published counts of several families."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import vit_jax
from tests.support import naming, tiny_models, tuning
from tests.support.abstract import abstract_params, count
from vit_jax import models, trees
from vit_jax.errors import UserError
from vit_jax.models import vit, vit_later
from vit_jax.nn.positions import sincos2d
from vit_jax.train import flops

# Of google-research/vision_transformer; the MAP heads of big_vision. 1000 classes, 224.
COUNTS = {
  ('Ti/16', 'token'): 5_717_416,
  ('S/16', 'token'): 22_050_664,
  ('S/32', 'token'): 22_878_952,
  ('B/8', 'token'): 86_576_872,
  ('B/16', 'token'): 86_567_656,
  ('B/32', 'token'): 88_224_232,
  ('L/16', 'token'): 304_326_632,
  ('L/32', 'token'): 306_535_400,
  ('H/14', 'token'): 632_045_800,
  ('S/16', 'gap'): 22_049_896,
  ('mu/16', 'gap'): 76_648,
  ('mu/16', 'map'): 89_320,
  ('Ti/16', 'map'): 6_161_704,
  ('M/16', 'gap'): 38_836_712,
  ('M/16', 'map'): 41_988_584,
  ('So400m/14', 'map'): 428_833_704,
  ('H/14', 'map'): 651_719_400,
  ('g/14', 'map'): 1_037_857_384,
  ('g-opt/14', 'map'): 1_164_428_776,
  ('G/14', 'map'): 1_882_797_416,
  ('G-opt/14', 'gap'): 1_664_839_144,
  ('e/14', 'gap'): 3_807_210_728,
}


# 1000 classes, 224 px. Hybrids and Mixers: google-research/vision_transformer; resnet_gn,
# R26 and Mixer H: big_vision; R50x3 and Mixers of 32 px: timm.
OTHERS = {
  'vit:R+Ti/16': 6_337_704,
  'vit:R26+S/32': 36_431_912,
  'vit:R50+B/16': 98_659_112,
  'resnet_gn:R26': 15_995_176,
  'resnet_gn:R50': 25_557_032,
  'bit:R50x3': 217_319_080,
  'bit:R26': 15_987_496,
  'mixer:S/32': 19_104_624,
  'mixer:S/16': 18_528_264,
  'mixer:B/32': 60_293_428,
  'mixer:B/16': 59_880_472,
  'mixer:L/32': 206_939_264,
  'mixer:L/16': 208_196_168,
  'mixer:H/16': 430_121_832,
  'mixer:H/14': 432_350_952,  # by hand: N 256 and not 196, 14 px patches
}


def test_parameter_counts_are_the_published_ones():
  for (variant, classifier), number in COUNTS.items():
    model = vit_jax.create_model('vit', variant, classifier=classifier)
    assert count(model) == number, (variant, classifier)
  for name, number in OTHERS.items():
    assert count(vit_jax.create_model(name)) == number, name


def test_scanned_blocks_agree_with_big_vision(golden):
  params = trees.unflatten(golden('vit_bigvision_scan_tok'))
  params['Transformer']['posembed_input'] = {
    'pos_embedding': params.pop('pos_embedding')
  }
  size = dict(patch_size=(8, 8), width=48, depth=3, num_heads=4, mlp_dim=96)
  size |= dict(num_classes=10, scan=True, posemb_tokens='patches')
  model, expected = (
    vit_jax.create_model('vit', **size),
    golden('training_bigvision_tok'),
  )
  reference = golden('vit_bigvision_scan_tok.expected')
  image = reference['image']
  logits = jax.jit(model.apply)({'params': params}, image)[0]
  # Two float32 implementations of three blocks; a wrong GELU differs by 1e-4.
  np.testing.assert_allclose(logits, reference['logits'], atol=5e-6, rtol=0)
  # 20 steps of its own model by optax.adamw(1e-3).
  optimizer = optax.adamw(1e-3)

  def loss(params):
    logits = model.apply({'params': params}, image)[0]
    return optax.softmax_cross_entropy(logits, expected['labels']).mean()

  @jax.jit
  def step(params, state):
    value, gradient = jax.value_and_grad(loss)(params)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, value

  state, losses = optimizer.init(params), []
  for _ in range(20):
    params, state, value = step(params, state)
    losses.append(value)
  np.testing.assert_allclose(losses, expected['loss'], rtol=1e-5)


def test_names_of_others_give_the_same_model():
  model = vit_jax.create_model('vit', 'B/16', num_classes=7)
  assert vit_jax.create_model('ViT-B_16', num_classes=7) == model
  assert vit_jax.create_model('vit:B/16', num_classes=7) == model
  timm = vit_jax.create_model('vit_base_patch16_224', num_classes=7)
  assert timm == model.change(act='gelu_erf')


@pytest.mark.parametrize(
  'fields', [dict(kv_heads=(2, 1)), dict(kv_heads=(3,)), dict(kv_heads=(1,), scan=True)]
)
def test_shared_keys_and_values_that_do_not_fit(fields):
  model = vit_jax.create_model('vit', 'mu/8', **fields)  # one block of two heads
  with pytest.raises(UserError, match=naming('kv_heads', 'num_heads')):
    abstract_params(model, 16)


@pytest.mark.parametrize(('fields', 'std'), [({}, 0.02), ({'posemb_std': None}, 0.125)])
def test_position_embeddings_start_as_asked(fields, std):
  model = vit_jax.create_model('vit', 'mu/1', width=64, depth=1, **fields)
  images = jnp.zeros((1, 16, 16, 3))
  start = lambda key: model.init(key, images)['params']['Transformer']['posembed_input']
  table = jax.jit(start)(jax.random.key(0))['pos_embedding']
  # 16,448 draws: one deviation of their deviation is 0.55 %.
  np.testing.assert_allclose(table.std(), std, rtol=0.03)


def test_non_square_images_and_patches():
  model = vit_jax.create_model('vit', 'mu/8x4', depth=1, num_classes=3)
  x = np.random.default_rng(0).normal(size=(2, 24, 32, 3)).astype(np.float32)
  params = trees.unflatten(tuning.random(model.shapes(x.shape[1:])['params']))
  variables, apply = {'params': params}, jax.jit(model.apply)
  _, out = apply(variables, x)
  assert out['stem'].shape == (2, 3, 8, 32)
  assert params['Transformer']['posembed_input']['pos_embedding'].shape == (1, 25, 32)
  # Pixels behind the last whole patch are cut off.
  more = np.pad(x, ((0, 0), (0, 7), (0, 3), (0, 0)), constant_values=9)
  np.testing.assert_array_equal(apply(variables, more)[1]['stem'], out['stem'])
  with pytest.raises(ValueError, match=naming('7x36', '8x4')):
    model.apply(variables, np.zeros((1, 7, 36, 3), np.float32))
  # The patch embedding is the strided convolution.
  product = jax.lax.conv_general_dilated(
    x,
    params['embedding']['kernel'],
    (8, 4),
    'VALID',
    dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
  )
  expected = product + params['embedding']['bias']
  # Sums of 96 products in another order.
  np.testing.assert_allclose(out['stem'], expected, atol=2e-6)


def test_without_positions_patches_may_be_permuted():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(1, 32, 32, 3)).astype(np.float32)
  tiles = x.reshape(1, 4, 8, 4, 8, 3).transpose(0, 1, 3, 2, 4, 5).reshape(16, 8, 8, 3)
  mixed = tiles[rng.permutation(16)].reshape(1, 4, 4, 8, 8, 3)
  mixed = mixed.transpose(0, 1, 3, 2, 4, 5).reshape(x.shape)
  pre_logits = {}
  for posemb in ('none', 'learn'):
    fields = dict(posemb=posemb, classifier='gap', depth=1)
    model = vit_jax.create_model('vit', 'mu/8', **fields)
    variables = {'params': tiny_models.init(model)}
    apply = jax.jit(model.apply)
    a, b = (apply(variables, image)[1]['pre_logits'] for image in (x, mixed))
    pre_logits[posemb] = float(np.abs(a - b).max())
  assert pre_logits['none'] < 1e-5  # the sums' order
  assert pre_logits['learn'] > 1e-3


def test_sincos2d_closed_form():
  table = sincos2d(2, 3, 8)[0]
  omega = [1.0, 1e-4]  # 1 / 10000 ** (k / (8 / 4 - 1))
  x, y = 2, 1  # the last of six positions, row by row
  expected = [*np.sin(np.multiply(omega, x)), *np.cos(np.multiply(omega, x))]
  expected += [*np.sin(np.multiply(omega, y)), *np.cos(np.multiply(omega, y))]
  np.testing.assert_allclose(table[5], expected, rtol=1e-6)  # rounding to float32


def test_head_starts_at_the_prior():
  fields = dict(depth=1, num_classes=5, head_bias_init=-10.0)
  model = vit_jax.create_model('vit', 'mu/16', **fields)
  x = np.ones((2, 32, 32, 3), np.float32)
  head = jax.jit(lambda key: model.init(key, x)['params']['head'])(jax.random.key(0))
  np.testing.assert_array_equal(head['kernel'], 0)
  np.testing.assert_array_equal(head['bias'], -10)


def test_without_features_the_last_block_is_for_the_class_token():
  model = vit_jax.create_model(
    'vit', 'mu/8', depth=2, num_classes=5, classifier='token', remat='full'
  )
  rng = np.random.default_rng(0)
  images = rng.standard_normal((2, 16, 16, 3), np.float32)
  params = jax.eval_shape(model.init, jax.random.key(0), images)['params']
  params = jax.tree.map(lambda x: rng.normal(0, 0.2, x.shape).astype('f'), params)

  def loss(params, features):
    logits, _ = model.apply({'params': params}, images, train=True, features=features)
    return jnp.sin(logits).sum()

  value = jax.jit(jax.value_and_grad(loss), static_argnums=1)
  operations = [flops.count(lambda p, f=f: loss(p, f), params) for f in (False, True)]
  assert operations[0] < 0.8 * operations[1]
  # The same sums, at most in another order, of terms up to 10.
  for one, other in zip(
    *(jax.tree.leaves(value(params, f)) for f in (False, True)), strict=True
  ):
    np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
  'fields',
  [
    dict(dropout=0.1, stochastic_depth=0.1, representation_size=8),
    dict(classifier='map', posemb='sincos2d', scan=True, remat='full'),
    dict(classifier='gap', attention='axial', posemb='learn2d', posemb_where='every'),
    dict(posemb='relative', stem_blocks=(1,), stem_width=32),
  ],
  ids=lambda fields: fields.get('classifier', 'token') + '-' + fields.get('posemb', ''),
)
def test_the_later_page_computes_the_same_with_its_defaults(fields):
  fields |= dict(patch_size=(4, 4), width=16, depth=2, mlp_dim=32, num_heads=2)
  paper, later = vit.ViT(**fields), vit_later.LaterViT(**fields)
  assert type(models.build('vit', **fields)) is vit.ViT
  shapes = paper.shapes((64, 64, 3))
  assert later.shapes((64, 64, 3)) == shapes
  images = jax.ShapeDtypeStruct((2, 64, 64, 3), jnp.float32)

  def lower(model):
    def run(variables, images):
      rngs = {'dropout': jax.random.key(0)}
      return model.apply(variables, images, train=True, features=False, rngs=rngs)

    return jax.jit(run).lower(shapes, images).as_text()

  assert lower(later) == lower(paper)


def test_a_field_of_a_later_paper_makes_the_later_model():
  model = models.build('vit', 'mu/16')
  assert type(model) is vit.ViT
  assert type(model.change(scan=True)) is vit.ViT
  later = model.change(registers=4)
  assert type(later) is vit_later.LaterViT
  assert later == models.build('vit', 'mu/16', registers=4)
  assert model.family_name == later.family_name == 'vit'
  assert {**model.fields(), 'registers': 4} == later.fields()
  assert (
    type(models.build('vit', 'mu/16', classifier='token_mean')) is vit_later.LaterViT
  )
  with pytest.raises(UserError, match=naming('vit.registres', 'registers')):
    models.build('vit', 'mu/16', registres=4)


@pytest.mark.parametrize(
  ('base', 'family'), [(vit.ViT, vit.FAMILY), (vit_later.LaterViT, vit_later.FAMILY)]
)
def test_a_subclass_of_ones_own_is_built(base, family, monkeypatch):
  class Mine(base):
    pass

  family = dataclasses.replace(family, model=Mine)
  monkeypatch.setitem(models.MODELS.data, 'mine', family)
  model = models.build('mine', 'mu/16')
  assert type(model) is type(model.change(scan=True)) is Mine
  assert model.family_name == 'mine'


def test_a_class_that_another_family_has_is_refused(monkeypatch):
  monkeypatch.setitem(models.MODELS.data, 'mine', vit_later.FAMILY)
  with pytest.raises(UserError, match=naming("'vit'", "'mine'", 'ViT', 'subclass')):
    models.build('mine', 'mu/16')
