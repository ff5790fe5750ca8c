"""`tools.bench --tpu`: what a step costs on a TPU, by the compiler, part by part."""

import contextlib
import sys
import time

from vit_jax.errors import UserError
from vit_jax.tools.bench import arguments, record
from vit_jax.tools.tpu import cost, topology
from vit_jax.tools.tpu.generations import GENERATIONS, parse

LEFT_OUT = 'not in it: collectives, the host and its input, waiting for other devices'


def main(args, argv: list[str]) -> int:
  """Prints the table (or its JSON); writes what `--out` asks for; returns 0."""
  topology.prepare()
  from vit_jax.tools.bench import ours

  out = record.check_file(args.out)
  fields, size = arguments.fields(args), (args.resolution, args.resolution)
  slices = {text: topology.devices(text)[:1] for text in args.tpu}
  dtypes = args.dtype or ['bfloat16']
  subjects = [ours.Model(args.model, dtype, size, fields) for dtype in dtypes]
  programs = {'ours': _ours}
  if args.vs:
    from vit_jax.tools.bench import big_vision

    peer = big_vision.Peer(args.big_vision)
    for model in subjects:
      peer.check(model)
    programs['vs'] = peer.lower
  rows = []
  for text, devices in slices.items():
    for mode in args.mode:
      for model in subjects:
        for batch in args.batch or [64]:
          row = _row(programs, text, devices, model, mode, batch)
          row['set'] = args.set
          rows.append(row)
          print(_line(row), file=sys.stderr, flush=True)
  command = record.command('python -m vit_jax.tools.bench', argv)
  result = record.record('bench --tpu', command, record.machine(), _versions(), rows)
  result['left_out'] = LEFT_OUT
  record.deliver(result, out, args.json, table)
  return 0


def _ours(model, mode: str, batch: int, devices):
  """Returns the lowered step of a run on one device."""
  import jax

  from vit_jax import sharding, trees
  from vit_jax.tools.bench import ours
  from vit_jax.train import runtime

  step, init, spec = (
    model.train(batch, ours.OPTIM_TPU) if mode == 'train' else model.forward(batch)
  )
  mesh = sharding.make_mesh(1, devices=devices)
  with jax.set_mesh(mesh):
    abstract = jax.eval_shape(init, trees.flatten(model.shapes))
    abstract = sharding.abstract(abstract, mesh)
    return runtime.lowered(step, abstract, spec, mesh)


def _row(programs, text: str, devices, model, mode: str, batch: int) -> dict:
  name, _ = parse(text)
  generation = GENERATIONS[name]
  row = {'model': model.name, 'mode': mode, 'dtype': model.module.dtype.name}
  row |= {'tpu': text, 'batch': batch, 'resolution': model.size[0]}
  row |= {
    'params': model.params,
    'gflops': model.flops / 1e9,
    'calibrated': generation.calibrated,
  }
  passes = 3 if mode == 'train' else 1  # see `flops.exa_training`
  for side, lower in programs.items():
    start = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
      found = _compile(lower(model, mode, batch, devices), generation)
    found['compile_s'] = time.perf_counter() - start
    seconds = found['cycles'] / generation.clock
    found['mfu'] = (
      passes * model.flops * batch / (found['cycles'] * generation.ops_per_cycle)
    )
    found['step_s'] = seconds
    found['images_per_s_chip'] = batch / seconds * generation.devices
    if side == 'ours':
      row |= found
    else:
      row[side] = found
  if 'vs' in row:
    row['ratio'] = {key: row[key] / row['vs'][key] for key in ('cycles', 'temp_bytes')}
  return row


def _compile(lowered, generation) -> dict:
  """Returns `cost.measure` of a lowered program; UserError where it is too large."""
  import jax

  try:
    return cost.measure(lowered.compile(), generation)
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    raise UserError(
      f'The step does not fit: {str(error).splitlines()[0]} Try a smaller --batch, or '
      '--set remat=full.'
    ) from None


def _versions() -> dict[str, str]:
  import importlib.metadata

  return {**record.versions(), 'libtpu': importlib.metadata.version('libtpu')}


