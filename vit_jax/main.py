"""vit_jax train --config=NAME|FILE.py[:ARGS] [--workdir=DIR] [--config.KEY=VALUE]"""

import contextlib
import gc
import os
import shlex
import sys
import time

from vit_jax import cli

if __name__ == '__main__':
  cli.exit_on_interrupt()  # before the imports, which take a while

from vit_jax.errors import DataError, DiskFull, Unreachable, UserError
from vit_jax.train import arguments

_cut_off: list[bool] = []  # not empty once a write has failed for good


def main(argv: list[str]) -> int:
  """Runs a command line; returns the exit code."""
  start = time.perf_counter()
  args, config, workdir = arguments.parse(argv)
  # After the arguments: it takes seconds.
  from vit_jax import buckets, distributed
  from vit_jax.train import peers

  with contextlib.ExitStack() as stack:
    if args.distributed:
      stack.enter_context(peers.watched())
      distributed.start(args.distributed)
    if not distributed.is_first():  # only process 0 prints; every process prints errors
      nowhere = stack.enter_context(open(os.devnull, 'w'))
      stack.enter_context(contextlib.redirect_stdout(nowhere))
    print(f'Run folder: {workdir}', flush=True)
    from vit_jax.train import progress, run, runtime

    runtime.enable_compilation_cache()
    command = shlex.join(['vit_jax', 'train', *argv])
    try:
      status, rows = run.train(config, workdir, command)
    except (DiskFull, Unreachable):
      _cut_off.append(True)
      raise
    except DataError as error:
      raise UserError(
        f'{error}{arguments.without_data(args.config, config)}'
      ) from error
    page = None
    if config.get('log', {}).get('report', True):
      from vit_jax.tools.report import automatic

      page = automatic.write(workdir, status)
    seconds = time.perf_counter() - start
    folder = buckets.path(workdir)
    text = progress.summary(rows, status, config, folder, seconds, page)
    print(text, flush=True)
  return 0


if __name__ == '__main__':
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')  # TensorFlow's start-up notes
  # Imports and traces make a million objects and no garbage to look for among them.
  gc.set_threshold(100_000)
  code = cli.run(main)
  if _cut_off:
    # Orbax's threads may wait forever for a file that could not be written.
    sys.stdout.flush()
    os._exit(code)
  sys.exit(code)
