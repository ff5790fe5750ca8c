"""The contract that every entry of MODELS keeps, on the `tiny` models of its family."""

import functools
import re

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import naming
from tests.support.scanned import stacked
from tests.support.tiny_models import (
  CLASSIFIERS,
  SIZE,
  TINY,
  apply,
  build,
  compiled,
  family_of,
  having,
  images,
  init,
  one_of_each,
  outputs_of,
  total,
  variables,
)
from vit_jax import models, sharding, trees
from vit_jax.errors import UserError


@functools.cache
def shapes_of(model):
  """Returns the shapes of (outputs, out), without computing them."""
  return jax.eval_shape(model.apply, variables(model, init(model)), images())


@pytest.fixture(params=TINY)
def name(request):
  return request.param


def test_the_family_knows_every_parameter(name):
  family = family_of(name)
  shapes = {n: x.shape for n, x in trees.flatten(init(build(name))).items()}
  depths, blocks = family.depths(shapes)
  numbers = {d for depth in depths.values() for d in np.ravel(depth)}
  assert numbers == set(range(blocks + 2))  # something before, in and after the blocks
  assert blocks >= 2
  assert len(shapes[family.stem(shapes)]) == 4
  assert depths[family.stem(shapes)] == 0
  after = r'(head|p\d+_\w+|level\d+|rpn)/.*'  # a classifier's head; what pyramids add
  assert {depths[n] for n in shapes if re.match(after, n)} == {blocks + 1}
  for special in (family.position, family.patches):
    assert special is None or special in shapes
  for inputs, outputs in filter(None, map(family.matrix_axes, shapes)):
    assert not set(inputs) & set(outputs)
  dense = {n for n, s in shapes.items() if n.endswith('/kernel') and len(s) == 2}
  assert all(family.matrix_axes(n) for n in dense if 1 <= np.max(depths[n]) <= blocks)


