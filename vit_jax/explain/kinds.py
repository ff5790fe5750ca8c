"""The kinds of maps: functions of a model and a batch of images.

Each function takes (model, variables, images [B, H, W, C], classes int [B]), and options by
name.
"""

import jax
import jax.numpy as jnp

from vit_jax.errors import UserError
from vit_jax.explain import attention as maps
from vit_jax.explain import saliency, weights
from vit_jax.explain.attention import positive_part


def rollout(model, variables, images, classes, *, fusion='mean', residual=True):
  """Returns the attention rollout, see `attention.rollout`."""
  attended, grid = weights.attention(model, variables, images)
  rows = maps.rollout(attended.layers, fusion, residual)
  return _read(model, rows, _one_head(attended.pooling), grid)


def attention(model, variables, images, classes, *, layer=-1, head=None):
  """Returns the weights of one layer, or of attention pooling if `layer='pooling'`."""
  attended, grid = weights.attention(model, variables, images)
  if layer == 'pooling':
    if attended.pooling is None:
      raise UserError(
        f"layer='pooling': {type(model.untuned).__name__} has no attention pooling "
        "(classifier='map'); give the number of a layer."
      )
    return weights.reshape_to_grid(_one_head(attended.pooling, head)[:, 0], grid)
  L = len(attended.layers)
  if type(layer) is not int or not -L <= layer < L:
    raise UserError(
      f"layer={layer!r}: expected 0 to {L - 1}, -1 to -{L} from the end, or 'pooling'."
    )
  rows = _one_head(attended.layers[layer], head)
  return _read(model, rows, _one_head(attended.pooling), grid)


def class_rollout(model, variables, images, classes):
  """Returns the relevance for the class, see `attention.class_rollout`."""
  attended, gradients, grid = weights.attention_and_gradients(
    model, variables, images, classes
  )
  rows = maps.class_rollout(attended.layers, gradients.layers)
  if (pooling := attended.pooling) is not None:
    pooling = positive_part(pooling, gradients.pooling)
  else:
    # In a mean over tokens, the identity adds the same to all tokens and hides their
    # differences.
    rows -= jnp.eye(rows.shape[-1])
  return _read(model, rows, pooling, grid)


def gradient(model, variables, images, classes):
  """Returns the gradient of the class's logit times the image."""
  return saliency.gradient_times_input(_score(model, variables, classes), images)


def integrated_gradients(model, variables, images, classes, *, steps=32, baseline=0.0):
  """Returns integrated gradients of the class's logit, see `saliency.integrated_gradients`."""
  score = _score(model, variables, classes)
  return saliency.integrated_gradients(score, images, baseline, steps)


KINDS = {
  'rollout': rollout,
  'attention': attention,
  'class_rollout': class_rollout,
  'gradient': gradient,
  'integrated': integrated_gradients,
}
OF_A_CLASS = ('class_rollout', 'gradient', 'integrated')


def _score(model, variables, classes):
  def score(images):
    logits, _ = model.apply(variables, images)
    return jnp.take_along_axis(logits, classes[:, None], 1)[:, 0]

  return score


def _read(model, rows, pooling, grid):
  reader = weights.reader(model, pooling, rows.shape[-1], grid)
  row = jnp.matmul(reader, rows, precision='highest')[:, 0]  # [B, N]
  return weights.reshape_to_grid(row, grid)


def _one_head(x: jax.Array | None, head: int | None = None):
  """Returns one head of [B, M, N, S], or their mean: float32 [B, N, S]."""
  if x is None:
    return None
  if head is None:
    return x.astype(jnp.float32).mean(1)
  if type(head) is not int or not 0 <= head < x.shape[1]:
    raise UserError(
      f'head={head!r}: expected 0 to {x.shape[1] - 1}, or None for their mean.'
    )
  return x[:, head].astype(jnp.float32)
