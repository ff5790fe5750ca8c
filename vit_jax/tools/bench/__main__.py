"""Images per second, step time, MFU, compile time and memory of a model, on one device.

  vit_jax bench vit:B/16
  vit_jax bench vit:S/16 --mode train --dtype bfloat16 --batch 128,256,512
  vit_jax bench vit:Ti/16 --vs timm --torch-python torchenv/bin/python
  .venv-tpu/bin/vit_jax bench vit:B/16 --tpu v3,v5e --mode train
  .venv-gpu/bin/vit_jax bench vit:B/16 --gpu h100 --batch 64,128

Training is the step of a run (AdamW, its checks and counters included), `forward` the
logits in evaluation; both on synthetic images that are on the device already, so that no
data and no TensorFlow is needed. MFU is the share of the device's rate in large matrix
products, measured in the same call: 3 x forward FLOPs for training, what `remat`
recomputes not counted. `--vs timm` runs timm's PyTorch model of the same shape in turns
with ours. `--out benchmarks/results/NAME.json` keeps the results.

`--tpu` runs nothing: it compiles the same step for one device of a TPU that need not be
there and says what XLA's own cost model expects of it, see `vit_jax.tools.tpu.cost`.
`--gpu` does so for an NVIDIA GPU: memory, and which attention is cuDNN's fused kernel; that
compiler has no model of time.
"""

import contextlib
import math
import os
import statistics
import sys

from vit_jax import cli
from vit_jax.errors import OutOfMemory, UserError
from vit_jax.tools.bench import ahead, arguments, gpu, tpu
from vit_jax.tools.bench import text as bench_text

# Steps are timed in turns: long enough that starting one and waiting for its end is
# nothing, short enough that, with --vs, both sides meet the same load.
_TURN, _TURN_VS = 0.2, 1.5  # seconds
_SECONDS, _FEWEST = 10.0, 5  # without --steps: of a row, and turns in it


def main(argv: list[str]) -> int:
  """Prints the table (or its JSON); writes what `--out` asks for; returns 0."""
  args = arguments.parse(argv, __doc__.split('\n')[0])
  if args.tpu or args.gpu:
    return ahead.main(args, argv, tpu.TARGET if args.tpu else gpu.TARGET)
  if args.vs:  # else JAX takes most of a GPU's memory before PyTorch starts
    os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
  import jax

  from vit_jax.tools.bench import ours as bench_ours
  from vit_jax.tools.bench import peer as bench_peer
  from vit_jax.tools.bench import record as bench_record

  out = bench_record.check_file(args.out)
  fields, section = arguments.fields(args), arguments.tuning(args)
  cpu = jax.default_backend() == 'cpu'
  size = (args.resolution, args.resolution)
  dtypes = args.dtype or ['float32' if cpu else 'bfloat16']
  # All are built, and so refused, before the first is timed.
  subjects = [
    bench_ours.Model(args.model, dtype, size, fields, section) for dtype in dtypes
  ]
  if 'train' in args.mode:
    for model in subjects:
      model.train(1)
  spec = worker = None
  with contextlib.ExitStack() as stack:
    if args.vs:
      spec = {**bench_peer.theirs(subjects[0]), **_torch_side(args, size)}
      worker = stack.enter_context(contextlib.closing(bench_peer.start(args.python)))
    machine, versions, rows = bench_record.machine(), bench_record.versions(), []
    if worker is not None:
      versions |= worker.ask(check=spec)
    if note := bench_text.note(machine):
      print(note, file=sys.stderr, flush=True)
    for mode in args.mode:
      for model in subjects:
        for batch in args.batch or [8 if cpu else 128]:
          row = _row(model, mode, batch, args, worker, spec)
          rows.append(row)
          print(bench_text.line(row), file=sys.stderr, flush=True)
  peaks = {dtype: bench_ours.matrix_peak(dtype) for dtype in dtypes}
  _finish(rows, peaks)
  command = bench_record.command('python -m vit_jax.tools.bench', argv)
  record = bench_record.record('bench', command, machine, versions, rows)
  record['peak'] = peaks
  bench_record.deliver(record, out, args.json, bench_text.table)
  return 0


