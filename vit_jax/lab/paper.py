"""Repeats experiments of the ViT paper in miniature, and judges the paper's claims by them.

  vit_jax paper [--out DIR] [--only posemb,head]

It uses bundled data and takes about twenty minutes on two cores. Finished runs are only read.
DIR/paper.md lists each claim with the numbers that were measured.
"""

import math
from collections.abc import Sequence

from vit_jax import cli

if __name__ == '__main__':
  # This comes before the imports, because they take a while.
  cli.exit_on_interrupt()

from vit_jax import files
from vit_jax.evaluators.base import interval
from vit_jax.lab import runner, sweep, table
from vit_jax.lab.published import CLAIMS, Claim
from vit_jax.tools import out_folder
from vit_jax.train import program

_NOTE = """\
Small models, 1,437 handwritten digits and 10,000 images of coloured shapes: a claim about
large models and hundreds of millions of images may be true and still not show here. Brackets
hold the 95 % interval of the difference, for that number of test images; it ignores the
randomness of training and of few-shot draws. The interval decides: one result is better if
it lies on one side of 0, and both are equally good if it lies within 2 points. Otherwise we
cannot tell."""
# Results that differ by no more are equally good. It is less than the 2.8 points that
# position embeddings are worth in Table 8.
_SAME = 0.02
# {ablation: options that select the cells for the claims}, if these are not all cells.
_CELLS = {'masked': ['--cells', 'scratch,mean_color']}


def main(argv: list[str]) -> int:
  """Trains, judges and writes the table; returns the exit code."""
  names = list(dict.fromkeys(claim.ablation for claim in CLAIMS))
  title, _, epilog = __doc__.split('\n\n')
  parser = cli.Parser('vit_jax paper', description=title, epilog=epilog, json=False)
  add = parser.add_argument
  add('--out', metavar='DIR', default='runs/paper', help='default: %(default)s')
  only = dict(type=cli.words(names), default=names, metavar='NAME,NAME')
  add('--only', help=f'ablations, of {", ".join(names)}', **only)
  args = parser.parse_args(argv)
  out = out_folder.check_folder(args.out)
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
  """Judges a claim; returns (verdict, the numbers on which it is based)."""
  means, limits = [], []
  for cell in (claim.first, claim.second):
    rows = [row for row in results.rows() if row['cell'] == cell]
    if cell.startswith('0.'):
      means.append(float(cell))
      limits.append((means[-1], means[-1]))
    elif mean := table.mean(rows, claim.metric):
      means.append(mean.mean)
      limits.append(interval(mean.mean, claim.examples))
    else:
      return 'no result', ''
  first, second = means
  low, high = difference(means, limits)
  if claim.sign == '>':
    holds, fails = low > 0, high < 0
  else:
    holds, fails = low > -_SAME and high < _SAME, low > _SAME or high < -_SAME
  verdict = 'holds' if holds else 'does not hold' if fails else 'cannot tell'
  return verdict, (
    f'{claim.first} {100 * first:.1f} %, {claim.second} {100 * second:.1f} % of '
    f'{claim.metric}; {100 * (first - second):+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]'
  )


def difference(shares: Sequence[float], limits: Sequence) -> tuple[float, float]:
  """Returns the interval of the difference of two shares, given the interval of each.

  This is Newcombe's method 10 (1998) for independent images. If both shares are measured on
  the same images, the interval is too wide.
  """
  (first, second), ((low, high), (least, most)) = shares, limits
  return (
    first - second - math.hypot(first - low, most - second),
    first - second + math.hypot(high - first, second - least),
  )


if __name__ == '__main__':
  program.run_and_exit(main)
