"""XLA: the compilation cache, memory, profiles."""

import contextlib
import itertools
import os
import platform
from pathlib import Path

import jax

from vit_jax import files, machine, sharding
from vit_jax.errors import OutOfMemory
from vit_jax.train.workdir import LocalFolder

# Number of steps that the host may run ahead of the device: enough to keep it busy, and few
# enough to notice a sequence of bad steps at once.
MAX_IN_FLIGHT = 2
# The step before which a profile begins, and the step before which it ends, counted from the
# start of the process. By then everything is compiled and warm.
PROFILED = (3, 8)
# Peak operations per second in bfloat16, as the vendors state them. On TPU v2 and v3, a JAX
# device is one core.
PEAKS = {
  'TPU v2': 22.5e12,
  'TPU v3': 61.5e12,
  'TPU v4': 275e12,
  'TPU v5 lite': 197e12,
  'TPU v5': 459e12,
  'TPU v6 lite': 918e12,
  'NVIDIA A100': 312e12,
  'NVIDIA H100': 989e12,
  'NVIDIA H100 PCIe': 756e12,
  'NVIDIA H200': 989e12,
}
SMALLER = (
  'Try a smaller config.data.batch_size, smaller images, config.optim.accum=2 or more, '
  "config.model.remat='full', config.model.dtype='bfloat16', or more devices with "
  'config.mesh.fsdp.'
)


def enable_compilation_cache() -> None:
  """Enables JAX's compilation cache below `files.cache_dir()`, unless the user chose a folder.

  Every machine has its own cache, because a program for one CPU may not suit another.
  """
  if 'JAX_COMPILATION_CACHE_DIR' in os.environ:
    return
  folder = files.cache_dir() / 'programs' / (platform.node() or 'here')
  jax.config.update('jax_compilation_cache_dir', str(folder))


def trace_step(step, abstract, spec, mesh):
  """Traces a step that donates its state, with shardings of the state, batch and metrics.

  Args:
    abstract: the state, see `sharding.abstract`.
  """
  batch = {
    key: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding.batch_sharding(mesh))
    for key, s in spec.items()
  }
  shardings = jax.tree.map(lambda x: x.sharding, abstract)
  out_shardings = (shardings, sharding.replicated_sharding(mesh))
  jitted = jax.jit(step, donate_argnums=0, out_shardings=out_shardings)
  return jitted.trace(abstract, batch)


def peak(device) -> float | None:
  """Returns the entry of PEAKS for a device, or None if there is none."""
  names = [name for name in PEAKS if device.device_kind.startswith(name)]
  return PEAKS[max(names, key=len)] if names else None


def memory(program) -> dict[str, int]:
  """Returns the memory that a compiled program allocates on one device.

  'temp_bytes' are temporaries, and 'argument_bytes' are the state and the batch. 'bytes' is
  their sum, plus the results that do not replace an argument.
  """
  m = program.memory_analysis()
  held = m.argument_size_in_bytes + m.temp_size_in_bytes
  return {
    'temp_bytes': m.temp_size_in_bytes,
    'argument_bytes': m.argument_size_in_bytes,
    'bytes': held + m.output_size_in_bytes - m.alias_size_in_bytes,
  }


@contextlib.contextmanager
def report_out_of_memory(
  error_of=lambda why: OutOfMemory(f'Out of memory: {why} {SMALLER}'),
):
  """Replaces XLA's error for lack of memory, which is a page long, by one line.

  Args:
    error_of: maps the first line of XLA's error to the exception to raise.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    raise error_of(str(error).splitlines()[0]) from error


def device_memory(device) -> int:
  """Returns the bytes that one device may use; on CPUs its share of the machine's memory."""
  stats = device.memory_stats() or {}
  if 'bytes_limit' in stats:
    return stats['bytes_limit']
  return machine.memory() // max(jax.local_device_count(), 1)


@contextlib.contextmanager
def profiler(enabled: bool, workdir: Path):
  """Yields a function to call before each step. It profiles the range of steps PROFILED."""
  options = jax.profiler.ProfileOptions()
  # Do not trace Python calls: thousands per step would be most of the profile and its cost.
  options.python_tracer_level = 0
  steps = itertools.count()
  with contextlib.ExitStack() as stack:

    def profile_step() -> None:
      step = next(steps)
      if enabled and step == PROFILED[0]:
        local = stack.enter_context(
          contextlib.closing(LocalFolder(workdir / 'profile'))
        )
        trace = jax.profiler.trace(str(local.folder), profiler_options=options)
        stack.enter_context(trace)
      elif step == PROFILED[1]:
        stack.close()

    yield profile_step
