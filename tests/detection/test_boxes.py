"""Forms of boxes and their overlap, against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.detection import boxes


def test_forms_of_boxes():
  centre = np.array([[0.5, 0.4, 0.2, 0.6], [0, 0, 0, 0]], np.float32)
  corners = np.array([[0.4, 0.1, 0.6, 0.7], [0, 0, 0, 0]], np.float32)
  np.testing.assert_allclose(boxes.to_corners(centre), corners, atol=1e-7)
  np.testing.assert_allclose(boxes.to_centres(corners), centre, atol=1e-7)
  np.testing.assert_allclose(
    boxes.swap_axes(jnp.array([1.0, 2.0, 3.0, 4.0])), [2, 1, 4, 3]
  )


# Corners of two boxes; their overlap, and the generalised one.
PAIRS = [
  ([0, 0, 2, 2], [0, 0, 2, 2], 1, 1),
  ([0, 0, 2, 2], [1, 0, 3, 2], 2 / 6, 2 / 6),  # fills the box around both
  ([0, 0, 2, 2], [1, 1, 3, 3], 1 / 7, 1 / 7 - 2 / 9),
  ([0, 0, 1, 1], [3, 0, 4, 1], 0, -2 / 4),
  ([0, 0, 1, 1], [1, 1, 2, 2], 0, -2 / 4),  # touch
  ([0, 0, 4, 4], [1, 1, 2, 2], 1 / 16, 1 / 16),  # inside
  ([0, 0, 0, 0], [1, 1, 2, 2], 0, -3 / 4),
  ([1, 1, 1, 1], [1, 1, 1, 1], 0, 0),  # points
]


def test_overlap():
  a, b = (np.array([p[k] for p in PAIRS], np.float32) for k in (0, 1))

  @jax.jit
  def overlaps(a, b):
    total = lambda a: jnp.sum(boxes.giou(a, b) + boxes.iou(a, b))
    every = boxes.giou(a[:, None], b[None])
    return boxes.iou(a, b), boxes.giou(a, b), every, jax.grad(total)(a)

  for one, other in ((a, b), (b, a)):
    iou, giou, every, grads = overlaps(one, other)
    np.testing.assert_allclose(iou, [p[2] for p in PAIRS], atol=1e-6)
    np.testing.assert_allclose(giou, [p[3] for p in PAIRS], atol=1e-6)
    assert every.shape == (len(PAIRS), len(PAIRS))
    np.testing.assert_allclose(np.diagonal(every), giou, atol=1e-6)
    assert np.isfinite(grads).all()
