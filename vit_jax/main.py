"""vit_jax train --config=NAME|FILE.py[:ARGS] [--workdir=DIR] [--config.KEY=VALUE]"""

import contextlib
import os
import shlex
import time

from vit_jax import cli

if __name__ == '__main__':
  # This comes before the imports, because they take a while.
  cli.exit_on_interrupt()

from vit_jax.train import program


def main(argv: list[str]) -> int:
  """Runs a command line; returns the exit code."""
  start = time.perf_counter()
  args, config, workdir = program.parse(argv)
  # Import these only now, after the arguments are parsed, because they take seconds.
  from vit_jax import distributed, files
  from vit_jax.train import process, progress

  with contextlib.ExitStack() as stack:
    if args.distributed:
      stack.enter_context(process.watch_peers())
      distributed.start(args.distributed)
    if not distributed.is_first():
      # Only the first process prints, but every process prints errors.
      devnull = stack.enter_context(open(os.devnull, 'w'))
      stack.enter_context(contextlib.redirect_stdout(devnull))
    print(f'Run folder: {workdir}', flush=True)
    command = shlex.join(['vit_jax', 'train', *argv])
    status, rows = program.train(config, workdir, command, args.config)
    address = None
    if config.get('log', {}).get('report', True):
      from vit_jax.tools.report import page

      address = page.write(workdir)
    seconds = time.perf_counter() - start
    folder = files.path(workdir)
    imports = program.import_option(args.config)
    text = progress.summary(rows, status, config, folder, seconds, address, imports)
    print(text, flush=True)
  return 0


if __name__ == '__main__':
  program.run_and_exit(main)
