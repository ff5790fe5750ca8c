import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from vit_jax import sharding
from vit_jax.kernels import choose_by_platform, tpu_attention, tpu_layer_norm
from vit_jax.train import flops


def shape(*sizes):
  return jax.ShapeDtypeStruct(sizes, jnp.float32)


MATMUL = 2 * 3 * 4 * 5
X, W = shape(3, 4), shape(4, 5)


def test_products_of_matrices():
  assert flops.count(jnp.matmul, X, W) == MATMUL
  # b batch, contracted over two dimensions: 2 * out * contracted
  product = lambda a, b: jnp.einsum('bnmd,bsmd->bmns', a, b)
  assert (
    flops.count(product, shape(2, 7, 3, 8), shape(2, 9, 3, 8)) == 2 * 2 * 3 * 7 * 9 * 8
  )
  assert flops.count(lambda x: jnp.tanh(x).sum(), X) == 0


@pytest.mark.parametrize('groups', [1, 2])
def test_convolutions(groups):
  def conv(x, kernel):
    return jax.lax.conv_general_dilated(
      x,
      kernel,
      (2, 2),
      'SAME',
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
      feature_group_count=groups,
    )

  # Every output, 1 x 4 x 4 x 10, is a sum of 3 x 3 x (6 / groups) products.
  count = flops.count(conv, shape(1, 8, 8, 6), shape(3, 3, 6 // groups, 10))
  assert count == 2 * (4 * 4 * 10) * (3 * 3 * 6 // groups)


def test_inside_of_other_functions():
  square = shape(4, 4)
  n = flops.count(jnp.matmul, square, square)
  layer = lambda x, w: (jax.nn.gelu(x @ w), None)  # gelu has a custom derivative
  scan = lambda x, ws: jax.lax.scan(layer, x, ws)
  assert flops.count(scan, square, shape(6, 4, 4)) == 6 * n
  assert flops.count(jax.jit(jax.checkpoint(scan)), square, shape(6, 4, 4)) == 6 * n
  either = lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x @ x @ x, lambda: x @ x)
  assert flops.count(either, square) == 2 * n
  loop = lambda x: jax.lax.fori_loop(0, 5, lambda _, x: x @ x, x)
  assert flops.count(loop, square) == 5 * n
  unknown = lambda x: jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: x @ x, x)
  with pytest.raises(NotImplementedError, match='while'):
    flops.count(unknown, square)
  platforms = choose_by_platform(cpu=unknown, default=lambda x: x @ x)
  assert flops.count(platforms, square) == n


def test_over_all_devices_of_a_shard_map():
  mesh = sharding.make_mesh(devices=jax.devices()[:4])
  spec = P('data')
  f = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(spec, P()), out_specs=spec)
  assert flops.count(f, shape(8, 4), W) == 2 * 8 * 4 * 5


@pytest.mark.parametrize('devices', [1, 4])
def test_attention_kernels(devices):
  plan = tpu_attention.Plan(16, 64, 9, 2**24)
  query, key = (jax.ShapeDtypeStruct((4, n, 4, 16), jnp.bfloat16) for n in (9, 7))
  attend = lambda *args: tpu_attention.attend(*args, None, plan)
  forward = 2 * (2 * 4 * 4 * 9 * 7 * 16)  # q k', then weights times v
  loss = lambda *args: attend(*args).astype(jnp.float32).sum()
  with jax.set_mesh(sharding.make_mesh(devices=jax.devices()[:devices])):
    assert flops.count(attend, query, key, key) == forward
    # Backward: the scores again, and two products for each of the two.
    both = flops.count(jax.value_and_grad(loss, (0, 1, 2)), query, key, key)
  assert both == forward + forward * 5 // 2


def test_kernels_of_norms_have_no_products():
  x, scale = jax.ShapeDtypeStruct((2, 16, 128), jnp.bfloat16), shape(128)
  run = lambda *args: tpu_layer_norm.layer_norm(*args, 1e-6, 16)
  loss = lambda *args: run(*args).astype(jnp.float32).sum()
  assert flops.count(jax.grad(loss), x, scale, scale) == 0


def test_backward_costs_two_forwards():
  # But for the gradient of the images, which nobody asks for.
  loss = lambda w, x: jnp.sum(x @ w[0] @ w[1])
  w, x = (shape(4, 5), shape(5, 6)), X
  forward = flops.count(loss, w, x)
  first = flops.count(jnp.matmul, X, W)
  assert flops.count(jax.value_and_grad(loss), w, x) == 3 * forward - first
