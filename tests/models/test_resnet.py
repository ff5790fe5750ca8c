"""ResNet: dilated stages, norms that are frozen; logits are in test_goldens.py."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import vit_jax
from tests.support import GOLDEN, naming
from tests.support.goldens import arrays_of, check, path_of
from vit_jax import models, trees, weights
from vit_jax.errors import UserError
from vit_jax.weights import export, formats, readers


def test_unknown_variants_are_refused():
  with pytest.raises(UserError, match=naming("'35'", "'34'", "'50'")):
    models.build('resnet', '35')


@pytest.mark.parametrize(
  ('fields', 'words'),
  [
    (dict(widths=(256,)), ('(256,)', '(3, 4, 6, 3)')),
    (dict(depths=(1,), widths=(30,)), ('(30,)', '4')),
    (dict(output_stride=12), ('output_stride', '12', '16')),
    (dict(anti_alias=True, avg_down=True), ('anti_alias', 'avg_down')),
    (dict(depths=(1,), widths=(32,), pool='attention'), ('(32,)', '64')),
  ],
)
def test_fields_that_make_no_network_are_refused(fields, words):
  with pytest.raises(UserError, match=naming(*words)):
    shapes_of(models.build('resnet', **fields))


def shapes_of(model, size=(32, 32), **options):
  init = functools.partial(model.init_with_output, **options)
  return jax.eval_shape(init, jax.random.key(0), jnp.zeros((2, *size, 3)))


# -- the golden's network, whose statistics are those of a trained one ------------------


@functools.cache
def golden(**options):
  return vit_jax.load(path_of('resnet_timm'), **options)


def images():
  return np.load(GOLDEN / 'resnet_timm.expected.npz')['image']


def test_maps_of_odd_sizes_are_those_of_padding_by_pixels():
  (_, out), _ = shapes_of(golden().model, (51, 70))
  assert out['stem'].shape[1:3] == (13, 18)  # ceil(51 / 4), ceil(70 / 4)
  assert [out[f'stage{s}'].shape[1:3] for s in (2, 3, 4)] == [(7, 9), (4, 5), (2, 3)]


@functools.cache
def maps_of(stride):
  loaded = golden(output_stride=stride)
  return jax.jit(lambda v: loaded.model.apply(v, images())[1])(loaded.variables)


@pytest.mark.parametrize('stride', [8, 16])
def test_dilated_stages_compute_between_the_positions_of_strides(stride):
  out = {s: maps_of(s) for s in (32, stride)}
  for stage in ('stage3', 'stage4'):
    maps, dilated = out[32][stage], out[stride][stage]
    by = dilated.shape[1] // maps.shape[1]
    # Every second position of the one is a position of the other; float32 rounding.
    np.testing.assert_allclose(dilated[:, ::by, ::by], maps, rtol=0, atol=1e-5)
  assert out[stride]['stage4'].shape[1] == 64 // stride


def test_frozen_norms_are_statistics_and_load_from_the_same_file():
  check(path_of('resnet_timm'), 'resnet_timm', frozen_norm=True)
  plain, frozen = golden(), golden(frozen_norm=True)
  names = trees.flatten(frozen.params)
  assert not [name for name in names if '/norm' in name]
  one, other = (trees.flatten_variables(x.variables) for x in (plain, frozen))
  assert len(one) == len(other)
  scale = 'stage1_block_0/norm1/scale'
  np.testing.assert_array_equal(one[scale], other[f'batch_stats/{scale}'])


def test_frozen_norms_do_not_change_in_training():
  loaded = golden(frozen_norm=True)
  x = images()

  @jax.jit
  def both(variables):
    apply = functools.partial(loaded.model.apply, variables, x)
    return apply(train=True, mutable=['batch_stats']), apply()

  ((logits, _), updated), (expected, _) = both(loaded.variables)
  np.testing.assert_array_equal(logits, expected)
  jax.tree.map(
    np.testing.assert_array_equal,
    updated['batch_stats'],
    loaded.variables['batch_stats'],
  )


# -- files ------------------------------------------------------------------------------


@pytest.mark.parametrize('frozen', [False, True])
def test_files_of_timm_come_back_to_the_bit(tmp_path, frozen):
  loaded = weights.read(path_of('resnet_timm'), frozen_norm=frozen)
  assert loaded.unused == []
  weights.write(loaded, tmp_path / 'timm', 'timm')
  written = load_file(tmp_path / 'timm' / 'model.safetensors')
  original = arrays_of('resnet_timm')
  assert written.keys() == original.keys()
  for name, x in original.items():
    if not name.endswith('num_batches_tracked'):
      np.testing.assert_array_equal(written[name], x)


def test_files_of_transformers_hold_the_same(tmp_path):
  loaded = weights.read(path_of('resnet_timm'))
  weights.write(loaded, tmp_path / 'hf', 'hf')
  check(tmp_path / 'hf', 'resnet_timm')
  names = load_file(tmp_path / 'hf' / 'model.safetensors')
  norm = 'resnet.encoder.stages.3.layers.0.shortcut.normalization'
  assert {f'{norm}.running_var', f'{norm}.num_batches_tracked'} <= names.keys()
  assert len(names) == len(arrays_of('resnet_timm'))


@pytest.mark.parametrize(
  ('to', 'changed', 'words'),
  [
    ('timm', {'model_args': {'act_layer': 'silu'}}, ("act_layer='silu'", "'relu'")),
    ('hf', {'downsample_in_bottleneck': True}, ('downsample_in_bottleneck=True',)),
    ('hf', {'layer_type': 'basic'}, ('layer_type', "'basic'", "'bottleneck'")),
    ('hf', {'hidden_act': 'gelu'}, ("hidden_act='gelu'", "'relu'")),
  ],
)
def test_files_of_other_networks_are_refused(tmp_path, to, changed, words):
  weights.write(weights.read(path_of('resnet_timm')), tmp_path / 'a', to)
  raw = readers.read(tmp_path / 'a')
  arrays = {name: np.asarray(x) for name, x in raw.arrays.items()}
  export.save(tmp_path / 'b', arrays, raw.config | changed)
  with pytest.raises(UserError, match=naming(*words)):
    vit_jax.load(tmp_path / 'b')


@pytest.mark.parametrize(
  ('to', 'fields', 'words'),
  [
    ('timm', {'depths': (1, 1)}, ('timm', 'depths=(1, 1)', '4 stages')),
    ('google', {}, ('google', 'resnet', 'timm')),
  ],
)
def test_what_a_format_cannot_express_is_refused(tmp_path, to, fields, words):
  loaded = weights.read(path_of('resnet_timm'), **fields)
  model = models.build('resnet', **loaded.fields).fields()
  with pytest.raises(ValueError, match=naming(*words)):
    formats.find_writer('resnet', to).write(loaded.flat, model, (64, 64), None)


def test_dilation_is_kept_in_files_of_timm(tmp_path):
  loaded = weights.read(path_of('resnet_timm'), output_stride=16)
  weights.write(loaded, tmp_path / 'timm', 'timm')
  args = json.loads((tmp_path / 'timm' / 'config.json').read_text())['model_args']
  assert args['output_stride'] == 16
  assert vit_jax.load(tmp_path / 'timm').model.output_stride == 16


def test_statistics_are_not_dropped_as_a_model_is_unpacked():
  with pytest.raises(UserError, match=naming("'batch_stats'", 'loaded.variables')):
    _, _ = golden()


def test_skipped_layers_take_no_statistics_either():
  loaded = vit_jax.load(path_of('resnet_timm'), skip=['stage4_.*'])
  stats = trees.flatten(loaded.variables['batch_stats'])
  assert (stats['stage4_block_0/norm1/mean'] == 0).all()
  assert (stats['stage3_block_0/norm1/mean'] != 0).any()