@pytest.mark.parametrize('name', CLASSIFIERS)
def test_the_family_knows_the_stride(name):
  family, model = models.family(name.split()[0]), build(name)
  maps = [x for x in shapes_of(model)[1].values() if x.ndim == 4]
  h, w = min(x.shape[1:3] for x in maps)
  fields = models.complete(name.split()[0], **TINY[name])
  assert fields.keys() == model.fields().keys()
  assert family.stride(fields) == (SIZE // h, SIZE // w)


def test_the_family_knows_whether_any_size_will_do(name):
  family, model = family_of(name), build(name)
  fields = model.fields()
  h, w = (2 * s for s in family.stride(fields))
  h, w = -(-SIZE // h) * h * 2, -(-SIZE // w) * w * 2
  other = lambda: model.apply(variables(model, init(model)), jnp.zeros((1, h, w, 3)))
  if family.any_size(fields):
    assert all(len(x) == 1 for x in jax.tree.leaves(jax.eval_shape(other)))
  else:
    with pytest.raises((flax.errors.ScopeParamShapeError, UserError)):
      jax.eval_shape(other)


@pytest.mark.parametrize('name', having('scan'))
def test_stacked_names_come_apart_and_together(name):
  family = models.family(name.split()[0])
  params = init(build(name))
  ones = {n: x.shape for n, x in trees.flatten(params).items()}
  stacks = trees.flatten(stacked(params, build(name).depth))
  assert {family.stacked(n)[0] for n in ones if family.stacked(n)} == {
    n for n in stacks if family.is_stacked(n)
  }
  for n in filter(family.stacked, ones):
    assert family.unstacked(*family.stacked(n)) == n
  depths, _ = family.depths(ones)
  together, _ = family.depths({n: x.shape for n, x in stacks.items()})
  for n in filter(family.stacked, ones):
    stack, layer = family.stacked(n)
    assert together[stack][layer] == depths[n]


def test_outputs(name):
  model = build(name)
  params = init(model)
  outputs, out = shapes_of(model)
  if (kind := outputs_of(name)) == 'maps':
    assert outputs
    for level, x in outputs.items():
      side = -(-SIZE // 2 ** int(level.removeprefix('p')))
      assert x.shape == out[level].shape == (2, side, side, model.channels)
  elif kind == 'boxes':
    Q, depth = model.num_queries, model.decoder_depth
    shapes = {'logits': (2, Q, 8), 'boxes': (2, Q, 4)}
    assert {key: x.shape for key, x in outputs.items()} == shapes
    for key, shape in shapes.items():  # the layers before the last, for the losses
      assert out[f'aux_{key}'].shape == (depth - 1, *shape)
  elif kind == 'regions':
    shapes = {'boxes': (2, 5, 4), 'masks': (2, 5, 28, 28)}
    shapes |= dict.fromkeys(('scores', 'labels', 'valid'), (2, 5))
    assert {key: x.shape for key, x in outputs.items()} == shapes
  else:
    shape = {'classes': (2, 7), 'pixels': (2, SIZE, SIZE, 7)}[kind]
    assert (outputs.shape, outputs.dtype) == (shape, jnp.float32)
  assert 'stem' in out
  assert ('pre_logits' in out) == (kind == 'classes')
  assert all(x.shape[0] == 2 for n, x in out.items() if not n.startswith('aux_'))
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))


def test_features_are_the_same_in_training_and_scanned(name):
  def shapes(train=False, **fields):
    model = build(name, **fields)
    rngs = {'params': jax.random.key(0), 'dropout': jax.random.key(0)}
    call = lambda: model.init_with_output(rngs, images(), train=train)[0]
    return jax.tree.map(lambda x: (x.shape, x.dtype), jax.eval_shape(call))

  expected = shapes()
  assert shapes(train=True) == expected
  if 'scan' in models.signature(name.split()[0]).parameters:
    assert shapes(train=True, scan=True) == expected


@pytest.mark.parametrize('name', one_of_each(TINY))
def test_without_features_logits_are_the_same(name):
  model, params = build(name), init(build(name))
  outputs, out = apply(model, params)
  apply_less = functools.partial(model.apply, features=False)
  full, less = jax.jit(apply_less)(variables(model, params), images())
  if outputs_of(name) == 'classes':
    assert less.keys() == {'pre_logits'}
  else:
    assert less.keys() <= out.keys() - {'stem'}
  # The same sums over fewer rows, in another order.
  close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
  jax.tree.map(close, full, outputs)
  for key, x in less.items():
    close(x, out[key])


@pytest.mark.parametrize('name', one_of_each(TINY))
def test_interceptors_see_every_dense_layer_of_a_step(name):
  # Wide ones too, on a mesh: where a short cut past the layer would be tempting.
  wide = {'mlp_dim', 'channels_mlp_dim'} & set(
    models.signature(name.split()[0]).parameters
  )
  model = build(name, **dict.fromkeys(wide, 1600))
  paths = set()

  def spy(call, args, kwargs, context):
    if isinstance(context.module, nn.Dense | nn.DenseGeneral):
      paths.add('/'.join(context.module.path))
    return call(*args, **kwargs)

  rngs = {'params': jax.random.key(0), 'dropout': jax.random.key(0)}
  params = jax.eval_shape(model.init, rngs, images())['params']

  def loss(params):
    called = model.apply(variables(model, params), images(), train=True, rngs=rngs)
    return total(called[0])

  mesh = sharding.make_mesh(1, devices=jax.devices()[:1])
  with jax.set_mesh(mesh), nn.intercept_methods(spy):
    jax.eval_shape(jax.grad(loss), params)
  names = {n for n, x in trees.flatten(params).items() if x.ndim < 4}  # no convolution
  assert paths >= {n.removesuffix('/kernel') for n in names if n.endswith('/kernel')}


@pytest.mark.parametrize('name', one_of_each(CLASSIFIERS))
def test_without_a_head_logits_are_pre_logits(name):
  params = {key: x for key, x in init(build(name)).items() if key != 'head'}
  logits, out = apply(build(name, num_classes=None), params)
  np.testing.assert_array_equal(logits, out['pre_logits'])


@pytest.mark.parametrize(
  ('name', 'field'),
  [(n, f) for f in ('dropout', 'stochastic_depth') for n in one_of_each(having(f))],
)
def test_values_and_branches_are_dropped_in_training_only(name, field):
  model, params = build(name, **{field: 0.5}), init(build(name))
  call = lambda model, key=None: jax.tree.leaves(apply(model, params, key)[0])[0]
  first, again, *others = (call(model, key) for key in (0, 0, 1, 2, 3))
  np.testing.assert_array_equal(first, again)
  assert any(np.any(first != other) for other in others)
  np.testing.assert_array_equal(call(model), call(build(name)))


@pytest.mark.parametrize('name', one_of_each(CLASSIFIERS))
def test_bfloat16_logits_are_as_fine_as_float32(name):
  # A rare class's prior as bias: bfloat16 numbers near -10 are 0.0625 apart.
  fields = {'num_classes': 1000, 'head_bias_init': -10.0}
  params = init(build(name, **fields))
  x = np.random.default_rng(1).uniform(-1, 1, (16, SIZE, SIZE, 3)).astype(np.float32)
  model = build(name, **fields)
  exact, _ = compiled(model, False)(variables(model, params), x)
  model = build(name, dtype='bfloat16', **fields)
  logits, out = compiled(model, False)(variables(model, params), x)
  assert logits.dtype == out['pre_logits'].dtype == jnp.float32
  assert out['stem'].dtype == jnp.bfloat16
  # With a head in bfloat16 a sixth of them at most.
  assert len(np.unique(logits)) > 0.99 * len(np.unique(exact))
  spread = np.std(exact)
  assert np.std(logits - exact) < 0.015 * spread  # a body in bfloat16: up to 0.011
  best = np.sort(exact, axis=-1)
  clear = best[:, -1] - best[:, -2] > 0.1 * spread  # the largest error is 0.07
  assert clear.sum() > 3
  np.testing.assert_array_equal(logits.argmax(-1)[clear], exact.argmax(-1)[clear])


def test_fields_from_json_are_hashable():
  model = models.build('rcnn', anchor_sizes=[[8, 9], [16]], ratios=[1])
  assert model.anchor_sizes == ((8, 9), (16,))
  assert hash(model) == hash(
    models.build('rcnn', anchor_sizes=((8, 9), (16,)), ratios=(1,))
  )


def test_unknown_fields_and_values_are_refused(name):
  with pytest.raises(UserError, match=naming('dtipe', 'dtype')):
    build(name, dtipe='float32')
  with pytest.raises(UserError, match=naming('float33', 'float32')):
    build(name, dtype='float33')
  if 'remat' in models.signature(name.split()[0]).parameters:
    with pytest.raises(UserError, match=naming("'ful'", 'full')):
      build(name, remat='ful').init(jax.random.key(0), images())


@pytest.mark.parametrize(
  ('name', 'field', 'value'),
  [
    (name, field, value)
    for field, value in (('num_classes', 0), ('dropout', 1.0), ('dropout', -0.1))
    for name in having(field)
  ],
)
def test_values_out_of_range_are_refused(name, field, value):
  with pytest.raises(UserError, match=naming(f'{field}={value}')):
    build(name, **{field: value})
