"""Lists versions, devices, memory and missing packages, and takes one training step.

  vit_jax doctor [--expect tpu] [--json]

Exit code 0 means that a training step works here. Exit code 1 means that a necessary package
is missing, that the training step failed, or that JAX does not compute on the platform of
`--expect`. This module imports nothing at the top that may be missing or broken.
"""

import glob
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import time
from pathlib import Path

from vit_jax import cli, machine
from vit_jax.version import __version__

# Modules without which nothing works. They are imported, because an installed package may be
# broken.
NEEDED = ('numpy', 'jax', 'flax', 'optax', 'orbax.checkpoint', 'ml_collections', 'PIL')
# Module -> (extra, purpose). They are not imported, because TensorFlow alone takes seconds.
OPTIONAL = {
  'tensorflow': ('tf', 'preprocessing, TFRecords'),
  'tensorflow_datasets': ('train', 'data sets by name'),
  'matplotlib': ('plots', 'figures'),
  'pycocotools': ('detection', "COCO's metric, and masks"),
  'huggingface_hub': ('hub', 'weights from the hub and to it'),
  'tokenizers': ('text', 'texts for CLIP and SigLIP'),
  'sentencepiece': ('text', 'texts for SigLIP'),
  'gcsfs': ('gcs', 'runs and data in buckets, gs://'),
  'pyarrow': ('features', 'files of features, images in Parquet'),
  'pillow_heif': ('heif', 'HEIC photographs'),
  'wandb': ('wandb', 'a mirror of the metrics'),
  'mlflow': ('mlflow', 'a mirror of the metrics'),
}
# Extra -> (device, platform of JAX, files that its driver makes). The files exist even if JAX
# cannot use the device.
ACCELERATORS = {
  'cuda': ('NVIDIA GPU', 'gpu', ('/dev/nvidia[0-9]*',)),
  'tpu': ('TPU', 'tpu', ('/dev/accel[0-9]*', '/dev/vfio/[0-9]*')),
}


def main(argv: list[str]) -> int:
  """Prints the report or its JSON; returns 0 if training works here, else 1."""
  parser = cli.Parser('vit_jax doctor', description=__doc__.split('\n')[0])
  platforms = ('cpu', 'gpu', 'tpu')
  parser.add_argument('--expect', choices=platforms, help='fail on other devices')
  args = parser.parse_args(argv)
  record = examine(args.expect)
  return cli.show(args, record, _render(record)) or int(not record['ok'])


def examine(expected: str | None = None) -> dict:
  """Returns the report; its `ok` says whether training works here.

  Args:
    expected: the platform on which JAX must compute; None: any. JAX falls back to the CPU if
      the driver of an accelerator fails.
  """
  packages = {name: _import(name) for name in NEEDED}
  missing = [name for name in OPTIONAL if importlib.util.find_spec(name) is None]
  broken = [name for name, package in packages.items() if package['problem']]
  step, devices = {'ok': False, 'error': 'not tried: see the packages'}, []
  if not broken:
    devices, step = _devices(), smoke_test()
  platforms = {device['platform'] for device in devices}
  lacks = expected if expected and platforms != {expected} else None
  advice = [f'{", ".join(broken)}: {install_command(None)}'] if broken else []
  if 'tensorflow' in missing:
    hint = install_command('tf')
    advice.append(f'To train and evaluate on data, TensorFlow is missing: {hint}')
  for extra, (label, kind, patterns) in ACCELERATORS.items():
    if devices and kind not in platforms and any(map(glob.glob, patterns)):
      hint = install_command(extra)
      advice.append(f'A {label} is here, but JAX does not see it: {hint}')
  return {
    'ok': not broken and step['ok'] and lacks is None,
    'lacks': lacks,
    'python': platform.python_version(),
    'system': f'{platform.system()} {platform.machine()}',
    'vit_jax': __version__,
    'cores': machine.cores(),
    'memory_bytes': _memory(),
    'disk_free_bytes': shutil.disk_usage(os.getcwd()).free,
    'devices': devices,
    'packages': packages,
    'missing': missing,
    'step': step,
    'advice': advice,
  }


