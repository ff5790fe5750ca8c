"""Draws attention, filters and positions of a model, and results of runs.

  vit_jax figures rollout SOURCE photo.jpg folder/ --out DIR
  vit_jax figures posemb SOURCE --format pdf
  vit_jax figures compute RUN RUN ...

Each figure is DIR/NAME.png (--format: pdf, svg) and its numbers DIR/NAME.csv. SOURCE is
what `vit_jax.load` takes, RUN the folder of a run.
"""

import sys

from vit_jax import cli
from vit_jax.tools import out_folder
from vit_jax.tools.figures import arguments
from vit_jax.tools.figures.drawn import load_plots


def main(argv: list[str]) -> int:
  """Writes the figure and its numbers; returns 0."""
  args = arguments.parse(argv, __doc__.split('\n')[0])
  out = out_folder.check(args.out)
  plots = load_plots()
  drawn = arguments.FIGURES[args.name](args)
  out_folder.make(out)
  written = [out / f'{args.name}.csv']
  out_folder.write_csv(written[0], drawn.rows)
  for suffix in args.format:
    written.append(out / f'{args.name}.{suffix}')
    plots.save(drawn.figure, written[-1])
  if args.json:
    cli.print_json(
      {
        'figure': args.name,
        'source': getattr(args, 'source', None),
        'files': [str(path) for path in written],
        'notes': list(drawn.notes),
      }
    )
    return 0
  print('\n'.join([*drawn.notes, f'written: {", ".join(map(str, written))}']))
  return 0


if __name__ == '__main__':
  sys.exit(cli.run(main))
