"""Kernels of an MLP for TPUs: interpreted on the CPU, and lowered without a TPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.test_tpu_attention import KINDS, lowered, tpu
from vit_jax import sharding
from vit_jax.kernels import tpu_mlp
from vit_jax.models import build
from vit_jax.nn.mlp import MlpBlock
from vit_jax.tune.tuned import Added, Tuned

WIDE = lambda *arrays: [a.astype(jnp.float32) for a in arrays]


def arrays(images: int):
  """Returns x, kernels and biases of two layers, a residual connection, and a gradient."""
  x, y = (images, 3, 4, 6), (images, 3, 4, 5)
  shapes = [x, (6, 24), (24, 5), (24,), (5,), y, y]
  keys = jax.random.split(jax.random.key(0), len(shapes))
  both = zip(keys, shapes, strict=True)
  return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in both]


def run(act, plan, *inputs):
  """Returns the result and the derivatives of all inputs but the last, its gradient."""
  fn = lambda x, w, v, b, c, skip: tpu_mlp.mlp(x, (w, v), (b, c), act, plan, skip)
  y, pullback = jax.vjp(fn, *inputs[:-1])
  return y, *pullback(inputs[-1])


TURNED = tpu_mlp.Plan(32, 2**24, turned=True, interpret=True)  # of 96 tokens
IMAGES = tpu_mlp.Plan(6, 2**24, images=4, interpret=True)  # half of four images


@pytest.mark.thorough
@pytest.mark.parametrize(
  ('act', 'plan'),
  [
    ('gelu_erf', TURNED),
    ('gelu_tanh', IMAGES),
    pytest.param('gelu_tanh', TURNED, marks=pytest.mark.slow),
  ],
)
def test_kernels_compute_an_mlp_and_its_derivative(act, plan):
  inputs = arrays(8)
  gelu = lambda x: jax.nn.gelu(x, approximate=act == 'gelu_tanh')
  reference = lambda x, w, v, b, c, skip: gelu(x @ w + b) @ v + c + skip
  *wide, dy = WIDE(*inputs)
  expected, exact = jax.vjp(reference, *wide)
  found = jax.jit(run, static_argnums=(0, 1))(act, plan, *inputs)
  for a, b in zip(found, [expected, *exact(dy)], strict=True):
    assert a.dtype == jnp.bfloat16
    # The hidden layer, its gradient and what leaves the kernel are rounded, by 2**-9 each.
    np.testing.assert_allclose(*WIDE(a, b), rtol=0, atol=3 * 2**-9 * np.abs(b).max())


@pytest.mark.parametrize('trained', ['x', 'biases', 'kernels'])
def test_products_are_computed_for_kernels_that_are_trained(trained):
  x, *params, _, dy = arrays(8)
  chosen = dict(x=[0], biases=[3, 4], kernels=[1])[trained]
  fn = lambda *args: tpu_mlp.mlp(
    args[0], args[1:3], args[3:], 'gelu_tanh', IMAGES._replace(rows=12, interpret=False)
  )
  text = lowered(jax.grad(lambda *args: (fn(*args) * dy).sum(), chosen), x, *params)
  (line,) = (line for line in text.splitlines() if '"backward_mlp"' in line)
  results = re.search(r'->\s*\(([^)]*)\)', line)[1].split(', ')
  assert len(results) == (5 if trained == 'kernels' else 3)


@pytest.mark.thorough
def test_frozen_kernels_change_no_other_gradient():
  x, w, v, b, c, skip, dy = arrays(8)
  everything = run('gelu_tanh', IMAGES, x, w, v, b, c, skip, dy)
  fn = lambda x, b, c: tpu_mlp.mlp(x, (w, v), (b, c), 'gelu_tanh', IMAGES, skip)
  _, pullback = jax.vjp(fn, x, b, c)
  for a, b in zip(pullback(dy), [everything[1], *everything[4:6]], strict=True):
    np.testing.assert_array_equal(*WIDE(a, b))


@pytest.mark.slow
@pytest.mark.parametrize('plan', [TURNED, IMAGES])
def test_devices_of_a_mesh_compute_their_own_images(plan):
  inputs = arrays(32)
  alone = run('gelu_erf', plan, *inputs)
  mesh = sharding.make_mesh(2, 2, 1, devices=jax.devices()[:4])
  with jax.set_mesh(mesh):
    x = jax.device_put(inputs[0], sharding.batch_sharding(mesh))
    found = jax.jit(run, static_argnums=(0, 1))('gelu_erf', plan, x, *inputs[1:])
  assert found[1].sharding.shard_shape(x.shape) == (8, 3, 4, 6)
  for a, b in zip(found, alone, strict=True):  # sums of images in another order
    np.testing.assert_allclose(*WIDE(a, b), rtol=0, atol=2**-8 * np.abs(b).max())


SHAPE = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def test_the_plan_of_a_width():
  plan = lambda *x: tpu_mlp.plan(SHAPE(*x), 4 * x[-1], x[-1], 'gelu_erf', turned=True)
  assert plan(8, 56, 56, 96) is None  # no mesh
  with tpu(KINDS['v5e'], 1, 1, 1):
    assert plan(8, 56, 56, 96).rows == 3136  # 8 to a device
    assert plan(8, 28, 28, 192).rows == 1568
    assert plan(8, 14, 14, 384).rows == 784
    assert plan(8, 7, 7, 768) is None  # products take longer than their bytes
    assert plan(4, 56, 56, 96) is None  # half a tile of images
    assert plan(8, 4, 1, 96) is None  # few tokens
    assert tpu_mlp.plan(SHAPE(8, 8, 8, 96), 384, 96, 'relu') is None
    assert tpu_mlp.plan(jnp.zeros((8, 8, 8, 96)), 384, 96, 'gelu_erf') is None
  with tpu(KINDS['v5e'], 1, 1, 2):
    assert plan(8, 56, 56, 96) is None  # channels are split
  with tpu(KINDS['v3'], 1, 1, 1):
    assert plan(8, 56, 56, 96) is None  # its kernels multiply float32


def test_the_plan_of_images():
  def plan(*x):
    found = tpu_mlp.plan(SHAPE(*x), 4 * x[-1], x[-1], 'gelu_tanh')
    return found and (found.images, found.rows)

  with tpu(KINDS['v5e'], 1, 1, 1):
    assert plan(128, 197, 384) == (4, 197)
    assert plan(64, 577, 384) == (1, 577)
    assert plan(32, 1024, 384) == (1, 512)
    assert plan(32, 1025, 384) is None  # too long to be whole, of no use in parts
    assert plan(96, 197, 384) is None  # the hidden layer stays on the chip
    assert plan(128, 1, 384) is None  # a class token
    assert plan(128, 197, 192) is None  # half of every second register
    assert plan(64, 197, 768) is None
  with tpu(KINDS['v6e'], 1, 1, 1):
    assert plan(64, 197, 768) == (2, 197)  # more products for a byte of memory
    assert plan(64, 197, 1024) is None


@pytest.mark.parametrize(
  ('options', 'kernels'),
  [
    ({}, 1),
    (dict(whole=False), 0),  # as where a layer is replaced
    (dict(train=True), 0),  # dropout
  ],
)
def test_a_block_lowered_for_tpus_calls_the_kernel(options, kernels):
  block = MlpBlock(
    64, dropout=0.1, act='gelu_erf', dtype=jnp.bfloat16, fused=True, turned=True
  )
  x, scale = SHAPE(8, 4, 4, 16), jnp.ones(16)
  params = jax.eval_shape(block.init, jax.random.key(0), x)
  assert sorted(params['params']) == ['Dense_0', 'Dense_1']
  apply = lambda *args: block.apply(*args, scale, **options, rngs={'dropout': key})
  key = jax.random.key(0)
  assert lowered(apply, params, x).count('@tpu_custom_call') == kernels


@pytest.mark.parametrize(
  ('options', 'operands'),
  [
    ({}, [6, 6]),  # tokens, those of the residual connection, and four parameters
    (dict(stochastic_depth=0.1), [5, 5]),
    (dict(dropout=0.1), []),
  ],
)
def test_an_encoder_block_lowered_for_tpus_adds_in_the_kernel(options, operands):
  fields = dict(width=128, depth=2, num_heads=2, mlp_dim=256, classifier='gap')
  model = build('vit', **fields, **options, dtype=jnp.bfloat16)
  images = jax.ShapeDtypeStruct((4096, 128, 128, 3), jnp.float32)
  params = jax.eval_shape(model.init, jax.random.key(0), images)
  rngs = {'dropout': jax.random.key(0)}
  logits = lambda *args: model.apply(*args, train=True, rngs=rngs)[0]
  lines = lowered(logits, params, images).splitlines()
  calls = [
    re.search(r'\((%.*?)\)', line)[1] for line in lines if '"forward_mlp"' in line
  ]
  assert [len(call.split(',')) for call in calls] == operands


class Replaced(Added):
  at: str

  def layers(self, images, train):
    twice = lambda call, x, *args: 2 * call(x, *args)
    return lambda module, path: twice if path == self.at else None


@pytest.mark.thorough
@pytest.mark.parametrize(
  ('path', 'kernels'), [('stage1_block_0/mlp/Dense_1', 0), ('head', 1)]
)
def test_what_replaces_a_layer_finds_it(path, kernels):
  fields = dict(depths=(1,), widths=(16,), num_classes=3, dtype=jnp.bfloat16)
  model = Tuned(build('convnext', **fields), tune=Replaced(path))
  images = jax.ShapeDtypeStruct((8, 32, 32, 3), jnp.float32)
  params = jax.eval_shape(model.init, jax.random.key(0), images)
  text = lowered(model.apply, params, images)
  assert text.count('"depthwise"') == 1
  assert text.count('"forward_mlp"') == kernels
