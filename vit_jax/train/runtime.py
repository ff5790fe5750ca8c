"""The compiled step, and the memory that it needs, before anything runs."""

import contextlib
import os
import platform
import time

import jax

from vit_jax import sharding
from vit_jax.errors import OutOfMemory
from vit_jax.train import metrics
from vit_jax.weights import download

# XLA on CPUs gives matrix products to YNNPACK by default. Eigen's are up to 1.35 times as
# fast at a ViT's shapes (benchmarks/NOTES.md); reductions stay with YNNPACK.
_CPU_OPTIONS = {'xla_cpu_experimental_ynn_fusion_type': 'LIBRARY_FUSION_TYPE_REDUCE'}


def options() -> dict[str, str]:
  """Returns the `compiler_options` of `jax.jit` under which a model is fast here."""
  return dict(_CPU_OPTIONS) if jax.default_backend() == 'cpu' else {}


def keep_programs() -> None:
  """Keeps compiled programs on disk, so that a run that starts again compiles nothing.

  Below the cache folder (see `weights.download`), one for each machine, as a program for
  one CPU may not suit another; JAX_COMPILATION_CACHE_DIR, if set, has its say instead.
  """
  if 'JAX_COMPILATION_CACHE_DIR' in os.environ:
    return
  folder = download.cache_dir() / 'programs' / (platform.node() or 'here')
  jax.config.update('jax_compilation_cache_dir', str(folder))


def compiled(step, abstract, shardings, spec, mesh, **more: str):
  """Returns the compiled step: state donated and placed, batch split, metrics on all.

  `more` are further compiler options.
  """
  batch = {
    key: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding.batch_sharding(mesh))
    for key, s in spec.items()
  }
  out_shardings = (shardings, sharding.replicated(mesh))
  jitted = jax.jit(step, donate_argnums=0, out_shardings=out_shardings)
  return jitted.lower(abstract, batch).compile(options() | more)


def run_once(fn, out_shardings, *args):
  """Returns `fn(*args)`, jitted for this one call.

  On CPU LLVM does not optimise it, which would take longer than all it can gain: 2 of 4 s
  for the initialisers of configs/digits.py.
  """
  cpu = jax.default_backend() == 'cpu'
  options = {'xla_backend_optimization_level': 0} if cpu else {}
  lowered = jax.jit(fn, out_shardings=out_shardings).lower(*args)
  return lowered.compile(options)(*args)


def compile_step(step, abstract, shardings, spec, mesh):
  """Returns the compiled step; says what memory it needs and refuses what cannot fit."""
  start = time.perf_counter()
  with out_of_memory():
    program = compiled(step, abstract, shardings, spec, mesh)
  m = program.memory_analysis()
  needs = m.argument_size_in_bytes + m.temp_size_in_bytes
  needs += m.output_size_in_bytes - m.alias_size_in_bytes
  has = metrics.device_memory(mesh.local_devices[0])
  print(
    f'Step compiled in {time.perf_counter() - start:.1f} s; it needs '
    f'{needs / 2**30:.2f} GiB per device of {has / 2**30:.1f} GiB.',
    flush=True,
  )
  if needs > has:
    raise OutOfMemory(
      f'A step needs {needs / 2**30:.1f} GiB per device, which has {has / 2**30:.1f} '
      f'GiB. {_SMALLER}'
    )
  return program


_SMALLER = (
  'Try a smaller config.data.batch_size, config.optim.accum=2 or more, '
  "config.model.remat='full', config.model.dtype='bfloat16', or more devices with "
  'config.mesh.fsdp.'
)


@contextlib.contextmanager
def out_of_memory():
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    first = str(error).splitlines()[0]
    raise OutOfMemory(f'Out of memory: {first} {_SMALLER}') from error
