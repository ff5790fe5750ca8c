"""Losses per example, computed in float32."""

import functools
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.check import Call, Factor, Fraction, Positive, Share, parse_options
from vit_jax.errors import UserError
from vit_jax.registry import Registry


def softmax_cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
  """Cross entropy of a softmax: logits and targets [B, K] -> [B] float32.

  A row of targets should sum to 1, which several labels may share (as in mixup).
  """
  return optax.softmax_cross_entropy(logits.astype(jnp.float32), targets)


def focal(logits: jax.Array, targets: jax.Array, *, gamma: Factor = 2.0) -> jax.Array:
  """Cross entropy in which a class of probability p counts (1 - p)**gamma as much.

  "Focal Loss for Dense Object Detection" (arXiv 1708.02002), for a softmax.
  """
  log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
  return -(targets * _power(1 - jnp.exp(log_p), gamma) * log_p).sum(-1)


def sigmoid_cross_entropy(
  logits: jax.Array, targets: jax.Array, *, threshold: Share | None = None
) -> jax.Array:
  """K independent binary cross entropies, summed. Maps [B, K] to [B], float32.

  The pre-training loss of i21k and JFT in the reference code. It is summed over classes, so
  that it does not shrink with K.

  Args:
    threshold: targets above it become 1, and others 0. DeiT III trains with 0: both labels of
      a mixed image are right.
  """
  logits = logits.astype(jnp.float32)
  if threshold is not None:
    targets = (targets > threshold).astype(jnp.float32)
  return optax.sigmoid_binary_cross_entropy(logits, targets).sum(-1)


def sigmoid_focal(
  logits: jax.Array,
  targets: jax.Array,
  *,
  gamma: Factor = 2.0,
  alpha: Fraction | None = 0.25,
) -> jax.Array:
  """The focal loss of K independent binary classes, summed, as for RetinaNet.

  Args:
    alpha: the weight of positives; negatives have 1 - alpha. None: both have 1.
  """
  logits = logits.astype(jnp.float32)
  losses = optax.sigmoid_binary_cross_entropy(logits, targets)
  p = jax.nn.sigmoid(logits)
  losses *= _power(p * (1 - targets) + (1 - p) * targets, gamma)
  if alpha is not None:
    losses *= alpha * targets + (1 - alpha) * (1 - targets)
  return losses.sum(-1)


def asymmetric(
  logits: jax.Array,
  targets: jax.Array,
  *,
  gamma_neg: Factor = 4.0,
  gamma_pos: Factor = 1.0,
  clip: Share = 0.05,
  stop_gradient: bool = False,
) -> jax.Array:
  """The asymmetric loss of K binary classes, of which few are right (arXiv 2009.14119).

  Easy negatives count little. It is summed over classes, as in the authors' code.

  Args:
    gamma_neg, gamma_pos: exponents of the focal weights of negatives and positives.
    clip: negatives with a smaller probability count nothing.
    stop_gradient: treat the focal weights as constants, as the authors' training does.
  """
  p = jax.nn.sigmoid(logits.astype(jnp.float32))
  wrong = jnp.minimum(1 - p + clip, 1)
  log_p = targets * _log(p) + (1 - targets) * _log(wrong)
  right = targets * p + (1 - targets) * wrong
  weights = _power(1 - right, targets * gamma_pos + (1 - targets) * gamma_neg)
  if stop_gradient:
    weights = jax.lax.stop_gradient(weights)
  return -(weights * log_p).sum(-1)


def _power(x, exponent):
  # The derivative of a power below 1 is infinite at 0.
  return jnp.maximum(x, 1e-12) ** exponent


def _log(x):
  return jnp.log(jnp.maximum(x, 1e-8))


def smooth_binary(targets: jax.Array, amount: float) -> jax.Array:
  """Moves every binary target [B, K] towards its opposite by a: 1 -> 1 - a, 0 -> a.

  The paper's i21k run used a = 1e-4 (on 0.9999, off 0.0001).
  """
  return targets * (1 - amount) + (1 - targets) * amount


# A loss is a function `(logits [B, K], targets [B, K]) -> [B]`, float32. It may have
# keyword-only options, and an attribute `smooth`, see the function `smooth`.
EXCLUSIVE = {'softmax': softmax_cross_entropy, 'focal': focal}
BINARY = {
  'sigmoid': sigmoid_cross_entropy,
  'sigmoid_focal': sigmoid_focal,
  'asymmetric': asymmetric,
}
LOSSES = Registry('loss', EXCLUSIVE | BINARY)
for _loss in BINARY.values():
  _loss.smooth = smooth_binary
check_loss = Call(LOSSES)


def build(text: str, num_classes: int) -> Callable:
  """Returns the loss `(logits, targets) -> [B]` that a text names, with its options.

  Raises:
    ValueError: for positional options, or a loss that does not return one number per
      example.
  """
  name, options = parse_options(text)
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


# -- weights of classes ---------------------------------------------------------------


def balanced(counts: np.ndarray) -> np.ndarray:
  """Returns n / (C n_c) of n examples of C classes, so that all classes count alike."""
  return counts.sum() / (len(counts) * counts)


def effective(counts: np.ndarray, *, beta: Share = 0.999) -> np.ndarray:
  """Returns (1 - beta) / (1 - beta**n_c), scaled to a mean of 1 (arXiv 1901.05555)."""
  weights = (1 - beta) / (1 - beta**counts)
  return weights / weights.mean()


CLASS_WEIGHTS = Registry(
  'kind of class weights', {'balanced': balanced, 'effective': effective}
)


def check_class_weights(where: str, value: str | list, task: dict) -> None:
  """Checks the weights of classes; a rule for `vit_jax.check`."""
  if isinstance(value, str):
    Call(CLASS_WEIGHTS)(where, value, task)
  name, _ = parse_options(task.get('loss', 'softmax'))
  if name not in EXCLUSIVE:
    raise UserError(
      f'{where} is for losses of one class per image, {list(EXCLUSIVE)}; the loss is {name!r}.'
    )


# The type of the weights of classes in a config.
ClassWeights = Annotated[str | list[Positive] | None, check_class_weights]


def class_weights(text: str, counts: np.ndarray) -> list[float]:
  """Returns the weights of K classes by their numbers of examples; 1 for a class of none."""
  name, options = parse_options(text)
  weights, some = np.ones(len(counts)), counts > 0
  weights[some] = CLASS_WEIGHTS[name](counts[some], **options)
  return weights.tolist()
