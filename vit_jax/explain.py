"""What a model looked at, image by image."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import models, pretrained, trees, viz
from vit_jax.errors import UserError, choose

KINDS = ('rollout', 'last')


def attention_maps(
  source, images: Iterable, kind: str = 'rollout', *, batch_size: int = 8
) -> np.ndarray:
  """Returns how much of each patch is in what the model classifies.

  A row of the rollout (see `viz.rollout`), or of the last layer's weights alone, averaged
  over heads. Whose row: of a model with a class token, that token's; where attention
  pooling reads the tokens, the average of their rows by its weights; else, as where their
  mean is classified, the mean of the rows.

  Args:
    source: what `vit_jax.load` takes, or what it returned.
    images: paths, bytes, PIL images or uint8 arrays [H, W, C].
    kind: 'rollout' or 'last'.
    batch_size: images at a time; all weights of all layers are held for so many, of
      B/16 at 224 px 22 MB each.

  Returns:
    float32 [B, h, w] on the grid of patches, from 0; the sum is 1 less what the class
    token has of itself. Divide by the maximum to look at it.

  Raises:
    UserError: for a model without attention, an unknown kind, images that are none.
  """
  choose('kind of attention map', kind, KINDS)
  if batch_size < 1:
    raise UserError(f'batch_size={batch_size}: expected 1 or more.')
  loaded = source
  if not isinstance(source, pretrained.Loaded):
    loaded = pretrained.load(source)
  x = loaded.preprocess(images)
  run = jax.jit(lambda variables, x: _maps(loaded.model, variables, x, kind))
  variables, found = jax.device_put(loaded.variables), []
  for i in range(0, len(x), batch_size):
    part = x[i : i + batch_size]
    padding = ((0, min(batch_size, len(x)) - len(part)), *((0, 0),) * 3)
    # The last batch is padded: one program for all.
    found.append(np.asarray(run(variables, np.pad(part, padding)))[: len(part)])
  return np.concatenate(found)


def _maps(model, variables, x, kind: str) -> jax.Array:
  (_, out), sown = model.apply(variables, x, mutable=['intermediates'])
  layers, pooling = _weights(model, sown.get('intermediates', {}))
  B, h, w, _ = out['stem'].shape
  N = layers.shape[-1]
  if kind == 'rollout':
    rows = viz.rollout(layers)
  else:
    rows = layers[-1].astype(jnp.float32).mean(1)  # [B, N, N]
  if pooling is not None:
    reader = pooling.astype(jnp.float32).mean(1)  # [B, 1, N]
  elif h * w < N:
    reader = jnp.broadcast_to(jax.nn.one_hot(0, N), (B, 1, N))
  else:
    reader = jnp.full((B, 1, N), 1 / N)
  found = jnp.matmul(reader, rows, precision='highest')[:, 0]  # [B, N]
  return found[:, N - h * w :].reshape(B, h, w)


def _weights(model, intermediates: dict) -> tuple[jax.Array, jax.Array | None]:
  """Returns (the blocks' weights [L, B, M, N, N], a pooling head's [B, M, 1, N])."""
  family = models.family_of(model)
  layers, pooling = {}, None
  for name, x in trees.flatten(intermediates).items():
    if '/attention_weights/' not in name:
      continue
    if family.is_stacked(name):
      layers |= dict(enumerate(x))
    elif found := family.stacked(name):
      layers[found[1]] = x
    else:
      pooling = x
  if not layers:
    raise UserError(
      f'{type(model).__name__} has no attention to map; a ViT and its hybrids have.'
    )
  return jnp.stack([layers[i] for i in sorted(layers)]), pooling
