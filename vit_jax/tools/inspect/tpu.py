"""`tools.inspect --config C --tpu v3:16x16`: the real recipe, compiled for the real slice."""

import sys

from vit_jax import cli
from vit_jax.errors import UserError
from vit_jax.tools.inspect import mesh_memory
from vit_jax.tools.tpu import cost, schedules, topology
from vit_jax.tools.tpu.generations import GENERATIONS, parse

_GIB = 2**30
# Pre-training on JFT-300M, in TPUv3-core-days: Table 2 of arXiv 2010.11929.
PAPER = {('vit:L/16', 14): 680, ('vit:H/14', 14): 2500}


def inspect(request: dict, recipe: dict, mesh: dict[str, int], text: str) -> dict:
  """Returns what a recipe's step costs each device of a slice, and the whole run.

  Args:
    request: see `mesh_memory.measure`; its `mesh` is not used.
    recipe: see `recipe.describe`.
    mesh: the config's section; -1 is the rest of the slice's devices.
    text: the slice, 'v3:16x16'.

  Returns:
    What `cost.measure` does, with tpu; devices; mesh; hbm; step_s, by the clock
    at which the vendor's peak is reached; interconnect_s: that collectives would take at
    the vendor's rate if nothing else ran beside them; images_per_s of the slice; mfu;
    hours of the whole run, its chip_hours and core_days, without interconnect; paper:
    core-days of the same model in the paper, or None.

  Raises:
    UserError: for a mesh or batch that a run would refuse, or a program that does not
      fit: the compiler refuses it, or plans more than the device's memory (libtpu 0.0.42
      lets 17.7 GiB for 16 pass, ViT-g/14 on v3:4x8).
  """
  import jax

  from vit_jax import kernels, models, optim, sharding
  from vit_jax.train import runtime

  name, shape = parse(text)
  generation = GENERATIONS[name]
  devices = topology.devices(text)
  family = models.family(**request['model'])
  optimizer = optim.build(
    **request['optim'], total_steps=recipe['steps'], family=family
  )
  placed = sharding.make_mesh(**mesh, devices=devices)
  mesh_memory.check_batch(request['batch'], dict(placed.shape), optimizer.accum)
  model = models.build(**request['model'])
  step = mesh_memory.TrainStep(model, optimizer, request, placed)
  count = len(devices)
  smaller = [
    *(['--config.model.remat=full'] if request['model'].get('remat') != 'full' else []),
    *([f'--config.mesh.fsdp={count}'] if placed.shape['fsdp'] < count else []),
    f'--config.optim.accum={2 * optimizer.accum}',
  ]
  too_large = lambda why: UserError(
    f'--tpu {name}:{shape}: the step does not fit {generation.hbm / _GIB:g} GiB on each of '
    f'{count} devices: {why} Try {", ".join(smaller)} or a larger slice.'
  )
  print(
    f'Compiling the step for {name}:{shape}: a minute to half an hour.',
    file=sys.stderr,
    flush=True,
  )
  # The mesh is of devices where nothing can run: for compiling alone.
  fused = kernels.using(*kernels.KERNELS)
  with jax.set_mesh(placed), fused, runtime.out_of_memory(too_large):
    program = cli.interruptible(step.lower().compile, schedules.forget)
    found = cost.measure(program, generation)
  if found['bytes'] > generation.hbm:
    raise too_large(f'it takes {found["bytes"] / _GIB:.2f}.')
  seconds = found['cycles'] / generation.clock
  count = len(devices)
  moved = sum(row['bytes'] for row in found['collectives'].values())
  rate = generation.ops_per_cycle * found['cycles'] * count
  run = seconds * recipe['steps']
  known = (recipe['model'], round(recipe['epochs'] or 0))
  return found | {
    'tpu': f'{name}:{shape}',
    'devices': count,
    'mesh': dict(placed.shape),
    'hbm': generation.hbm,
    'step_s': seconds,
    'interconnect_s': moved / generation.interconnect,
    'images_per_s': request['batch'] / seconds,
    'mfu': 3 * recipe['gflops'] * 1e9 * request['batch'] / rate,
    'hours': run / 3600,
    'chip_hours': run / 3600 * count / generation.devices,
    'core_days': run / 86400 * count * generation.cores,
    'paper': PAPER.get(known) if name == 'v3' else None,
    'calibrated': generation.calibrated,
  }


def _amount(x: float) -> str:
  """Returns a number to two digits or to the whole: '0.0031', '4.2', '1,240'."""
  return f'{x:.2g}' if x < 10 else f'{x:,.0f}'


def render(record: dict) -> str:
  """Returns the record of `inspect` as text."""
  axes = ', '.join(
    f'{axis}={size}' for axis, size in record['mesh'].items() if size > 1
  )
  paper = f', the paper reports {record["paper"]:,}' if record['paper'] else ''
  rows = [
    ('slice', f'{record["tpu"]}, {record["devices"]:,} devices ({axes or "one"})'),
    (
      'memory of a device',
      f'{record["bytes"] / _GIB:.2f} GiB of {record["hbm"] / _GIB:g}: fits '
      f'(temporaries {record["temp_bytes"] / _GIB:.2f})',
    ),
    (
      'a step',
      f'{record["cycles"] / 1e6:,.1f} M cycles, {1e3 * record["step_s"]:,.1f} ms',
    ),
    ('images/s', f'{record["images_per_s"]:,.0f} (MFU {record["mfu"]:.1%})'),
    (
      'whole run',
      f'{_amount(record["hours"])} hours, {_amount(record["chip_hours"])} chip-hours, '
      f'{_amount(record["core_days"])} core-days{paper}',
    ),
  ]
  for opcode, row in record['collectives'].items():
    rows.append((opcode, f'{row["bytes"] / 1e9:.3f} GB in {row["times"]:,} calls'))
  if record['collectives']:
    share = record['interconnect_s'] / record['step_s']
    text = f"{1e3 * record['interconnect_s']:,.1f} ms a step at the vendor's rate"
    rows.append(('interconnect', f'{text}: {share:.0%} more, if nothing overlaps'))
  lines = [f'  {label:<22}{value}' for label, value in rows]
  lines += [
    '',
    '  Memory is exact: it is what the compiler allocates. Time is its cost model at the',
    "  clock of the vendor's peak; input, host and waiting are not in it, nor is the",
    '  interconnect, which is an estimate.',
  ]
  if record['unknown_loops']:
    lines.append(
      f'  {record["unknown_loops"]} loops whose length the compiler does not tell are '
      'counted as one pass.'
    )
  if not record['calibrated']:
    lines.append("  Of this generation the model does not reach the vendor's rate.")
  return '\n'.join(lines)
