"""vit_jax ablate NAME [--seeds 0,1,2] [--data SOURCE] [--config CONFIG] [--out DIR]"""

import shlex

from vit_jax import cli

if __name__ == '__main__':
  cli.exit_on_interrupt()  # before the imports, which take a while

from vit_jax.errors import UserError
from vit_jax.lab.ablate import arguments
from vit_jax.train import program


def main(argv: list[str]) -> int:
  """Trains the cells and writes the results; returns the exit code."""
  args = arguments.parse(argv)
  # After the arguments: it takes seconds.
  from vit_jax import terminal
  from vit_jax.lab.ablate import asked
  from vit_jax.lab.ablate.results import Results
  from vit_jax.lab.grid import cells, runs
  from vit_jax.tools import out_folder

  out = out_folder.check(args.out)
  ablation = asked.ablation(args.name)
  spec, config, chosen = asked.cells(args, ablation)
  seeds = args.seeds or ablation.seeds
  planned = cells.plan(config, chosen, seeds, out)
  title = arguments.NAMES[args.name]
  common = asked.common(args, ablation)
  results = Results(args.name, title, ablation, spec, common, planned, args.metric, out)
  out_folder.make(out)
  say = terminal.say if args.json else lambda line: print(line, flush=True)
  say(
    f'{args.name}: {len(chosen)} cells of {spec}, seeds {", ".join(map(str, seeds))}: '
    f'{len(planned)} runs, in {out}'
  )
  command = shlex.join(['vit_jax', 'ablate', *argv])
  done = lambda outcome: say(results.add(outcome))
  outcomes = runs.train(planned, command, spec, done)
  if results.files:
    try:
      results.draw()
    except UserError as error:
      say(f'warning: {error}')
    if args.json:
      cli.print_json(results.record())
    else:
      written = ', '.join(map(str, results.files.values()))
      say(f'\n{results.text()}\nwritten: {written}')
  for outcome in results.failed:
    what = '' if outcome.held else f'{outcome.run.name} failed: '
    terminal.say(f'error: {what}{outcome.error}')
  return runs.exit_code(outcomes)


if __name__ == '__main__':
  program.run_and_exit(main)
