"""Tests the fused kernels on the device at hand before a run uses them.

Every kernel that a program could use is run, with its gradient, on random input of the
program's shapes, and so is XLA's program. A kernel that does not compile, gives other
results, or is slower is not used.
"""

import math
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType

from vit_jax import terminal
from vit_jax.errors import one_line
from vit_jax.kernels import KERNELS, collect_calls, using

# Largest difference that passes, as a share of the largest value. Both programs round to
# bfloat16 several times, and each rounding has an error of up to 2**-9.
_CLOSE = 2**-5
_AXES = ('data', 'fsdp', 'tensor')
_ROUNDS, _CALLS = 5, 4  # A round times _CALLS calls; the fastest round counts.


def choose(
  mode: str, trace: Callable[[], object]
) -> tuple[tuple[str, ...], list[dict]]:
  """Returns (kernels to use, rows of `verified`). Process 0 decides for all processes.

  Args:
    mode: 'auto' for the kernels that pass, 'xla' for none, 'fused' for all, unverified.
    trace: a function that traces the program on the current mesh, such as
      `lambda: jax.eval_shape(step, state, batch)`.
  """
  if mode == 'fused':
    return KERNELS, []
  if mode == 'xla' or jax.default_backend() == 'cpu':  # CPUs have no fused kernels.
    return (), []
  calls, rows = collect_calls(trace), []
  if jax.process_index() == 0:
    mesh = jax.sharding.get_abstract_mesh()
    rows = verify_calls(
      [(k, fn, _share_of_one_device(arrays, mesh)) for k, fn, arrays in calls]
    )
  for row in rows:
    if row['reason']:
      terminal.say(f'warning: {row["kernel"]} is left to XLA: it {row["reason"]}.')
  reasons = lambda kernel: {row['reason'] for row in rows if row['kernel'] == kernel}
  verdict = np.asarray([reasons(kernel) == {None} for kernel in KERNELS])
  if jax.process_count() > 1:
    verdict = multihost_utils.broadcast_one_to_all(verdict)
  return tuple(k for k, good in zip(KERNELS, verdict, strict=True) if good), rows


def _share_of_one_device(arrays, mesh):
  """Returns the shapes of one device's share of arrays [B, ...] and [B, N, M, ...]."""
  data, fsdp, tensor = (mesh.shape.get(axis, 1) for axis in _AXES)
  parts = {3: (data * fsdp, 1, 1), 4: (data * fsdp, 1, tensor, 1)}

  def share(x):
    sizes = zip(x.shape, parts.get(x.ndim, (1,) * x.ndim), strict=True)
    return jax.ShapeDtypeStruct([math.ceil(n / k) for n, k in sizes], x.dtype)

  return jax.tree.map(share, arrays)


def verify_calls(calls: list[tuple[str, Callable, tuple]]) -> list[dict]:
  """Runs each distinct call with its kernel and without it, on the first device.

  Args:
    calls: (kernel, function, shapes of its arguments), see `kernels.collect_calls`.

  Returns:
    A dict for each call: `kernel`, `shapes`, `seconds` and `xla_seconds` of the function with
    its gradient, and `reason`, why the kernel is not used, or None.
  """
  different = {}
  for kernel, function, arrays in calls:
    shapes = [list(x.shape) for x in jax.tree.leaves(arrays)]
    different.setdefault((kernel, str(shapes)), (kernel, function, arrays, shapes))
  first = jax.local_devices()[:1]
  one = jax.make_mesh((1, 1, 1), _AXES, (AxisType.Auto,) * 3, devices=first)
  with jax.set_mesh(one):
    return [_verify(*call) for call in different.values()]


def _verify(kernel, function, arrays, shapes) -> dict:
  row = {'kernel': kernel, 'shapes': shapes, 'seconds': None, 'xla_seconds': None}
  keys = iter(jax.random.split(jax.random.key(0), len(shapes)))
  draw = lambda x: jax.random.normal(next(keys), x.shape, x.dtype)
  inputs = jax.tree.map(draw, arrays)
  try:
    results, row['seconds'] = _run(function, inputs, kernel)
  except Exception as error:  # The compiler and the device may raise anything.
    what = f'{type(error).__name__}: {one_line(error, 200)}'
    return row | {'reason': f'does not run on {shapes}: {what}'}
  try:
    expected, row['xla_seconds'] = _run(function, inputs)
  except jax.errors.JaxRuntimeError:
    # The kernel is good if XLA's program does not fit into memory, but the kernel's does.
    return row | {'reason': None}
  return row | {'reason': _fault(results, expected, row, shapes)}


def _run(function, inputs, *kernels: str):
  """Returns (results of the function and its gradient, seconds per call)."""

  @jax.jit
  def program(*inputs):
    y, pullback = jax.vjp(function, *inputs)
    return y, pullback(y)

  with using(*kernels):
    results = jax.block_until_ready(program(*inputs))
  seconds = math.inf
  for _ in range(_ROUNDS):
    start = time.perf_counter()
    jax.block_until_ready([program(*inputs) for _ in range(_CALLS)])
    seconds = min(seconds, (time.perf_counter() - start) / _CALLS)
  return results, seconds


def _fault(results, expected, row, shapes) -> str | None:
  pairs = zip(*map(jax.tree.leaves, (results, expected)), strict=True)
  # It may be NaN, which fails below.
  worst = float(np.max([_difference(a, b) for a, b in pairs]))
  if not worst <= _CLOSE:
    return f"differs from XLA's by {worst:.2g} of the largest value on {shapes}"
  if row['seconds'] > row['xla_seconds']:
    times = f'{1e3 * row["seconds"]:.3g} ms, {1e3 * row["xla_seconds"]:.3g} by XLA'
    return f'is slower on {shapes}: {times}'
  return None


@jax.jit
def _difference(a, b):
  a, b = (x.astype(jnp.float32) for x in (a, b))
  return jnp.abs(a - b).max() / jnp.maximum(jnp.abs(b).max(), 1e-30)
