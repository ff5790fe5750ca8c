"""Channels of all heads, side by side, taken apart."""

import jax
import jax.numpy as jnp

from vit_jax.kernels.placement import tpus


def apart(x: jax.Array, heads: int) -> jax.Array:
  """Returns [B, M, N, Dh] of x [B, N, M Dh], M heads.

  On TPUs by slices of the channels. XLA may lay out what is reshaped to [B, N, M, Dh] as
  that, whatever comes after, with M rows in each tile of 8 (benchmarks/NOTES.md). Not where
  heads are split among devices: a slice would have to be sent.
  """
  mesh = tpus(x.shape[0])
  if heads > 1 and mesh is not None and mesh.shape['tensor'] == 1:
    return jnp.stack(jnp.split(x, heads, axis=-1), axis=1)
  return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)
