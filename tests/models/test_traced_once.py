"""What kernels are differentiated by is traced once for all layers of one shape.

Otherwise a deep model takes minutes before its compilation starts.
"""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.test_tpu_attention import KINDS, tpu
from vit_jax.kernels import (
  attention,
  depthwise,
  layer_norm,
  tpu_attention,
  tpu_window_attention,
)
from vit_jax.kernels.dense import dense
from vit_jax.kernels.window_bias import WindowBias

PADDING = ((1, 1), (1, 1))


@pytest.mark.parametrize(
  ('layer', 'x', 'w', 'parts'),
  [
    (lambda x, w: dense(x, w, None), (4, 5, 6), (6, 6), 1),
    (lambda x, w: attention.softmax(x * w, 'float32'), (4, 5, 6), (6,), 1),
    (lambda x, w: layer_norm.normalise(x * w, 1e-6), (4, 5, 6), (6,), 1),
    # By the input and by the kernel.
    (
      lambda x, w: depthwise.depthwise(x, w, 1, PADDING),
      (1, 32, 32, 8),
      (3, 3, 1, 8),
      2,
    ),
  ],
  ids=['dense', 'softmax', 'normalise', 'depthwise'],
)
def test_gradients_of_three_layers(layer, x, w, parts):
  def loss(x, w):
    for _ in range(3):
      x = jnp.sin(layer(x, w))
    return x.sum()

  traced = jax.make_jaxpr(jax.grad(loss, (0, 1)))(jnp.ones(x), jnp.ones(w))
  chosen = [e.params['jaxpr'] for e in traced.eqns if e.primitive.name == 'remat2']
  assert len(chosen) == 3 * parts
  assert len({id(jaxpr) for jaxpr in chosen}) == parts


@pytest.mark.parametrize(
  ('kernels', 'bias'),
  [
    (tpu_attention, None),
    (tpu_window_attention, WindowBias(1, np.zeros((2, 23, 23), np.float32))),
  ],
  ids=['attention', 'windows'],
)
def test_kernels_for_tpus(kernels, bias):
  x = jax.ShapeDtypeStruct((1, 23, 2, 64), jnp.bfloat16)

  def loss(x):
    for _ in range(3):
      x = attention.attend(x, x, x, bias=bias)
    return x.astype(jnp.float32).sum()

  heads = mock.patch.object(kernels, 'heads', wraps=kernels.heads)
  with tpu(KINDS['v5e'], 1, 1, 1), heads as traced:
    step = jax.jit(jax.value_and_grad(loss)).trace(x).lower(lowering_platforms=('tpu',))
  assert step.as_text().count('@tpu_custom_call') == 6
  assert traced.call_count == 2  # forward and backward
