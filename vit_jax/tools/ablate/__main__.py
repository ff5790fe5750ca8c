"""vit_jax ablate NAME [--seeds 0,1,2] [--data SOURCE] [--config CONFIG] [--out DIR]"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from vit_jax import cli

if __name__ == '__main__':
  cli.exit_on_interrupt()  # before the imports, which take a while

from vit_jax.tools.ablate import arguments
from vit_jax.train import program


def main(argv: list[str]) -> int:
  """Trains the cells and writes what they came to; returns the exit code."""
  args = arguments.parse(argv)
  # After the arguments: it takes seconds.
  from vit_jax import terminal
  from vit_jax.tools import out_folder
  from vit_jax.tools.ablate import asked
  from vit_jax.tools.grid import cells, rows, runs

  out = out_folder.check(args.out)
  ablation = asked.ablation(args.name)
  spec, config, chosen = asked.cells(args, ablation)
  seeds = args.seeds or ablation.seeds
  planned = cells.plan(config, chosen, seeds, out)
  evals = {k: v for run in planned for k, v in run.config.get('evals', {}).items()}
  out_folder.make(out)
  say = terminal.say if args.json else lambda line: print(line, flush=True)
  say(
    f'{args.name}: {len(chosen)} cells of {spec}, seeds {", ".join(map(str, seeds))}: '
    f'{len(planned)} runs, in {out}'
  )
  done = []

  def after(outcome) -> None:
    done.append(outcome)
    say(_line(outcome, evals, args.metric, max(len(run.name) for run in planned)))
    written = [x.row for x in _sorted(done, chosen)]
    if written:  # whatever comes next, these are there
      out_folder.write_csv(out / 'results.csv', rows.table(written))

  runs.train(planned, shlex.join(['vit_jax', 'ablate', *argv]), spec, after)
  finished, failed = _sorted(done, chosen), [x for x in done if x.error]
  if finished:
    _write(args, ablation, spec, finished, failed, evals, out, say)
  for outcome in failed:
    terminal.say(f'error: {outcome.run.name} failed: {outcome.error}')
  return failed[0].error.exit_code if failed else 0


def _sorted(done: Sequence, chosen: Sequence) -> list:
  """Returns the outcomes that have numbers, cell by cell."""
  order = [cell.name for cell in chosen]
  found = [x for x in done if x.row is not None]
  return sorted(found, key=lambda x: order.index(x.run.cell.name))


def _line(outcome, evals: dict, metric: str | None, width: int) -> str:
  from vit_jax.tools.ablate import table
  from vit_jax.train import progress

  if outcome.error:
    shown = f'failed: {outcome.error}'
  else:
    keys = table.metrics([outcome.row], evals, metric)[:2]
    shown = progress.shown({key: outcome.row[key] for key in keys}, evals)
  return f'{outcome.run.name:<{width}}  {shown}  {outcome.seconds:.0f} s'


def _write(args, ablation, spec, finished, failed, evals, out: Path, say) -> None:
  from vit_jax.tools import out_folder
  from vit_jax.tools.ablate import draw, table

  rows = [outcome.row for outcome in finished]
  metrics = table.metrics(rows, evals, args.metric)
  records = table.summary(rows, metrics)
  notes = [
    f'Each cell is {spec} with its changes; ± is the standard deviation over seeds.'
  ]
  notes += [f'{x.run.name} failed and is left out: {x.error}' for x in failed]
  text = table.markdown(
    f'{args.name}: {arguments.NAMES[args.name]}',
    records,
    metrics,
    evals,
    (ablation.published_as, ablation.published),
    notes,
  )
  written = [out / 'results.csv', out / 'table.md']
  written[1].write_text(text, encoding='utf-8')
  try:
    from vit_jax.viz import plots
  except ImportError as error:
    say(
      f'warning: no figure, without the package matplotlib ({error}): pip install '
      "'vit_jax[plots]'."
    )
  else:
    drawn = getattr(draw, ablation.draw)(finished, metrics, evals)
    written += [out / f'{args.name}.csv', out / f'{args.name}.png']
    out_folder.write_csv(written[-2], drawn.rows)
    plots.save(drawn.figure, written[-1])
  if args.json:
    cli.print_json(
      {
        'ablation': args.name,
        'config': spec,
        'runs': rows,
        'cells': [table.plain(record) for record in records],
        'failed': {x.run.name: str(x.error) for x in failed},
        'files': [str(path) for path in written],
      }
    )
  else:
    say('\n' + text + '\nwritten: ' + ', '.join(map(str, written)))


if __name__ == '__main__':
  program.run_and_exit(main)
