"""Swin: borders of maps, windows of another size; logits are in test_goldens.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vit_jax
from tests.support import naming
from tests.support.goldens import path_of
from vit_jax import models, resample
from vit_jax.errors import UserError
from vit_jax.nn.windows import Windows
from vit_jax.weights import adapt


@pytest.mark.parametrize(
  ('variant', 'facts'),
  [
    ('X', ("'X'", 'T', 'V2-')),
    ('B/0', ("'B/0'", 'V2-')),
    ('B/12to24', ("'B/12to24'", 'V2-B/12to24')),
  ],
)
def test_other_variants_are_refused(variant, facts):
  with pytest.raises(UserError, match=naming(*facts)):
    models.build('swin', variant)


@pytest.mark.parametrize(
  ('fields', 'facts'),
  [
    (dict(windows=(7, 7)), ('windows=(7, 7)', 'depths=(2, 2, 6, 2)')),
    (dict(shift=1.0), ('shift=1.0',)),
    (dict(version=3), ('version', '3', '2')),
    (
      dict(pretrained_windows=(7,) * 4),
      ('pretrained_windows=(7, 7, 7, 7)', 'version=1'),
    ),
    (dict(borders='timm'), ("'timm'", 'shift_pad')),
  ],
)
def test_fields_that_do_not_fit_are_refused(fields, facts):
  build = lambda: models.build('swin', 'T', **fields)
  init = lambda key: build().init(key, jnp.zeros((1, 32, 32, 3)))
  with pytest.raises(UserError, match=naming(*facts)):
    jax.eval_shape(init, jax.random.key(0))


# -- windows ----------------------------------------------------------------------------


@pytest.mark.parametrize('pad_first', [True, False])
@pytest.mark.parametrize(
  ('shape', 'window', 'shift'),
  [((8, 12), (4, 4), (2, 2)), ((7, 10), (4, 3), (2, 1)), ((3, 9), (3, 4), (0, 2))],
)
def test_windows_come_apart_and_together(shape, window, shift, pad_first):
  windows = Windows(shape, window, shift, pad_first)
  x = np.random.default_rng(0).normal(size=(2, *shape, 5)).astype(np.float32)
  cut = windows.cut(x)
  assert cut.shape == (2 * np.prod(windows.grid), np.prod(window), 5)
  np.testing.assert_array_equal(windows.join(cut), x)


def test_tokens_are_apart_where_a_shift_brought_them_together():
  # Two tokens of a window see each other if they are as far apart in the map.
  windows = Windows((8, 6), (4, 3), (2, 1))
  y, x = np.meshgrid(np.arange(8), np.arange(6), indexing='ij')
  places = np.asarray(windows.cut(jnp.asarray(np.stack([y, x], -1)[None], jnp.float32)))
  inside = np.stack(np.meshgrid(range(4), range(3), indexing='ij'), -1).reshape(12, 2)
  far = places[:, :, None] - places[:, None] != inside[:, None] - inside
  mask = windows.mask(len(far), -9.0)[:, 0]
  np.testing.assert_array_equal(mask, np.where(far.any(-1), -9.0, 0.0))


def test_padding_before_or_after_the_shift(golden):
  expected = golden('swin_timm_pad.expected')
  other = golden('swin_timm_pad_then_shift')['logits']
  model, params = vit_jax.load(path_of('swin_timm_pad'), borders='pad_shift')
  logits, _ = jax.jit(model.apply)({'params': params}, expected['image'])
  np.testing.assert_allclose(logits, other, rtol=0, atol=1e-5)
  assert np.abs(other - expected['logits']).max() > 0.1


def test_images_that_nothing_tiles():
  model = models.build('swin', **models.family('swin').tiny[0], num_classes=7)
  images = lambda *size: jax.ShapeDtypeStruct((1, *size, 3), jnp.float32)
  params = jax.eval_shape(model.init, jax.random.key(0), images(32, 32))
  shapes = lambda *size: jax.eval_shape(model.apply, params, images(*size))[1]
  out = shapes(37, 61)
  assert out['stem'].shape == (1, 10, 16, 16)
  assert out['stage2'].shape == (1, 5, 8, 32)
  # Windows are cut to the size of a map, and the biases of nearer offsets are taken.
  assert shapes(4, 30)['stage2'].shape == (1, 1, 4, 32)


# -- another window -----------------------------------------------------------------------


@pytest.mark.parametrize(
  ('method', 'matrix'),
  [('bicubic', resample.bicubic_of_edges), ('timm', resample.geometric)],
)
def test_tables_for_another_window(golden, method, matrix):
  file = golden('swin_rel_pos_resize')
  for name, expected in file.items():
    if match := name.startswith(method) and name.replace('w', '').split('_'):
      old, new = int(match[1]), int(match[3])
      table = file[f'table_w{old}'].reshape(2 * old - 1, 2 * old - 1, -1)
      result = adapt.resize_offsets(table, (2 * new - 1,) * 2, matrix)
      expected = expected.reshape(result.shape)
      # Torch computes kernels at positions up to 24 in float32.
      np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5)


def test_windows_of_another_size_by_loading(golden):
  expected = golden('swin_timm_resized')
  source = path_of('swin_timm')
  loaded = vit_jax.load(source, image_size=96, windows=(6, 6, 6))
  logits, out = jax.jit(loaded.model.apply)(loaded.variables, expected['image'])
  for name, x in {**out, 'logits': logits}.items():
    if name in expected:
      np.testing.assert_allclose(x, expected[name], rtol=0, atol=1e-5)
  assert 'from 4x4 to 6x6, geometric' in loaded.report
  assert set(expected) == {'image', 'stage1', 'stage2', 'stage3', 'logits'}