def _line(row: dict) -> str:
  text = f'{row["tpu"]} {row["mode"]} {row["dtype"]} batch {row["batch"]}'
  return f'{text}: {row["cycles"] / 1e6:.2f} M cycles'


def table(result: dict) -> str:
  """Returns what the tool prints of a record."""
  rows = result['rows']
  first = rows[0]
  size = f'{first["resolution"]}x{first["resolution"]}'
  set_ = ''.join(f', {setting}' for setting in first['set'])
  lines = [
    f'{first["model"]}{set_} at {size} px: {first["params"]:,} parameters, '
    f"{first['gflops']:.3g} GFLOPs forward; one device, by XLA's cost model",
    ' '.join(f'{name} {version}' for name, version in result['versions'].items()),
    '',
    f'{"":13}{"mode":9}{"dtype":10}{"batch":>5}{"M cycles":>10}{"MFU":>7}{"images/s/chip":>15}'
    f'{"temp":>10}{"in all":>10}{"accessed":>10}',
  ]
  for row in rows:
    lines.append(_numbers(row['tpu'], row, row))
    if 'vs' in row:
      lines.append(_numbers('  big_vision', row, row['vs']))
      ratio = row['ratio']
      lines.append(
        f'{"  ratio":37}{ratio["cycles"]:10.3f}{"":22}{ratio["temp_bytes"]:10.3f}'
      )
  for row in rows:
    lines += ['', *_parts(row)]
  guessed = sorted(
    {row['tpu'].partition(':')[0] for row in rows if not row['calibrated']}
  )
  lines += ['', LEFT_OUT[0].upper() + LEFT_OUT[1:] + '.']
  if guessed:
    lines.append(
      f"MFU and images/s of {', '.join(guessed)} are by the vendor's rate, which XLA's "
      'estimate of a large product does not reach.'
    )
  return '\n'.join(lines)


def _numbers(name: str, row: dict, side: dict) -> str:
  gib = lambda key: f'{side[key] / 2**30:6.2f} GiB'
  accessed = f'{side["bytes_accessed"] / 1e9:7.1f} GB' if side['bytes_accessed'] else ''
  return (
    f'{name:13}{row["mode"]:9}{row["dtype"]:10}{row["batch"]:5}{side["cycles"] / 1e6:10.2f}'
    f'{side["mfu"]:7.1%}{side["images_per_s_chip"]:15,.0f}{gib("temp_bytes")}'
    f'{gib("bytes")}{accessed:>10}'
  )


def _parts(row: dict) -> list[str]:
  """Returns the lines of where cycles go, beside the other side's where there is one."""
  sides = [row['parts'], *([row['vs']['parts']] if 'vs' in row else [])]
  names = [(p, part) for p in cost.PASSES for part in sides[0].get(p, {})]
  names += [
    (p, part)
    for side in sides[1:]
    for p in cost.PASSES
    for part in side.get(p, {})
    if (p, part) not in names
  ]
  names.sort(key=lambda name: cost.PASSES.index(name[0]))
  heads = ['M cycles', *(['big_vision'] if len(sides) > 1 else [])]
  lines = [f'{row["tpu"]} {row["mode"]:21}' + ''.join(f'{head:>12}' for head in heads)]
  for which, part in names:
    cycles = [side.get(which, {}).get(part, 0) / 1e6 for side in sides]
    if max(cycles) >= 0.001 * row['cycles'] / 1e6:
      lines.append(f'  {which:10}{part:16}' + ''.join(f'{c:12.2f}' for c in cycles))
  if estimated := sum(found['cycles'] for found in row['uncosted']):
    lines.append(f'  of which estimated here, not by XLA: {estimated / 1e6:.2f}')
    for found in row['uncosted'][:5]:
      if found['cycles'] >= 0.001 * row['cycles']:
        lines.append(
          f'    {found["cycles"] / 1e6:6.2f}  {found["times"]} x {found["op"]}'
        )
  if row['unknown_loops']:
    lines.append(f'  loops of unknown length, counted once: {row["unknown_loops"]}')
  if beside := sum(found['cycles'] for found in row['overlapped'].values()):
    lines.append(f'  copies beside the rest, not in the sum: {beside / 1e6:.2f}')
  return lines
