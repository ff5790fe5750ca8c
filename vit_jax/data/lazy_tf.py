"""The only module that imports TensorFlow, and only when `tf` is first used."""

import contextlib
import functools
import os
import sys

from vit_jax.errors import UserError


@functools.cache
def load():
  """Imports TensorFlow, hides the accelerators from it, and returns the module.

  Raises:
    UserError: if TensorFlow is not installed, naming the extra to install.
  """
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  # The results of oneDNN's kernels may differ in the last bit from machine to machine, and
  # no image op needs these kernels.
  os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')
  # Hide Keras meanwhile: importing TensorFlow takes four seconds, a third of them for
  # Keras. TensorFlow works without it, and finds it later if `tensorflow.keras` is used.
  hidden = not {'keras', 'tensorflow'} & sys.modules.keys()
  if hidden:
    sys.modules['keras'] = None
  try:
    import tensorflow
  except ImportError as error:
    raise UserError(
      f"This needs TensorFlow ({error}): pip install 'vit_jax[tf]'."
    ) from None
  finally:
    if hidden:
      del sys.modules['keras']
  # A RuntimeError means that the caller has set up TensorFlow's devices already.
  with contextlib.suppress(RuntimeError):
    tensorflow.config.set_visible_devices([], 'GPU')
    tensorflow.config.set_visible_devices([], 'TPU')
  return tensorflow


class _TensorFlow:
  def __getattr__(self, name: str):
    return getattr(load(), name)


tf = _TensorFlow()


def call_module():
  """Returns TensorFlow's op that runs StableHLO, which `tf.raw_ops` lacks (2.21)."""
  load()
  from tensorflow.compiler.tf2xla.python import xla

  return xla.call_module
