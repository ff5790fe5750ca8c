"""Mixup and CutMix against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.tasks.mixing import Mixing

B, K, SIDE = 512, 4, 32


def example_batch(weight=None):
  """Returns images that hold their own number, one-hot labels, weights."""
  images = jnp.broadcast_to(
    jnp.arange(1.0, B + 1)[:, None, None, None], (B, SIDE, SIDE, 3)
  )
  targets = jax.nn.one_hot(jnp.arange(B) % K, K)
  return images, targets, jnp.ones(B) if weight is None else weight


def shares(images):
  """Returns the share of an example's own pixels, [B, H, W]; of constant images."""
  own, other = np.arange(1.0, B + 1), np.roll(np.arange(1.0, B + 1), 1)
  of = lambda x: x[:, None, None]
  return (np.asarray(images)[..., 0] - of(other)) / of(own - other)


def test_mixup_mixes_images_and_labels_alike():
  mix = Mixing(mixup=0.5, mixup_mode='example')
  images, targets = mix(*example_batch(), jax.random.key(0))
  # float32 rounding of numbers up to 512, divided by a difference of 1.
  share = shares(images)
  np.testing.assert_allclose(share, share[:, :1, :1] + 0 * share, atol=1e-4)
  own = np.asarray(targets)[np.arange(B), np.arange(B) % K]
  np.testing.assert_allclose(share[:, 0, 0], own, atol=1e-4)
  np.testing.assert_allclose(targets.sum(-1), 1, rtol=1e-6)
  assert own.min() >= 0.5
  # E max(x, 1 - x) of Beta(1/2, 1/2), the arcsine law, is 1/2 + 1/pi.
  sigma = own.std() / np.sqrt(B)
  assert abs(own.mean() - (0.5 + 1 / np.pi)) < 4 * sigma


@pytest.mark.parametrize('options', [dict(mixup=0.2), dict(cutmix=1.0)])
def test_one_draw_for_the_batch(options):
  images, targets = Mixing(**options)(*example_batch(), jax.random.key(1))
  share = shares(images)
  np.testing.assert_allclose(share, share[:1] + 0 * share, atol=1e-3)
  own = np.asarray(targets)[np.arange(B), np.arange(B) % K]
  np.testing.assert_allclose(own, own[0], rtol=1e-5)


def test_cutmix_pastes_one_box_and_its_share_of_the_label():
  mix = Mixing(cutmix=1.0, mixup_mode='example')
  images, targets = mix(*example_batch(), jax.random.key(2))
  keep = shares(images)
  np.testing.assert_allclose(keep, np.round(keep), atol=1e-4)
  keep = np.round(keep).astype(bool)
  for i in range(B):
    rows, columns = np.flatnonzero(~keep[i].all(1)), np.flatnonzero(~keep[i].all(0))
    if len(rows):
      box = np.ix_(
        np.arange(rows[0], rows[-1] + 1), np.arange(columns[0], columns[-1] + 1)
      )
      assert not keep[i][box].any()
      assert (~keep[i]).sum() == keep[i][box].size
  own = np.asarray(targets)[np.arange(B), np.arange(B) % K]
  np.testing.assert_allclose(own, keep.mean((1, 2)), rtol=1e-5)
  # lambda is uniform for alpha 1. A side s = sqrt(1 - lambda) covers s - s^2 / 4 of its
  # axis on average, once cut off at the border: in all 1/2 - 1/5 + 1/48. Sides rounded
  # to whole, even numbers of pixels (on average one less of 32) cover 3 % less.
  sigma = own.std() / np.sqrt(B)
  assert abs(own.mean() - (1 - 0.3208 + 0.03)) < 4 * sigma
  corners = [keep[:, y, x].mean() for y in (0, -1) for x in (0, -1)]
  assert min(corners) > keep.mean()  # boxes cover the middle more often


@pytest.mark.parametrize(('side', 'box'), [(0.3, 8), (0.32, 10), (0.99, 30), (0.03, 0)])
def test_the_box_of_cutmix_has_whole_pixels(monkeypatch, side, box):
  # 32 px: 9.6, 10.24, 31.68 and 0.96 are floored, then made even around the centre.
  monkeypatch.setattr(jax.random, 'beta', lambda *_: jnp.float32([1 - side**2]))
  monkeypatch.setattr(jax.random, 'randint', lambda *_: jnp.int32([16]))
  images, targets = Mixing(cutmix=1.0)(*example_batch(), jax.random.key(0))
  expected = np.ones((SIDE, SIDE))
  expected[16 - box // 2 : 16 + box // 2, 16 - box // 2 : 16 + box // 2] = 0
  np.testing.assert_allclose(shares(images)[3], expected, atol=1e-4)
  np.testing.assert_allclose(targets[3, 3], 1 - box**2 / SIDE**2, rtol=1e-6)


def test_both_are_drawn_equally_often():
  mix = Mixing(mixup=0.5, cutmix=1.0, mixup_mode='example')
  images, _ = mix(*example_batch(), jax.random.key(3))
  share = shares(images)
  is_box = np.isclose(share, np.round(share), atol=1e-4).all((1, 2))
  # A mixup share next to 1 looks like a box: 3 % of the arcsine law lie within 1e-3.
  assert abs(is_box.mean() - 0.5) < 4 * np.sqrt(0.25 / B) + 0.04


def test_a_broken_image_is_nobody_s_partner():
  weight = jnp.ones(B).at[7].set(0)
  images, targets = Mixing(mixup=0.5)(*example_batch(weight), jax.random.key(4))
  np.testing.assert_array_equal(images[8], 9.0)  # its partner would be 7
  np.testing.assert_array_equal(targets[8], jax.nn.one_hot(0, K))
  assert float(images[9, 0, 0, 0]) != 10.0


def test_a_key_is_a_result():
  mix = Mixing(mixup=0.2, cutmix=1.0)
  one, other = (mix(*example_batch(), jax.random.key(n))[0] for n in (5, 5))
  np.testing.assert_array_equal(one, other)
  assert not np.array_equal(one, mix(*example_batch(), jax.random.key(6))[0])
