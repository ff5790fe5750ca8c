"""vit_jax vtab SOURCE [--tasks natural,dmlab] [--protocol paper|bit|vpt] [--out DIR]"""

import shlex

from vit_jax import cli

if __name__ == '__main__':
  cli.exit_on_interrupt()  # before the imports, which take a while

from vit_jax.errors import UserError
from vit_jax.lab.vtab import arguments
from vit_jax.train import program


def main(argv: list[str]) -> int:
  """Trains on the tasks and writes the results; returns the exit code."""
  args = arguments.parse(argv)
  # After the arguments: it takes seconds.
  from vit_jax import terminal
  from vit_jax.lab.vtab import asked, tasks
  from vit_jax.tools import out_folder

  out = out_folder.check(args.out or asked.default_out(args))
  model = asked.told(args.source)
  planned = {
    name: asked.task(args, args.benchmark, name, model, out) for name in args.tasks
  }
  asked.check_sizes(planned, model)
  say = terminal.say if args.json else lambda line: print(line, flush=True)
  number = sum(map(tasks.runs_of, planned.values()))
  say(f'{args.source}: tasks: {len(planned)}, runs: {number}, in {out}')
  if args.dry_run:
    for name, each in planned.items():
      say(f'  {name}: {tasks.described(each)}')
    if args.json:
      cli.print_json({'tasks': list(planned), 'runs': number, 'files': []})
    return 0
  out_folder.make(out)
  command = shlex.join(['vit_jax', 'vtab', *argv])
  results = tasks.run(args, planned, out, command, say)
  if results.means():  # without a complete group there is nothing to draw
    try:
      results.draw()
    except UserError as error:
      say(f'warning: {error}')
  if args.json:
    cli.print_json(results.record())
  elif results.files:
    written = ', '.join(map(str, results.files.values()))
    say(f'\n{results.text()}\nwritten: {written}')
  errors = {name: ended.error for name, ended in results.ended.items() if ended.error}
  for name, error in errors.items():
    terminal.say(f'error: {name}: {error}')
  return next((error.exit_code for error in errors.values()), 0)


if __name__ == '__main__':
  program.run_and_exit(main)
