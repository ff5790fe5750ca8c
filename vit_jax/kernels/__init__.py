"""Computations of layers whose best program depends on the platform, without Flax.

Every computation has a program that XLA compiles. A fused kernel replaces it only while
`using` allows the kernel. A run allows the kernels that `verify` found correct and fast on
its device.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import jax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

# cuDNN's attention on NVIDIA GPUs, and Pallas kernels for TPUs from v4 on.
KERNELS = ('cudnn_attention', 'tpu_attention', 'tpu_layer_norm', 'tpu_roi_align')
MODES = ('auto', 'xla', 'fused')  # config.kernels, see `verify.choose`

# Names of intermediate results, to which the policies of `jax.checkpoint` refer.
WEIGHTS = 'attention_weights'
ATTENDED = 'attended'
CONVOLVED = 'depthwise_convolved'

_EXAMPLES = ('data', 'fsdp')  # the mesh axes that split a batch

# cuDNN's kernel is a part of JAX. Our own kernels have to be verified first.
_allowed = frozenset({'cudnn_attention'})
_planned: list | None = None


@contextlib.contextmanager
def using(*kernels: str) -> Iterator[None]:
  """Context manager in which traced functions use these kernels and no others."""
  global _allowed
  before, _allowed = _allowed, frozenset(kernels)
  try:
    yield
  finally:
    _allowed = before


def collect_calls(trace: Callable[[], object]) -> list[tuple[str, Callable, tuple]]:
  """Returns (kernel, function, shapes) of each call in `trace` that a kernel may compute."""
  global _planned
  _planned = calls = []
  try:
    trace()
  finally:
    _planned = None
  return calls


def allows(kernel: str, function: Callable, *arrays) -> bool:
  """Whether `kernel` may compute function(*arrays); `collect_calls` records the call."""
  if _planned is not None:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    _planned.append((kernel, function, shapes))
    return False
  return kernel in _allowed


def choose_by_platform(**branches: Callable) -> Callable:
  """Returns a function that calls one of `branches`, chosen when the program is lowered.

  The derivative of `lax.platform_dependent` stores the residuals of every branch. The
  derivative of the returned function stores only the arguments and recomputes the rest. Make
  the function once for all layers, so that JAX traces and transposes it once per shape.

  Args:
    branches: a function for each platform and for 'default', as
      `lax.platform_dependent` takes them.
  """
  choice = functools.partial(lax.platform_dependent, **branches)
  return jax.checkpoint(choice, prevent_cse=False)


def place(x: jax.Array) -> jax.Array:
  """Splits the examples of a block's input x [B, ..., D] over the mesh axes data and fsdp.

  The compiler alone would split channels over fsdp and keep fsdp times as many examples on
  each device. A step of G/14 on data=64, fsdp=16 with full recomputation would then need
  7.8 GiB of temporaries instead of 2.7 GiB (XLA for a TPU v4).

  On GPUs this also keeps the channels of x last in memory. Otherwise XLA puts the batch last
  in a whole encoder, and every block transposes its tokens for matrix products.

  Returns x unchanged if there is no mesh (`jax.set_mesh`), or if the mesh does not divide the
  batch, such as the one image from which parameters are made.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if not _divides(mesh, x.shape[0]):
    return x
  split = lambda x: lax.with_sharding_constraint(x, PartitionSpec(_EXAMPLES))
  device = mesh.abstract_device
  if device is None or device.platform != 'gpu':
    return split(x)
  # Split before and after the layout constraint. Otherwise XLA gathers activations and their
  # gradients over fsdp.
  return split(with_layout_constraint(split(x), Layout(tuple(range(x.ndim)))))


def tpus(batch: int):
  """Returns the mesh if it has TPUs from v4 on and splits the batch evenly, or None."""
  mesh = jax.sharding.get_abstract_mesh()
  device = mesh.abstract_device
  if device is None or device.platform != 'tpu' or not _divides(mesh, batch):
    return None
  from jax.experimental.pallas import tpu as pltpu

  return mesh if pltpu.get_tpu_info().generation >= 4 else None


def split(function: Callable, inputs: tuple[PartitionSpec, ...]) -> Callable:
  """Returns a function that calls `function` on each device's share of the arrays.

  Pallas kernels need it, because XLA cannot split them. Results are split like the first
  input.
  """
  if jax.sharding.get_abstract_mesh().empty:
    return function
  return jax.shard_map(function, in_specs=inputs, out_specs=inputs[0], check_vma=False)


def _divides(mesh, batch: int) -> bool:
  """Whether a mesh has the axes data, fsdp and tensor, and splits the batch evenly."""
  if not {*_EXAMPLES, 'tensor'} <= set(mesh.axis_names):
    return False
  return batch % (mesh.shape['data'] * mesh.shape['fsdp']) == 0
