"""The one door to TensorFlow, which is imported when `tf` is first used."""

import contextlib
import functools
import os
import sys

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
  # TensorFlow imports Keras, and by that scikit-learn, for a third of its four seconds, but
  # goes on where Keras is missing, and finds it later if `tensorflow.keras` is used.
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
  with contextlib.suppress(RuntimeError):  # the caller manages TensorFlow's devices
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
