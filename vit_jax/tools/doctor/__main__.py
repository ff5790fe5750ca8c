"""Versions, devices, memory, what is missing and how to get it, one training step.

  vit_jax doctor [--expect tpu] [--json]

Exit code 0: training works here. 1: a package that everything needs is missing, the
training step failed, or JAX does not compute on the platform of `--expect`. Nothing is
imported at the top that may be missing or broken.
"""

import glob
import os
import platform
import shutil
import sys
import time

from vit_jax import cli, machine
from vit_jax.tools.doctor import packages

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
  checked = [packages.check(package) for package in packages.PACKAGES]
  broken = [p for p in checked if p['problem'] and p['needed']]
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
    'cores': machine.cores(),
    'memory_bytes': _memory(),
    'disk_free_bytes': free,
    'devices': devices,
    'packages': checked,
    'smoke': smoke,
    'advice': _advice(checked, devices),
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
  shapes = models.shapes_of(model, images.shape[1:])['params']
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


def _advice(checked, devices) -> list[str]:
  advice = []
  if sys.version_info < (3, 11):  # noqa: UP036 - the doctor must start to say so
    advice.append(f'Python {platform.python_version()} is too old: 3.11 or newer.')
  missing = [p for p in checked if p['problem']]
  for extra in dict.fromkeys(p['extra'] for p in missing):
    lack = [p for p in missing if p['extra'] == extra]
    names = ', '.join(p['name'] for p in lack)
    purposes = ', '.join(dict.fromkeys(p['purpose'] for p in lack))
    advice.append(f'{names} (for {purposes}): {packages.install_command(extra)}')
  platforms = {device['platform'] for device in devices}
  for extra, (label, patterns) in ACCELERATORS.items():
    name = {'cuda': 'gpu'}.get(extra, extra)
    present = any(glob.glob(pattern) for pattern in patterns)
    if present and devices and name not in platforms:
      install = packages.install_command(extra)
      advice.append(f'A {label} is here, but JAX does not see it: {install}')
  return advice


def _own_version() -> str:
  from vit_jax.version import __version__

  return __version__


def _memory() -> int | None:
  try:
    return machine.memory()
  except (AttributeError, ValueError, OSError):
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
