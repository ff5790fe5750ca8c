"""RoIAlign, levels of boxes, and masks of boxes, beside detectron2's numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import GOLDEN, tpu
from tests.support.tpu import interpreted  # noqa: F401
from vit_jax import kernels
from vit_jax.detection.regions import masks, tpu_roi_align
from vit_jax.detection.regions.roi_align import level_of, roi_align

TOLERANCE = 3e-5  # float32 sums in another order; values are up to 30


@functools.cache
def golden(name):
  return dict(np.load(GOLDEN / 'twostage' / f'{name}.npz'))


def close(x, expected, tolerance=TOLERANCE):
  np.testing.assert_allclose(x, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize('case', range(6))
def test_bins_and_gradients(case):
  of = lambda name: golden('roi_align')[f'{name}_{case}']
  scale, size, _, samples, aligned = golden('roi_align')['cases'][case]
  image, boxes = np.split(of('rois'), [1], -1)

  @jax.jit
  def run(x, cotangent):
    every = jnp.broadcast_to(boxes, (len(x), *boxes.shape))
    function = lambda x: roi_align(
      [x], every, [1 / scale], int(size), int(samples), bool(aligned)
    )[image[:, 0].astype(int), jnp.arange(len(boxes))]
    out, vjp = jax.vjp(function, x)
    return out, vjp(cotangent)[0]

  out, gradient = run(of('features'), of('cotangent'))
  close(out, of('output'))
  # Up to 45: sums over all boxes.
  close(gradient, of('gradient'), 1e-6 * np.abs(of('gradient')).max() + TOLERANCE)


@pytest.mark.parametrize('samples', [0, 2])
def test_each_box_is_pooled_from_its_level(samples):
  z = golden('roi_align')
  levels = level_of(z['pooler_boxes'], 2, 5, tuple(z['pooler_canonical']))
  np.testing.assert_array_equal(levels, z['pooler_levels'])
  maps = [z[f'pooler_p{level}'] for level in (2, 3, 4, 5)]
  run = lambda *args: roi_align(*args, [4, 8, 16, 32], 7, samples, levels=levels)
  out = jax.jit(run)(maps, z['pooler_boxes'])
  close(out, z[f'pooler_output_sr{samples}'])


LEVELS = {
  'detectron2': lambda side: 4 + np.log2(side / 224 + 1e-8) - 2,
  'torchvision': lambda side: 4 + np.log2(side / 224) + 1e-6 - 2,
  'mmdetection': lambda side: np.log2(side / 56 + 1e-6),
}


@pytest.mark.parametrize('origin', LEVELS)
def test_levels_near_powers_of_two(origin):
  level = jax.jit(level_of, static_argnums=(1, 2, 3, 4))
  near = 1 + np.array([-1e-3, -3e-6, -4e-7, 0, 3e-7, 1e-3])
  sides = np.outer([1, 56, 112, 224, 448, 1e4], near).ravel()
  boxes = np.stack([0 * sides, 0 * sides, sides, sides], -1).astype(np.float32)
  expected = np.clip(np.floor(LEVELS[origin](sides)), 0, 3)
  canonical = (56, 2) if origin == 'mmdetection' else (224, 4)
  levels = level(boxes, 2, 5, canonical, origin)
  np.testing.assert_array_equal(levels, expected)
  assert level_of(np.zeros(4), 2, 5, canonical, origin) == 0


def test_gradients_of_many_boxes_add_up_in_float32():
  # In bfloat16 the sum would stay at 256, where 1 is half a unit in the last place.
  x = jnp.zeros((1, 8, 8, 1), jnp.bfloat16)
  boxes = jnp.tile(jnp.array([2.5, 2.5, 3.5, 3.5]), (1, 1000, 1))
  total = lambda x: roi_align([x], boxes, [1], 1, 2).astype(jnp.float32).sum()
  gradient = jax.jit(jax.grad(total))(x)
  close(gradient[0, 1:5, 1:5, 0].astype(jnp.float32).sum(), 1000, 0)
  of_boxes = jax.jit(jax.grad(lambda b: roi_align([x + 1], b, [1], 2).sum()))
  assert of_boxes(boxes).max() == 0


# -- The kernel for TPUs ------------------------------------------------------------------


def boxes_of_all_kinds(rng, number, width, height):
  """Returns corners [2, number, 4]: outside, without area, thin, and larger than the image."""
  sides = np.exp(rng.uniform(0, 6, (2, number, 2)))
  low = rng.uniform(-10, [width, height], sides.shape) - sides / 2
  boxes = np.concatenate([low, low + sides], -1).astype(np.float32)
  boxes[0, 0, 2], boxes[0, 1], boxes[1, 0] = boxes[0, 0, 0], -300, [5, 0, 6, height]
  return boxes


@pytest.mark.usefixtures('interpreted')
@pytest.mark.parametrize(
  ('size', 'samples', 'aligned'), [(7, 0, True), (7, 2, False), (14, 0, True)]
)
def test_the_kernel_and_its_derivative(size, samples, aligned):
  rng = np.random.default_rng(0)
  # Maps whose sides are no multiples of a window's, and one that is narrower.
  maps = [rng.normal(size=(2, h, w, 128)) for h, w in ((17, 70), (9, 35))]
  maps = tuple(jnp.asarray(x, jnp.bfloat16) for x in maps)
  boxes = boxes_of_all_kinds(rng, 12, 280, 68)
  levels = level_of(boxes, 2, 3, (112, 3))
  assert {*np.unique(levels)} == {0, 1}
  options = dict(strides=(4, 8), size=size, samples=samples, aligned=aligned)

  @functools.partial(jax.jit, static_argnums=0)
  def run(function, maps, gradient):
    out, vjp = jax.vjp(function, maps)
    return out, *vjp(gradient)[0]

  gradient = jnp.asarray(rng.normal(size=(2, 12, size, size, 128)), jnp.bfloat16)
  pooling = tpu_roi_align.Pooling(**options, sums=2**19)  # three groups, or twelve
  kernel = lambda maps: tpu_roi_align.roi_align(maps, boxes, levels, pooling)
  exact = lambda maps: roi_align(maps, boxes, **options, levels=levels)
  wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
  expected = run(exact, *wide((maps, gradient)))
  for a, b in zip(run(kernel, maps, gradient), expected, strict=True):
    assert a.dtype == jnp.bfloat16
    # Weights and results are rounded to bfloat16, by 2**-9 at most; sums are not.
    close(a.astype(jnp.float32), b, 2**-8 * np.abs(b).max())


def test_when_the_kernel_pools():
  shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
  maps = [shape(2, 64, 80, 256), shape(2, 32, 40, 256)]

  def pooled(*maps, size=7):
    boxes = jnp.ones((len(maps[0]), 100, 4))
    return roi_align(maps, boxes, (4, 8), size).astype(jnp.float32).sum()

  both = jax.value_and_grad(pooled)
  assert tpu.kernels_in(both, *maps) == 2
  assert tpu.kernels_in(both, *maps, generation='v3') == 0
  assert tpu.kernels_in(functools.partial(both, size=64), *maps) == 0  # too many bins
  assert tpu.kernels_in(both, shape(2, 64, 80, 200), shape(2, 32, 40, 200)) == 0
  with tpu.mesh('v5e'):  # the call that is verified on the device
    calls = kernels.collect_calls(lambda: jax.eval_shape(both, *maps))
  ((kernel, function, arrays),) = calls
  assert kernel == 'tpu_roi_align'
  assert jax.eval_shape(function, *arrays).shape == (2, 100, 7, 7, 256)


# -- Masks --------------------------------------------------------------------------------


mask_targets = jax.jit(masks.targets, static_argnums=(5, 6))


def bits(name, shape):
  packed = golden('masks')[name]
  flat = np.unpackbits(packed, axis=-1)[:, : np.prod(shape)]
  return flat.reshape(-1, *shape).astype(bool)


@pytest.mark.parametrize('size', [14, 28])
def test_targets(size):
  z = golden('masks')
  height, width = z['crop_size']
  whole = bits('crop_masks_bits', (height, width))
  extents = np.tile(np.float32([0, 0, width, height]), (len(whole), 1))
  args = whole, extents, z['crop_boxes'], np.arange(len(whole))
  soft = mask_targets(*args, np.array([height, width]), size)
  close(soft, z[f'crop_soft_{size}'], 1e-5)
  np.testing.assert_array_equal(soft >= 0.5, z[f'crop_targets_{size}'])


def test_targets_of_masks_that_cover_an_extent():
  rng = np.random.default_rng(0)
  mask = rng.integers(0, 2, (1, 12, 10)).astype(np.uint8) * 255
  image = np.pad(mask, ((0, 0), (5, 7), (6, 8)))
  # Inside the extent, and beyond it.
  boxes = np.float32([[7.3, 6.2, 14.9, 15.1], [8, 9, 12, 16], [4.5, 3.2, 17.8, 21.1]])

  def run(mask, extent, boxes, side=24, bins=4):
    args = mask, np.float32([extent]), boxes, np.zeros(len(boxes), int)
    return mask_targets(*args, np.array([side, side]), bins)

  expected = run(image == 255, [0, 0, 24, 24], boxes)
  close(run(mask, [6, 5, 16, 17], boxes), expected, 1e-6)
  # The same mask as one object of twice the size.
  close(run(mask, [12, 10, 32, 34], 2 * boxes, 48), expected, 1e-6)
  assert np.isfinite(run(mask, [6, 5, 6, 5], boxes)).all()  # padding has no length
  # An object at a corner of the image goes on beyond the border, and ends inside.
  corner = np.pad(mask, ((0, 0), (0, 12), (14, 0)))
  boxes = np.float32([[13, 0, 24, 12], [10.5, 0, 23.9, 14.3]])
  expected = run(corner == 255, [0, 0, 24, 24], boxes)
  close(run(mask, [14, 0, 24, 12], boxes), expected, 1e-6)
  # Fine cells of a rectangle: the targets of its whole image, but for the four corners.
  image = np.pad(np.ones((1, 12, 10)), ((0, 0), (5, 7), (6, 8)))
  boxes = np.float32([[4.4, 3.2, 17.8, 18.7], [6, 5, 16, 17], [3.3, 5.6, 17.1, 15]])
  args = boxes, np.zeros(3, int), np.array([24, 24]), 28
  for aligned in (True, False):
    whole = mask_targets(image, np.float32([[0, 0, 24, 24]]), *args, aligned)
    fine = np.full((1, 112, 112), 255, np.uint8)
    fine = mask_targets(fine, np.float32([[6, 5, 16, 17]]), *args, aligned)
    assert ((fine >= 0.5) != (whole >= 0.5)).sum((1, 2)).max() <= 4
  # Whatever the cells: 80 pixels are covered.
  full = np.full((1, 5, 5), 255, np.uint8)
  shares = run(full, [6, 5, 14, 15], np.float32([[0, 0, 20, 20]]), bins=20)
  np.testing.assert_allclose(shares.sum(), 80, rtol=1e-6)


def test_paste():
  z = golden('masks')
  size = tuple(z['paste_size'])
  pasted = masks.paste(z['paste_masks'], z['paste_boxes'], size)
  wrong = pasted != bits('paste_binary_bits', size)
  assert not (wrong & (np.abs(z['paste_soft'] - 0.5) > 1e-5)).any()


def test_paste_of_boxes_without_pixels():
  boxes = np.float32([[5, 5, 5, 9], [-9, 0, -1, 9], [30, 0, 40, 9], [0, 0, 20, 9]])
  pasted = masks.paste(np.ones((4, 28, 28)), boxes, (9, 20))
  assert pasted.sum((1, 2)).tolist() == [0, 0, 0, 180]
  # One half is enough.
  half = masks.paste(np.full((1, 32, 32), 0.5), np.float32([[0, 0, 32, 32]]), (32, 32))
  assert half.all()
