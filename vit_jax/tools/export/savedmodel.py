"""A SavedModel of TensorFlow around the same StableHLO, by `jax2tf`.

    model = tf.saved_model.load('FOLDER')
    logits = model.signatures['serving_default'](images=images)['logits']

Its parameters are variables, of any size; the facts are in assets.extra/vit_jax.json.
"""

import json
from pathlib import Path

import numpy as np

from vit_jax.data import lazy_tf
from vit_jax.tools.export.program import BATCH, Program

SUFFIX = ''
FACTS = 'assets.extra/vit_jax.json'


def load() -> None:
  """Imports TensorFlow; UserError, which names the extra, where it is missing."""
  lazy_tf.load()


def files(dest: Path) -> list[Path]:
  """Returns what `write` makes."""
  return [dest]


def check(program: Program) -> None:
  """Holds every model."""


def write(program: Program, path: Path, facts: dict, platforms: list[str]) -> None:
  """Writes the folder `path`."""
  import jax
  from jax.experimental import jax2tf

  tf = lazy_tf.load()
  H, W, C = program.shape(BATCH)[1:]
  open_batch = None if program.batch else f'{BATCH}, {H}, {W}, {C}'
  converted = jax2tf.convert(
    program,
    with_gradient=False,
    polymorphic_shapes=[None, open_batch],
    native_serialization_platforms=platforms,
  )
  leaves, structure = jax.tree.flatten(program.variables)
  images = tf.TensorSpec((program.batch, H, W, C), tf.float32, name='images')

  class Exported(tf.Module):
    def __init__(self):
      super().__init__()
      self.parameters = [tf.Variable(x, trainable=False) for x in leaves]

    @tf.function(input_signature=[images], autograph=False)
    def __call__(self, images):
      values = [parameter.value() for parameter in self.parameters]
      return converted(jax.tree.unflatten(structure, values), images)

  exported = Exported()
  signatures = {'serving_default': exported.__call__}
  tf.saved_model.save(exported, str(path), signatures=signatures)
  (path / FACTS).parent.mkdir()
  (path / FACTS).write_text(json.dumps(facts, indent=1), encoding='utf-8')


def run(path: Path, images: np.ndarray) -> dict[str, np.ndarray]:
  """Returns the outputs of the folder on the CPU."""
  tf = lazy_tf.load()
  serve = tf.saved_model.load(str(path)).signatures['serving_default']
  return {name: x.numpy() for name, x in serve(images=tf.constant(images)).items()}
