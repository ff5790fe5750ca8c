"""Estimates whether training fits on a mesh, without the devices.

`mesh_memory` measures; here are the question, the verdict and what to change first.
"""

import json
import math
import os
import re
import subprocess
import sys

from vit_jax.errors import UserError, choose
from vit_jax.tools.inspect import mesh_memory

_GIB = 2**30
_DEVICES = '--xla_force_host_platform_device_count'
_MOST_DEVICES = 2048  # of one process, by the numbers that JAX gives CPU devices


def parse(text: str) -> dict[str, int]:
  """Returns {'data': 64, 'fsdp': 16, 'tensor': 1} of 'data=64,fsdp=16'.

  Raises:
    UserError: for another axis, a size that is not a positive integer, or more devices
      than can be imitated.
  """
  sizes = {'data': 1, 'fsdp': 1, 'tensor': 1}
  for item in text.split(','):
    axis, _, size = item.strip().partition('=')
    choose('--mesh axis', axis, sizes, '; write data=64,fsdp=16')
    if not re.fullmatch('[1-9][0-9]*', size):
      raise UserError(
        f'--mesh {text}: {axis}={size!r} is not a positive integer; the number of devices '
        'is their product, so that none may be left open.'
      )
    sizes[axis] = int(size)
  if (devices := math.prod(sizes.values())) > _MOST_DEVICES:
    raise UserError(
      f'--mesh {text}: {devices} devices, and {_MOST_DEVICES} can be imitated. Divide '
      'data and the batch by the same number: a device then holds just as much.'
    )
  return sizes


def inspect(request: dict, hbm: float | None = None) -> dict:
  """Returns what `mesh_memory.measure` does, and whether it fits.

  Args:
    request: see `mesh_memory.measure`.
    hbm: GiB of memory of one device; None: nothing is judged.

  Returns:
    The measure, with the request's mesh, sharding, batch, dtype, remat and optimizer.
    With hbm also fits, {policy: True, False, or None where it is too close to tell};
    first, what to change first, or None; and apart, how many times the estimate the
    compiler's plan is at the least.

  Raises:
    UserError: for a request that a run would refuse.
  """
  accum = request['optim'].get('accum', 1)
  mesh_memory.check_batch(request['batch'], request['mesh'], max(accum, 1))
  record = _measure_apart(request)
  model = request['model']
  record |= {key: request[key] for key in ('mesh', 'sharding', 'batch')}
  record |= {
    'dtype': str(model.get('dtype', 'float32')),
    'remat_asked': model.get('remat', 'none'),
    'optim': request['optim']['name'],
    'devices': math.prod(request['mesh'].values()),
  }
  if hbm is not None:
    record |= judge(record, hbm)
  return record


def judge(record: dict, hbm: float) -> dict:
  """Returns {'hbm', 'fits', 'apart', 'first'} of what `mesh_memory.measure` found.

  XLA for CPUs computes half precision in float32, so that its temporaries are up to
  twice those of an accelerator: between half of them and all of them the truth is
  sought, and not below the estimate. (XLA for TPU v4 was asked about B/16 on 8 devices
  and G/14 on 1024, with these policies: eight times of eight it was there, to 5 %.)
  """
  limit = hbm * _GIB
  half = 1 if record['dtype'] == 'float32' else 2
  fits, apart = {}, {}
  for policy, row in record['remat'].items():
    least = row['arguments'] + row['temporaries'] / half
    apart[policy] = least / row['estimate']
    if max(row['compiled'], row['estimate']) <= limit:
      fits[policy] = True
    else:
      fits[policy] = False if max(least, row['estimate']) > limit else None
  first = None
  if fits[record['remat_asked']] is not True:
    first = _first_change(record, fits, limit)
  return {'hbm': hbm, 'fits': fits, 'apart': apart, 'first': first}


def _first_change(record: dict, fits: dict, limit: float) -> str:
  held = record['device']
  fixed = sum(held.values()) - held['batch']
  wider = f'a larger fsdp than {record["mesh"]["fsdp"]}'
  if record['sharding'] == 'replicate':
    wider = "sharding 'fsdp', and fsdp=2 or more"
  if fixed > limit:
    return f'{wider}: parameters, gradients and optimizer alone do not fit.'
  policies = list(fits)
  for policy in policies[policies.index(record['remat_asked']) + 1 :]:
    if fits[policy]:
      return f'remat={policy}: it fits, and computes part of the forward pass twice.'
  if record['dtype'] == 'float32':
    return 'dtype=bfloat16: it halves the activations.'
  row = record['remat'][policies[-1]]
  used = max(row['compiled'], row['estimate'])
  images = int(record['images'] * (limit - fixed) / max(used - fixed, 1))
  if images < 1:
    return f'{wider}: one image for each device would be too much.'
  batch = record['batch'] // record['images'] * images
  remat = f' with remat={policies[-1]}' if len(policies) > 1 else ''
  return f'a batch of {batch}{remat}: {images} images for each device at a time.'


def _measure_apart(request: dict) -> dict:
  """Returns `mesh_memory.measure(request)`, from a process with as many fake devices.

  Raises:
    UserError: as `mesh_memory.measure`.
    RuntimeError: if the process ends by anything else; with what it wrote.
  """
  flags = os.environ.get('XLA_FLAGS', '').split()
  flags = [flag for flag in flags if not flag.startswith(_DEVICES)]
  flags.append(f'{_DEVICES}={math.prod(request["mesh"].values())}')
  done = subprocess.run(
    [sys.executable, '-m', mesh_memory.__name__],
    input=json.dumps(request),
    env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ' '.join(flags)},
    capture_output=True,
    text=True,
    check=False,
  )
  if done.returncode == UserError.exit_code:
    raise UserError(done.stderr.strip().splitlines()[-1].removeprefix('error: '))
  if done.returncode:
    raise RuntimeError(
      f'Compiling for {request["mesh"]} failed:\n{done.stderr[-4000:]}'
    )
  return json.loads(done.stdout.splitlines()[-1])
