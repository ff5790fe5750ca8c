"""Channels split by head: by a transposition and, as for TPUs, by slices."""

import types

import numpy as np
import pytest

from vit_jax.kernels import split_heads


# Devices along a mesh's axis 'tensor'; None: no mesh of TPUs.
@pytest.mark.parametrize('tensor', [None, 1, 2])
@pytest.mark.parametrize('heads', [1, 3])
def test_heads_are_runs_of_channels(heads, tensor, monkeypatch):
  mesh = tensor and types.SimpleNamespace(shape={'tensor': tensor})
  monkeypatch.setattr(split_heads, 'tpus', lambda batch: mesh)
  x = np.arange(2 * 5 * 12.0).reshape(2, 5, 12)
  found = split_heads.split_heads(x, heads)
  assert found.shape == (2, heads, 5, 12 // heads)
  for i, head in enumerate(np.split(x, heads, axis=-1)):
    np.testing.assert_array_equal(found[:, i], head)
