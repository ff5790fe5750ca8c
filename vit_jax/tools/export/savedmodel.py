"""Writes a SavedModel of TensorFlow: StableHLO in the op XlaCallModule.

    model = tf.saved_model.load('FOLDER')
    logits = model.signatures['serving_default'](images=images)['logits']

The parameters are variables, of any size. The description is in assets.extra/vit_jax.json.
"""

import json
import re
from pathlib import Path

import jax
import numpy as np
from jax import export
from jax.extend.mlir.dialects import stablehlo

from vit_jax.data import lazy_tf
from vit_jax.errors import UserError
from vit_jax.tools.export.program import BATCH, Program

FACTS = 'assets.extra/vit_jax.json'
# The version to write. TensorFlow 2.21, the oldest that the extra `tf` allows, reads versions
# up to 1.13.7. jax2tf writes the version of four weeks before JAX's release, which is newer:
# 1.18 with JAX 0.12.
_STABLEHLO = '1.13.0'
_COMPOSITE = re.compile(
  r'stablehlo\.composite "[^"]+" ([%\w#, ]*) \{decomposition = (@[\w.]+)[^}]*\} :'
)


def write(program: Program, path: Path, facts: dict, platforms: list[str]) -> None:
  """Writes the SavedModel to the folder `path`."""
  tf, call_module = lazy_tf.load(), lazy_tf.call_module()
  leaves, structure = jax.tree.flatten(program.variables)
  # The order in which jax.tree flattens the outputs.
  names = sorted(program.outputs)

  def flat(*arguments):
    *values, images = arguments
    return program(jax.tree.unflatten(structure, values), images)

  (batch,) = export.symbolic_shape(BATCH)
  shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
  shapes.append(jax.ShapeDtypeStruct(program.shape(batch), 'float32'))
  lower = export.export(jax.jit(flat, keep_unused=True), platforms=platforms)
  exported = lower(*shapes)
  text = exported.mlir_module()
  # TensorFlow 2.21 cannot sort a variable number of rows.
  if program.batch is None and 'stablehlo.composite "chlo.top_k"' in text:
    raise UserError(
      'A SavedModel of a two-stage detector needs a fixed batch: give --batch N.'
    )
  # TensorFlow 2.21 does not refine shapes within composite operations, such as erfc, so call
  # their decompositions.
  text = _COMPOSITE.sub(r'func.call \2(\1) :', text)
  module = stablehlo.serialize_portable_artifact_str(text, _STABLEHLO)
  images = tf.TensorSpec((program.batch, *program.shape(1)[1:]), name='images')

  class Exported(tf.Module):
    def __init__(self):
      super().__init__()
      self.parameters = [tf.Variable(x, trainable=False) for x in leaves]

    @tf.function(input_signature=[images], autograph=False)
    def __call__(self, images):
      outputs = call_module(
        [*(parameter.value() for parameter in self.parameters), images],
        version=exported.calling_convention_version,
        module=module,
        Tout=[tf.float32] * len(names),
        Sout=[(program.batch, *program.outputs[name]) for name in names],
        platforms=[name.upper() for name in exported.platforms],
      )
      return dict(zip(names, outputs, strict=True))

  model = Exported()
  signatures = {'serving_default': model.__call__}
  tf.saved_model.save(model, str(path), signatures=signatures)
  (path / FACTS).parent.mkdir()
  (path / FACTS).write_text(json.dumps(facts, indent=1), encoding='utf-8')


def run(path: Path, images: np.ndarray) -> dict[str, np.ndarray]:
  """Runs the SavedModel on the CPU and returns its outputs."""
  tf = lazy_tf.load()
  serve = tf.saved_model.load(str(path)).signatures['serving_default']
  return {name: x.numpy() for name, x in serve(images=tf.constant(images)).items()}
