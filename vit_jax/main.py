"""vit_jax train --config=NAME|FILE.py[:ARGS] [--workdir=DIR] [--config.KEY=VALUE]"""

import contextlib
import os
import shlex
import time

from vit_jax import cli

if __name__ == '__main__':
  cli.exit_on_interrupt()  # before the imports, which take a while

from vit_jax.train import arguments, program


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
    from vit_jax.train import progress

    command = shlex.join(['vit_jax', 'train', *argv])
    status, rows = program.train(config, workdir, command, args.config)
    page = None
    if config.get('log', {}).get('report', True):
      from vit_jax.tools.report import automatic

      page = automatic.write(workdir)
    seconds = time.perf_counter() - start
    folder = buckets.path(workdir)
    text = progress.summary(rows, status, config, folder, seconds, page)
    print(text, flush=True)
  return 0


if __name__ == '__main__':
  program.run_and_exit(main)
