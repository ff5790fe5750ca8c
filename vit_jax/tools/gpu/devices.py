"""NVIDIA GPUs as XLA describes them to its compiler.

The numbers are those of XLA's own target configurations, files of the same name in
github.com/openxla/xla, xla/backends/gpu/target_config/specs, read 2026-11.
"""

from typing import NamedTuple

from vit_jax.errors import choose

# The same in all of these files. Blocks are of threads, cores are multiprocessors.
_COMMON = {
  'threads_per_block_limit': 1024,
  'threads_per_warp': 32,
  'shared_memory_per_block': 48 * 1024,
  'block_dim_limit_x': 2**31 - 1,
  'block_dim_limit_y': 2**16 - 1,
  'block_dim_limit_z': 2**16 - 1,
  'registers_per_core_limit': 2**16,
  'registers_per_block_limit': 2**16,
}


class Gpu(NamedTuple):
  """One GPU.

  Attributes:
    source: its file. kind: as JAX names the device.
    capability: compute capability, (major, minor).
    cores: multiprocessors. fpus, threads: of a core, float32 units and resident threads.
    clock: GHz. l2: bytes of cache. shared: bytes of a core, and what one block may have.
    memory: bytes. bandwidth: of memory, bytes per second.
  """

  source: str
  kind: str
  capability: tuple[int, int]
  cores: int
  fpus: int
  threads: int
  clock: float
  l2: int
  shared: tuple[int, int]
  memory: int
  bandwidth: int

  def target(self) -> str:
    """Returns the text protobuf `GpuTargetConfigProto` that XLA compiles for."""
    info = _COMMON | {
      'core_count': self.cores,
      'fpus_per_core': self.fpus,
      'threads_per_core_limit': self.threads,
      'clock_rate_ghz': self.clock,
      'l2_cache_size': self.l2,
      'shared_memory_per_core': self.shared[0],
      'shared_memory_per_block_optin': self.shared[1],
      'device_memory_size': self.memory,
      'memory_bandwidth': self.bandwidth,
    }
    lines = ''.join(f'  {key}: {value}\n' for key, value in info.items())
    major, minor = self.capability
    # Instructions of this generation alone (sm_90a), which XLA uses on such a device.
    extension = 'ACCELERATED_FEATURES' if major >= 9 else 'NONE'
    return (
      f'gpu_device_info {{\n{lines}'
      f'  cuda_compute_capability {{ major: {major} minor: {minor} '
      f'feature_extension: {extension} }}\n}}\n'
      f'platform_name: "CUDA"\n{_CUDNN}device_description_str: "{self.kind}"\n'
    )


# Which cuDNN XLA itself may call; the calls counted here are JAX's, whatever this says.
_CUDNN = 'dnn_version_info { major: 9 minor: 10 patch: 0 }\n'
_AMPERE, _HOPPER = (167936, 166912), (233472, 232448)
_MIB = 2**20

GPUS = {
  'a100': Gpu(
    'a100_sxm_80',
    'NVIDIA A100-SXM4-80GB',
    (8, 0),
    108,
    64,
    2048,
    1.41,
    40 * _MIB,
    _AMPERE,
    85100068864,
    2039040000000,
  ),
  'h100': Gpu(
    'h100_sxm',
    'NVIDIA H100 80GB HBM3',
    (9, 0),
    132,
    128,
    2048,
    1.98,
    50 * _MIB,
    _HOPPER,
    84942979072,
    3352320000000,
  ),
  'h200': Gpu(
    'h200',
    'NVIDIA H200 141GB HBM3e',
    (9, 0),
    132,
    128,
    2048,
    1.98,
    50 * _MIB,
    _HOPPER,
    151397597184,
    4800000000000,
  ),
  'b200': Gpu(
    'b200',
    'NVIDIA B200',
    (10, 0),
    148,
    128,
    2048,
    1.965,
    132644864,
    _HOPPER,
    191514411008,
    7672320000000,
  ),
}


def parse(text: str) -> str:
  """Returns `text` if it names a GPU of `GPUS`.

  Raises:
    UserError: for one that is not described here.
  """
  choose('GPU', text, GPUS)
  return text
