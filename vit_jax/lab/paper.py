"""Trains the experiments of the ViT paper in miniature, and judges its claims by them.

  vit_jax paper [--out DIR] [--only posemb,head]

It takes bundled data, and about twenty minutes on two cores; finished runs are only read.
DIR/paper.md sets the claims beside the numbers that were measured.
"""

import math

from vit_jax import cli

if __name__ == '__main__':
  cli.exit_on_interrupt()  # before the imports, which take a while

from vit_jax import files
from vit_jax.lab import runner, sweep, table
from vit_jax.lab.published import CLAIMS, Claim
from vit_jax.tools import out_folder
from vit_jax.train import program

_NOTE = """\
Small models, 1,437 handwritten digits and 10,000 images of coloured shapes: a claim about
large models and hundreds of millions of images may well be true and not show here. A
difference counts beyond two standard errors for the number of test images; the randomness
of training is not part of that."""
_CELLS = {'masked': ['--cells', 'scratch,mean_color']}  # where not all are needed


def main(argv: list[str]) -> int:
  """Trains, judges and writes the table; returns the exit code."""
  names = list(dict.fromkeys(claim.ablation for claim in CLAIMS))
  title, _, epilog = __doc__.split('\n\n')
  parser = cli.Parser('vit_jax paper', description=title, epilog=epilog)
  add = parser.add_argument
  add('--out', metavar='DIR', default='runs/paper', help='default: %(default)s')
  only = dict(type=cli.words(names), default=names, metavar='NAME,NAME')
  add('--only', help=f'ablations, of {", ".join(names)}', **only)
  args = parser.parse_args(argv)
  out = out_folder.check(args.out)
  results = {}
  for name in args.only:
    words = ['--ablation', name, *_CELLS.get(name, [])]
    command = ' '.join(['vit_jax sweep', *words])
    print(f'\n== {command}', flush=True)
    grid = sweep.plan(sweep.parse(words), out / name)
    results[name] = runner.run(grid, command, lambda line: print(line, flush=True))
  claims = [claim for claim in CLAIMS if claim.ablation in results]
  rows = []
  for claim in claims:
    verdict, numbers = judge(claim, results[claim.ablation])
    row = {'claim': claim.text, 'in the paper': claim.where}
    rows.append({**row, 'here': verdict, 'measured': numbers})
  text = table.markdown('The ViT paper in miniature', rows, [_NOTE])
  files.replace(out / 'paper.md', text)
  print(f'\n{text}\nwritten: {out / "paper.md"}', flush=True)
  errors = [error for each in results.values() for error in each.errors.values()]
  return errors[0].exit_code if errors else 0


def judge(claim: Claim, results: runner.Results) -> tuple[str, str]:
  """Returns (verdict, the numbers behind it)."""
  means = []
  for cell in (claim.first, claim.second):
    rows = [row for row in results.rows() if row['cell'] == cell]
    mean = table.mean(rows, claim.metric)
    means.append(mean and mean.mean)
  if claim.second.startswith('0.'):
    means[1] = float(claim.second)
  if None in means:
    return 'no result', ''
  first, second = means
  least = noise(first, second, claim.examples)
  difference = first - second
  holds = difference > least if claim.sign == '>' else abs(difference) <= least
  return 'holds' if holds else 'does not hold', (
    f'{claim.first} {100 * first:.1f} %, {claim.second} {100 * second:.1f} % of '
    f'{claim.metric}; {100 * least:.1f} points count'
  )


def noise(first: float, second: float, examples: int) -> float:
  """Returns two standard errors of the difference of two accuracies (normal)."""
  # At 0 or 1 the approximation would say 0: half an example is added on either side.
  p = [(share * examples + 0.5) / (examples + 1) for share in (first, second)]
  return 2 * math.sqrt(sum(share * (1 - share) for share in p) / examples)


if __name__ == '__main__':
  program.run_and_exit(main)
