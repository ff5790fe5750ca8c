"""What masked patch prediction predicts: colours and pixels, by closed forms."""

import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.lab.masked import patch_targets


@pytest.mark.slow
def test_colors_have_three_bits_a_channel():
  levels = np.array([[0, 0, 0], [1, 1, 1], [0.124, 0.126, 0.5], [0.999, 0.25, 0.874]])
  codes = patch_targets.color_code(jnp.float32(levels * 2 - 1))
  code = lambda r, g, b: r + 8 * g + 64 * b
  assert codes.tolist() == [0, 511, code(0, 1, 4), code(7, 2, 6)]
  gray = patch_targets.color_code(jnp.float32([[-1], [0], [1]]))
  assert gray.tolist() == [0, 4, 7]
  beyond = patch_targets.color_code(jnp.float32([[-1.2] * 3, [1.2] * 3]))
  assert beyond.tolist() == [0, 511]


def test_targets_are_those_of_a_loop():
  images = np.random.default_rng(0).uniform(-1, 1, (2, 16, 24, 3)).astype(np.float32)
  found = {
    name: np.asarray(target((8, 8), 3).of(images))
    for name, target in patch_targets.TARGETS.items()
  }
  assert {k: x.shape for k, x in found.items()} == {
    'mean_color': (2, 6, 1),
    'downsized': (2, 6, 16),
    'pixels': (2, 6, 192),
  }
  code = lambda x: sum(
    min(int(8 * (x[..., c].mean(dtype=np.float64) + 1) / 2), 7) << 3 * c
    for c in range(3)
  )
  for b in range(2):
    for n in range(6):
      y, x = 8 * (n // 3), 8 * (n % 3)
      patch = images[b, y : y + 8, x : x + 8]
      assert found['mean_color'][b, n] == [code(patch)]
      cells = [patch[i : i + 2, j : j + 2] for i in (0, 2, 4, 6) for j in (0, 2, 4, 6)]
      assert found['downsized'][b, n].tolist() == [code(cell) for cell in cells]
      np.testing.assert_array_equal(found['pixels'][b, n], patch.ravel())


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(n, marks=() if n == 'pixels' else pytest.mark.slow)
    for n in patch_targets.TARGETS
  ],
)
def test_the_loss_is_its_formula(name):
  target = patch_targets.TARGETS[name]((8, 8), 3)
  rng = np.random.default_rng(0)
  goal = np.asarray(target.of(rng.uniform(-1, 1, (2, 16, 16, 3)).astype(np.float32)))
  predicted = rng.normal(size=(2, 4, target.outputs)).astype(np.float32)
  loss, right = target.measure(jnp.asarray(predicted), jnp.asarray(goal))
  if name == 'pixels':
    expected, accuracy = ((predicted - goal) ** 2).mean(-1), None
  else:
    logits = predicted.reshape(*goal.shape, 512).astype(np.float64)
    of_goal = np.take_along_axis(logits, goal[..., None], -1)[..., 0]
    expected = (np.log(np.exp(logits).sum(-1)) - of_goal).mean(-1)
    accuracy = (logits.argmax(-1) == goal).mean(-1)
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  assert right is None if accuracy is None else (right == accuracy).all()
