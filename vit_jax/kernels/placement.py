"""Where activations live on the mesh.

Left to itself the compiler lets the fsdp axis split channels, as a tensor axis would, and
keeps fsdp times as many examples on each device: for G/14 on data=64, fsdp=16 the step
then needs 7.8 GiB of temporaries with full recomputation, and 2.7 with the batch pinned
(XLA for a TPU v4).
"""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec

from vit_jax.errors import choose

# The axes that split examples and channels at the entry of every block. 'batch': examples
# over data and fsdp, as they arrive; 'width': channels over tensor besides, between the
# matrix products that split heads and hidden units; 'free': as the compiler likes.
PLACEMENTS = {
  'batch': (('data', 'fsdp'), None),
  'width': (('data', 'fsdp'), 'tensor'),
  'free': None,
}


def place(x: jax.Array, placement: str) -> jax.Array:
  """Returns x [B, ..., D], constrained to a row of PLACEMENTS; UserError if unknown.

  Without a mesh (`jax.set_mesh`), as in a model used by itself, nothing is done, nor to a
  batch that the mesh does not divide, as the one image from which parameters are made.
  """
  axes = choose('placement of activations', placement, PLACEMENTS)
  if axes is None or not _divides(jax.sharding.get_abstract_mesh(), x.shape[0]):
    return x
  examples, channels = axes
  spec = PartitionSpec(examples, *(None,) * (x.ndim - 2), channels)
  return jax.lax.with_sharding_constraint(x, spec)


def tpus(batch: int):
  """Returns the mesh (`jax.set_mesh`) whose TPUs share a batch of this size; None if none do.

  For what is chosen while tracing: a Pallas kernel, whose form depends on the shapes.
  """
  mesh = jax.sharding.get_abstract_mesh()
  device = mesh.abstract_device
  there = device is not None and device.platform == 'tpu'
  return mesh if there and _divides(mesh, batch) else None


def images_each(batch: int) -> int | None:
  """Returns how many images each TPU of the mesh has; None as of `tpus`, or with a tensor axis."""
  mesh = tpus(batch)
  if mesh is None or mesh.shape['tensor'] > 1:
    return None
  return batch // (mesh.shape['data'] * mesh.shape['fsdp'])


def each_its_images(run: Callable, arrays: int, params: int) -> Callable:
  """Returns `run(*arrays, *params)`, each device of the mesh with its own images.

  For Pallas kernels, which XLA does not split. Results have the images of a device, or what
  it found of them, in front.
  """
  if jax.sharding.get_abstract_mesh().empty:
    return run
  spec = PartitionSpec(('data', 'fsdp'))
  specs = (spec,) * arrays + (PartitionSpec(),) * params
  return jax.shard_map(run, in_specs=specs, out_specs=spec, check_vma=False)


def _divides(mesh, batch: int) -> bool:
  """Whether a mesh has our axes and splits a batch of this size evenly."""
  if not {'data', 'fsdp', 'tensor'} <= set(mesh.axis_names):
    return False
  return batch % (mesh.shape['data'] * mesh.shape['fsdp']) == 0
