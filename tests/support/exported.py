"""Exports of goldens, and what they compute in a process that cannot import this library."""

import os
import subprocess
import sys

import numpy as np

from tests.support import GOLDEN
from tests.support.goldens import GOLDENS, path_of
from tests.test_structure import _BLOCK
from vit_jax import cli
from vit_jax.tools.export import __main__ as export

SOURCE = path_of('vit_google_token')  # 10 classes, 32 x 32 pixels
# A golden of each kind of model.
FAMILIES = (
  *('hybrid_google', 'mixer_google', 'bit_timm', 'resnet_timm'),
  *('convnext_timm', 'swin_hf', 'mvit_timm'),
)

# Reads FILE and EXPECTED, argv[2:4], and writes the program's outputs for the images to
# argv[4]: of all, and of the first alone.
_READ = (
  _BLOCK
  + """
import numpy as np
for name in sys.argv[1].split(','):
  try: __import__(name)
  except ModuleNotFoundError: continue
  raise AssertionError(f'{name} can be imported')
_, _, file, expected, out = sys.argv
images = np.load(expected)['image']
"""
)
READERS = {
  'stablehlo': """
from jax import export
call = export.deserialize(bytearray(open(file, 'rb').read())).call
""",
  'savedmodel': """
import tensorflow as tf
model = tf.saved_model.load(file)
call = lambda x: model.signatures['serving_default'](images=tf.constant(x))
""",
}
_CALL = """
whole = {k: np.asarray(v) for k, v in call(images).items()}
for k, v in call(images[:1]).items(): whole[k + ' alone'] = np.asarray(v)
np.savez(out, **whole)
"""


def run(*args) -> int:
  return cli.run(export.main, [str(arg) for arg in args])


def arrays(file) -> dict[str, np.ndarray]:
  with np.load(file) as outputs:
    return dict(outputs)


def read_elsewhere(file, to, golden, out) -> dict[str, np.ndarray]:
  """Returns the outputs of a file for a golden's images, by a process of its own."""
  # TensorFlow's has no JAX either.
  blocked = 'vit_jax,jax,flax' if to == 'savedmodel' else 'vit_jax,flax'
  code = _READ + READERS[to] + _CALL
  expected = GOLDEN / f'{golden}.expected.npz'
  env = {k: v for k, v in os.environ.items() if k not in ('PYTHONPATH', 'XLA_FLAGS')}
  done = subprocess.run(
    [sys.executable, '-c', code, blocked, str(file), str(expected), str(out)],
    cwd=out.parent,
    env=env,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  return arrays(out)


def check(golden, to, tmp_path, *options):
  """Exports a golden and compares with the other library's logits, to its tolerance.

  Another compiler sums in another order, as the other library did: its tolerance covers both.
  """
  height, width = arrays(GOLDEN / f'{golden}.expected.npz')['image'].shape[1:3]
  options = ['--resolution', f'{height}x{width}', *options]
  file = tmp_path / f'model{ {"stablehlo": ".stablehlo"}.get(to, "") }'
  assert run(path_of(golden), file, '--to', to, *options) == 0
  outputs = read_elsewhere(file, to, golden, tmp_path / 'out.npz')
  logits = arrays(GOLDEN / f'{golden}.expected.npz')['logits']
  tolerance = GOLDENS[golden][2] * max(1, np.abs(logits).max())
  assert outputs['logits'].dtype == np.float32
  np.testing.assert_allclose(outputs['logits'], logits, rtol=0, atol=tolerance)
  alone = outputs['logits alone']
  np.testing.assert_allclose(alone, logits[:1], rtol=0, atol=tolerance)
  return file, outputs
