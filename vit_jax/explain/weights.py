"""Reads the attention weights of a model, and how its head combines the tokens."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp

from vit_jax import trees
from vit_jax.errors import UserError
from vit_jax.tune.vpt import Prompts

_SOWN = '/attention_weights'


class Attention(NamedTuple):
  """Attention weights, or gradients with respect to them.

  Attributes:
    layers: [L, B, M, N, N], the weights of the blocks.
    pooling: [B, M, 1, N], the weights of an attention pooling head, or None.
  """

  layers: jax.Array
  pooling: jax.Array | None


def attention(model, variables, images) -> tuple[Attention, tuple[int, int]]:
  """Returns the attention weights of a batch, and the (h, w) of its grid of patches."""
  _, sown, grid = _apply(model, variables, images)
  return _sort_layers(model, sown), grid


def attention_and_gradients(
  model, variables, images, classes
) -> tuple[Attention, Attention, tuple[int, int]]:
  """Returns (weights, gradients of a class's logit with respect to them, (h, w) of patches).

  Args:
    classes: int [B], a class for each image.
  """
  shapes = jax.eval_shape(lambda: _apply(model, variables, images)[1])
  zeros = jax.tree.map(jnp.zeros_like, _unpack(shapes))

  def score(perturbations):
    perturbed = {**variables, 'perturbations': perturbations}
    logits, sown, grid = _apply(model, perturbed, images)
    return jnp.take_along_axis(logits, classes[:, None], 1).sum(), (sown, grid)

  gradients, (sown, grid) = jax.grad(score, has_aux=True)(zeros)
  return _sort_layers(model, sown), _sort_layers(model, gradients), grid


def reader(
  model, pooling: jax.Array | None, tokens: int, grid: tuple[int, int]
) -> jax.Array:
  """Returns the share of each token in the vector that is classified, [B or 1, 1, N].

  With attention pooling, the shares are its weights, averaged over heads. With a class token,
  that token has the whole share. With a second head, each head's token has half of it. If the
  mean of the patches is added, the class token and the mean have half each. Otherwise all
  patches have the same share. Prompts have no share.

  Args:
    pooling: weights [B, 1, N] of attention pooling, or None.
    grid: (h, w) of patches.
  """
  classifier = getattr(model.untuned, 'classifier', None)
  first = jax.nn.one_hot(jnp.zeros((1, 1), int), tokens)
  if classifier == 'token':
    return first
  if classifier == 'distilled':
    return (first + jnp.roll(first, 1, axis=-1)) / 2
  patches = grid[0] * grid[1]
  shares = jnp.full((1, 1, patches), 1 / patches) if pooling is None else pooling
  shares = jnp.pad(shares, ((0, 0), (0, 0), (tokens - shares.shape[-1], 0)))
  return (first + shares) / 2 if classifier == 'token_mean' else shares


def reshape_to_grid(row: jax.Array, grid: tuple[int, int]) -> jax.Array:
  """Reshapes the last h * w tokens of a row [B, N], the patches, to [B, h, w]."""
  h, w = grid
  return row[:, row.shape[1] - h * w :].reshape(-1, h, w)


def _apply(model, variables, images):
  """Returns (logits, sown attention weights, (h, w) of the grid of patches)."""
  core, family = model.untuned, model.family
  (logits, out), sown = model.apply(variables, images, mutable=['intermediates'])
  sown = sown.get('intermediates', {})
  if getattr(core, 'attention', 'full') == 'axial':
    problem = "has attention='axial', along rows and along columns"
  elif not any(_SOWN in f'/{name}' for name in trees.flatten(sown)):
    problem = 'has no attention weights'
  elif 'stage' in re.compile(family.blocks).groupindex:
    problem = 'attends within the maps of several stages'
  elif _prompts_change(model):
    problem = 'has deep prompts, or a tune.pool, which change the tokens between layers'
  else:
    return logits, sown, out['stem'].shape[1:3]
  raise UserError(
    f'{type(core).__name__} {problem}: this map needs one grid of attention weights. The '
    'kinds gradient and integrated work for every model.'
  )


def _prompts_change(model) -> bool:
  prompts = getattr(model, 'tune', None)
  if not isinstance(prompts, Prompts) or (at := prompts.places).where == 'add':
    return False
  # If only the first block has prompts, they are tokens like any other, before the patches.
  return len(at.blocks) > 1 or not at.blocks[0].endswith('_0') or bool(prompts.pool)


def _unpack(sown: dict) -> dict:
  """Replaces each tuple that `sow` writes by the one array in it."""
  return jax.tree.map(lambda x: x[0], sown, is_leaf=lambda x: isinstance(x, tuple))


def _sort_layers(model, sown: dict) -> Attention:
  family = model.family
  layers, pooling = {}, None
  for name, x in trees.flatten(sown).items():
    if _SOWN not in name:
      continue
    if family.is_stacked(name):
      layers |= dict(enumerate(x))
    elif block := family.stacked(name):
      layers[block[1]] = x
    else:
      pooling = x
  return Attention(jnp.stack([layers[i] for i in sorted(layers)]), pooling)
