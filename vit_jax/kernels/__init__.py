"""Computations of layers whose best program depends on the platform; no Flax.

XLA's program is always there. A fused kernel computes in its place only while `using`
allows it: a run allows the kernels that `verify` found correct and fast on its device.
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

# Names of intermediate results, for the policies of `jax.checkpoint`.
WEIGHTS = 'attention_weights'
ATTENDED = 'attended'
CONVOLVED = 'depthwise_convolved'

_EXAMPLES = ('data', 'fsdp')  # the mesh axes that split a batch

# cuDNN's kernel is a part of JAX. Those of ours have to be verified first.
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
  """Returns (kernel, function, shapes) of each call in `trace` that a kernel could compute."""
  global _planned
  _planned = calls = []
  try:
    trace()
  finally:
    _planned = None
  return calls


def allows(kernel: str, function: Callable, *arrays) -> bool:
  """Whether `kernel` may compute function(*arrays); `collect_calls` notes the call."""
  if _planned is not None:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    _planned.append((kernel, function, shapes))
    return False
  return kernel in _allowed


def choose_by_platform(**branches: Callable) -> Callable:
  """Returns a function that is one of `branches`, chosen when the program is lowered.

  A derivative of `lax.platform_dependent` stores the residuals of every branch. This one
  stores its arguments alone and computes the rest again. Make it once for all layers: JAX
  then traces and transposes it once for each shape.

  Args:
    branches: a function for each platform and for 'default', as
      `lax.platform_dependent` takes them.
  """
  choice = functools.partial(lax.platform_dependent, **branches)
  return jax.checkpoint(choice, prevent_cse=False)


def place(x: jax.Array) -> jax.Array:
  """Splits the examples of x [B, ..., D] over the axes data and fsdp, at block entry.

  The compiler by itself splits channels over fsdp, and keeps fsdp times as many examples
  on each device: a step of G/14 on data=64, fsdp=16 then needs 7.8 GiB of temporaries
  with full recomputation instead of 2.7 (XLA for a TPU v4).

  On GPUs x also keeps its channels last in memory. Left to XLA, the tokens of a whole
  encoder have the batch last, and every block transposes them for its products.

  Returns x as it is without a mesh (`jax.set_mesh`), or where the mesh does not divide
  the batch, such as the one image from which parameters are made.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if not _divides(mesh, x.shape[0]):
    return x
  split = lambda x: lax.with_sharding_constraint(x, PartitionSpec(_EXAMPLES))
  device = mesh.abstract_device
  if device is None or device.platform != 'gpu':
    return split(x)
  # Split on both sides: otherwise fsdp gathers activations, of the gradient as well.
  return split(with_layout_constraint(split(x), Layout(tuple(range(x.ndim)))))


def tpus(batch: int):
  """Returns the mesh (`jax.set_mesh`) if its TPUs, v4 or later, share a batch; else None."""
  mesh = jax.sharding.get_abstract_mesh()
  device = mesh.abstract_device
  if device is None or device.platform != 'tpu' or not _divides(mesh, batch):
    return None
  from jax.experimental.pallas import tpu as pltpu

  return mesh if pltpu.get_tpu_info().generation >= 4 else None


def split(function: Callable, inputs: tuple[PartitionSpec, ...]) -> Callable:
  """Returns `function`, computed by each device of the mesh on its share of the arrays.

  For Pallas kernels, which XLA cannot split. Results are split as the first input is.
  """
  if jax.sharding.get_abstract_mesh().empty:
    return function
  return jax.shard_map(function, in_specs=inputs, out_specs=inputs[0], check_vma=False)


def _divides(mesh, batch: int) -> bool:
  """Whether a mesh has our axes and splits a batch of this size evenly."""
  if not {*_EXAMPLES, 'tensor'} <= set(mesh.axis_names):
    return False
  return batch % (mesh.shape['data'] * mesh.shape['fsdp']) == 0
