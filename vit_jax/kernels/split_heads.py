"""Channels of all heads, side by side, split by head."""

import jax
import jax.numpy as jnp

from vit_jax.kernels.placement import tpus


def split_heads(x: jax.Array, heads: int) -> jax.Array:
  """Returns [B, M, N, Dh] of x [B, N, M Dh], which has M heads.

  On TPUs the channels are sliced. Reshaped and transposed, they may be stored as
  [B, N, M, Dh], where M heads fill M of the 8 rows of a tile (benchmarks/NOTES.md). On a mesh
  that splits heads among devices they are reshaped: slices would be sent between devices.
  """
  mesh = tpus(x.shape[0])
  if heads > 1 and mesh is not None and mesh.shape['tensor'] == 1:
    return jnp.stack(jnp.split(x, heads, axis=-1), axis=1)
  return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)
