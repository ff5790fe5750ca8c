"""Kernels are used only if they run, agree with XLA's program, and are no slower."""

import json
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from tests.support import tpu
from vit_jax import kernels, sharding
from vit_jax.kernels import verify
from vit_jax.kernels.attention import attend
from vit_jax.train import run, status

X = jax.ShapeDtypeStruct((4, 8, 16), jnp.float32)
QUERY = jax.ShapeDtypeStruct((8, 17, 4, 64), jnp.bfloat16)


def slow_double(x):
  return 2 * jax.pure_callback(lambda x: (time.sleep(0.004), x)[1], x, x)


def broken(x):
  raise NotImplementedError('Mosaic does not know this operation.\nAnd much more.')


def layer_with(kernel, plain=slow_double):
  """Returns a layer with a kernel, and with a gradient."""

  @jax.custom_vjp
  def layer(x):
    return (kernel if kernels.allows('tpu_layer_norm', layer, x) else plain)(x)

  layer.defvjp(lambda x: (layer(x), None), lambda _, dy: (2 * dy,))
  return layer


def rows_of(layer):
  return verify.verify_calls(kernels.collect_calls(lambda: jax.eval_shape(layer, X)))


@pytest.mark.parametrize(
  ('kernel', 'plain', 'reason'),
  [
    (lambda x: x + x, slow_double, None),
    (broken, slow_double, 'does not run on [[4, 8, 16]]: NotImplementedError: Mosaic'),
    (lambda x: 2.2 * x, slow_double, "differs from XLA's by 0.1"),
    (lambda x: jnp.nan * x, slow_double, "differs from XLA's by nan"),
    (slow_double, lambda x: 2 * x, 'is slower'),
  ],
)
def test_a_kernel_has_to_run_agree_and_be_fast(kernel, plain, reason):
  (row,) = rows_of(layer_with(kernel, plain))
  assert (row['kernel'], row['shapes']) == ('tpu_layer_norm', [[4, 8, 16]])
  if reason is None:
    assert row['reason'] is None
    assert 0 < row['seconds'] < row['xla_seconds']
  else:
    assert row['reason'].startswith(reason)


def test_the_verdict_is_that_of_all_shapes(monkeypatch, capfd):
  monkeypatch.setattr(jax, 'default_backend', lambda: 'tpu')
  good, bad = layer_with(lambda x: 2 * x, slow_double), layer_with(broken)

  def trace(*layers):
    return lambda: jax.eval_shape(
      lambda x: [layer(x[:i]) for i, layer in enumerate(layers, 1)], X
    )

  assert verify.choose('auto', trace(good))[0] == ('tpu_layer_norm',)
  used, rows = verify.choose('auto', trace(good, bad))
  assert used == ()
  assert [row['reason'] is None for row in rows] == [True, False]
  assert capfd.readouterr().err.count('\n') == 1
  assert verify.choose('auto', trace())[0] == ()  # nothing planned, nothing verified
  assert verify.choose('xla', trace(good)) == ((), [])
  assert verify.choose('fused', trace(bad)) == (kernels.KERNELS, [])


def test_a_run_decides_once_for_each_kind_of_device(monkeypatch, tmp_path):
  monkeypatch.setattr(jax, 'default_backend', lambda: 'tpu')
  layers = {'good': layer_with(lambda x: 2 * x), 'bad': layer_with(broken)}

  def used(layer, mode='auto'):
    trainer = SimpleNamespace(
      step=lambda state, batch: layers[layer](batch), abstract_state=None, spec=X
    )
    return run._choose_kernels({'kernels': mode}, tmp_path, trainer)

  start = {'step': 0, 'device': jax.devices()[0].device_kind, 'kernels': used('good')}
  assert start['kernels']['used'] == ['tpu_layer_norm']
  (tmp_path / status.STARTS).write_text(json.dumps([start]))
  assert used('bad') == start['kernels']  # resumed: same bits as before
  assert used('bad', 'xla')['used'] == []
  (tmp_path / status.STARTS).write_text(json.dumps([start | {'device': 'TPU v9'}]))
  assert used('bad')['used'] == []


def test_calls_are_planned_for_the_share_of_one_device():
  with tpu.mesh('v5e', 2, 2, 2):
    calls = kernels.collect_calls(lambda: jax.eval_shape(attend, QUERY, QUERY, QUERY))
    ((kernel, _, arrays),) = calls
    shares = verify._share_of_one_device(arrays, jax.sharding.get_abstract_mesh())
  assert kernel == 'tpu_attention'
  assert [x.shape for x in jax.tree.leaves(shares)] == [(2, 17, 2, 64)] * 3


def test_kernels_are_off_until_allowed():
  lower = lambda: jax.jit(lambda x: attend(x, x, x)).trace(QUERY)
  calls = lambda: lower().lower(lowering_platforms=('tpu',)).as_text().count('@tpu')
  with tpu.mesh('v5e'):
    assert calls() == 0
    with kernels.using('tpu_attention'):
      assert calls() == 1
    assert calls() == 0


def test_blocks_pin_examples_to_the_mesh():
  constrained = lambda batch: (
    'sharding_constraint'
    in jax.jit(kernels.place).lower(jnp.ones((batch, 8))).as_text()
  )
  mesh = sharding.make_mesh(2, 2, 2)
  with jax.set_mesh(mesh):
    assert constrained(4)
    assert not constrained(1)  # not divided by the mesh
    x = jax.jit(kernels.place)(np.ones(X.shape, X.dtype))
  expected = jax.sharding.NamedSharding(mesh, P(('data', 'fsdp')))
  assert x.sharding.is_equivalent_to(expected, 3)
  assert not constrained(4)  # without a mesh


def test_on_gpus_blocks_keep_channels_last():
  device = AbstractDevice(device_kind='NVIDIA H200', num_cores=None, platform='gpu')
  sizes, axes = (1, 2, 1), ('data', 'fsdp', 'tensor')
  mesh = AbstractMesh(sizes, axes, (AxisType.Auto,) * 3, abstract_device=device)
  loss = lambda x: kernels.place(x).sum()
  with jax.sharding.use_abstract_mesh(mesh):
    equations = jax.make_jaxpr(jax.grad(loss))(X).jaxpr.eqns
  names = [e.primitive.name for e in equations if 'constraint' in e.primitive.name]
  # Split on both sides of the layout, forwards and backwards.
  assert names == 2 * [
    'sharding_constraint',
    'layout_constraint',
    'sharding_constraint',
  ]
  layouts = [e.params['layout'] for e in equations if 'layout' in e.primitive.name]
  assert [x.major_to_minor for x in layouts] == 2 * [(0, 1, 2)]