def _row(model, mode: str, batch: int, args, worker, spec) -> dict:
  """Returns the measurements of one mode, dtype and batch size."""
  from vit_jax.tools.bench import ours as bench_ours
  from vit_jax.tools.bench import peer as bench_peer

  dtype = model.module.dtype.name
  row = {'model': model.name, 'mode': mode, 'dtype': dtype, 'batch': batch}
  row |= {'resolution': args.resolution, 'set': arguments.settings(args)}
  row |= {'params': model.params, 'gflops': model.flops / 1e9, 'error': None}
  try:
    # What the compilation says is progress, not the result.
    with contextlib.redirect_stdout(sys.stderr):
      step = bench_ours.Step(model, mode, batch)
    row['compile_s'] = step.compile_s
    step.turn(1)
    each = step.turn(2) / 2
    steps = None
    if worker is not None:
      spec = {**spec, 'mode': mode, 'dtype': dtype, 'batch': batch}
      try:
        match = bench_peer.Match(worker, model, step, spec)
        steps, seconds, row['timm'] = _against(match, args, each)
      except bench_peer.PeerOutOfMemory as error:
        row['timm'] = {'error': f'out of memory: {error}'}
    if steps is None:
      steps, seconds = _alone(step, args.steps, each)
    memory, source = step.memory()
  except OutOfMemory as error:
    # Its advice is about configs.
    return row | {'error': f'out of memory: {str(error).partition(" Try ")[0]}'}
  middle = statistics.median(seconds)
  return row | {
    'images_per_s': batch / middle,
    'step_s': {
      'median': middle,
      'min': min(seconds),
      'max': max(seconds),
      'turns': len(seconds),
      'steps_per_turn': steps,
    },
    'memory_bytes': memory,
    'memory_from': source,
    'passes': model.passes(mode),
  }


def _alone(step, steps: int | None, each: float) -> tuple[int, list[float]]:
  """Returns (steps in a turn, seconds of a step in each turn)."""
  per_turn = math.ceil(_TURN / each)
  turns = max(math.ceil(_SECONDS / (per_turn * each)), _FEWEST)
  if steps:
    per_turn = min(per_turn, steps)
    turns = steps // per_turn
  return per_turn, [step.turn(per_turn) / per_turn for _ in range(turns)]


def _against(match, args, each: float) -> tuple[int, list[float], dict]:
  """Returns the same of turns with timm, and timm's part of the row."""
  per_turn = math.ceil((args.steps or _TURN_VS * args.rounds / each) / args.rounds)
  return per_turn, *match.play(args.rounds, per_turn)


def _finish(rows: list[dict], peaks: dict) -> None:
  """Adds MFU, and which batch size is best for its mode and dtype, in place."""
  done = [row for row in rows if not row['error']]
  for row in done:
    passes = row.pop('passes')
    rate = passes and passes * row['gflops'] * 1e9 * row['images_per_s']
    row['flops_per_s'] = rate
    row['mfu'] = passes and rate / peaks[row['dtype']]['flops_per_s']
    rivals = [r for r in done if (r['mode'], r['dtype']) == (row['mode'], row['dtype'])]
    row['best'] = row is max(rivals, key=lambda r: r['images_per_s'])


def _torch_side(args, size: tuple[int, int]) -> dict:
  """Returns what `torch_worker.Timm` is told of the machine."""
  import jax

  from vit_jax.machine import cores

  devices = {'cpu': 'cpu', 'gpu': 'cuda'}
  backend = jax.default_backend()
  if backend not in devices:
    raise UserError(f'--vs timm runs on CPUs and GPUs; JAX is on {backend} here.')
  compiled = backend == 'gpu' if args.torch_compile is None else args.torch_compile
  return {
    'device': devices[backend],
    'threads': cores(),
    'compile': compiled,
    'size': list(size),
  }


if __name__ == '__main__':
  sys.exit(cli.run(main))
