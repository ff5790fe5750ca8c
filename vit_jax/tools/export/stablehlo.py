"""Writes a file of `jax.export`, StableHLO with its calling convention, and a description.

    exported = jax.export.deserialize(bytearray(open('model.stablehlo', 'rb').read()))
    logits = exported.call(images)['logits']

`exported.mlir_module()` is the program as text, for compilers other than JAX.
"""

import json
from pathlib import Path

import jax
import numpy as np
from jax import export

from vit_jax.errors import UserError
from vit_jax.tools.export.program import BATCH, Program

# Flatbuffers hold up to 2 GiB, of which the program needs a part.
_MOST_BYTES = 2**31 - 2**24


def write(program: Program, path: Path, facts: dict, platforms: list[str]) -> None:
  """Writes the program to `path`, and its description to a JSON file beside it.

  Raises:
    UserError: if there are more parameters than the format can hold.
  """
  if (size := 4 * program.params) > _MOST_BYTES:
    raise UserError(
      f'The model has {size / 2**30:.1f} GiB of parameters, but a file of jax.export holds '
      'at most 2: --to savedmodel has no such limit.'
    )
  (batch,) = export.symbolic_shape(BATCH)
  images = jax.ShapeDtypeStruct(program.shape(batch), 'float32')
  exported = export.export(jax.jit(program.run_with_constants), platforms=platforms)(
    images
  )
  path.write_bytes(exported.serialize())
  path.with_suffix('.json').write_text(json.dumps(facts, indent=1), encoding='utf-8')


def run(path: Path, images: np.ndarray) -> dict[str, np.ndarray]:
  """Runs the file on the CPU and returns its outputs."""
  with jax.default_device(jax.local_devices(backend='cpu')[0]):
    outputs = export.deserialize(bytearray(path.read_bytes())).call(images)
    return {name: np.asarray(x) for name, x in outputs.items()}
