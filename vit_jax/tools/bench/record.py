"""The file of a benchmark's results: on what machine, when, by which command."""

import contextlib
import datetime
import os
import platform
import re
import shlex
from collections.abc import Callable
from pathlib import Path

from vit_jax import cli
from vit_jax.errors import UserError
from vit_jax.machine import cores


def check_file(name: str | None) -> Path | None:
  """Returns the path of `--out`, its folder made, before long work starts.

  Raises:
    UserError: if it cannot be written.
  """
  if name is None:
    return None
  path = Path(name)
  if path.suffix != '.json' or path.is_dir():
    raise UserError(f'--out {name}: the name of a file that ends in .json.')
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise UserError(f'--out {name}: {error.strerror}.') from None
  if not os.access(path.parent, os.W_OK | os.X_OK):
    raise UserError(f'--out {name}: {path.parent} cannot be written to.')
  return path


def command(program: str, argv: list[str]) -> str:
  """Returns the command as a shell takes it.

  The other side's Python, a place on one machine, is written as PYTHON.
  """
  argv = list(argv)
  for i, arg in enumerate(argv):
    if arg == '--torch-python' and i + 1 < len(argv):
      argv[i + 1] = 'PYTHON'
    elif arg.startswith('--torch-python='):
      argv[i] = '--torch-python=PYTHON'
  return f'{program} {shlex.join(argv)}'.strip()


def record(
  tool: str, command: str, machine: dict, versions: dict[str, str], rows: list[dict]
) -> dict:
  """Returns what a file of benchmarks/results holds.

  Args:
    tool: what made the rows: 'bench' or 'input_pipeline'.
    command, machine, versions: see the functions of these names.
  """
  now = datetime.datetime.now(datetime.UTC)
  return {
    'tool': tool,
    'date': now.isoformat(timespec='seconds'),
    'command': command,
    'machine': machine,
    'versions': {'python': platform.python_version(), **versions},
    'rows': rows,
  }


def deliver(record: dict, out: Path | None, as_json: bool, table: Callable) -> None:
  """Writes a record to the file that `--out` names, and prints it.

  Args:
    as_json: as one line of JSON; else `table(record)`.
  """
  from vit_jax.train import metrics

  if out:
    metrics.write_json(out, record)
  if as_json:
    cli.print_json(record)
  else:
    print(table(record))


def machine() -> dict:
  """Returns device, platform, cpu, cores (usable here), load and system.

  load: of the last minute, 1 for a core kept busy; taken before a benchmark it says
  what else the machine was doing.
  """
  import jax

  device, cpu = jax.local_devices()[0], _cpu()
  return {
    'device': cpu if device.platform == 'cpu' else device.device_kind,
    'platform': device.platform,
    'cpu': cpu,
    'cores': cores(),
    'load': round(os.getloadavg()[0], 2) if hasattr(os, 'getloadavg') else None,
    'system': f'{platform.system()} {platform.machine()}',
  }


def versions() -> dict[str, str]:
  """Returns {package: version} of our side, and the driver's where a device has one."""
  import jax
  import jaxlib

  from vit_jax.version import __version__

  found = {'vit_jax': __version__, 'jax': jax.__version__, 'jaxlib': jaxlib.__version__}
  driver = jax.local_devices()[0].client.platform_version
  return found if driver == 'cpu' else {**found, 'driver': ' '.join(driver.split())}


def _cpu() -> str:
  with contextlib.suppress(OSError):
    text = Path('/proc/cpuinfo').read_text(encoding='utf-8')
    if match := re.search(r'^model name\s*:\s*(.+)$', text, re.MULTILINE):
      return match[1].strip()
  return platform.processor() or platform.machine()
