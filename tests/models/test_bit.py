"""The two ResNets against published counts, names and reference outputs."""

import jax
import numpy as np
import pytest

import vit_jax
from tests.support import naming
from tests.support.abstract import abstract_params
from vit_jax import trees
from vit_jax.errors import UserError


@pytest.mark.parametrize(
  ('model', 'variant', 'count'),
  # Of big_vision; x4, R50x3 and R101x3 of timm. 1000 classes.
  [
    ('resnet_gn', 'R26', 15_995_176),
    ('resnet_gn', 'R50', 25_557_032),
    ('bit', 'R50x3', 217_319_080),
    ('bit', 'R26', 15_987_496),
  ],
)
def test_parameter_counts_are_the_published_ones(model, variant, count):
  params = abstract_params(vit_jax.create_model(model, variant))
  assert sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(params)) == count


def test_names_and_shapes_are_the_published_ones():
  shapes = abstract_params(vit_jax.create_model('bit', 'R50', num_classes=21_843))
  shapes = {k: v.shape for k, v in trees.flatten(shapes).items()}
  expected = {
    'root_block/standardized_conv2d/kernel': (7, 7, 3, 64),
    'block1/unit01/a/proj/standardized_conv2d/kernel': (1, 1, 64, 256),
    'block1/unit01/a/group_norm/scale': (64,),
    'block1/unit01/a/standardized_conv2d/kernel': (1, 1, 64, 64),
    'block3/unit06/b/standardized_conv2d/kernel': (3, 3, 256, 256),
    'block4/unit03/c/standardized_conv2d/kernel': (1, 1, 512, 2048),
    'block4/unit03/c/group_norm/bias': (512,),
    'group_norm/scale': (2048,),
    'head/conv2d/kernel': (1, 1, 2048, 21_843),
    'head/conv2d/bias': (21_843,),
  }
  assert {k: shapes[k] for k in expected} == expected


def from_tensorflow(name):
  """Returns our name of a parameter in a published BiT file."""
  name = name.removeprefix('resnet/')
  return name.replace('/gamma', '/scale').replace('/beta', '/bias')


def run(model, params, image):
  return jax.jit(lambda p, x: model.apply({'params': p}, x))(params, image)


def test_what_pads_the_pool_matters_at_the_border_only(golden):
  params = {from_tensorflow(k): v for k, v in golden('bit_timm').items()}
  params = trees.unflatten(params)
  fields = dict(blocks=(2, 1), width=32, num_classes=10)
  image = golden('bit_timm.expected')['image'][:, :, :32]
  zeros, nothing = (
    np.asarray(run(model, params, image)[1]['stem'])
    for model in (
      vit_jax.create_model('bit', **fields),
      vit_jax.create_model('bit', zero_pad_pool=False, **fields),
    )
  )
  border = np.zeros_like(nothing)
  border[:, 1:, 1:] = -np.inf  # even sizes: the windows reach over two sides
  np.testing.assert_array_equal(zeros, np.maximum(nothing, border))
  assert (zeros != nothing).any()


def test_unknown_variants_are_refused():
  with pytest.raises(UserError, match=naming('R51', 'R50')):
    vit_jax.create_model('resnet_gn', 'R51')
  for name in ('50', 'R50x0', 'R50x', 'R50/16'):
    with pytest.raises(UserError, match=naming(f"'{name}'", 'R26', 'R50x3')):
      vit_jax.create_model('bit', name)
  with pytest.raises(UserError, match=naming('blocks[1]=0')):
    vit_jax.create_model('resnet_gn', blocks=[3, 0])
