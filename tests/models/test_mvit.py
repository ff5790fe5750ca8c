"""MViTv2: other sizes of images, files; logits are in test_goldens.py."""

import dataclasses
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import vit_jax
from tests.support import naming
from tests.support.goldens import GOLDENS, arrays_of, path_of
from vit_jax import models, trees, weights
from vit_jax.errors import UserError
from vit_jax.kernels import tpu_attention
from vit_jax.kernels.attention import GridBias
from vit_jax.nn.map_positions import DecomposedPositions
from vit_jax.weights import formats


@pytest.mark.parametrize(
  ('fields', 'facts'),
  [
    (dict(variant='X'), ("'X'", 'T', 'H')),
    (dict(expand='head'), ("'head'", 'attention', 'mlp')),
    (dict(classifier='map'), ("'map'", 'gap', 'token')),
    (dict(width=16, num_heads=3), ('num_heads=3', '16')),
    (dict(kv_stride=0), ('kv_stride=0',)),
  ],
)
def test_fields_that_do_not_fit_are_refused(fields, facts):
  build = lambda: models.build('mvit', **{'depths': (1,), **fields})
  init = lambda key: build().init(key, jnp.zeros((1, 32, 32, 3)))
  with pytest.raises(UserError, match=naming(*facts)):
    jax.eval_shape(init, jax.random.key(0))


# -- positions --------------------------------------------------------------------------


def scores_one_by_one(tables, query, grid, keys):
  """The scores' bias [B, M, n, k] by the formula, for every query and key."""
  B, N, M, _ = query.shape
  bias = np.zeros((B, M, N, keys[0] * keys[1]), np.float32)
  for n in range(N):
    for k in range(keys[0] * keys[1]):
      for table, q, at, (a, b) in zip(
        tables,
        (n // grid[1], n % grid[1]),
        (k // keys[1], k % keys[1]),
        zip(grid, keys, strict=True),
        strict=True,
      ):
        # In pixels of the larger map, counted from the furthest key behind a query.
        offset = q * max(b / a, 1) + (b - 1 - at) * max(a / b, 1)
        bias[:, :, n, k] += query[:, n] @ table[int(offset)]
  return bias


@pytest.mark.parametrize(('grid', 'keys'), [((4, 6), (2, 3)), ((2, 3), (4, 6))])
def test_a_bias_is_of_the_distance_in_pixels_of_the_larger_map(grid, keys):
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  tables = {'rows': normal(7, 5), 'columns': normal(11, 5)}
  query, key = normal(2, grid[0] * grid[1], 3, 5), normal(2, keys[0] * keys[1], 3, 5)
  apply = lambda *args: DecomposedPositions().apply(
    {'params': tables}, *args, grid, keys
  )
  _, _, bias = apply(query, key)
  expected = scores_one_by_one(tables.values(), query, grid, keys)
  result = bias.scores(query.shape[1], key.shape[1])
  np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5)
  # Tokens before the map, such as a class token, have no distance.
  more = lambda x: np.concatenate([normal(2, 1, 3, 5), x], axis=1)
  _, _, bias = apply(more(query), more(key))
  result = bias.scores(query.shape[1] + 1, key.shape[1] + 1)
  np.testing.assert_allclose(result[:, :, 1:, 1:], expected, rtol=0, atol=1e-5)
  assert not result[:, :, 0].any()
  assert not result[:, :, :, 0].any()


def test_a_bias_is_the_product_of_its_factors():
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  bias = GridBias(normal(2, 4, 3, 2), normal(2, 4, 3, 3))  # 4 queries and 2 x 3 keys
  added, places = tpu_attention._factors(
    bias, 5, 7, jnp.float32
  )  # and of a token before each
  result, expected = added @ places.T, bias.scores(5, 7)
  np.testing.assert_allclose(result, expected, rtol=0, atol=1e-6)


def test_images_of_another_size_with_and_without_resized_tables():
  images = np.random.default_rng(0).uniform(-1, 1, (1, 40, 96, 3)).astype(np.float32)
  path = path_of('mvit_timm_cls')
  model, params = vit_jax.load(path)
  expected, out = jax.jit(model.apply)({'params': params}, images)
  assert [out[f'stage{s}'].shape[1:3] for s in (1, 2, 3, 4)] == [
    (10, 24),
    (5, 12),
    (3, 6),
    (2, 3),
  ]
  loaded = vit_jax.load(path, image_size=(40, 96))
  tables = loaded.params['stage1_block_0']['attention']['relative_positions']
  assert {n: x.shape for n, x in tables.items()} == {
    'rows': (19, 12),
    'columns': (47, 12),
  }
  assert 'sides of maps resized from 16 to 24, linear' in loaded.report
  logits, _ = jax.jit(model.apply)(loaded.variables, images)
  np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5)


# -- files --------------------------------------------------------------------------------

MVIT = [name for name, (_, family, _) in GOLDENS.items() if family == 'mvit']


def test_the_class_token_s_residual_is_the_file_s(golden):
  images = golden('mvit_timm_cls.expected')['image']
  expected = golden('mvit_timm_cls_original')['logits']
  model, params = vit_jax.load(path_of('mvit_timm_cls'), class_residual=False)
  logits, _ = jax.jit(model.apply)({'params': params}, images)
  np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize('name', MVIT)
