"""One mesh (data, fsdp, tensor), its compiler options, and shardings from path rules.

Rules run over the abstract train state, so optimizer moments and EMA, whose paths end
in the parameter's path, follow the parameter with no further code. A rule's spec is
written for the trailing dimensions (right-aligned), so that one rule serves scanned
([L, ...]) and unscanned blocks alike.
"""

import math
from collections import deque
from collections.abc import Iterator
from typing import Annotated, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from vit_jax import trees
from vit_jax.check import Range, check
from vit_jax.errors import UserError, choose

AXES = ('data', 'fsdp', 'tensor')

# Smaller leaves, such as biases, norms and tokens, are not split over fsdp: gathering them
# would cost more than keeping them.
FSDP_MIN_SIZE = 2**16

# Megatron-style split (arXiv 1909.08053, section 3): q, k and v by heads, the output
# projection by its heads, the MLP by its hidden dimension. Nothing else is split.
_TENSOR_RULES = (
  (r'.*/(query|key|value)/kernel', (None, 'tensor', None)),  # [D, M, Dh]
  (r'.*/(query|key|value)/bias', ('tensor', None)),  # [M, Dh]
  (
    r'.*/(MultiHeadDotProductAttention_\d+|attention)/out/kernel',
    ('tensor', None, None),
  ),
  (r'.*/(MlpBlock_\d+|mlp)/(Dense_0|gate)/kernel', (None, 'tensor')),  # [D, hidden]
  (r'.*/(MlpBlock_\d+|mlp)/(Dense_0|gate)/bias', ('tensor',)),
  (r'.*/(MlpBlock_\d+|mlp)/Dense_1/kernel', ('tensor', None)),  # [hidden, D]
)

# Adafactor's means over a kernel's rows or columns have other dimensions than the kernel.
_FACTORED = (r'.*/v_(row|col)/.*', 'fsdp')

# Presets for `config.sharding`. The spec 'fsdp' splits the largest free dimension that the
# fsdp axis divides. On a mesh whose axes all have size 1, every preset replicates.
PRESETS = {
  'replicate': (('.*', ()),),
  'fsdp': (('.*', 'fsdp'),),
  'fsdp_tensor': (
    _FACTORED,
    *((rule, (*spec, '+fsdp')) for rule, spec in _TENSOR_RULES),
    ('.*', 'fsdp'),
  ),
}
DEFAULT = 'fsdp'

# Compiler options by platform.
_OPTIONS = {
  # By default, XLA leaves matrix products on CPUs to YNNPACK. Eigen is up to 1.35 times as fast
  # at the shapes of a ViT (benchmarks/NOTES.md). This option leaves only reductions to YNNPACK.
  'cpu': {'xla_cpu_experimental_ynn_fusion_type': 'LIBRARY_FUSION_TYPE_REDUCE'},
  # Under fsdp, XLA would cut a product into a piece for each chip, too small for a matrix
  # unit. Gathering the parameters takes a quarter of the cycles (docs/speed.md).
  'tpu': {'xla_jf_spmd_threshold_for_windowed_einsum_mib': '1000000'},
}
# Sums a gradient over the chips while the next product runs. It saves 3 % of a step of L/16
# under fsdp, and nothing where parameters are replicated (docs/speed.md). Only small sums are
# joined: one sum for a whole block, as by default, would have to wait for all its gradients.
_SUM_BESIDE_PRODUCTS = {
  'xla_enable_async_all_reduce': 'true',
  'xla_tpu_enable_async_collective_fusion_fuse_all_reduce': 'true',
  'xla_jf_crs_combiner_threshold_in_bytes': '1048576',
}

_Axis = Annotated[int, Range(-1, 2**20, why='-1: the devices that are left')]
_Rules = list[
  tuple[str, Literal['fsdp'] | list[Literal['data', 'fsdp', 'tensor', '+fsdp'] | None]]
]


def make_mesh(
  data: _Axis = -1, fsdp: _Axis = 1, tensor: _Axis = 1, *, devices=None
) -> Mesh:
  """Returns the mesh (data, fsdp, tensor); a size of -1 stands for the remaining devices.

  All axes are `AxisType.Auto`, so that the compiler propagates shardings. (The default of
  `jax.make_mesh`, Explicit, makes them part of types, which Linen modules do not satisfy.)
  """
  devices = jax.devices() if devices is None else devices
  sizes = {'data': data, 'fsdp': fsdp, 'tensor': tensor}
  fixed = math.prod(size for size in sizes.values() if size != -1)
  free = [axis for axis, size in sizes.items() if size == -1]
  if len(free) == 1 and fixed > 0 and len(devices) % fixed == 0:
    sizes[free[0]] = len(devices) // fixed
  if math.prod(sizes.values()) != len(devices) or min(sizes.values()) < 1:
    raise UserError(
      f'config.mesh: {data=} x {fsdp=} x {tensor=} must be the number of devices, '
      f'{len(devices)}; one size may be -1, for the remaining devices.'
    )
  return jax.make_mesh(
    tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices
  )


