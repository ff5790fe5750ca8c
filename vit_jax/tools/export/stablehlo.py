"""A file of `jax.export`: StableHLO with its calling convention, and facts beside it.

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

_MOST_BYTES = 2**31 - 2**24  # flatbuffer's limit of 2 GiB, less room for the program


def write(program: Program, path: Path, facts: dict, platforms: list[str]) -> None:
  """Writes the program at `path`, and the facts beside it.

  Raises:
    UserError: for more parameters than the format holds.
  """
  if (size := 4 * program.params) > _MOST_BYTES:
    raise UserError(
      f'{size / 2**30:.1f} GiB of parameters, but a file of jax.export holds 2: --to '
      'savedmodel has no such limit.'
    )
  (batch,) = export.symbolic_shape(BATCH)
  images = jax.ShapeDtypeStruct(program.shape(batch), 'float32')
  exported = export.export(jax.jit(program.run_with_constants), platforms=platforms)(
    images
  )
  path.write_bytes(exported.serialize())
  path.with_suffix('.json').write_text(json.dumps(facts, indent=1), encoding='utf-8')


def run(path: Path, images: np.ndarray) -> dict[str, np.ndarray]:
  """Returns the outputs of the file on the CPU."""
  with jax.default_device(jax.local_devices(backend='cpu')[0]):
    outputs = export.deserialize(bytearray(path.read_bytes())).call(images)
    return {name: np.asarray(x) for name, x in outputs.items()}
