"""A GPU that is not there, to compile for."""

import importlib.metadata
import os

from vit_jax.errors import UserError
from vit_jax.tools.gpu.devices import GPUS

PLUGIN, CUDNN = 'jax-cuda13-plugin', 'nvidia-cudnn-cu13'  # of the extra `cuda`


def prepare() -> None:
  """Readies this process to compile for GPUs; before JAX is first used.

  Raises:
    UserError: if JAX's plugin for CUDA is not installed.
  """
  try:
    versions()
  except importlib.metadata.PackageNotFoundError as error:
    raise UserError(
      f"Compiling for GPUs needs JAX's plugin for CUDA, and no GPU; {error.name} is not "
      'installed. In an environment of its own (beside it JAX looks for GPUs whenever it '
      'starts): run `make .venv-gpu`, 4.4 GB, then .venv-gpu/bin/python.'
    ) from None
  os.environ['JAX_PLATFORMS'] = 'cpu'  # the plugin compiles without being the backend


def versions() -> dict[str, str]:
  """Returns {package: version} of what compiles, and of cuDNN."""
  return {name: importlib.metadata.version(name) for name in (PLUGIN, CUDNN)}


def devices(name: str) -> list:
  """Returns one device of that name, see `GPUS`."""
  from jax.experimental import topologies

  described = topologies.get_topology_desc(
    platform='cuda',
    topology_name='1x1x1',
    topology='1x1x1',  # partitions, hosts, GPUs of a host
    target_config=GPUS[name].target(),
  )
  return list(described.devices)