def test_files_come_back_bit_for_bit(tmp_path, name):
  source = weights.read(path_of(name))
  weights.write(source, tmp_path / 'out', 'timm')
  arrays = load_file(tmp_path / 'out' / 'model.safetensors')
  expected = arrays_of(name)
  assert arrays.keys() == expected.keys()
  for key, x in expected.items():
    np.testing.assert_array_equal(arrays[key], x, err_msg=key)
  assert weights.read(tmp_path / 'out').fields == source.fields
  theirs, ours = (
    json.loads((folder / 'config.json').read_text())
    for folder in (path_of(name), tmp_path / 'out')
  )
  assert ours['model_args'].items() >= theirs['model_args'].items()
  assert ours['global_pool'] == theirs['global_pool']


def as_the_authors(arrays):
  """Returns a golden's arrays under the names of facebookresearch/mvit."""
  numbers = sorted({tuple(n.split('.')[:4]) for n in arrays if n.startswith('stages.')})
  renamed = {}
  for key, x in arrays.items():
    parts = key.split('.')
    if parts[0] == 'stages':
      key = '.'.join([f'blocks.{numbers.index(tuple(parts[:4]))}', *parts[4:]])
    key = re.sub(r'shortcut_proj_(attn|mlp)', 'proj', key)
    renamed[key.replace('head.fc', 'head.projection')] = x
  return renamed


@pytest.mark.parametrize('name', MVIT)
def test_the_authors_files_both_ways(tmp_path, name):
  arrays = as_the_authors(arrays_of(name))
  save_file(arrays, tmp_path / 'a.safetensors')
  source = weights.read(tmp_path / 'a.safetensors')
  timm = weights.read(path_of(name))
  assert source.format == 'authors'
  assert source.image_size == timm.image_size
  # What differs is the code that the files are for.
  residual = {'class_residual': True} if timm.fields['classifier'] == 'token' else {}
  assert 'class_residual' not in source.fields
  assert source.fields | residual == timm.fields
  for key, x in timm.flat.items():
    np.testing.assert_array_equal(source.flat[key], x, err_msg=key)
  weights.write(source, tmp_path / 'out', 'authors')
  again = load_file(tmp_path / 'out' / 'model.safetensors')
  assert again.keys() == arrays.keys()
  for key, x in arrays.items():
    np.testing.assert_array_equal(again[key], x, err_msg=key)


def test_published_sizes_are_written_under_their_names(tmp_path):
  model = models.build('mvitv2_tiny', num_classes=3)
  shapes = jax.eval_shape(
    model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32)
  )['params']
  flat = {n: np.zeros(x.shape, x.dtype) for n, x in trees.flatten(shapes).items()}

  fields = model.fields()
  _, config = formats.find_writer('mvit', 'timm').write(flat, fields, (32, 32), None)
  assert config['architecture'] == 'mvitv2_tiny'
  assert config['model_args'] == {'img_size': [32, 32]}


@pytest.mark.parametrize(
  ('name', 'to', 'fields', 'size', 'facts'),
  [
    ('mvit_timm_cls', 'authors', {}, 64, ('class_residual=True',)),
    ('mvit_timm', 'timm', {}, 48, ('48x48', '32 px')),
    ('mvit_timm', 'hf', {}, 64, ('hf', 'mvit')),
  ],
)
def test_what_a_format_cannot_express_is_refused(
  tmp_path, name, to, fields, size, facts
):
  source = weights.read(path_of(name), **fields)
  source = dataclasses.replace(source, image_size=(size, size))
  with pytest.raises(UserError, match=naming(*facts)):
    weights.write(source, tmp_path / 'out', to)


@pytest.mark.parametrize(
  ('name', 'key', 'value', 'facts'),
  [
    ('mvit_timm', 'model_args.pool_first', True, ('pool_first', 'True')),
    ('mvit_timm', 'model_args.stride_q', [[2, 2]] * 4, ('stride_q', '[1, 1]')),
    ('mvit_timm', 'model_args.stride_kv_adaptive', [4, 2], ('[4, 2]',)),
    ('mvit_timm_cls', 'global_pool', 'avg', ("'avg'", "'token'")),
  ],
)
def test_what_is_not_read_is_refused(tmp_path, name, key, value, facts):
  shutil.copytree(path_of(name), tmp_path / 'a')
  config = json.loads((tmp_path / 'a' / 'config.json').read_text())
  part, _, last = key.rpartition('.')
  (config[part] if part else config)[last] = value
  (tmp_path / 'a' / 'config.json').write_text(json.dumps(config))
  with pytest.raises(UserError, match=naming(tmp_path / 'a', *facts)):
    vit_jax.load(tmp_path / 'a')


def test_stages_that_do_not_double_are_refused(tmp_path):
  arrays = arrays_of('mvit_timm')
  rest = {n: x for n, x in arrays.items() if not n.startswith(('stages.1', 'stages.3'))}
  rest = {n.replace('stages.2', 'stages.1'): x for n, x in rest.items()}
  save_file(rest, tmp_path / 'a.safetensors')
  facts = tmp_path / 'a.safetensors', '[1, 4]', '[12, 48]'
  with pytest.raises(UserError, match=naming(*facts)):
    vit_jax.load(tmp_path / 'a.safetensors')
