"""Heads taken apart, by a transposition and, as for TPUs, by slices."""

import types

import numpy as np
import pytest

from vit_jax.kernels import by_head


@pytest.mark.parametrize('heads', [1, 3])
@pytest.mark.parametrize(
  'tensor', [None, 1, 2]
)  # axis of a mesh of TPUs; None: no mesh
def test_heads_are_runs_of_channels(heads, tensor, monkeypatch):
  mesh = tensor and types.SimpleNamespace(shape={'tensor': tensor})
  monkeypatch.setattr(by_head, 'tpus', lambda batch: mesh)
  x = np.arange(2 * 5 * 12.0).reshape(2, 5, 12)
  found = by_head.apart(x, heads)
  assert found.shape == (2, heads, 5, 12 // heads)
  for i, head in enumerate(np.split(x, heads, axis=-1)):
    np.testing.assert_array_equal(found[:, i], head)
