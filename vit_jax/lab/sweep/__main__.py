"""vit_jax sweep --config=CONFIG --set KEY=A,B [KEY=C,D] [--pick METRIC] [--out DIR]"""

import shlex

from vit_jax import cli

if __name__ == '__main__':
  cli.exit_on_interrupt()  # before the imports, which take a while

from vit_jax.lab.sweep import arguments
from vit_jax.train import program


def main(argv: list[str]) -> int:
  """Trains the runs of the grid and writes the results; returns the exit code."""
  args = arguments.parse(argv)
  # After the arguments: it takes seconds.
  from vit_jax import terminal
  from vit_jax.lab.grid import kept, runs
  from vit_jax.lab.grid import search as searches
  from vit_jax.lab.sweep import asked as asked_for
  from vit_jax.lab.sweep.results import Results
  from vit_jax.tools import out_folder

  out = out_folder.check(args.out or asked_for.default_out(args))
  task = args.task or arguments.of_slurm()
  asked = asked_for.sweep(args, out)
  search = asked.search
  mine = searches.share(search.planned, *task) if task else search.planned
  say = terminal.say if args.json else lambda line: print(line, flush=True)
  number, names = len(search.planned), {run.cell.name for run in search.planned}
  say(f'{args.config}: cells: {len(names)}, runs: {number}, in {out}')
  if task:
    whose = '' if args.task else ' (this process is of a SLURM array)'
    say(f'--task {task[0] + 1}/{task[1]}{whose}: {len(mine)} of the runs')
  if args.dry_run:
    for run in mine:
      say(f'  {run.name}{"  finished" if kept.read(run) else ""}')
    if args.json:
      cli.print_json({'runs': [run.name for run in mine], 'files': []})
    return 0
  out_folder.make(out)
  results = Results(f'Sweep of {args.config}', args.config, asked, out)
  command = shlex.join(['vit_jax', 'sweep', *argv])
  done = lambda outcome: say(results.add(outcome))
  found = searches.run(search, mine, command, args.config, done, args.discard)
  if results.files:
    results.write_tables()
  if args.json:
    cli.print_json(results.record(found))
  elif results.files:
    written = ', '.join(map(str, results.files.values()))
    say(f'\n{results.text()}\nwritten: {written}')
  for outcome in results.failed:
    what = '' if outcome.held else f'{outcome.run.name} failed: '
    terminal.say(f'error: {what}{outcome.error}')
  if found.missing and search.again:
    terminal.say(
      f'No cell is chosen yet: {found.missing} of {number} runs have not ended. --final is '
      'done by the process that ends last, or by the same command later.'
    )
  return runs.exit_code(found.outcomes)


if __name__ == '__main__':
  program.run_and_exit(main)
