"""Which patches of an image are corrupted, and how: arXiv 2010.11929, appendix B.1.2.

Functions of a key: the result does not depend on how many devices share the batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Shares of the corrupted patches; the rest keep their embeddings. As BERT (arXiv
# 1810.04805, section 3.1).
MASKED, SWAPPED = 0.8, 0.1


class Corruption(NamedTuple):
  """The corruption of the N patches of each image, k of which are corrupted."""

  positions: jax.Array  # int32 [..., k], the corrupted ones, in no order.
  masked: jax.Array  # bool [..., N], those that get the mask embedding.
  # int32 [..., N], the patch of the same image whose embedding each one gets, often itself.
  source: jax.Array


def draw(key, k: int, shape: tuple[int, ...]) -> Corruption:
  """Returns the corruption of k of the N patches of each image, for shape (..., N).

  It is uniform, and as many in each image, so that each counts the same in the loss.
  """
  chosen_key, kind_key, other_key = jax.random.split(key, 3)
  N = shape[-1]
  order = jnp.argsort(jax.random.uniform(chosen_key, shape), axis=-1).astype(jnp.int32)
  corrupted = jnp.argsort(order, axis=-1) < k  # the rank of each patch in `order`
  kind = jax.random.uniform(kind_key, shape)
  swapped = corrupted & (kind >= MASKED) & (kind < MASKED + SWAPPED)
  itself = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32), shape)
  other = (itself + jax.random.randint(other_key, shape, 1, N)) % N
  return Corruption(
    order[..., :k], corrupted & (kind < MASKED), jnp.where(swapped, other, itself)
  )


def of_examples(index, k: int, patches: int) -> Corruption:
  """Returns the corruption of examples int32 [B], the same in every evaluation."""
  key = jax.random.key(0)
  return jax.vmap(lambda i: draw(jax.random.fold_in(key, i), k, (patches,)))(index)
