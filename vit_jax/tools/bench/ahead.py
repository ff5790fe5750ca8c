"""`tools.bench --tpu` and `--gpu`: the same step, compiled for a device that is not here.

What is asked of either is the same. How it is compiled, and what can be said of it then,
is each one's own: see `Target`.
"""

import contextlib
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

from vit_jax.errors import UserError
from vit_jax.tools.bench import arguments, record


class Target(NamedTuple):
  """A kind of device to compile for.

  Attributes:
    flag: 'tpu': its name on the command line and in the rows.
    topology: prepare(), before JAX is first used; versions() of what compiles;
      devices(name).
    left_out: what its numbers do not hold.
    ratios: the numbers of ours that are divided by the other side's.
    about: (name, model, mode) -> what a row says of no program in particular.
    measure: (lowered, name, model, mode, batch) -> what it says of either side's program.
    line: (row) -> a row in short. table: (record) -> all that is printed.
  """

  flag: str
  topology: ModuleType
  left_out: str
  ratios: tuple[str, ...]
  about: Callable
  measure: Callable
  line: Callable
  table: Callable


def main(args, argv: list[str], target: Target) -> int:
  """Prints the table (or its JSON); writes what `--out` asks for; returns 0."""
  target.topology.prepare()
  from vit_jax.tools.bench import ours

  out = record.check_file(args.out)
  fields, section = arguments.fields(args), arguments.tuning(args)
  size = (args.resolution, args.resolution)
  devices = target.topology.devices
  wanted = {name: devices(name)[:1] for name in getattr(args, target.flag)}
  dtypes = args.dtype or ['bfloat16']
  subjects = [ours.Model(args.model, dtype, size, fields, section) for dtype in dtypes]
  programs = {'ours': lower}
  if args.vs:
    from vit_jax.tools.bench import big_vision

    peer = big_vision.Peer(args.big_vision)
    for model in subjects:
      peer.check(model)
    programs['vs'] = peer.lower
  rows = []
  for name, one in wanted.items():
    for mode in args.mode:
      for model in subjects:
        for batch in args.batch or [64]:
          row = _row(programs, target, name, one, model, mode, batch)
          row['set'] = arguments.settings(args)
          rows.append(row)
          print(_line(target, row), file=sys.stderr, flush=True)
  command = record.command('python -m vit_jax.tools.bench', argv)
  versions = record.versions() | target.topology.versions()
  tool = f'bench --{target.flag}'
  result = record.record(tool, command, record.machine(), versions, rows)
  result['left_out'] = target.left_out
  record.deliver(result, out, args.json, target.table)
  return 0


def lower(model, mode: str, batch: int, devices):
  """Returns the lowered step of a run on one device."""
  import jax

  from vit_jax import kernels, sharding, trees
  from vit_jax.tools.bench import ours
  from vit_jax.train import runtime

  step, init, spec = (
    model.train(batch, ours.OPTIM_AHEAD) if mode == 'train' else model.forward(batch)
  )
  mesh = sharding.make_mesh(1, devices=devices)
  with jax.set_mesh(mesh), kernels.using(*kernels.KERNELS):
    abstract = jax.eval_shape(init, trees.flatten(model.shapes))
    abstract = sharding.abstract(abstract, mesh)
    return runtime.lowered(step, abstract, spec, mesh)


def _row(programs, target, name: str, devices, model, mode: str, batch: int) -> dict:
  from vit_jax.train import runtime

  too_large = lambda why: UserError(
    f'The step does not fit: {why} Try a smaller --batch, or --set remat=full.'
  )
  row = {'model': model.name, 'mode': mode, 'dtype': model.module.dtype.name}
  row |= {target.flag: name, 'batch': batch, 'resolution': model.size[0]}
  row |= {'params': model.params, 'gflops': model.flops / 1e9}
  row |= target.about(name, model, mode)
  for side, lower in programs.items():
    start = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr), runtime.out_of_memory(too_large):
      lowered = lower(model, mode, batch, devices)
      found = target.measure(lowered, name, model, mode, batch)
    found['compile_s'] = time.perf_counter() - start
    if side == 'ours':
      row |= found
    else:
      row[side] = found
  if 'vs' in row:
    row['ratio'] = {key: row[key] / row['vs'][key] for key in target.ratios}
  return row


def _line(target, row: dict) -> str:
  name = f'{row[target.flag]} {row["mode"]} {row["dtype"]} batch {row["batch"]}'
  return f'{name}: {target.line(row)}'


def head(result: dict, what: str) -> list[str]:
  """Returns the lines above a table: the model, `what` is measured, versions."""
  first = result['rows'][0]
  size = f'{first["resolution"]}x{first["resolution"]}'
  set_ = ''.join(f', {setting}' for setting in first['set'])
  return [
    f'{first["model"]}{set_} at {size} px: {first["params"]:,} parameters, '
    f'{first["gflops"]:.3g} GFLOPs forward; {what}',
    ' '.join(f'{name} {version}' for name, version in result['versions'].items()),
    '',
  ]


def body(
  rows: list[dict], flag: str, columns: str, numbers: Callable, ratio: Callable
) -> list[str]:
  """Returns the lines of a table: a header, then each row, where measured with the other
  side's numbers and the ratios below.

  Args:
    rows: of `result['rows']`.
    flag: the target's, a key of the rows.
    columns: the header of the columns that follow the batch.
    numbers: (row, side) -> the text of these columns; side is the row itself or row['vs'].
    ratio: row['ratio'] -> the text of these columns.
  """
  lines = [f'{"":13}{"mode":9}{"dtype":10}{"batch":>5}{columns}']
  for row in rows:
    setting = f'{row["mode"]:9}{row["dtype"]:10}{row["batch"]:5}'
    lines.append(f'{row[flag]:13}{setting}{numbers(row, row)}')
    if 'vs' in row:
      lines.append(f'{"  big_vision":13}{setting}{numbers(row, row["vs"])}')
      lines.append(f'{"  ratio":37}{ratio(row["ratio"])}')
  return lines


def gib(side: dict, key: str) -> str:
  """Returns bytes of a row as the tables show them, in 10 columns."""
  return f'{side[key] / 2**30:6.2f} GiB'