def install_command(extra: str | None) -> str:
  """Returns the command that installs an extra, or the requirements of vit_jax itself."""
  extra = f'[{extra}]' if extra else ''
  try:
    importlib.metadata.version('vit_jax')
    return f"pip install 'vit_jax{extra}'"
  except importlib.metadata.PackageNotFoundError:
    # vit_jax runs from a source checkout.
    return f"pip install -e '{Path(__file__).parents[2]}{extra}'"


def smoke_test() -> dict:
  """Takes one training step of a tiny ViT; returns ok, seconds and error."""
  start = time.perf_counter()
  try:
    before, after = _train_one_step()
    error = None if after < before else f'the loss went from {before} to {after}'
  except Exception as failure:
    # Any failure is part of the report.
    error = f'{type(failure).__name__}: {failure}'.partition('\n')[0]
  seconds = round(time.perf_counter() - start, 2)
  return {'ok': error is None, 'seconds': seconds, 'error': error}


def _train_one_step() -> tuple[float, float]:
  """Returns the loss of a tiny ViT before and after one step of SGD."""
  import jax
  import numpy as np

  from vit_jax import losses, models

  model = models.build('vit', 'mu/16', num_classes=4)
  rng = np.random.default_rng(0)
  images = rng.uniform(-1, 1, (4, 32, 32, 3)).astype(np.float32)
  # NumPy makes the parameters, because compiling JAX's initialisers takes longer than the
  # step.
  shapes = model.shapes(images.shape[1:])['params']
  params = jax.tree.map(lambda p: rng.normal(0, 0.1, p.shape).astype(p.dtype), shapes)

  def loss(params):
    logits, _ = model.apply({'params': params}, images)
    return losses.softmax_cross_entropy(logits, np.eye(4, dtype=np.float32)).mean()

  @jax.jit
  def step(params):
    value, gradients = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients)

  before, params = step(params)
  after, _ = step(params)
  return float(before), float(after)


def _import(name: str) -> dict:
  try:
    module = importlib.import_module(name)
  except Exception as error:
    # A broken installation may raise anything.
    problem = f'cannot be imported: {type(error).__name__}: {error}'
    return {'version': None, 'problem': problem}
  return {'version': getattr(module, '__version__', None), 'problem': None}


def _devices() -> list[dict]:
  import jax

  try:
    devices = jax.local_devices()
  except RuntimeError as error:
    # The training step reports the whole error.
    return [{'platform': 'none', 'kind': str(error).splitlines()[0], 'memory': None}]
  memory = lambda device: (device.memory_stats() or {}).get('bytes_limit')
  return [
    {'platform': x.platform, 'kind': x.device_kind, 'memory': memory(x)}
    for x in devices
  ]


def _memory() -> int | None:
  try:
    return machine.memory()
  except (AttributeError, ValueError, OSError):
    return None


def _render(record) -> str:
  gib = lambda size: 'unknown' if size is None else f'{size / 2**30:.1f} GiB'
  step, rows = record['step'], {}
  rows['one training step'] = (
    f'works ({step["seconds"]} s)' if step['ok'] else step['error']
  )
  if record['lacks']:
    rows['expected'] = f'{record["lacks"]}, but JAX does not compute on it here'
  for i, device in enumerate(record['devices']):
    memory = f', {gib(device["memory"])}' if device['memory'] else ''
    kind = '' if device['kind'] == device['platform'] else f', {device["kind"]}'
    rows[f'device {i}'] = f'{device["platform"]}{kind}{memory}'
  rows |= {name: x['problem'] or x['version'] for name, x in record['packages'].items()}
  for name in record['missing']:
    extra, purpose = OPTIONAL[name]
    rows[name] = f'optional, for {purpose}: {install_command(extra)}'
  lines = [
    'A training step works here.' if record['ok'] else 'Not well.',
    *(f'  - {line}' for line in record['advice']),
    f'vit_jax {record["vit_jax"]}, Python {record["python"]}, {record["system"]}',
    f'{record["cores"]} cores, {gib(record["memory_bytes"])} memory, '
    f'{gib(record["disk_free_bytes"])} free in {os.getcwd()}',
    *(f'  {name:<22}{text or "present"}' for name, text in rows.items()),
  ]
  return '\n'.join(lines)


if __name__ == '__main__':
  sys.exit(cli.run(main))
