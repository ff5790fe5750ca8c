"""An ONNX file, by jax2onnx; the facts are its metadata, as JSON.

session = onnxruntime.InferenceSession('model.onnx')
(logits,) = session.run(['logits'], {'images': images})
facts = session.get_modelmeta().custom_metadata_map
"""

import contextlib
import json
import logging
from pathlib import Path

import jax
import numpy as np

from vit_jax.errors import UserError
from vit_jax.tools.export.program import BATCH, Program

SUFFIX = '.onnx'
_MOST_BYTES = 2**30  # of parameters in the file: protobuf's limit is 2 GiB


def load() -> None:
  """Imports its packages; UserError, which says how to install them, if one is missing."""
  try:
    import jax2onnx  # noqa: F401
    import onnx_ir  # noqa: F401
    import onnxruntime  # noqa: F401
  except ImportError as error:
    raise UserError(
      f'--to onnx needs jax2onnx ({error}), whose releases exclude the Orbax of vit_jax: '
      'in an environment of its own, `make .venv-onnx` in a clone, or pip install '
      "'vit_jax[onnx]' && pip install --no-deps jax2onnx."
    ) from None


def files(dest: Path) -> list[Path]:
  """Returns all that `write` may make: of a large model, both."""
  return [dest, dest.with_name(f'{dest.name}.data')]


def check(program: Program) -> None:
  """Refuses bfloat16, in which ONNX Runtime has few operations."""
  if program.dtype != 'float32':
    raise UserError(
      f'SOURCE computes in {program.dtype}, which few ONNX runtimes support: add --dtype '
      'float32. The parameters are float32 either way.'
    )


def write(program: Program, path: Path, facts: dict, platforms: None) -> None:
  """Writes the file; a large model's parameters go to FILE.onnx.data beside it."""
  import jax2onnx
  import onnx_ir

  names = list(program.outputs)

  def outputs(images):
    # jax2onnx 0.17.1 ignores such padding, and cannot convert a choice by platform.
    with _default_platform():
      found = program.baked(images)
    return tuple(found[name] for name in names)

  with _quiet('jax2onnx', 'onnx_ir'):
    model = jax2onnx.to_onnx(
      outputs,
      inputs=[program.shape(BATCH)],
      model_name='vit_jax',
      input_names=['images'],
      output_names=names,
      return_mode='ir',
    )
    model.metadata_props.update({k: json.dumps(v) for k, v in facts.items()})
    large = 4 * program.params > _MOST_BYTES
    onnx_ir.save(model, path, external_data=f'{path.name}.data' if large else None)


@contextlib.contextmanager
def _default_platform():
  """Within it, `lax.platform_dependent` takes its default branch on every platform."""
  choice = jax.lax.platform_dependent
  jax.lax.platform_dependent = lambda *args, default, **_: default(*args)
  jax.clear_caches()  # they hold what was traced with the choice
  try:
    yield
  finally:
    jax.lax.platform_dependent = choice
    jax.clear_caches()


@contextlib.contextmanager
def _quiet(*names: str):
  """Silences loggers' warnings, of plugins for other libraries and of missing types."""
  loggers = [logging.getLogger(name) for name in names]
  levels = [logger.level for logger in loggers]
  for logger in loggers:
    logger.setLevel(logging.ERROR)
  try:
    yield
  finally:
    for logger, level in zip(loggers, levels, strict=True):
      logger.setLevel(level)


def run(path: Path, images: np.ndarray) -> dict[str, np.ndarray]:
  """Returns the outputs of the file by ONNX Runtime on the CPU."""
  import onnxruntime

  session = onnxruntime.InferenceSession(path, providers=['CPUExecutionProvider'])
  names = [output.name for output in session.get_outputs()]
  return dict(zip(names, session.run(names, {'images': images}), strict=True))
