"""Losses per example, computed in float32."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from vit_jax.check import bind, parse_call, prefix_errors
from vit_jax.registry import Registry


def softmax_cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
  """Cross entropy of a softmax: logits and targets [B, K] -> [B] float32.

  A row of targets should sum to 1, which several labels may share (as in mixup).
  """
  return optax.softmax_cross_entropy(logits.astype(jnp.float32), targets)


def sigmoid_cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
  """K independent binary cross entropies, summed. Maps [B, K] to [B], float32.

  The pre-training loss of i21k and JFT in the reference code. It is summed over classes, so
  that it does not shrink with K.
  """
  logits = logits.astype(jnp.float32)
  return optax.sigmoid_binary_cross_entropy(logits, targets).sum(-1)


def smooth_binary(targets: jax.Array, amount: float) -> jax.Array:
  """Moves every binary target [B, K] towards its opposite by a: 1 -> 1 - a, 0 -> a.

  The paper's i21k run used a = 1e-4 (on 0.9999, off 0.0001).
  """
  return targets * (1 - amount) + (1 - targets) * amount


sigmoid_cross_entropy.smooth = smooth_binary

# A loss is a function `(logits [B, K], targets [B, K]) -> [B]`, float32. It may have
# keyword-only options, and an attribute `smooth`, see the function `smooth`.
LOSSES = Registry(
  'loss', {'softmax': softmax_cross_entropy, 'sigmoid': sigmoid_cross_entropy}
)


def check_loss(where: str, text: str, _) -> None:
  """Checks a loss, 'NAME' or 'NAME(option=value)'; a rule for `vit_jax.check`."""
  with prefix_errors(where):
    name, options = _parse(text)
    signature = LOSSES.signature(name)
  bind(f'{where} {name}', options, signature)


def _parse(text: str) -> tuple[str, dict]:
  name, args, options = parse_call(text)
  if args:
    raise ValueError(f'give the options of {text!r} by name, {name}(option=value)')
  return name, options


def build(text: str, num_classes: int) -> Callable:
  """Returns the loss `(logits, targets) -> [B]` that a text names, with its options.

  Raises:
    ValueError: for positional options, or a loss that does not return one number per
      example.
  """
  name, options = _parse(text)
  function = LOSSES[name]
  loss = functools.update_wrapper(functools.partial(function, **options), function)
  pair = [jax.ShapeDtypeStruct((2, num_classes), jnp.float32)] * 2
  result = jax.eval_shape(loss, *pair)
  if (shape := getattr(result, 'shape', result)) != (2,):
    raise ValueError(
      f'loss {text!r} returns shape {shape} for logits {pair[0].shape}: expected (2,), one '
      'number per example'
    )
  return loss


def targets_of(label: jax.Array, num_classes: int) -> jax.Array:
  """Converts labels in either form to targets float32 [B, K].

  Args:
    label: int [B], which becomes one-hot, or float32 [B, K], which is a target already.
  """
  return label if label.ndim == 2 else jax.nn.one_hot(label, num_classes)


def check_labels(label: jax.ShapeDtypeStruct, num_classes: int) -> None:
  """Raises ValueError unless labels have one of the two forms, by their shape and dtype."""
  if label.ndim > 2 or (label.ndim == 2 and label.dtype != jnp.float32):
    raise ValueError(
      'classification needs labels int [B] or float32 [B, K]; the data has '
      f'{label.dtype} {list(label.shape)}'
    )
  if label.ndim == 2 and label.shape[1] != num_classes:
    raise ValueError(
      f'config.data.pp makes labels of {label.shape[1]} classes, but '
      f'config.model.num_classes={num_classes}'
    )


def is_label(classes: jax.Array, label: jax.Array) -> jax.Array:
  """Returns bool [B]: whether each class, int [B], is a label of its example."""
  if label.ndim == 2:
    return jnp.take_along_axis(label, classes[:, None], axis=-1)[:, 0] > 0
  return classes == label


def smooth(targets: jax.Array, amount: float, loss: Callable) -> jax.Array:
  """Smooths targets [B, K] in the way that fits the loss.

  That is `loss.smooth(targets, amount)` if the loss has this attribute, and otherwise
  (1 - a) y + a / K (Szegedy et al., arXiv 1512.00567, section 7).
  """
  return getattr(loss, 'smooth', optax.smooth_labels)(targets, amount)
