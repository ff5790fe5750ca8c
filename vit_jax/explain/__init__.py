"""Attention maps and saliency of a model, image by image."""

import inspect
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from vit_jax.errors import UserError, choose
from vit_jax.explain import attention, weights
from vit_jax.explain.kinds import KINDS as KINDS
from vit_jax.explain.kinds import OF_A_CLASS as OF_A_CLASS
from vit_jax.weights import Loaded, load


def attention_maps(
  source,
  images: Iterable,
  kind: str = 'rollout',
  *,
  classes: int | Sequence[int] | None = None,
  batch_size: int = 8,
  **options,
) -> np.ndarray:
  """Returns maps of the tokens that a model attends to, or of the pixels that favour a class.

  | kind | what it is | options |
  |---|---|---|
  | rollout | weights of all layers multiplied: `attention.rollout` | fusion='mean', residual=True |
  | attention | weights of one layer; 'pooling': of an attention pooling head | layer=-1, head=None (their mean) |
  | class_rollout | weights times their gradient for a class, through all layers: `attention.class_rollout` | classes |
  | gradient | gradient for a class times image: `saliency.gradient_times_input` | classes |
  | integrated | integrated gradients for a class: `saliency.integrated_gradients` | classes, steps=32, baseline=0.0 |

  The first three need a model with attention. Their maps are on the grid of patches and not
  negative. A map is one row of the weights: the row of the class token if the model has one;
  with attention pooling, the mean of the tokens' rows by the pooling weights; otherwise the
  mean of all rows. A row of the first two kinds sums to 1, including the share of the class
  token. In a mean of rows, class_rollout leaves out the relevance of each token to itself,
  which is the same for all tokens. The last two kinds work for every model. Their maps have
  a value with a sign for each pixel.

  Args:
    source: an argument of `vit_jax.load`, or its result.
    images: paths, bytes, PIL images or uint8 arrays [H, W, C].
    kind: see the table.
    classes: the number of the class to explain: one for all images, or a list with one per
      image. By default, each image's most probable class is explained.
    batch_size: number of images in a batch. Each image needs memory for the weights of all
      layers, 22 MB for B/16 at 224 px, and for class_rollout as much again for gradients.

  Returns:
    float32 [B, h, w] on the grid of patches, or [B, H, W] for pixels.
  """
  function = choose('kind of attention map', kind, KINDS)
  parameters = inspect.signature(function).parameters.values()
  allowed = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
  for name in options:
    choose(f'option of the kind {kind}:', name, allowed)
  if classes is not None and kind not in OF_A_CLASS:
    raise UserError(
      f'classes={classes!r}: the kind {kind} explains no class; kinds that do are '
      f'{", ".join(OF_A_CLASS)}.'
    )
  loaded = ensure_loaded(source)
  x = loaded.preprocess(images)
  chosen = np.zeros(len(x), int)
  if kind in OF_A_CLASS:
    chosen = _classes(loaded, x, classes, batch_size)

  def run(variables, x, classes):
    return function(loaded.model, variables, x, classes, **options)

  return run_in_batches(run, loaded.variables, x, chosen, batch_size=batch_size)


def attention_distances(source, images: Iterable, *, batch_size: int = 8) -> np.ndarray:
  """Returns the attention distance of each head in each image, float32 [B, L, M].

  See `attention.attention_distance`. A distance is in pixels of the model's input. The
  arguments are those of `attention_maps`.
  """
  loaded = ensure_loaded(source)
  family, fields = loaded.model.family, loaded.model.fields()

  def run(variables, x):
    attended, grid = weights.attention(loaded.model, variables, x)
    patch = family.stride(fields)
    return attention.attention_distance(attended.layers, grid, patch).swapaxes(0, 1)

  x = loaded.preprocess(images)
  return run_in_batches(run, loaded.variables, x, batch_size=batch_size)


def predict_logits(loaded, images: np.ndarray, batch_size: int = 8) -> np.ndarray:
  """Returns the logits [B, K] of preprocessed images [B, H, W, C].

  Raises:
    UserError: for a model that gives no class logits.
  """
  _number_of_classes(loaded)
  run = lambda variables, x: loaded.model.apply(variables, x)[0]
  return run_in_batches(run, loaded.variables, images, batch_size=batch_size)


def ensure_loaded(source) -> Loaded:
  """Returns `source` if it is already loaded, otherwise `vit_jax.load(source)`."""
  return source if isinstance(source, Loaded) else load(source)


def run_in_batches(
  fn: Callable, variables, *arrays: np.ndarray, batch_size: int
) -> np.ndarray:
  """Returns `fn(variables, *arrays)` [B, ...], compiled once and run batch by batch."""
  if batch_size < 1:
    raise UserError(f'batch_size={batch_size}: expected 1 or more.')
  fn, variables, outputs = jax.jit(fn), jax.device_put(variables), []
  total = len(arrays[0])
  for i in range(0, total, batch_size):
    parts = [x[i : i + batch_size] for x in arrays]
    number = len(parts[0])
    # Pad, so that one program serves all batches.
    missing = min(batch_size, total) - number
    pad = lambda x, n: np.pad(x, ((0, n), *((0, 0),) * (x.ndim - 1)))
    out = fn(variables, *(pad(x, missing) for x in parts))
    outputs.append(np.asarray(out)[:number])
  return np.concatenate(outputs)


def _classes(loaded, x, classes, batch_size: int) -> np.ndarray:
  """Returns the class to explain for each image, int [B]."""
  K = _number_of_classes(loaded)
  if classes is None:
    return predict_logits(loaded, x, batch_size).argmax(-1)
  chosen = np.asarray(classes)
  if chosen.ndim == 0:
    chosen = np.repeat(chosen, len(x))
  if chosen.shape != (len(x),):
    raise UserError(
      f'{len(chosen)} classes for {len(x)} images: give one class, or one per image.'
    )
  if chosen.dtype.kind not in 'iu' or not ((chosen >= 0) & (chosen < K)).all():
    raise UserError(f'classes={classes!r}: expected numbers from 0 to {K - 1}.')
  return chosen.astype(int)


def _number_of_classes(loaded) -> int:
  K = getattr(loaded.model, 'num_classes', None)
  if K is None or getattr(loaded.model.untuned, 'classifier', None) == 'none':
    raise UserError(
      f'{loaded.source} gives no class logits to explain. The kinds rollout and '
      'attention work without them.'
    )
  return K
