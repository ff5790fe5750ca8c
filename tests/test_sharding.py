"""The mesh, and shardings from rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import vit_jax
from tests.support import naming
from tests.support.abstract import abstract_params
from vit_jax import sharding, trees
from vit_jax.errors import UserError


def specs(mesh, rules, shapes):
  tree = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
  places = sharding.state_shardings(tree, mesh, rules)
  return {k: s.spec for k, s in places.items()}


def test_one_axis_takes_the_rest():
  assert dict(sharding.make_mesh().shape) == {'data': 8, 'fsdp': 1, 'tensor': 1}
  mesh = sharding.make_mesh(data=2, fsdp=-1, tensor=2)
  assert dict(mesh.shape) == {'data': 2, 'fsdp': 2, 'tensor': 2}
  with pytest.raises(UserError, match=naming('config.mesh', 'data=3', 8)):
    sharding.make_mesh(data=3)
  with pytest.raises(UserError, match=naming('config.mesh', 'data=-1', 8)):
    sharding.make_mesh(data=-1, fsdp=-1)


def test_fsdp_splits_the_largest_free_dimension():
  mesh = sharding.make_mesh(data=2, fsdp=4)
  shapes = {'a': (300, 1024), 'b': (1024, 301), 'small': (16, 16), 'odd': (301, 303)}
  assert specs(mesh, 'fsdp', shapes) == {
    'a': P(None, 'fsdp'),
    'b': P('fsdp', None),
    'small': P(None, None),
    'odd': P(None, None),
  }


@pytest.mark.parametrize('scan', [False, True])
def test_tensor_rules_serve_scanned_and_unscanned_blocks(scan):
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  model = vit_jax.create_model('vit', 'S/16', depth=2, scan=scan)
  abstract = abstract_params(model, 32)
  places = trees.flatten(sharding.state_shardings(abstract, mesh, 'fsdp_tensor'))
  block = 'Transformer/encoderblock' + ('' if scan else '_1')
  lead = (None,) if scan else ()
  attention = f'{block}/MultiHeadDotProductAttention_0'
  expected = {
    f'{attention}/query/kernel': P(*lead, 'fsdp', 'tensor', None),
    f'{attention}/out/kernel': P(*lead, 'tensor', None, 'fsdp'),
    f'{attention}/key/bias': P(*lead, 'tensor', None),
    f'{block}/MlpBlock_0/Dense_0/kernel': P(*lead, 'fsdp', 'tensor'),
    f'{block}/MlpBlock_0/Dense_1/kernel': P(*lead, 'tensor', 'fsdp'),
    f'{block}/LayerNorm_0/scale': P(*lead, None),
  }
  assert {k: places[k].spec for k in expected} == expected


def test_tensor_rules_serve_blocks_of_stages():
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  block = 'stage3_block_1'
  shapes = {
    f'{block}/attention/query/kernel': (512, 16, 32),
    f'{block}/attention/out/kernel': (16, 32, 512),
    f'{block}/mlp/Dense_0/kernel': (512, 2048),
    f'{block}/mlp/gate/kernel': (512, 2048),
    f'{block}/mlp/Dense_1/kernel': (2048, 512),
    'stage3_downsample/reduction/kernel': (1024, 512),
  }
  assert specs(mesh, 'fsdp_tensor', shapes) == {
    f'{block}/attention/query/kernel': P('fsdp', 'tensor', None),
    f'{block}/attention/out/kernel': P('tensor', None, 'fsdp'),
    f'{block}/mlp/Dense_0/kernel': P('fsdp', 'tensor'),
    f'{block}/mlp/gate/kernel': P('fsdp', 'tensor'),
    f'{block}/mlp/Dense_1/kernel': P('tensor', 'fsdp'),
    'stage3_downsample/reduction/kernel': P('fsdp', None),
  }


def test_unknown_rules_are_refused():
  mesh = sharding.make_mesh()
  with pytest.raises(UserError, match=naming('config.sharding', 'fspd', 'fsdp')):
    sharding.state_shardings({}, mesh, 'fspd')
  with pytest.raises(UserError, match=naming('model', 'data', 'fsdp', 'tensor')):
    sharding.state_shardings({}, mesh, [('.*', ['model'])])
  with pytest.raises(UserError, match=naming('a', (4, 3), 'tensor=2')):
    specs(sharding.make_mesh(data=4, tensor=2), [('.*', ('tensor',))], {'a': (4, 3)})


def test_a_tensor_axis_that_splits_nothing_is_refused():
  mesh = sharding.make_mesh(data=4, tensor=2)
  tree = {'query': {'kernel': jax.ShapeDtypeStruct((64, 4, 16), jnp.float32)}}
  with pytest.raises(UserError, match=naming('mesh.tensor=2', 'fsdp_tensor')):
    sharding.abstract(tree, mesh, 'fsdp')
  x = sharding.abstract({'a': tree}, mesh, 'fsdp_tensor')['a']['query']['kernel']
  assert x.sharding.spec == P(None, 'tensor', None)


def test_global_batch_spreads_examples_in_order():
  mesh = sharding.make_mesh(data=4, fsdp=2)
  batch = sharding.global_batch({'x': np.arange(16)}, mesh)
  assert len(batch['x'].addressable_shards) == 8
  np.testing.assert_array_equal(batch['x'], np.arange(16))
