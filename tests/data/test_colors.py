"""Changes of colour on the device and random crops against torchvision, Pillow and timm."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import GOLDEN, naming
from tests.support.run_ops import run_graph
from vit_jax.data import lazy_tf, pipeline
from vit_jax.data.ops import colors, registry
from vit_jax.errors import UserError

tf = lazy_tf.load()
REFERENCE = np.load(GOLDEN / 'augment.npz')
IMAGE = REFERENCE['image'].astype(np.float32)
PLANES = np.moveaxis(IMAGE, -1, 0)
DINO = (
  'color_jitter(0.4, 0.4, 0.2, 0.1, p=0.8)|grayscale(0.2)|gaussian_blur((1.0, 0.1, 0.5))|'
  'solarize((0, 0.2, 0))|value_range(-1, 1)'
)


def jitter(**factors):
  kinds = ('brightness', 'contrast', 'saturation', 'hue')
  values = [factors.get(kind, kind != 'hue') for kind in kinds]
  return lambda x: colors._jitter(x, jnp.arange(4), jnp.float32(values))


CHANGES = {
  f'{kind}_{factor}': jitter(**{kind: factor})
  for kind, factors in {
    **dict.fromkeys(('brightness', 'contrast', 'saturation'), (0.0, 0.6, 1.4)),
    'hue': (-0.1, 0.05, 0.1, 0.5),
  }.items()
  for factor in factors
}
CHANGES |= {
  f'blur9_sigma{sigma}': lambda x, sigma=sigma: colors._blur(x, sigma)
  for sigma in (0.1, 0.7, 1.3, 2.0)
}
CHANGES |= {'grayscale': colors._grey, 'solarize_0.5': colors._solarize}


def test_changes_agree_with_torchvision():
  results = jax.jit(lambda x: {name: f(x) for name, f in CHANGES.items()})(PLANES)
  for name, result in results.items():
    # Float32 in another order.
    expected = REFERENCE[f'{name}/float']
    result = np.moveaxis(result, 0, -1) / 255
    np.testing.assert_allclose(result, expected, atol=2e-6, err_msg=name)


def test_jitter_in_any_order_agrees_with_torchvision():
  orders, factors = REFERENCE['jitter_order'], REFERENCE['jitter_factors']
  result = jax.jit(jax.vmap(colors._jitter, (None, 0, 0)))(PLANES, orders, factors)
  result = np.moveaxis(result, 1, -1) / 255
  np.testing.assert_allclose(result, REFERENCE['jitter_float'], atol=3e-6)


def test_blur_agrees_with_pillow():
  radii = [0.1, 0.7, 1.3, 2.0, float(REFERENCE['three_blur_radius'])]
  blurred = jax.jit(jax.vmap(colors._blur_of_pillow, (None, 0)))(
    PLANES, jnp.float32(radii)
  )
  blurred = np.moveaxis(blurred, 1, -1)
  expected = [REFERENCE[f'blur_pil_radius{radius}'] for radius in radii[:-1]]
  difference = np.abs(blurred - np.stack([*expected, REFERENCE['three_blur']]))
  # Pillow rounds to 8 bits after each of six passes.
  assert difference.max() < 2.5
  assert difference.mean() < 0.5


@pytest.mark.parametrize(
  ('inverted', 'shares'), [(False, (1, 0.1, 0.5)), (True, (0, 0.9, 0.5))]
)
def test_each_kind_of_crop_is_blurred_in_its_share(inverted, shares):
  (op,) = registry.parse(f'gaussian_blur((1.0, 0.1, 0.5), inverted={inverted})')
  image = np.random.default_rng(0).integers(0, 256, (9, 9, 3), np.uint8)
  crops = np.broadcast_to(image, (400, 2, *image.shape))
  u = np.random.default_rng(1).random((400, 2), np.float32)
  u = np.floor(u * 2**24) / np.float32(2**24)
  out = jax.jit(op.on_device)({'image': crops, 'local': crops}, u)
  changed = [(x != crops).any((2, 3, 4)) for x in (out['image'], out['local'])]
  counts = [changed[0][:, 0].mean(), changed[0][:, 1].mean(), changed[1].mean()]
  # Three standard deviations: 0.3 / 20 and 0.5 / 20.
  np.testing.assert_allclose(counts, shares, atol=0.075)
  # Local crops are drawn one by one.
  assert 0.4 < (changed[1][:, 0] != changed[1][:, 1]).mean() < 0.6
  if inverted:
    published = [REFERENCE[f'dinov2_blur_share_p{p}'] for p in ('1.0', '0.1', '0.5')]
    # 80 draws of the authors' code.
    np.testing.assert_allclose(counts, published, atol=0.15)


def test_three_augment_has_one_change_of_three():
  (op,) = registry.parse('three_augment(0)')
  u = np.random.default_rng(0).integers(0, 2**24, (300, 2)) / np.float32(2**24)
  images = np.broadcast_to(IMAGE, (300, *IMAGE.shape))
  out = np.asarray(
    jax.jit(op.on_device)({'image': images}, u.astype(np.float32))['image']
  )
  near = lambda x: np.abs(out - x).max((1, 2, 3)) < 1e-2
  grey, solarized = (
    near(np.moveaxis(f(PLANES), 0, -1)) for f in (colors._grey, colors._solarize)
  )
  assert not near(IMAGE).any()
  # Three standard deviations: sqrt(2 / 9 / 300) is 0.027.
  for share in (grey.mean(), solarized.mean(), 1 - (grey | solarized).mean()):
    assert share == pytest.approx(1 / 3, abs=0.082)


@pytest.mark.parametrize(
  ('name', 'area'), [('global', (32, 100)), ('local', (5, 32)), ('mae', (20, 100))]
)
def test_random_boxes_are_distributed_as_torchvisions(name, area):
  crop = registry.parse(f'random_resized_crop(8, {area[0]}, {area[1]})')[0].apply
  u = np.random.default_rng(0).integers(0, 2**24, (2000, 2)) / np.float32(2**24)
  box = lambda u: tf.stack(crop.box(150, 200, u))
  every = lambda u: tf.map_fn(box, u, fn_output_signature=tf.int32)
  boxes = tf.function(every, autograph=False)(u.astype(np.float32)).numpy()
  y, x, h, w = boxes.T
  assert min(y.min(), x.min()) >= 0
  assert (y + h).max() <= 150
  assert (x + w).max() <= 200
  mean, std = (REFERENCE[f'boxes_{name}_{key}'] for key in ('mean', 'std'))
  # Four standard deviations of the difference of two means of 2,000 or more.
  assert (np.abs(boxes.mean(0) - mean) < 4 * std * np.sqrt(2 / 2000)).all()
  np.testing.assert_allclose(boxes.std(0), std, rtol=0.08)
  area = np.median(h * w / 30_000)
  assert area == pytest.approx(REFERENCE[f'boxes_{name}_area_quantiles'][3], rel=0.04)
  aspect = REFERENCE[f'boxes_{name}_log_aspect_std']
  assert np.log(w / h).std() == pytest.approx(aspect, rel=0.05)


def test_a_box_of_an_image_that_is_too_narrow_is_central():
  crop = registry.parse('random_resized_crop(8, 99)')[0].apply
  u = tf.constant([0.5, 0.5])
  assert [int(n) for n in crop.box(100, 20, u)] == [36, 0, 27, 20]
  assert [int(n) for n in crop.box(30, 100, u)] == [0, 30, 30, 40]


@pytest.mark.parametrize('name', ['crop_a', 'crop_b', 'crop_c'])
def test_a_crop_is_resized_as_by_torchvision(name):
  top, left, height, width, size = REFERENCE[f'{name}_box']
  crop = registry.parse(f'random_resized_crop({size})')[0].apply
  part = IMAGE[top : top + height, left : left + width] / 255
  expected = REFERENCE[f'{name}/float_bicubic_antialias']
  # Float32 sums in another order.
  np.testing.assert_allclose(crop.finish(tf.constant(part)), expected, atol=3e-6)


def test_erased_areas_are_distributed_as_timms():
  images = np.zeros((800, 32, 32, 1), np.float32)
  u = np.random.default_rng(0).random((800, 5), np.float32)
  erase = tf.function(lambda x, u: run_graph('random_erasing(0.25)', x, u))
  share = (erase(images, u).numpy() != 0).mean((1, 2, 3))
  # Standard deviations are 0.015 and 0.006.
  assert (share > 0).mean() == pytest.approx(REFERENCE['erasing_probability'], abs=0.05)
  mean = share[share > 0].mean()
  assert mean == pytest.approx(REFERENCE['erasing_area_mean'], abs=0.02)


def test_crops_of_a_pipeline_follow_from_the_position():
  pp = f'decode(3)|multi_crop(16, 8, 3, 32)|{DINO}'

  def take(batches, step):
    with contextlib.closing(batches.iterate(step)) as iterator:
      return next(iterator)

  make = lambda size: pipeline.TrainBatches('digits', 'train', pp, size, seed=3)
  batches, halves = make(6), make(3)
  assert batches.spec['image'].shape == (6, 2, 16, 16, 3)
  assert batches.spec['local'].shape == (6, 3, 8, 8, 3)
  batch, parts = take(batches, 1), [take(halves, step) for step in (2, 3)]
  for name in ('image', 'local', 'u'):
    joined = np.concatenate([part[name] for part in parts])
    np.testing.assert_array_equal(batch[name], joined)
  finished = jax.jit(batches.finish_on_device)(batch)
  assert finished.keys() == {'image', 'local', 'index', 'label', 'mask'}
  for name in ('image', 'local'):
    assert finished[name].dtype == np.float32
    flat = np.asarray(finished[name]).reshape(6, batch[name].shape[1], -1)
    assert (flat[:, 0] != flat[:, 1]).any(-1).all()


@pytest.mark.parametrize(
  ('pp', 'facts'),
  [
    ('decode(3)|solarize(0.1)|resize(8)|value_range', ('resize(8)', 'solarize(0.1)')),
    ('decode(3)|multi_crop(16)|flip_lr|value_range', ('flip_lr', 'multi_crop(16)')),
    ('decode(3)|solarize((1, 0, 0))|value_range', ('p=(1, 0, 0)', 'multi_crop')),
    ('decode(1)|solarize(0.1)|value_range', ('3 channels', 'decode(3)')),
  ],
)
def test_impossible_pipelines(pp, facts):
  with pytest.raises(UserError, match=naming(*facts)):
    _ = pipeline.TrainBatches('digits', 'train', pp, 8).spec