def compiler_options(mesh: Mesh | None = None) -> dict[str, str]:
  """Returns the `compiler_options` of `jax.jit` that make a model fast.

  Args:
    mesh: where the program will run; by default on the first device.
  """
  device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
  chosen = _OPTIONS.get(device.platform, {})
  fsdp = mesh is not None and mesh.shape['fsdp'] > 1
  # The compiler supports this on TPU v5e alone.
  own = fsdp and device.device_kind == 'TPU v5 lite'
  return chosen | (_SUM_BESIDE_PRODUCTS if own else {})


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of a batch: its leading dimension over data and fsdp."""
  return NamedSharding(mesh, PartitionSpec(('data', 'fsdp')))


def replicated_sharding(mesh: Mesh) -> NamedSharding:
  """Returns the sharding that keeps a full copy on every device."""
  return NamedSharding(mesh, PartitionSpec())


def batch_divisor(mesh: Mesh) -> int:
  """Returns the number that must divide every global batch size."""
  return mesh.shape['data'] * mesh.shape['fsdp']


def host_of_batch(mesh: Mesh) -> dict[str, int]:
  """Returns {'host', 'hosts'}: index of this process's part of a batch, number of parts.

  Parts are equal, and usually numbered as the processes. Processes whose devices differ along
  the tensor axis only have the same examples. For the data they are one host.
  """
  # Look at a batch with one row for each part of the mesh that has rows of its own.
  rows = batch_divisor(mesh)
  parts = batch_sharding(mesh).addressable_devices_indices_map((rows,))
  bounds = {part.indices(rows)[:2] for (part,) in parts.values()}
  start, stop = min(a for a, _ in bounds), max(b for _, b in bounds)
  size = stop - start
  if sum(b - a for a, b in bounds) != size or rows % size or start % size:
    raise UserError(
      'config.mesh: data x fsdp must be a multiple, or a divisor, of the number of '
      f'processes: process {jax.process_index()} has the parts {sorted(bounds)} of {rows}.'
    )
  return {'host': start // size, 'hosts': rows // size}


def global_batch(local: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
  """Makes global arrays [B, ...] from this host's part of a batch, see `host_of_batch`."""
  sharding = batch_sharding(mesh)
  size = len(next(iter(local.values())))
  hosts = host_of_batch(mesh)['hosts']
  return {
    key: jax.make_array_from_process_local_data(
      sharding, value, (size * hosts, *value.shape[1:])
    )
    for key, value in local.items()
  }


def prefetch(batches: Iterator[dict], mesh: Mesh) -> Iterator[dict]:
  """Yields global batches from an endless iterator; copies each next one in advance."""
  ahead = deque()
  for batch in batches:
    ahead.append(global_batch(batch, mesh))
    if len(ahead) == 2:
      yield ahead.popleft()


def resolve_rules(sharding) -> tuple:
  """Returns the rules of a preset, given its name, or of an explicit list of (regex, spec).

  A spec is 'fsdp', or a tuple of an axis name or None for each of the trailing dimensions.
  """
  if isinstance(sharding, str):
    return choose('config.sharding', sharding, PRESETS)
  check('config.sharding', sharding, _Rules)
  return tuple(map(tuple, sharding))


def state_shardings(tree, mesh: Mesh, rules=DEFAULT):
  """Returns a tree of NamedSharding for an abstract state; scalars are replicated."""
  rules = resolve_rules(rules)

  def sharding(name, leaf):
    spec = trees.first_match(rules, name) if leaf.ndim else ()
    return NamedSharding(mesh, _partition(name, leaf.shape, spec, mesh))

  return trees.map_named(sharding, tree)


def abstract(tree, mesh: Mesh, rules=DEFAULT):
  """Returns a tree of `jax.ShapeDtypeStruct` with their `state_shardings`.

  Raises:
    UserError: if the mesh has a tensor axis along which the rules split nothing. Its devices
      would all do the same work.
  """
  shardings = state_shardings(tree, mesh, rules)
  split = {axis for sharding in jax.tree.leaves(shardings) for axis in sharding.spec}
  if mesh.shape['tensor'] > 1 and 'tensor' not in split:
    raise UserError(
      f'config.mesh.tensor={mesh.shape["tensor"]}, but config.sharding splits no parameter of '
      "this model over tensor: set config.sharding='fsdp_tensor' for a Transformer, list rules "
      'of your own, or use mesh.fsdp.'
    )
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
  )


def _partition(name, shape, spec, mesh) -> PartitionSpec:
  spec, fsdp = ((), True) if spec == 'fsdp' else (spec, '+fsdp' in spec)
  spec = tuple(axis for axis in spec if axis != '+fsdp')
  # Where Adafactor stores no moment, its placeholder [1] has fewer dimensions than the
  # rule.
  spec = (None,) * (len(shape) - len(spec)) + spec if len(shape) >= len(spec) else ()
  axes = list(spec) or [None] * len(shape)
  for size, axis in zip(shape, axes, strict=True):
    if axis and size % mesh.shape[axis]:
      raise UserError(
        f'{name} {shape}: mesh axis {axis}={mesh.shape[axis]} does not divide {size}.'
      )
  if fsdp and math.prod(shape) >= FSDP_MIN_SIZE:
    free = [
      (size, -i)
      for i, size in enumerate(shape)
      if axes[i] is None and size % mesh.shape['fsdp'] == 0
    ]
    if free:
      axes[-max(free)[1]] = 'fsdp'
  return PartitionSpec(*axes)
