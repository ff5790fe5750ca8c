"""Devices of a TPU slice that is not there, to compile for."""

import importlib.metadata
import importlib.util
import os

from vit_jax.errors import UserError
from vit_jax.tools.tpu import generations, schedules

# libtpu asks the machine's metadata server what it runs on, and lets one process at a
# time have it, unless it is told that no TPU is there to be shared.
_ENVIRONMENT = {
  'JAX_PLATFORMS': 'cpu',
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_ACCELERATOR_TYPE': 'v5litepod-4',  # any that it knows: of others it complains
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  'TPU_STDERR_LOG_LEVEL': '3',
}


def prepare() -> None:
  """Readies this process to compile for TPUs; before JAX is first used.

  Raises:
    UserError: if libtpu is not installed.
  """
  if importlib.util.find_spec('libtpu') is None:
    raise UserError(
      'Compiling for TPUs needs libtpu, in an environment of its own (beside it JAX looks '
      'for TPUs whenever it starts): run `make .venv-tpu`, then .venv-tpu/bin/python.'
    )
  os.environ.update(_ENVIRONMENT)
  schedules.record()


def versions() -> dict[str, str]:
  """Returns {package: version} of what compiles."""
  return {'libtpu': importlib.metadata.version('libtpu')}


def devices(text: str) -> list:
  """Returns the devices of 'v3:4x4' or 'v5e'.

  Raises:
    UserError: for an unknown generation, or a shape that it is not made in.
  """
  import jax
  from jax.experimental import topologies

  name, shape = generations.parse(text)
  platform = f'tpu{name}' if name == '7x' else name
  try:
    described = topologies.get_topology_desc(
      platform='tpu',
      topology_name=f'{platform}:{shape}',
      # As Cloud TPU VMs set it up: both cores of a chip as one device.
      **({'chip_config_name': 'megacore'} if name == 'v4' else {}),
    )
  except jax.errors.JaxRuntimeError as error:
    smallest = generations.GENERATIONS[name].slice
    raise UserError(
      f'--tpu {text}: not a shape of {name}, chips along each axis such as '
      f'{name}:{smallest}, the smallest; the first two are even. libtpu says: '
      f'{str(error).splitlines()[0]}'
    ) from None
  return list(described.devices)
