"""The one door to TensorFlow."""

import functools
import os

from vit_jax.errors import UserError


@functools.cache
def load():
  """Returns the tensorflow module, kept away from accelerators.

  Raises:
    UserError: if TensorFlow is not installed, naming the extra to install.
  """
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  # oneDNN's kernels may differ in the last bit from machine to machine, and no image
  # op needs them.
  os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')
  try:
    import tensorflow as tf
  except ImportError as error:
    raise UserError(
      f"The data pipeline needs TensorFlow ({error}): pip install 'vit_jax[tf]'."
    ) from None
  try:
    tf.config.set_visible_devices([], 'GPU')
    tf.config.set_visible_devices([], 'TPU')
  except RuntimeError:
    pass  # The caller has used TensorFlow's devices already: theirs to manage.
  return tf
